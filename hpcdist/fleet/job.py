"""`Fleet`: a job that trains on a grid of ranks; `fleet.init` makes the one in use."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, final

import numpy.typing as npt

from hpcdist.arrays.libraries import row_of
from hpcdist.checkpoint.paddle import save_group_sharded_model
from hpcdist.checkpoint.storage import named
from hpcdist.comm.collectives import barrier
from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.session import current_session, require_session
from hpcdist.comm.states import State, verify_states, verifying
from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.fleet.placement import FLEET, divided, post_of, servers_of, workers_of
from hpcdist.fleet.plan import (
    Plan,
    check_arguments,
    check_roles,
    level_of,
    other_options,
    plan_of,
    settings_of,
)
from hpcdist.fleet.roles import RoleMakerBase
from hpcdist.fleet.strategy import DistributedStrategy
from hpcdist.fleet.workers import UtilBase, reduced, workers
from hpcdist.lazy import load
from hpcdist.parallel.engines import ARRAYS, Table, engine_for
from hpcdist.parallel.hybrid import HybridCommunicateGroup, set_current_grid
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.parallel.topology import (
    LONG,
    CommunicateTopology,
    by_node,
    describe_degrees,
)
from hpcdist.ps.cluster import Cluster, cluster_of
from hpcdist.ps.route import Told, Verb, perform
from hpcdist.ps.save import save_tables
from hpcdist.runtime import gpu
from hpcdist.runtime.process import resident_bytes
from hpcdist.text import volume
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.flight.call_site import outer_frame

T = TypeVar("T")

logger = logging.getLogger("hpcdist.fleet")

_TORCH, _ARRAYS = "hpcdist.torch.hybrid", "hpcdist.parallel.hybrid_arrays"
_MODELS: Table = {
    ("torch", "Module"): f"{_TORCH}:distribute_model",
    ARRAYS: f"{_ARRAYS}:distribute_model",
}
_OPTIMIZERS: Table = {
    ("torch", "Optimizer"): f"{_TORCH}:distribute_optimizer",
    ("hpcdist", "Optimizer"): f"{_ARRAYS}:distribute_optimizer",
}
_SCALERS: Table = {
    ("torch", "GradScaler"): f"{_TORCH}:distribute_scaler",
    ("hpcdist", "GradScaler"): f"{_ARRAYS}:distribute_scaler",
}
TABLES = "tables"
"""The folder of tables, beside the model's."""

_MEANS = {"sum": ReduceOp.SUM, "mean": ReduceOp.AVG, "max": ReduceOp.MAX}


