"""Put faults into a copy of the package, one at a time, and tell which tests find them.

    python tests/mutations.py [NAME ...] [--list] [--quick]

For maintainers, on a machine that is idle: a fault that hides costs all tests. Each mutation names
the tests that should find it, which are tried first; only where they do not, all of `make test`
is run, and where that does not either, all of `make test-all`. `--quick` runs the tests named only.
The tests named must pass without the fault. Nothing here is changed: the copy is in a temporary
folder. A mutation whose text is not in the file any more, or there twice, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
USUAL, ALL = "not slow and not thorough", "not slow"
LIMIT_S = 3600


class Mutation(NamedTuple):
    """`old` becomes `new` in `file`; `tests`, arguments of pytest, should find it on `ranks`."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    ranks: int = 1


MUTATIONS = [
    # ---- transport
    Mutation(
        "exscan counts the rank itself",
        "transport/threads/collectives.py",
        "count = rank + inclusive",
        "count = rank + 1",
        "tests/contract -k scans",
    ),
    Mutation(
        "a rank that fails ends by its exit code, of which Open MPI tells nobody",
        "launch/job/shim.py",
        "_end_like(-signal.SIGKILL if reports and code else code)",
        "_end_like(code)",
        "tests/launch/test_survive.py -k exit_code",
    ),
    Mutation(
        "a process of which nobody has heard is no loss",
        "launch/job/deaths.py",
        "0 if arrived and not lost else 1",
        "0 if arrived else 1",
        "tests/unit/launch/test_survival.py -k lost",
    ),
    Mutation(
        "a death counts though the others have recovered",
        "launch/job/deaths.py",
        "if each.is_open]",
        "]",
        "tests/unit/launch/test_survival.py -k recovered",
    ),
    Mutation(
        "a spare on any node is as good as one on the node of the dead",
        "transport/presence/roles.py",
        "told[index].node != home",
        "0",
        "tests/unit/transport/presence/test_roles.py -k node",
    ),
    Mutation(
        "a broadcast comes from the first rank",
        "transport/threads/collectives.py",
        "source = calls[calls[0].root].recv",
        "source = calls[0].recv",
        "tests/contract -k broadcast",
    ),
    Mutation(
        "a receive takes a message of any sender",
        "transport/threads/messages.py",
        "return self._call.root in (ANY_SOURCE, envelope.source)",
        "return True",
        "tests/contract -k message",
    ),
    Mutation(
        "a rank's slice begins at another byte",
        "transport/shm/collectives.py",
        "start = first * data.itemsize",
        "start = first",
        "tests/mpi/test_shared.py -k reduce",
        2,
    ),
    Mutation(
        "small parts are scattered to other ranks",
        "transport/shm/collectives.py",
        "return Move(call.recv, call.root, rank * nbytes, nbytes)",
        "return Move(call.recv, call.root, (size - 1 - rank) * nbytes, nbytes)",
        "tests/mpi/test_contract.py -k scatter",
        2,
    ),
    Mutation(
        "no barrier before the slices of a node are shared",
        "transport/mpi/hierarchical/parts.py",
        "            steps.end(ended)\n        node.step(call)\n",
        "            steps.end(ended)\n",
        "tests/mpi/test_operators.py -k hierarchical",
        4,
    ),
    Mutation(
        "pairs of ranks exchange the wrong blocks, which two ranks cannot see",
        "transport/mpi/collectives.py",
        "given = blocks[to][part]",
        "given = blocks[source][part]",
        "tests/mpi/test_shared.py -k 'whichever or pair'",
        3,
    ),
    Mutation(
        "ranks that call different operations go on",
        "transport/mpi/decision.py",
        "if number != -opposite:",
        "if number != -opposite and number == 0:",
        "tests/unit/transport/over_mpi/test_decision.py",
    ),
    Mutation(
        "a rank that comes too late goes on alone",
        "transport/mpi/decision.py",
        "if -arrival > deadline:",
        "if -arrival > deadline + (1 << 62):",
        "tests/unit/transport/over_mpi/test_decision.py",
    ),
    Mutation(
        "an operation overtakes those that are queued",
        "transport/waiting/queue.py",
        "if not self.queued and not self.turn.is_inside():",
        "if not self.turn.is_inside():",
        "tests/unit/transport/waiting/test_queue.py",
    ),
    Mutation(
        "what listens to an operation counts as the middle of it",
        "transport/waiting/turn.py",
        "        self._is_served = True\n",
        "        self._is_served = False\n",
        "tests/unit/transport/waiting/test_turn.py",
    ),
    Mutation(
        "the wait for a plan is dropped",
        "transport/mpi/persistent.py",
        "            self._wait(timeout)\n",
        "            pass\n",
        "tests/mpi/test_contract.py -k plans",
        2,
    ),
    Mutation(
        "arrays of a device are read before they are complete",
        "transport/device/backend.py",
        "            self.runtime.wait_event(stream, event)\n",
        "            pass\n",
        "tests/mpi/test_device.py -k computed_before",
        2,
    ),
    Mutation(
        "a mean of 16-bit numbers is a sum",
        "transport/call/reduction.py",
        "            wire /= ranks\n",
        "            wire /= 1\n",
        "tests/contract -k average",
    ),
    # ---- parallel
    Mutation(
        "a backward pass does not wait for its buckets",
        "parallel/gradients.py",
        "failure = first_failure(self._works)",
        "failure = None",
        "tests/unit/parallel/test_data_parallel.py",
    ),
    Mutation(
        "the gradient of an unused parameter is an old one",
        "parallel/gradients.py",
        "self._memories[index].fill(0)\n",
        "pass\n",
        "tests/unit/parallel/test_data_parallel.py -k use",
    ),
    Mutation(
        "no_sync is not heard",
        "parallel/backward.py",
        "self._forward = self.sync\n",
        "self._forward = True\n",
        "tests/unit/parallel/test_data_parallel.py",
    ),
    Mutation(
        "a segment is taken from the wrong place of its parameter",
        "parallel/sharding/partition.py",
        "start - first, stop - first, start - begin)",
        "start - first, stop - first, start - first)",
        "tests/unit/parallel/sharding",
    ),
    Mutation(
        "the norm of the gradients is that of one rank",
        "parallel/sharding/optimizer.py",
        "        all_reduce(total, op, self._engine.groups.shard)\n",
        "",
        "tests/unit/parallel/sharding -k 'norm or clipped'",
    ),
    # ---- checkpoint
    Mutation(
        "damaged bytes are not noticed",
        "checkpoint/blocks.py",
        "if _PACK(checksum(block)) != ",
        "if not _PACK(checksum(block)) and b'' != ",
        "tests/unit/checkpoint/test_checkpoint.py -k flipped",
    ),
    Mutation(
        "elements of another division go to the wrong place",
        "checkpoint/copies.py",
        "behind + position_in(target, common),",
        "position_in(target, common),",
        "tests/unit/checkpoint/test_boxes.py tests/unit/checkpoint/test_slices.py",
    ),
    Mutation(
        "what is saved in the background is not copied first",
        "checkpoint/saving.py",
        "memory=memoryview(bytearray(each.memory))",
        "memory=each.memory",
        "tests/unit/checkpoint/test_checkpoint.py -k async",
    ),
    Mutation(
        "a checkpoint does not know the files of other ranks",
        "checkpoint/saving.py",
        "    files = [(each.file, each.nbytes) for each in written if each.pieces]\n",
        "    files = [(each.file, each.nbytes) for each in written[:1] if each.pieces]\n",
        "tests/unit/checkpoint/test_ranks.py",
    ),
    Mutation(
        "a series keeps one checkpoint more than it should",
        "checkpoint/storage.py",
        "others[len(others) - keep + 1 :]",
        "others[len(others) - keep :]",
        "tests/unit/checkpoint/test_checkpoint.py -k series",
    ),
]


