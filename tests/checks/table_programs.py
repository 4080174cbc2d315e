"""Random programs on a table with any entry, on workers and servers, against a model of dicts."""

import copy
import shutil
import tempfile

import numpy as np
from table_checks import initial

import hpcdist as dist
from hpcdist import fleet, ps
from hpcdist.ps.ids import coins

DIM = 3


class Model:
    """A table with SGD: rows, shows, clicks and periods by id, and ids that wait for their row."""

    def __init__(self, entry):
        self.entry = entry
        self.rows, self.counters, self.waiting = {}, {}, {}
        self.period, self.rate = 0, 0.5

    def first(self, id):
        return initial(np.array([id]), DIM)[0]

    def make(self, id):
        self.rows[id], self.counters[id] = self.first(id), [0, 0, self.period]

    def may_have_a_row(self, id):
        part = getattr(self.entry, "probability", 1)
        return coins(np.array([id]), 0)[0] < part

    def forget(self):
        """What workers had of their own is gone."""

    def flush(self):
        """What workers had of their own, the servers have, too."""

    def pull(self, ids, worker):
        self.fetch(ids)
        found = [self.rows[id] if id in self.rows else self.first(id) for id in ids]
        return np.array(found, np.float32).reshape(-1, DIM)

    def fetch(self, ids):
        for id in ids:
            makes = self.may_have_a_row(id) and not getattr(self.entry, "count_filter", 0)
            if id not in self.rows and makes:
                self.make(id)

    def push(self, batches):
        sums = summed(batches)
        rate = np.float32(self.rate)
        self.change({id: (-rate * grad, *marks) for id, (grad, *marks) in sums.items()})

    def change(self, changes):
        for id, (change, shows, clicks) in changes.items():
            if id not in self.rows and not self.admit(id, shows):
                continue
            self.rows[id] = self.rows[id] + change
            before = self.counters[id]
            self.counters[id] = [before[0] + shows, before[1] + clicks, self.period]

    def admit(self, id, shows):
        if not self.may_have_a_row(id):
            return False
        wanted = getattr(self.entry, "count_filter", 0)
        if wanted > 1:
            self.waiting[id] = self.waiting.get(id, 0) + shows
            if self.waiting[id] < wanted:
                return False
            del self.waiting[id]
        self.make(id)
        return True

    def shrink(self, threshold, decay=1.0, unseen=None):
        """Return how many were removed."""
        self.period += 1
        if self.waiting:
            weak = [id for id, n in self.waiting.items() if threshold is None or n < threshold]
            for id in weak:
                del self.waiting[id]
            return len(weak)
        if not isinstance(self.entry, dist.ShowClickEntry):
            return 0
        weak = []
        for id, counter in self.counters.items():
            shows, clicks = counter[:2] = [counter[0] * decay, counter[1] * decay]
            score = np.float32(0.1) * np.float32(shows - clicks) + np.float32(clicks)
            is_old = unseen is not None and self.period - counter[2] > unseen
            if score < (0.8 if threshold is None else threshold) or is_old:
                weak.append(id)
        for id in weak:
            del self.rows[id], self.counters[id]
        return len(weak)


def summed(batches):
    """Return by id the sum of its gradients, how often it is there, and its clicks."""
    sums = {}
    for ids, grads, clicks in batches:
        for id, grad, click in zip(ids.tolist(), grads, clicks.tolist(), strict=True):
            before = sums.get(id, (np.float32(0), 0, 0))
            sums[id] = before[0] + grad, before[1] + 1, before[2] + click
    return sums


class Replica:
    """A worker's rows, what they were when it last heard of the servers, and what it has pushed."""

    def __init__(self):
        self.own, self.base, self.known, self.pushed = {}, {}, set(), []

    def take(self, ids, rows):
        for id in ids:
            if id in rows:
                self.own[id] = self.base[id] = rows[id]


class GeoModel(Model):
    """A table of which each worker trains rows of its own; the workers act in turns."""

    def __init__(self, entry, workers, every):
        super().__init__(entry)
        self.workers, self.every = workers, every
        self.forget()

    def forget(self):
        self.replicas = [Replica() for _ in range(self.workers)]

    def heard(self, ids, worker):
        """Return a worker's replica, which has heard of these ids."""
        replica = self.replicas[worker]
        new = [id for id in sorted({*ids}) if id not in replica.known]
        self.fetch(new)
        replica.take(new, self.rows)
        replica.known.update(new)
        return replica

    def pull(self, ids, worker):
        own = self.heard(ids, worker).own
        found = [own[id] if id in own else self.first(id) for id in ids]
        return np.array(found, np.float32).reshape(-1, DIM)

    def push(self, batches):
        for worker, batch in enumerate(batches):
            replica = self.heard(batch[0].tolist(), worker)
            for id, (grad, *_) in summed([batch]).items():
                if id in replica.own:
                    replica.own[id] = replica.own[id] - np.float32(self.rate) * grad
            replica.pushed.append(batch)
            if len(replica.pushed) == self.every:
                self.meet(replica)

    def flush(self):
        for replica in self.replicas:
            self.meet(replica)

    def meet(self, replica):
        """Tell the servers a share of how the rows of a worker have changed; take theirs."""
        sums, replica.pushed = summed(replica.pushed), []
        none, changes = np.zeros(DIM, np.float32), {}
        for id, (_, *marks) in sums.items():
            own, base = replica.own.get(id, none), replica.base.get(id, none)
            changes[id] = (own - base) / np.float32(self.workers), *marks
        self.change(changes)
        replica.take(sums, self.rows)