def init(
    role_maker: RoleMakerBase | None = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
    log_level: int | str = "INFO",
    *,
    group: Group | None = None,
    server_num: int | None = None,
    dp: int | None = None,
    mp: int | None = None,
    pp: int | None = None,
    sharding: int | None = None,
    sep: int | None = None,
    cp: int | None = None,
) -> Fleet:
    """Lay the ranks out on a grid, and return the `Fleet`. Every rank calls this; collective.

    hpcdist is started if it is not yet. A second call with the same arguments returns the same
    `Fleet`.

    Args:
        role_maker: who is who; checked against what MPI knows. None: nobody says.
        is_collective: True refuses parameter servers; False takes those that a role maker, the
            environment or `server_num` tells of.
        strategy: how to train; None for the defaults.
        log_level: of the logger ``hpcdist.fleet``, a name or a number.
        group: the ranks that train; None for all. Nobody else calls this then.
        server_num: ranks that only serve tables, the last ones; the grid has the others. None or 0:
            every rank trains, and keeps its part of the tables.
        dp: ranks that train the same on other samples. -1: all that the other axes leave, and so it
            is if nobody tells another number.
        mp: ranks that share each layer. One degree may be -1; the strategy's is taken where one is
            None.
        pp: stages of the pipeline.
        sharding: ranks that share the state of the optimizer.
        sep: ranks that share each sequence.
        cp: ranks along an axis for layers of your own.

    Raises:
        UsageError: an argument is wrong, the degrees do not fit the number of ranks, or `init` was
            called before with others; on every rank an error.
        MismatchError: two ranks want different things.

    Example:
        >>> from hpcdist import fleet
        >>> print(fleet.init(dp=-1).get_hybrid_communicate_group())
        HybridCommunicateGroup(dp=1 x pp=1 x sharding=1 x sep=1 x cp=1 x mp=1)

    """
    world = init_parallel_env()
    if not (group is None or isinstance(group, Group)):
        verify_states((), world, "setting", UsageError(f"group must be a Group, got {group!r}"))
    group = world if group is None else group
    if not group.is_member():
        raise UsageError(f"only members of a group call fleet.init with it, got {group!r}")
    cluster = _placed(group, role_maker, is_collective, strategy, server_num)
    if cluster.worker < 0:
        return _server(cluster, role_maker, strategy)
    if cluster.dedicated:
        group = workers_of(cluster)
    keywords = {"dp": dp, "mp": mp, "pp": pp, "sharding": sharding, "sep": sep, "cp": cp}
    session = require_session()
    with verifying(group, "setting") as alike:
        check_arguments(role_maker, is_collective, strategy)
        strategy = DistributedStrategy() if strategy is None else strategy
        plan = plan_of(strategy, keywords, group.nranks)
        alike += [(each, (), "") for each in settings_of(plan)]
        check_roles(role_maker, group, world, cluster.dedicated)
        level = level_of(log_level)
        _check_again(cast("Fleet | None", session[FLEET]), plan, group)
    logger.setLevel(level)
    if session[FLEET] is None:
        hosts = [each.rpartition(":")[0] for each in session.whereabouts.endpoints]
        names = [LONG[axis] for axis in plan.degrees]
        topology = CommunicateTopology(
            names, [*plan.degrees.values()], ranks=by_node(group.ranks, hosts)
        )
        grid = HybridCommunicateGroup(topology, group=group)
        set_current_grid(grid)
        cluster.mode = strategy.table_mode()
        session[FLEET] = Fleet(role_maker, strategy, plan, grid, cluster, group)
        if group.rank == 0:
            logger.info("%s", grid.describe())
    return cast(Fleet, session[FLEET])


def _placed(
    group: Group, role_maker: Any, is_collective: Any, strategy: Any, server_num: Any
) -> Cluster:
    """Return who works and who serves. Collective."""
    post = None
    with verifying(group, "setting") as alike:
        check_arguments(role_maker, is_collective, strategy)
        if not is_collective:
            post = post_of(role_maker, server_num, group.rank, group.nranks)
        elif server_num:
            raise UsageError(
                f"server_num={server_num!r}, but is_collective=True refuses ranks that only serve; "
                "leave one of them out"
            )
        words = "all ranks train" if post is None else "with ranks that only serve"
        alike += [(words, (), "")]
    return cluster_of(group) if post is None else divided(group, post)


def _server(cluster: Cluster, role_maker: Any, strategy: DistributedStrategy | None) -> Fleet:
    """Return the `Fleet` of a rank that only serves."""
    session = require_session()
    if session[FLEET] is None:
        strategy = DistributedStrategy() if strategy is None else strategy
        cluster.mode = strategy.table_mode()
        session[FLEET] = Fleet(role_maker, strategy, None, None, cluster, servers_of(cluster))
    return cast(Fleet, session[FLEET])


def current_fleet(what: str) -> Fleet:
    """Return what `init` has made; `UsageError`, which names `what`, before it."""
    session = current_session()
    if session is None or session[FLEET] is None:
        raise UsageError(
            f"fleet.{what} was called before fleet.init; call hpcdist.fleet.init() first"
        )
    return cast(Fleet, session[FLEET])