class Found(NamedTuple):
    """Which tier found a fault, by what, and how long that took; nothing found it if None."""

    tier: str | None
    by: str
    seconds: float


class Tree:
    """A copy of the project in `folder`, in which faults are put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", ".mpich", "build", "dist", "site", "results", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, self.folder, ignore=ignored, symlinks=True)
        if (ROOT / ".mpich").exists():
            (self.folder / ".mpich").symlink_to(ROOT / ".mpich")

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Have the fault in the copy for a while."""
        path = self.folder / "hpcdist" / mutation.file
        text = path.read_text()
        path.write_text(text.replace(mutation.old, mutation.new))
        try:
            yield
        finally:
            path.write_text(text)

    def run_named(self, mutation: Mutation, marks: str, ranks: int) -> str | None:
        """Run the tests that a mutation names; return the first that fails."""
        tests = [*shlex.split(mutation.tests), "-x", "-q", "-m", marks, "-p", "no:cacheprovider"]
        pytest = [str(BIN / "python"), "-m", "pytest", *tests]
        if ranks > 1:
            pytest = [str(BIN / "mpiexec"), "-n", str(ranks), *pytest, "--with-mpi"]
        return self._failure(pytest)

    def run_tier(self, *tier: str) -> str | None:
        """Run `make test`, or all tests; return the suites that fail."""
        return self._failure(["bash", "tests/run.sh", str(BIN), *tier])

    def _failure(self, command: list[str]) -> str | None:
        ours = {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "-x --color=no",
            "TEST_LIMIT_S": "120",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_osc": "^ucx",
        }
        job = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **ours},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it has not ended after {LIMIT_S} s"
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.communicate()
        if job.returncode == 0:
            return None
        suites = re.findall(r"^(.*\S) +FAILED", said, re.M)
        tests = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        return "; ".join([*suites, *tests[:1]]) or f"exit code {job.returncode}: {said[-200:]}"