class Program:
    """What the workers do: the same on all of them, but for their batches.

    After what not all do at once (in other modes than sync) they wait for each other; in mode geo
    they act in turns.
    """

    def __init__(self, seed, table, entry, folder):
        self.rng, self.table, self.folder = np.random.default_rng(seed), table, folder
        self.worker, self.workers = fleet.worker_index(), fleet.worker_num()
        self.in_step, self.turns = (isinstance(table.mode, kind) for kind in (ps.Sync, ps.Geo))
        given = (self.workers, table.mode.k_steps) if self.turns else ()
        self.model, self.saved = (GeoModel if self.turns else Model)(entry, *given), None

    def run(self, steps):
        acts = [self.push] * 3 + [self.pull, self.shrink, self.load, self.export, self.set_lr]
        acts += [self.save] * 3 + [self.count]
        for _ in range(steps):
            act = acts[self.rng.integers(len(acts))]
            if act not in (self.push, self.pull):  # all workers flush first, in any order
                self.in_turn(self.table.flush)
                self.model.flush()
            act()

    def in_turn(self, act, *args, **options):
        """Do something once the workers before have, where that matters."""
        if not self.turns:
            return act(*args, **options)
        for worker in range(self.workers):
            if worker == self.worker:
                found = act(*args, **options)
            fleet.barrier_worker()
        return found

    def meet(self):
        if not self.in_step and not self.turns:
            self.table.flush()
            fleet.barrier_worker()

    def batches(self):
        for _ in range(self.workers):
            ids = self.rng.integers(-6, 30, self.rng.integers(0, 12))
            grads = self.rng.integers(-3, 4, (len(ids), DIM)).astype(np.float32)
            yield ids, grads, self.rng.integers(0, 2, len(ids))

    def push(self):
        batches = [*self.batches()]
        ids, grads, clicks = batches[self.worker]
        clicks = None if self.model.entry is None else clicks
        self.in_turn(self.table.push, ids, grads, clicks=clicks)
        self.meet()
        self.model.push(batches)

    def pull(self):
        batches = [ids for ids, _, _ in self.batches()]
        found = self.in_turn(self.table.pull, batches[self.worker])
        self.meet()
        expected = [self.model.pull(ids.tolist(), each) for each, ids in enumerate(batches)]
        assert np.array_equal(found, expected[self.worker])

    def shrink(self):
        given = {"threshold": [None, 0.0, 0.45, 1.0, 2.35][self.rng.integers(5)]}
        if isinstance(self.model.entry, dist.ShowClickEntry):
            given["decay"] = [1.0, 0.5][self.rng.integers(2)]
            given["unseen"] = [None, 0, 1, 2][self.rng.integers(4)]
        assert self.table.shrink(**given) == self.model.shrink(**given)

    def set_lr(self):
        self.model.rate = float(self.rng.choice([0.25, 0.5, 1.0]))
        self.table.set_lr(self.model.rate)
        assert self.table.get_lr() == self.model.rate

    def save(self):
        mode, beside = self.rng.integers(2, size=2)
        work = self.table.save(self.folder, mode=int(mode), async_save=bool(beside))
        self.saved = copy.deepcopy(self.model)
        if self.rng.integers(2):
            work.wait()

    def load(self):
        if self.saved is not None:
            rate = self.model.rate
            self.table.load(self.folder)
            self.model = copy.deepcopy(self.saved)
            self.model.rate = rate
            self.model.forget()

    def export(self):
        found = {}
        for ids, rows in fleet.util.all_gather(self.table.export()):
            for id, row in zip(ids.tolist(), rows.tolist(), strict=True):
                assert found.setdefault(id, row) is row  # nobody else has it
        assert found == {id: row.tolist() for id, row in self.model.rows.items()}

    def count(self):
        told = self.table.stats()
        assert told["rows"] == len(self.model.rows)
        assert sum(each["waiting"] for each in told["servers"]) == len(self.model.waiting)


def run_programs(seeds, servers, mode, steps=40):
    """Run programs, each with a table of its own; called on all ranks."""
    fleet.init(server_num=servers)
    tables = []
    for seed in seeds:
        entries = [None, dist.ShowClickEntry("show", "click"), dist.ProbabilityEntry(0.5)]
        if isinstance(mode, (ps.Sync, ps.Geo)):  # else it matters in which order the workers push
            entries.append(dist.CountFilterEntry(seed % 7))
        options = {"optimizer": ("sgd", {"learning_rate": 0.5}), "initializer": initial}
        entry = entries[(seed + seed // 4) % len(entries)]
        table = ps.SparseTable(f"rows {seed}", DIM, entry=entry, mode=mode, **options)
        tables.append((seed, table, entry))
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    for each in tables:
        made = tempfile.mkdtemp() if fleet.is_first_worker() else None
        folder = fleet.util.all_gather(made)[0]
        Program(*each, f"{folder}/saves").run(steps)
        fleet.barrier_worker()
        fleet.check_save_pre_patch_done()
        if fleet.is_first_worker():
            shutil.rmtree(folder)
    fleet.stop_worker()