@final
class Fleet:
    """A job that trains on a grid of ranks; `fleet.init` returns it.

    Its methods are functions of `hpcdist.fleet`, too.

    Attributes:
        strategy: how it trains.
        cluster: who trains, who serves, and their tables.
        peers: the ranks of this one's role: those that train, or those that only serve.
        util: what the workers do together.

    """

    def __init__(
        self,
        role_maker: RoleMakerBase | None,
        strategy: DistributedStrategy,
        plan: Plan | None,
        grid: HybridCommunicateGroup | None,
        cluster: Cluster,
        peers: Group,
    ) -> None:
        self.strategy, self.cluster, self.peers = strategy, cluster, peers
        self._plan, self._grid = plan, grid
        self.util = UtilBase()
        self._endpoints = [] if role_maker is None else role_maker.get_trainer_endpoints()
        self._servers = [] if role_maker is None else role_maker.get_pserver_endpoints()
        self._model: Any = None
        self._optimizer: Any = None
        self._scaler: Any = None

    @property
    def plan(self) -> Plan:
        """The plan made from the arguments of `init`; a rank that only serves has none."""
        return self._of_workers(self._plan)

    @property
    def options(self) -> HybridOptions:
        """The options of the engines, frozen from the strategy when `init` was called."""
        return self.plan.options

    @property
    def grid(self) -> HybridCommunicateGroup:
        """The ranks and the groups along the axes; a rank that only serves has none."""
        return self._of_workers(self._grid)

    def _of_workers(self, value: T | None) -> T:
        if value is None:
            raise UsageError(
                "this rank is a parameter server: it has no place on the grid of those that train; "
                "call fleet.run_server() here, and train where fleet.is_worker()"
            )
        return value

    # ---- ranks

    def is_first_worker(self) -> bool:
        """Return whether this is the first worker. Local, like all below without a note."""
        return self.cluster.worker == 0

    def worker_index(self) -> int:
        """Return this rank's number among the workers; a server gets its number among servers."""
        return self.cluster.server if self.is_server() else self.grid.group.rank

    def worker_num(self) -> int:
        """Return how many workers there are."""
        return len(self.cluster.workers)

    def node_num(self) -> int:
        """Return on how many nodes the workers are."""
        told = require_session().whereabouts.endpoints
        ranks = map(self.cluster.world_rank, self.cluster.workers)
        return len({told[rank].rpartition(":")[0] for rank in ranks})

    def local_rank(self) -> int:
        """Return this rank on its node."""
        return require_session().whereabouts.local_rank

    def local_device_ids(self) -> list[int]:
        """Return a list with the number of this rank's GPU; it is empty without a GPU."""
        number = require_session().whereabouts.gpu
        return [] if number is None else [number]

    def world_device_ids(self) -> list[list[int]]:
        """Return the numbers of the GPUs of each worker. Collective."""
        own = self.local_device_ids()
        return tell_all("hpcdist.fleet.world_device_ids", own, self.grid.group)

    def is_worker(self) -> bool:
        """Return whether this rank trains."""
        return self.cluster.worker >= 0

    def is_server(self) -> bool:
        """Return whether this rank only serves tables."""
        return self.cluster.worker < 0

    def is_coordinator(self) -> bool:
        """Return False: there is no coordinator."""
        return False

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return a ``host:port`` for each worker; it is a name only.

        Args:
            to_string: return one text, joined by commas, instead of a list.

        """
        told = require_session().whereabouts.endpoints
        ranks = map(self.cluster.world_rank, self.cluster.workers)
        endpoints = self._endpoints or [told[rank] for rank in ranks]
        return ",".join(endpoints) if to_string else list(endpoints)

    def server_num(self) -> int:
        """Return how many ranks only serve tables; 0 if every rank trains and serves."""
        return len(self.cluster.servers) if self.cluster.dedicated else 0

    def server_index(self) -> int:
        """Return this rank's number among those that only serve."""
        if not self.is_server():
            raise UsageError("this rank is not a parameter server; ask fleet.is_server() first")
        return self.cluster.server

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return a ``host:port`` for each rank that only serves; it is a name only.

        Args:
            to_string: return one text, joined by commas, instead of a list.

        """
        told = require_session().whereabouts.endpoints
        ranks = map(self.cluster.world_rank, self.cluster.servers)
        endpoints = self._servers or [told[rank] for rank in ranks]
        endpoints = list(endpoints) if self.cluster.dedicated else []
        return ",".join(endpoints) if to_string else endpoints

    def barrier_worker(self) -> None:
        """Wait until all workers have called this. Collective; servers have to be serving."""
        group = self.grid.group  # which a rank that only serves does not have
        if self.cluster.dedicated:
            perform(self.cluster, Verb.BARRIER, Told(()))
        else:
            barrier(group)

    def get_hybrid_communicate_group(self) -> HybridCommunicateGroup:
        """Return the grid."""
        return self.grid

    def get_hybrid_parallel_topology(self) -> CommunicateTopology:
        """Return which rank is where on the grid."""
        return self.grid.topology()

    def set_log_level(self, level: int | str) -> None:
        """Set the level of the logger ``hpcdist.fleet``.

        Args:
            level: a name, ``"INFO"`` for example, or a number of `logging`.

        """
        logger.setLevel(level_of(level))

    def check_memory_usage(self, msg: str = "") -> None:
        """Print how much memory this process has.

        Args:
            msg: what is printed with it.

        """
        now, most = (nbytes >> 20 << 20 for nbytes in resident_bytes())
        told = f"{volume(now)} of host memory, at most {volume(most)} so far"
        for number in self.local_device_ids():
            free, total = gpu.free_and_total(number)
            told += f"; {volume(total - free)} of {volume(total)} of GPU {number} are taken"
        print(f"rank {self.grid.global_rank}{msg and f', {msg}'}: {told}", flush=True)

    # ---- training

    def distributed_model(self, model: Any) -> Any:
        """Return `model` as the grid trains it. Collective.

        Modules of torch can be spread over all axes, models of arrays (`Parameter`) over dp and
        sharding: nothing carries gradients through the layers of mp and pp there.

        Args:
            model: a module of torch, or a model of arrays.

        Raises:
            UsageError: it is not a model, or cannot be spread over the axes of this grid.

        """
        distribute = self._on_all(lambda: _engine_of(model))
        self._model = distribute(model, self.grid, self.options)
        return self._model

    def distributed_optimizer(
        self, optimizer: Any, strategy: DistributedStrategy | None = None
    ) -> Any:
        """Return `optimizer` as the grid steps it. Collective.

        Args:
            optimizer: of torch or of `hpcdist.optim`.
            strategy: takes the place of that of `init`.

        Raises:
            UsageError: it is not an optimizer of torch or of `hpcdist.optim`, the grid cannot step
                it, or the strategy wants another grid; on every rank an error.
            MismatchError: ranks have optimizers of different classes.

        """
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._optimizer = self._on_all(
            lambda: self._stepping(optimizer, strategy), [(kind, (), "")], "optimizer"
        )
        return self._optimizer

    def _stepping(self, optimizer: Any, strategy: DistributedStrategy | None) -> Any:
        """Return `optimizer` as the grid steps it. Local."""
        distribute = _row(optimizer, _OPTIMIZERS, "an optimizer of torch or of hpcdist.optim")
        options = self.options
        if strategy is not None:
            options = other_options(self.plan, strategy, self.grid.nranks)
        return distribute(optimizer, self.grid, options)

    def _on_all(
        self, find: Callable[[], T], alike: Sequence[State] = (), noun: str = "setting"
    ) -> T:
        """Return what `find` returns, once it has returned on all workers. Collective.

        All have to be `alike`; `noun` is as in `verify_states`.
        """
        with verifying(self.grid.group, noun) as states:
            found = find()
            states += alike
        return found

    def distributed_scaler(self, scaler: Any) -> Any:
        """Return a scaler of losses whose steps all workers take or skip together. Collective.

        Args:
            scaler: one of torch or of hpcdist; None makes the one that `amp_configs` describe, for
                torch.

        Raises:
            UsageError: it is none, or None where the strategy has no `amp`; on every rank.

        """
        self._scaler = self._on_all(lambda: self._scaling(scaler))
        return self._scaler

    def _scaling(self, scaler: Any) -> Any:
        """Return a scaler that knows of all workers. Local."""
        if scaler is not None:
            distribute = _row(scaler, _SCALERS, "torch.amp.GradScaler or hpcdist.GradScaler")
            return distribute(scaler, self.grid)
        if self.options.amp is None:
            raise UsageError(
                "distributed_scaler(None) makes the scaler of strategy.amp_configs, but "
                "strategy.amp is False; set it, or give a scaler"
            )
        return load(_SCALERS["torch", "GradScaler"])(None, self.grid, self.options)

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Compute the gradients of `loss` and let the optimizer step. Collective.

        Gradients stay; `clear_grad` of the optimizer removes them.

        Args:
            loss: what has ``backward()``.
            startup_program: None: there are no programs.
            parameter_list: None: the optimizer has its parameters.
            no_grad_set: None: parameters have ``requires_grad``.

        Returns:
            No operators, and the parameters of the optimizer with their gradients.

        """
        given = {
            "startup_program": startup_program,
            "parameter_list": parameter_list,
            "no_grad_set": no_grad_set,
        }
        for name, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{name} is for static programs; here the optimizer has its "
                    "parameters, and those it is to leave alone have requires_grad=False"
                )
        if self._optimizer is None:
            raise UsageError("minimize needs an optimizer; call fleet.distributed_optimizer first")
        if not callable(getattr(loss, "backward", None)):
            raise UsageError(f"minimize needs a loss that has backward(), got {loss!r}")
        loss.backward()
        self._optimizer.step()
        groups = self._optimizer.param_groups
        entries: list[Any] = [each for group in groups for each in group["params"]]
        parameters = [each[1] if isinstance(each, tuple) else each for each in entries]
        return [], [(each, each.grad) for each in parameters]

    def get_loss_scaling(self) -> float:
        """Return the factor of the loss.

        Raises:
            UsageError: there is no scaler.

        """
        if self._scaler is None:
            raise UsageError("there is no scaler; call fleet.distributed_scaler first")
        return float(self._scaler.get_scale())

    def amp_init(
        self, place: Any, scope: Any = None, test_program: Any = None, use_fp16_test: bool = False
    ) -> None:
        """Raise `UsageError`: it would convert a static program, and there is none here."""
        raise UsageError(
            "amp_init converts the parameters of a program, and there is none; strategy.amp = True "
            "is all that mixed precision needs"
        )

    def qat_init(self, place: Any, scope: Any = None, test_program: Any = None) -> None:
        """Raise `UsageError`: it would prepare a static program, and there is none here."""
        raise UsageError(
            "qat_init prepares a program, and there is none; prepare the model with "
            "torch.ao.quantization before fleet.distributed_model"
        )

    def all_reduce(self, input: Any, mode: str = "sum") -> npt.NDArray[Any]:
        """Return the "sum", "mean" or "max" of numbers or arrays over the workers. Collective.

        Args:
            input: numbers, nested lists or an array, of one shape on all workers.
            mode: "sum", "mean" or "max".

        """
        return reduced(input, mode, _MEANS, workers())

    # ---- saving

    def save_persistables(
        self, executor: Any, dirname: str, main_program: Any = None, mode: int = 0
    ) -> None:
        """Write model, optimizer and tables to a folder, as checkpoints. Collective.

        ``hpcdist.checkpoint.load({"model": model, "optimizer": optimizer}, dirname)`` reads the
        first two, on any grid; `load_model` reads the tables, which are in ``dirname/tables``.

        Args:
            executor: accepted; there are no programs.
            dirname: the folder.
            main_program: the model, where it is not that of `distributed_model`.
            mode: 0 for all rows of the tables, 1 for those that have changed since the last save.

        """
        self._save(dirname, main_program, mode, self._optimizer)

    def save_inference_model(
        self,
        executor: Any,
        dirname: str,
        feeded_var_names: list[str],
        target_vars: list[Any],
        main_program: Any = None,
        export_for_deployment: bool = True,
        mode: int = 0,
    ) -> None:
        """Write the weights of the model, and the tables, to a folder. Collective.

        ``hpcdist.load_merged_state_dict(dirname)`` reads the weights whole, on one process; the
        tables are in ``dirname/tables``.

        Args:
            executor: accepted; there are no programs.
            dirname: the folder.
            feeded_var_names: no effect: nothing is cut out of a program.
            target_vars: no effect, as above.
            main_program: the model, where it is not that of `distributed_model`.
            export_for_deployment: accepted.
            mode: as in `save_persistables`.

        """
        if feeded_var_names or target_vars:
            warnings.warn(
                "feeded_var_names and target_vars have no effect: there is no program to be cut, "
                "and all weights of the model are saved",
                stacklevel=outer_frame()[1],
            )
        self._save(dirname, main_program, mode, None)

    def save(
        self, /, dirname: str, feed: Sequence[Any] = (), fetch: Sequence[Any] = (), **configs: Any
    ) -> None:
        """Write the model: its weights alone if `feed` or `fetch` is given. Collective.

        Args:
            dirname: the folder.
            feed: anything in it asks for the weights alone.
            fetch: as `feed`.
            configs: arguments of `save_inference_model` or `save_persistables`.

        """
        configs.setdefault("executor", None)
        if feed or fetch:
            self.save_inference_model(
                dirname=dirname, feeded_var_names=[*feed], target_vars=[*fetch], **configs
            )
        else:
            self.save_persistables(dirname=dirname, **configs)

    def _save(self, dirname: str, model: Any, mode: Any, optimizer: Any) -> None:
        model = self._model if model is None else model
        tables = [*self.cluster.tables]
        self._on_all(lambda: _check_saved(model, mode, tables, dirname))
        if model is not None:
            save_group_sharded_model(model, dirname, optimizer, group=self.grid.group)
        if tables:
            save_tables(self.cluster, tables, os.path.join(dirname, TABLES), mode)

    def __repr__(self) -> str:
        if self._plan is None:
            return f"Fleet(server {self.cluster.server} of {len(self.cluster.servers)})"
        return f"Fleet({describe_degrees(self.plan.degrees)})"