def misplaced(mutation: Mutation) -> str | None:
    """Return what is wrong with a mutation's text, or None."""
    path = ROOT / "hpcdist" / mutation.file
    times = path.read_text().count(mutation.old) if path.exists() else 0
    if times == 1:
        return None
    where = f"{times} times in" if path.exists() else "not there any more:"
    return f"{mutation.name}: {mutation.old!r} is {where} {mutation.file}"


def search(tree: Tree, mutation: Mutation, quick: bool) -> Found:
    """Return which tier finds a mutation."""
    began = time.monotonic()

    def found(tier: str | None, by: str = "") -> Found:
        return Found(tier, by, time.monotonic() - began)

    with tree.mutated(mutation):
        if failure := tree.run_named(mutation, USUAL, min(mutation.ranks, 2)):
            return found("make test", failure)
        if not quick and (failure := tree.run_tier()):
            return found("make test", failure)
        if failure := tree.run_named(mutation, ALL, mutation.ranks):
            return found("make test-all", failure)
        if not quick and (failure := tree.run_tier("all")):
            return found("make test-all", failure)
    return found(None)


def check_clean(tree: Tree, mutations: list[Mutation]) -> list[str]:
    """Return which of the tests named fail without a fault."""
    runs = {(each.tests, each.ranks): each for each in mutations}
    found = [(each.tests, tree.run_named(each, ALL, each.ranks)) for each in runs.values()]
    return [f"{tests} fail without a fault: {failure}" for tests, failure in found if failure]


def report(found: dict[Mutation, Found]) -> Table:
    """Return a table of what was found."""
    table = Table("fault", "file", "found by", "first failure", "s")
    for mutation, each in found.items():
        cells = (mutation.name, mutation.file, each.tier or "[bold]nothing[/bold]", each.by)
        table.add_row(*cells, f"{each.seconds:.0f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all mutations without")
    parser.add_argument("--list", action="store_true", help="only list the mutations")
    parser.add_argument("--quick", action="store_true", help="run the tests named only")
    parser.add_argument("--no-check", action="store_true", help="do not run them without a fault")
    arguments = parser.parse_args()
    wanted = [
        each
        for each in MUTATIONS
        if not arguments.names or any(part in each.name for part in arguments.names)
    ]
    console = Console(width=None if sys.stdout.isatty() else 150)
    problems = list(filter(None, map(misplaced, wanted)))
    if problems:
        print(*problems, sep="\n")
        return 2
    if arguments.list:
        console.print(report({each: Found("", "", 0) for each in wanted}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        if not arguments.no_check and (problems := check_clean(tree, wanted)):
            print(*problems, sep="\n")
            return 2
        found = {}
        for each in wanted:
            found[each] = search(tree, each, arguments.quick)
            print(f"{each.name}: {found[each].tier} ({found[each].by})", flush=True)
    console.print(report(found))
    tiers = [each.tier for each in found.values()]
    for tier in ("make test", "make test-all", None):
        print(f"{tiers.count(tier)} of {len(tiers)} found by {tier or 'nothing'}")
    return 1 if None in tiers else 0


if __name__ == "__main__":
    raise SystemExit(main())
