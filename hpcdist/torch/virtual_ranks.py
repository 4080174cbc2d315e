"""`TorchVirtualRanks`: `hpcdist.DataParallel` of a `torch.nn.Module` on virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, final

import torch

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.collectives import broadcast
from hpcdist.comm.group import Group
from hpcdist.comm.states import verifying
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.parallel.clipping import Measured
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.parallel.options import DEFAULT_MB, training_group
from hpcdist.parallel.virtual.engine import VirtualRanks
from hpcdist.parallel.virtual.exchange import Exchange
from hpcdist.parallel.virtual.memory import FlatMemory
from hpcdist.parallel.virtual.settings import checked_count, nan_in
from hpcdist.parallel.virtual.streams import GENERATORS, Generator, Streams
from hpcdist.torch.batch_norm import SyncBatchNorm
from hpcdist.torch.clipping import norm_of_all, norm_of_owned
from hpcdist.torch.module_state import agree
from hpcdist.torch.wrapper import Wrapper

Tensors = list[torch.Tensor]


@final
class TorchVirtualRanks(VirtualRanks, Wrapper):
    """A module on virtual ranks; see `VirtualRanks`."""

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
        virtual_ranks: int,
        seed: int = 0,
        compress: None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        group = training_group(group)
        with verifying(group, "condition") as alike:
            count = checked_count(virtual_ranks, group, find_unused_parameters)
            _check_layers(layers)
            seed = integer(seed, "seed")
            alike.append((f"virtual_ranks={count}, seed={seed}", (), ""))
            alike.append((f"torch.set_num_threads({torch.get_num_threads()})", (), ""))
        self._limit = agree(layers, group, comm_buffer_size, last_comm_buffer_size)
        self._layers, self.group, self._count = layers, group, count
        broadcast_tensors([*layers.parameters(), *layers.buffers()], group, group.ranks[0])
        self._exchange = Exchange(group, count)
        self.virtual_ranks = self._exchange.own
        self._streams = Streams(self.virtual_ranks, count, seed, _generators())
        self._check_nan = read_config().check_nan if check_nan is None else check_nan
        self._memory, self._kept = self._lay_out([]), {}
        self._syncs, self._has_turn = True, False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, as the virtual rank whose turn it is.

        Args:
            inputs: of the module, by position.
            kwargs: of the module, by name.

        Raises:
            UsageError: the module trains, and this is no virtual rank's turn.

        """
        if not self._has_turn and self.training and torch.is_grad_enabled():
            raise UsageError(
                "a model on virtual ranks trains in `for part in model.parts(batch):`; elsewhere "
                "call it after model.eval(), or in torch.no_grad()"
            )
        return self._layers(*inputs, **kwargs)

    # ---- see VirtualRanks

    def _named(self) -> list[tuple[str, Any]]:
        return [pair for pair in self._layers.named_parameters() if pair[1].requires_grad]

    def _lay_out(self, trained: Sequence[Any]) -> FlatMemory:
        likes = [each.detach().new_empty(0, dtype=_sum_dtype(each)) for each in trained]
        return self._memory_for(trained, likes, self._limit, _empty)

    def measure_gradients(self, norm_type: float) -> Measured:
        """See `VirtualRanks.measure_gradients`.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        if self._owners is None:
            return norm_of_all(self.parameters(), norm_type)
        return norm_of_owned([each for _, each in self._named()], norm_type, self.group)

    def _listed_buffers(self) -> list[Any]:
        return list(self._layers.buffers())

    def _fill_buffers(self, contents: Sequence[NumpyArray]) -> None:
        for buffer, content in zip(self._listed_buffers(), contents, strict=False):
            view_of(buffer)[...] = content

    def _broadcast_buffers(self) -> None:
        broadcast_tensors(self._listed_buffers(), self.group, self.group.ranks[0])

    def _taken(self, trained: Sequence[Any]) -> list[Any]:
        return [each.grad for each in trained]

    def _give(self, trained: Sequence[Any], gradients: Sequence[Any]) -> None:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    def _add(self, trained: Sequence[Any], means: Sequence[Any]) -> None:
        for parameter, mean in zip(trained, means, strict=True):
            if mean is None:
                continue
            mean = _shaped_as(parameter, mean)
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.add_(mean)

    def _wide(self, gradients: Sequence[Any]) -> Tensors:
        return [each.to(_sum_dtype(each)) for each in gradients]

    def _summed(self, one: Tensors, other: Tensors) -> Tensors:
        torch._foreach_add_(one, other)
        return one

    def _flaw(self, named: Sequence[tuple[str, Any]], gradients: Sequence[Any]) -> str | None:
        if any(each.is_sparse for each in gradients):
            return "gradients must not be sparse; use layers with sparse=False"
        looked_at = zip(named, gradients, strict=True) if self._check_nan else ()
        wrong = [name for (name, _), each in looked_at if bool(each.isnan().any())]
        return nan_in(wrong) if wrong else None

    # ---- what DataParallel has, too

    def register_comm_hook(self, state: Any, hook: Any) -> NoReturn:
        """Refuse: a hook would add in an order of its own.

        Args:
            state: of no effect.
            hook: of no effect.

        Raises:
            UsageError: always.

        """
        raise UsageError(
            "a communication hook does not go with virtual_ranks: it would decide in which order "
            "gradients are added; leave one of them out"
        )

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Alias of `load_state_dict`. Local."""
        return self.load_state_dict(state_dict)

    def extra_repr(self) -> str:
        """Return how many ranks train together; torch shows it with the module."""
        return f"{self._count} virtual ranks on {self.group.nranks} ranks"


