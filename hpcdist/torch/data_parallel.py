"""`TorchDataParallel`: `hpcdist.DataParallel` for a `torch.nn.Module`.

The engine is torch's own DistributedDataParallel (DDP), whose buckets hpcdist's `Averager`
averages. What DDP leaves open is settled here: parameters are compared by name, a parameter
without a gradient is an error that names it on every rank at the end of that very backward pass,
and evaluation never communicates.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_leaves

from hpcdist.arrays.libraries import view_of
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.comm.states import verify_states
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.parallel.attendance import heard_of
from hpcdist.parallel.averager import Averager, first_failure
from hpcdist.parallel.clipping import Measured, measure_groups
from hpcdist.parallel.compressed.averages import Parts
from hpcdist.parallel.compressed.options import scheme_of
from hpcdist.parallel.gradient_groups import group_of
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.nan_watch import NanWatch, places_in
from hpcdist.parallel.options import DEFAULT_MB, training_group
from hpcdist.parallel.overlap import CommStats
from hpcdist.torch.alike import states_of_layers
from hpcdist.torch.backend import process_group_of
from hpcdist.torch.clipping import norm_of_all
from hpcdist.torch.descriptions import mean
from hpcdist.torch.engine import Engine
from hpcdist.torch.gradient_groups import GroupedGradients
from hpcdist.torch.module_state import (
    agree,
    broadcast_module,
    registrations,
    states_of,
    trainable,
)
from hpcdist.torch.process_group import HpcdistProcessGroup
from hpcdist.torch.wrapper import Wrapper
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import Work


@final
class TorchDataParallel(DataParallel, Wrapper):
    """A wrapper of a module that averages its gradients; see `DataParallel`.

    Attributes:
        module: the module itself (also `_layers`).
        process_group: torch's process group of the ranks that train together.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> model = dist.DataParallel(torch.nn.Linear(8, 1))
        >>> type(model).__module__.startswith("hpcdist.torch")
        True
        >>> model(torch.ones(4, 8)).sum().backward()

    """

    def __init__(
        self,
        layers: torch.nn.Module,
        strategy: Any = None,
        comm_buffer_size: float = DEFAULT_MB,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
        *,
        check_nan: bool | None = None,
        virtual_ranks: None = None,
        seed: int = 0,
        compress: Any = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        group = training_group(group)
        self._limits_MB = comm_buffer_size, last_comm_buffer_size
        self._compress = compress
        self._layers = layers
        self.group = group
        self.comm_buffer_size = self._look_at_parameters()
        self.find_unused_parameters = find_unused_parameters
        self.grad_need_sync = True
        self.process_group: HpcdistProcessGroup = process_group_of(group)
        broadcast_module(layers, self.process_group)
        self._check_nan = read_config().check_nan if check_nan is None else check_nan
        scheme = scheme_of(compress)
        self._averager = Averager(self.process_group.group, mean, scheme=scheme)
        self._hook: tuple[Any, Callable[..., Any]] | None = None
        self._told = False
        self._begin_training()

    def _begin_training(self) -> None:
        """Make the engine, of a model that has trained nothing yet. Local."""
        self._watch_nan = NanWatch(self.group)
        self._strays: list[Any] = []
        self._handles: list[Any] = []
        self._looked_at: dict[int, tuple[Any, torch.Tensor]] = {}
        self._count_active = self._joining = False
        self._passes: list[_Forward] = []
        self._due = self._begun = self._laid_out = False
        self._launched, self._complete = 0, False
        self._task, self._blocks = -1, list[Any]()
        self._latest: torch.futures.Future[Any] | None = None
        self._error: BaseException | None = None
        self._sound, self._is_new, self._dropped = True, False, 0
        self._shadow: _Shadow | None = None
        self._engine = self._make_engines()
        _MODELS.add(self)
        self._look_for_strays()

    def _look_at_parameters(self) -> int:
        """Note which parameters are trained; return the bytes of a bucket. Collective.

        Raises:
            MismatchError: ranks train other parameters.

        """
        layers = self._layers
        limit = agree(layers, self.group, *self._limits_MB, self._compress)
        self._grouped = GroupedGradients(layers, self.group, limit)
        if not self._grouped.exist:  # else ranks have other layers, such as experts
            verify_states(states_of_layers(layers), self.group, "layer")
        self._note_parameters()
        return limit

    def _note_parameters(self) -> None:
        layers = self._layers
        own = {id(each) for _, each in self._grouped.trained}
        self._trained = [pair for pair in trainable(layers) if id(pair[1]) not in own]
        self._names = {id(parameter): name for name, parameter in self._trained}
        self._registered = registrations()
        self._listed = list(layers.parameters())
        self._kinds = _kinds_of(self._listed)

    def _follow_parameters(self) -> None:
        """Average gradients of what is trained now: more or less, new, or of another dtype.

        Collective where that has changed, unless all is frozen for a while.
        """
        if self._registered != registrations():
            self._registered, self._listed = registrations(), list(self._layers.parameters())
        kinds = _kinds_of(self._listed)
        if kinds == self._kinds or not any(each.requires_grad for each in self._listed):
            return
        # Where ranks differ, the others send gradients: in that group, they and we hear of it.
        verify_states(states_of(trainable(self._layers)), self.process_group.group)
        are_new = kinds[0] != self._kinds[0]
        if not are_new:
            self._average_pending([each for _, each in self._trained if not each.requires_grad])
        self._look_at_parameters()
        if are_new:
            broadcast_module(self._layers, self.process_group)
        self._laid_out = False
        self._renew_engine()
        self._look_for_strays()

    def _average_pending(self, frozen: list[torch.nn.Parameter]) -> None:
        """Average what passes in `no_sync` have left of gradients that no later pass will average.

        Collective, of parameters that are trained no more.
        """
        if not frozen or self.group.nranks == 1:
            return
        has = np.array([_is_other_than_zero(each.grad) for each in frozen], np.uint8)
        all_reduce(has, ReduceOp.MAX, self.process_group.group)
        for parameter, somewhere in zip(frozen, has, strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.detach()  # it may have a graph of its own
            self.process_group.allreduce([gradient.div_(self.group.nranks)]).wait()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; if gradients are wanted, prepare to average them.

        Args:
            inputs: of the module, by position.
            kwargs: of the module, by name.

        """
        self._leave_last_pass()
        if not torch.is_grad_enabled():
            return self._layers(*inputs, **kwargs)
        if self.grad_need_sync:
            self._follow_parameters()
        else:
            self._forget_parameters()
            self._drop_forward()
        run = self._prepared_engine() if self._engine else self._layers
        if self.grad_need_sync and not self._begun:
            self._due, self._launched, self._complete, self._latest = True, 0, False, None
        self._count_earlier()
        output = run(*inputs, **kwargs)
        if self.grad_need_sync:
            self._watch(output)
        return output

    def _drop_forward(self) -> None:
        """Make DDP forget a forward that no backward pass has followed: it would average the next.

        Such is one of an evaluation that was not under ``torch.no_grad()``.
        """
        if self._due and not self._begun:
            self._due = self._sound = False
            self._dropped += 1

    def _count_earlier(self) -> None:
        """Tell a new engine which parameters have a gradient of earlier passes, and so are used."""
        if self._is_new and self.find_unused_parameters and self._engine:
            left = [(name, each.grad) for name, each in self._trained if each.grad is not None]
            self._count_as_zeros([name for name, grad in left if grad.layout is torch.strided])
        self._is_new = False

    def _prepared_engine(self) -> Engine:
        engine = self._sound_engine()
        if self._shadow is not None and engine._join_config != self._shadow._join_config:
            engine._join_config = self._shadow._join_config
            engine.join_hook()  # as `Join` does with what it is given, which may be an older one
        # Left alone, DDP broadcasts buffers in the forwards of evaluation, too.
        engine.training = engine.broadcast_buffers = self.training
        engine.require_backward_grad_sync = self.grad_need_sync
        if not self._joining:  # DDP goes by its last forward, which was another one on some ranks
            engine.require_forward_param_sync = self.grad_need_sync
        return engine

    def _sound_engine(self) -> Engine:
        """Return the engine: a new one where DDP cannot go on from what has happened to the old.

        Local, for only some ranks need a new one. It has the buckets that all others have.
        """
        if not self._sound:
            parameters = [each for _, each in self._trained]
            layout = self._engine[0].layout(parameters) if self._laid_out else None
            self._renew_engine()
            if layout is not None:
                self._engine[0].lay_out(layout)
        return self._engine[0]

    def _renew_engine(self) -> None:
        for each in self._engine:
            each.retire()
        self._engine, self._error = [], None
        self._engine, self._sound, self._is_new = self._make_engines(), True, True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `DataParallel.no_sync`."""
        self._told = True
        before, self.grad_need_sync = self.grad_need_sync, False
        try:
            yield
        finally:
            self.grad_need_sync = before

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """See `DataParallel.join`."""
        if enable and self._grouped.exist:
            raise UsageError(
                "this module has parameters with an hpcdist_group, which cannot be averaged in "
                "join; give all ranks equal numbers of batches"
            )
        if not enable:
            yield
            return
        self._leave_last_pass()
        self._due = False
        self._count_active, self._joining = not divide_by_initial_world_size, True
        try:
            with ExitStack() as stack:
                if self._engine:
                    self._sound_engine().require_forward_param_sync = True
                    self._shadow = _Shadow(self)
                    stack.enter_context(Join([self._shadow]))
                stack.enter_context(heard_of(self.process_group.group, self._end_pass))
                yield
        finally:
            # DDP would go on as in `join`: a new one is as it is on all ranks, whoever left early.
            self._sound = self._count_active = self._joining = False
            self._shadow = None

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Register `hook(state, bucket)` to average the buckets, as torch's DDP does.

        For example those of ``torch.distributed.algorithms.ddp_comm_hooks``. Once per model, the
        same on all ranks.

        Args:
            state: is handed to each call of `hook`.
            hook: takes `state` and a ``torch.distributed.GradBucket``, and returns a future of the
                averaged tensor.

        """
        if self._compress is not None:
            raise UsageError(
                f"this model has compress={self._compress!r}, which averages the buckets; leave it "
                "out where a hook does"
            )
        if self._hook is not None:
            raise UsageError("a communication hook is registered already; one model takes one")
        self._hook = state, hook
        self._engine = self._engine or [self._make_engine()]

    def apply_collective_grads(self) -> None:
        """No-op: a backward pass ends when its gradients have been averaged."""

    def comm_stats(self) -> CommStats:
        """See `DataParallel.comm_stats`; a user-registered hook is not timed."""
        return self._averager.stats()

    norm_is_collective = True
    """As of a model, not of its parameters: only the model knows which ranks have them."""

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them.

        Each parameter counts once, on however many ranks it is. Collective where parameters, of
        any rank, have an ``hpcdist_group``.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        if not self._grouped.exist:
            return norm_of_all(self.parameters(), norm_type)
        gradients = [
            (view_of(each.grad), group_of(each, self.group))
            for each in self.parameters()
            if each.grad is not None
        ]
        return measure_groups(gradients, self.group, norm_type)

    # ---- one backward pass

    def _watch(self, output: Any) -> None:
        """Notice when the backward pass reaches `output`, by way of its tensors."""
        self._passes = []
        forward = _Forward(self._dropped)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._begin, forward))

    def _begin(self, forward: _Forward, _: torch.Tensor) -> None:
        if forward.averaged:
            raise UsageError(
                "this is a second backward pass through the same forward; its gradients would stay "
                "on this rank. Call the model again before it, or do the first one in "
                "`with model.no_sync():`, the forward included"
            )
        if forward.dropped != self._dropped:
            raise UsageError(
                "a call of the model in `no_sync` came between this backward pass and its forward, "
                "so its gradients would stay on this rank. Do the backward pass before that call, "
                "or call the model again before it"
            )
        if self._leave_last_pass():
            raise UsageError(
                "an exception has ended the last backward pass; call the model again before the "
                "next one"
            )
        if not self._passes:
            self._begun, self._sound = True, False
            self._task, self._latest = torch._C._current_graph_task_id(), None
            self._blocks = [*self.process_group.group.open_blocks]
            self._launched, self._complete, self._error = 0, False, None
            self._averager.begin()
            self._before = _versions(self._not_ddps())
            # Callbacks run in the order of queueing: `_end`, then DDP's, which is queued with the
            # last bucket and waits for all of them, then `_look`, which `_end` queues.
            _at_end(self._end)
        self._passes.append(forward)

    def _watch_parameters(self) -> None:
        """Notice when a backward pass reaches any parameter, be it not by way of an output.

        So does that of a loss made of what ``torch.autograd.grad(..., create_graph=True)`` returns,
        such as forces.
        """
        reached = partial(_reached, weakref.ref(self), _Forward(self._dropped))
        trained = [each for _, each in (*self._trained, *self._grouped.trained)]
        self._handles = self._handles or [
            each.register_hook(reached) for each in trained if each.requires_grad
        ]

    def _forget_parameters(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _look_for_strays(self) -> None:
        """Warn once of gradients that come from no call of the model, such as of a method of it.

        Only the first and the last parameter are looked at. Who uses `no_sync` knows.
        """
        for each in self._strays:
            each.remove()
        ends = {id(each): each for _, each in self._trained[:: max(len(self._trained) - 1, 1)]}
        hook = partial(_arrived, weakref.ref(self))  # else the parameters would hold the model
        watched = ends.values() if self._engine and not self._told else ()
        self._strays = [each.register_post_accumulate_grad_hook(hook) for each in watched]

    def _tell_of_stray(self, parameter: torch.nn.Parameter) -> None:
        """Warn that the gradient of a parameter has not been averaged, if that is so."""
        if (
            self._told
            or not self.grad_need_sync
            or any(each._expects(parameter) for each in _MODELS)
        ):
            return
        self._told = True
        warnings.warn(
            f"the gradient of {self._names[id(parameter)]} comes from no call of the DataParallel "
            "model, so it stays on this rank and is not averaged. Call model(...), not a method "
            "of the module or the module itself, and compute the loss from what it returns, or "
            "in the module's forward",
            stacklevel=6,  # the line of backward(), three frames of torch away
        )

    def _expects(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a call of this model may have given a parameter its gradient."""
        return (self._due or self._begun) and id(parameter) in self._names

    def _average_next(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket: DDP's communication hook."""
        self._latest = future = self._average(bucket)
        return future

    def _average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self._launched = bucket.index() + 1
        self._complete = bucket.is_last()
        if self._hook is not None:
            state, hook = self._hook
            return hook(state, bucket)
        gradients = bucket.buffer()
        if gradients.device.type != "cpu" and self._compress is None:
            work = self.process_group.allreduce([gradients.div_(self.group.nranks)])
            return work.get_future().then(lambda future: future.value()[0])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self._count_active and bucket.index() == 0:
            self._active = self._ranks_with_batches(bool(self._passes))
        factor = self.group.nranks / self._active if self._count_active else 1

        looks = self._look_for_nan(bucket)

        def arrived(error: BaseException | None) -> None:
            if looks is not None and _nan_in(gradients.index_select(0, looks)):
                self._watch_nan.heard()
            # A result also after an error, or DDP would wait for ever; it is raised in the end.
            self._error = self._error or error
            future.set_result(gradients if factor == 1 else gradients.mul_(factor))

        error = self._check_bucket(bucket)
        if self._compress is None:
            self._averager.average(gradients, error, arrived)
        else:
            error = error or _not_to_compress(gradients)
            flat = None if error else view_of(gradients)
            self._averager.average(flat, error, arrived, parts=self._parts_of(bucket))
        return future

    def _parts_of(self, bucket: Any) -> Parts:
        return tuple((self._names[id(each)], tuple(each.shape)) for each in bucket.parameters())

    def _look_for_nan(self, bucket: Any) -> torch.Tensor | None:
        """Tell once if some elements of a bucket are NaN here; return which to look at again."""
        watch = self._watch_nan
        if not watch.looks or self._check_nan:
            return None
        gradients = bucket.buffer()
        # DDP lays its buckets out anew once; sparse ones are not laid out.
        stamp = 0 if gradients.is_sparse else gradients.data_ptr(), gradients.numel()
        known, places = self._looked_at.get(bucket.index(), (None, None))
        if places is None or known != stamp:
            places = torch.from_numpy(places_in([each.numel() for each in bucket.gradients()]))
            self._looked_at[bucket.index()] = stamp, places
        if not _nan_in(gradients.index_select(0, places)):
            return places
        wrong = self._with_nan(bucket) or [f"bucket {bucket.index()}"]
        watch.tell(", ".join(wrong))
        return None

    def _with_nan(self, bucket: Any) -> list[str]:
        """Return the parameters of a bucket whose gradients have NaN."""
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return [self._names[id(parameter)] for parameter, part in pairs if _nan_in(part)]

    def _ranks_with_batches(self, mine: bool) -> float:
        """Count the ranks that are in a backward pass, not just joining; collective."""
        active = np.array([float(mine)])
        all_reduce(active, group=self.process_group.group)
        return float(active[0])

    def _end(self) -> None:
        """Come to the end of the computing; DDP waits for the buckets, and after that we look."""
        passes, self._passes = self._passes, []
        unchanged = self._unchanged()
        own = [name for name, _ in self._grouped.trained if name in unchanged]
        missing = self._missing(unchanged)
        if len(missing) + len(own) == len(self._trained) + len(self._grouped.trained):
            self._sound, self._due, self._begun = True, True, False
            self._watch_parameters()
            return  # not a backward pass to the parameters, but torch.autograd.grad
        self._forget_parameters()
        if self.find_unused_parameters and self._engine and missing:
            self._count_as_zeros(missing)
            missing = []
        self._due = self._begun = False
        error = self._complaint(missing, own)
        called_off = self._call_off(error) if self._engine and missing else []
        if error is None:
            for forward in passes:
                forward.averaged = True
            self._averager.computed()
        failure = self._grouped.average(self._averager, error)
        failure = first_failure(called_off) or failure
        if self._engine and not called_off:
            self._error = self._error or failure
            if self.find_unused_parameters:  # DDP would first raise what became of its own map
                self._wait_for_buckets()
                self.raise_first()
            _at_end(self._look)
        elif failure is not None:
            raise failure

    def _not_ddps(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that DDP does not look after."""
        return self._grouped.trained if self._engine else [*self._trained, *self._grouped.trained]

    def _unchanged(self) -> set[str]:
        """Find which of them got no gradient in this backward pass."""
        named = self._not_ddps()
        triples = zip(named, self._before, _versions(named), strict=True)
        return {name for (name, _), old, new in triples if old[0] is new[0] and old[1] == new[1]}

    def _missing(self, unchanged: set[str]) -> list[str]:
        """Return which parameters of the model's own group got none, where DDP cannot go on so."""
        if self._complete:
            return []
        if not self._engine:
            return [name for name, _ in self._trained if name in unchanged]
        names = [name for name, _ in self._trained]
        indices = self._engine[0].without_gradient()
        return names if indices is None else [names[index] for index in indices]

    def _count_as_zeros(self, missing: list[str]) -> None:
        """Give DDP zeros for what takes no part in the loss, though it does in the outputs."""
        named = dict(self._trained)
        parameters = [named[name] for name in missing]
        torch.autograd.backward(parameters, [torch.zeros_like(each) for each in parameters])

    def _complaint(self, missing: list[str], own: list[str]) -> UsageError | None:
        """Return what is wrong with the gradients, where DDP or its hook do not find it."""
        unused = [*missing, *own]
        if unused and not self.find_unused_parameters:
            return _unused(unused)
        checked = self._not_ddps() if self._check_nan else []
        wrong = [name for name, each in checked if _nan_in(each.grad)]
        if not wrong:
            return None
        where = "" if self._grouped.exist else f"rank {self.group.world_rank}: "
        return UsageError(where + _not_a_number(wrong))

    def _look(self) -> None:
        """Raise what went wrong with a bucket: a future would hand C++ its text only.

        If all went well, let DDP arrange its buckets anew, now that it knows the order in which
        gradients come: all ranks are in step here, but not in the next forward, where DDP would
        do it. With `join`, ranks that have no more batches expect it there.
        """
        self.raise_first()
        if not self._joining and self._engine[0].rearrange():
            self._laid_out = True
        self._sound = True

    def raise_first(self) -> None:
        """Raise the first error of the buckets of a pass, if there was one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _leave_last_pass(self) -> bool:
        """Call off the rest of the last backward pass, if an exception has ended it on this rank.

        Collective then: the others are still in that pass. Return whether there was one.
        """
        if not self._begun or torch._C._current_graph_task_id() == self._task:
            return False
        still_open = self.process_group.group.open_blocks
        if all(each in still_open for each in self._blocks):
            self._call_off_pass(UsageError("an exception has ended its last backward pass"))
        self._begun, self._passes = False, []  # a block of `together` has ended it for all ranks
        return True

    def _end_pass(self, error: UsageError) -> bool:
        """In `join`, call off the pass that is under way or comes next; False if there is none."""
        if not (self._due or self._begun):
            if self._shadow is None or not self._shadow.await_pass():
                return False
            self._launched, self._complete, self._latest = 0, False, None
        self._call_off_pass(error)
        return True

    def _call_off_pass(self, error: UsageError) -> None:
        """Take part, with `error`, in all that the others still do in this backward pass."""
        self._due = self._begun = False
        self._passes = []
        if self._count_active and not self._launched:
            self._ranks_with_batches(True)
        called_off = self._call_off(error) if self._engine else []
        first_failure(called_off)
        self._wait_for_buckets()
        if called_off and self.find_unused_parameters:
            self._engine[0].match_unused()
        self._grouped.average(self._averager, error)
        if self._engine and not called_off and not self._grouped.exist:
            self._call_off_layout(error)

    def _wait_for_buckets(self) -> None:
        """Wait for those that DDP has handed over."""
        if self._latest is not None:
            with suppress(RuntimeError):  # of a hook of the user's; DDP raises it
                self._latest.wait()

    def _call_off_layout(self, error: UsageError) -> None:
        """Let the others not wait in `_look`, where all buckets have been sent."""
        settled = self._laid_out or self._joining or self.find_unused_parameters
        if not settled and self._error is None:
            with suppress(UsageError):
                decline(self.process_group.group, Kind.BROADCAST, error)

    def _call_off(self, error: UsageError | None) -> list[Work]:
        """Report the error to all ranks, in place of every bucket that cannot be sent."""
        buckets = len(self._engine[0].buckets())
        parts = None if self._compress is None else ()
        average = partial(self._averager.average, None, error, parts=parts)
        return [average() for _ in range(self._launched, buckets)]

    def _check_bucket(self, bucket: Any) -> UsageError | None:
        if not self._check_nan or not _nan_in(bucket.buffer()):
            return None
        return UsageError(_not_a_number(self._with_nan(bucket)))

    def _make_engines(self) -> list[Engine]:
        """Return the engine, in a list: a module in it is none of our sub-modules.

        None for a rank that is alone, unless a hook wants to see its gradients.
        """
        wanted = self.group.nranks > 1 or self._hook is not None
        return [self._make_engine()] if wanted and self._trained else []

    def _make_engine(self) -> Engine:
        return Engine(
            self._layers,
            self.process_group,
            self._average_next,
            self.comm_buffer_size,
            self.find_unused_parameters,
        )

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchDataParallel:
        """Return a model with a copy of the module, for the same ranks. Local: made on all."""
        if self._grouped.exist:
            raise UsageError(
                "a model whose parameters have an hpcdist_group cannot be copied: the copies would "
                "have none; copy its module, give them their groups, and call DataParallel again"
            )
        twin = memo[id(self)] = self.__new__(type(self))
        torch.nn.Module.__init__(twin)
        own = {name: copy.deepcopy(vars(self)[name], memo) for name in vars(twin)}
        twin.__dict__.update({name: getattr(self, name) for name in _SHARED}, **own)
        twin._averager = self._averager.afresh()
        twin._note_parameters()
        twin._begin_training()
        return twin

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a DataParallel model belongs to the ranks of this job and cannot be pickled or saved "
            "whole; save model.state_dict(), or model.module"
        )

    # ---- a module like the one it holds

    def extra_repr(self) -> str:
        """Return how many ranks train together; torch shows it with the module."""
        return f"{self.group.nranks} ranks"

    def state_dict(
        self,
        destination: Any = None,
        include_sublayers: bool = True,
        structured_name_prefix: str = "",
        *,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state: names have no prefix of ours. Local.

        Args:
            destination: a dict that takes the state; None for a new one.
            include_sublayers: True: a torch module's state always has that of its sub-modules.
            structured_name_prefix: Paddle's name of `prefix`.
            prefix: put before each name.
            keep_vars: keep tensors in the graph, instead of detaching them.

        """
        prefix = prefix or structured_name_prefix
        if not include_sublayers:
            raise UsageError("a torch module's state_dict always includes its sub-modules")
        state: dict[str, Any] = self._layers.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        return state

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Alias of `load_state_dict`. Local."""
        return self.load_state_dict(state_dict)


_MODELS: weakref.WeakSet[TorchDataParallel] = weakref.WeakSet()
"""Of this process: parameters may be trained by several."""

_SHARED = (
    *("group", "process_group", "comm_buffer_size", "find_unused_parameters", "grad_need_sync"),
    *("_limits_MB", "_compress", "_check_nan", "_grouped", "_hook", "_told"),
)
"""What copies of a model have in common, by name."""


def _unused(missing: list[str]) -> UsageError:
    return UsageError(
        f"no gradient for {', '.join(missing)} in this backward pass; every parameter must take "
        "part in the loss. If some do not, set requires_grad=False on what shall not be trained; "
        "or pass find_unused_parameters=True to DataParallel, or with fleet set "
        "strategy.find_unused_parameters = True, or use level os_g with group_sharded_parallel"
    )


def _not_to_compress(gradients: torch.Tensor) -> UsageError | None:
    if gradients.device.type == "cpu" and not gradients.is_sparse:
        return None
    return UsageError(
        f"compress is for dense gradients in host memory, and these are {gradients.layout} on "
        f"{gradients.device}; leave it out"
    )


def _arrived(model: weakref.ref[TorchDataParallel], parameter: torch.nn.Parameter) -> None:
    """Tell the model of a gradient."""
    if (told := model()) is not None:
        told._tell_of_stray(parameter)


def _reached(
    model: weakref.ref[TorchDataParallel], forward: _Forward, gradient: torch.Tensor
) -> None:
    """Tell the model that a backward pass has come to a parameter."""
    if (told := model()) is not None and told._due and not told._begun:
        told._begin(forward, gradient)


def _kinds_of(parameters: list[torch.nn.Parameter]) -> tuple[Any, ...]:
    """Return which parameters these are, and what DDP takes for granted of them."""
    return (
        [*map(id, parameters)],
        [each.requires_grad for each in parameters],
        [each.dtype for each in parameters],
        [each.device for each in parameters[:1]],  # that of all
    )


def _versions(trained: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[Any, int]]:
    """Return what changes when a gradient is set or added to."""
    gradients = [parameter.grad for _, parameter in trained]
    return [(each, 0 if each is None else each._version) for each in gradients]


def _is_other_than_zero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


def _nan_in(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.isnan().any())


def _not_a_number(wrong: list[str]) -> str:
    return (
        f"the gradient of {', '.join(wrong)} has NaN; look at the loss and the batch of this rank, "
        "or clip gradients and lower the learning rate"
    )


def _at_end(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Shadow(Joinable, JoinHook):  # type: ignore[misc]
    """What a rank without batches does in `join`, by the engine that its model has just then."""

    def __init__(self, model: TorchDataParallel) -> None:
        super().__init__()
        self._model = model

    @property
    def _engine(self) -> Engine:
        return self._model._sound_engine()

    def join_hook(self, **_: Any) -> JoinHook:
        return self

    def main_hook(self) -> None:
        """Take part in a step of the others, and raise what went wrong in it."""
        self._engine.join_hook().main_hook()
        self._model.raise_first()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters of a rank that was last."""
        self._engine.join_hook().post_hook(is_last_joiner)

    def await_pass(self) -> bool:
        """Take part in what the others do until a backward pass of theirs; False if none comes."""
        engine = self._engine
        while self._others():
            if engine.follow_forward():
                return True
        return False

    def _others(self) -> float:
        """Return how many ranks have batches; collective."""
        count = torch.zeros(1, device=self.join_device)
        torch.distributed.all_reduce(count, group=self.join_process_group)
        return float(count.item())

    @property
    def join_device(self) -> torch.device:
        return self._engine.join_device

    @property
    def join_process_group(self) -> Any:
        return self._model.process_group


class _Forward:
    """One call of the model, after so many calls `dropped` (see `_drop_forward`).

    Attributes:
        averaged: True once a backward pass has gone through it.

    """

    averaged = False

    def __init__(self, dropped: int) -> None:
        self.dropped = dropped