# ---- arguments


def _check_again(before: Fleet | None, plan: Plan, group: Group) -> None:
    if before is None:
        return
    same = before.plan == plan and before.grid.group is group
    if not same:
        pairs = zip(settings_of(before.plan), settings_of(plan), strict=True)
        changes = [f"{new} in place of {old}" for old, new in pairs if old != new]
        raise UsageError(
            f"fleet.init was called before, for {describe_degrees(before.plan.degrees)} of group "
            f"{before.grid.group.name}, and now for {describe_degrees(plan.degrees)} of "
            f"group {group.name}, with {', '.join(changes) or 'the same strategy'}; call "
            "hpcdist.destroy_process_group() before"
        )


def _check_saved(model: Any, mode: Any, tables: Sequence[str], dirname: Any) -> None:
    named(dirname)
    if mode != 0 and not tables:
        raise UsageError(f"mode={mode!r} is for tables of parameter servers; use 0")
    if model is None and not tables:
        raise UsageError("there is no model; call fleet.distributed_model first")


def _engine_of(model: Any) -> Any:
    if model is None:
        raise UsageAssertionError(
            "model should not be None; give a torch.nn.Module or a model of arrays"
        )
    return engine_for(model, _MODELS, "distributed_model")


def _row(thing: Any, table: Table, wanted: str) -> Any:
    row = row_of(type(thing), table)
    if row is None:
        raise UsageError(f"{wanted} can be distributed, got {thing!r}")
    return load(row)