def _check_layers(layers: torch.nn.Module) -> None:
    norms = (torch.nn.SyncBatchNorm, SyncBatchNorm)
    wrong = [name for name, each in layers.named_modules() if isinstance(each, norms)]
    if wrong:
        raise UsageError(
            f"{wrong[0] or 'the module'} is a SyncBatchNorm, whose statistics are those of all "
            "ranks at once, while virtual ranks compute one after the other; use BatchNorm, each "
            "virtual rank with its own statistics, or GroupNorm"
        )
    apart = [name for name, each in layers.named_parameters() if own_group(each) is not None]
    if apart:
        raise UsageError(
            f"{apart[0]} has an hpcdist_group, so not all ranks have it; virtual ranks need every "
            "parameter on all ranks: take the group away, or leave virtual_ranks out"
        )


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: Group, src: int) -> None:
    """Give tensors the contents that they have on rank `src` (of the world). Collective."""
    if group.nranks == 1 or not tensors:
        return
    own = [each.detach() for each in tensors]
    broadcast_states([each for each in own if each.device.type == "cpu"], group, src)
    for each in own:
        if each.device.type != "cpu":
            broadcast(each, src, group)


_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return _SUMMED_IN.get(tensor.dtype, tensor.dtype)


def _empty(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_empty(size)


def _shaped_as(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the dtype and the layout of its parameter."""
    if mean.dtype == parameter.dtype and parameter.is_contiguous():
        return mean
    return torch.empty_like(parameter, requires_grad=False).copy_(mean)


# ---- torch's generators


def _generators() -> dict[str, Generator]:
    of_gpu = {"torch on the GPU": _generator("cuda")} if torch.cuda.is_available() else {}
    return {**GENERATORS, "torch": _generator("cpu"), **of_gpu}


def _generator(device: str) -> Generator:
    read, write = {
        "cpu": (torch.get_rng_state, torch.set_rng_state),
        "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
    }[device]

    def swap(state: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor = read()
        write(state)
        return before

    return Generator(
        lambda seed: torch.Generator(device).manual_seed(seed).get_state(),
        swap,
        lambda state: state.numpy().tobytes(),
        lambda content: torch.frombuffer(bytearray(content), dtype=torch.uint8),
    )
