"""`DataParallel`: the same model on every rank, each with its share of the batch."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.parallel.engines import ARRAYS, engine_for
from hpcdist.parallel.options import DEFAULT_MB
from hpcdist.parallel.overlap import CommStats

if TYPE_CHECKING:  # calling the class makes an engine, which is and has what the model is and has
    _Interface: TypeAlias = Any
else:
    _Interface = ABC


def _without_self(method: Callable[..., None]) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class DataParallel(_Interface):  # type: ignore[misc] # of Any
    """Make `layers` train on all ranks of a group: gradients are averaged in the backward pass.

    Collective over the group to create: parameters and buffers are checked by name, shape and
    dtype and get the values of the group's first rank. What you get depends on `layers`: for a
    `torch.nn.Module` it is one, too, and runs on torch's own DistributedDataParallel; anything
    else with `named_parameters()` (of `hpcdist.Parameter`) runs on hpcdist's engine for arrays.
    Whatever is not named here falls through to `layers`.

    A parameter may say which ranks have the same one, if not all have: `Parameter.group`, or the
    attribute ``hpcdist_group`` of torch's. Its gradient is averaged over these ranks.

    Args:
        layers: a `torch.nn.Module`, or an object with ``named_parameters()``.
        strategy: accepted for Paddle's sake.
        comm_buffer_size: size of a bucket of gradients in MiB; 0 is one bucket per parameter.
            At the default, ranks that share one node use 8.
        last_comm_buffer_size: size in MiB of the bucket that is reduced last, with nothing left
            to hide it behind. Not for torch modules, whose buckets are filled in the order in
            which their gradients become ready.
        find_unused_parameters: parameters without a gradient contribute zeros; without this
            they are an error that names them. A parameter that no rank uses keeps its gradient
            (None).
        group: the ranks that train together; None for all.
        check_nan: look for NaN in gradients and name parameter and rank; default: the setting
            ``HPCDIST_CHECK_NAN``.
        virtual_ranks: train as so many ranks would, at least as many as there are, with the same
            bits on any number of ranks. The loop over the batches then has one over ``parts``: see
            `hpcdist.parallel.virtual.engine.VirtualRanks`.
        seed: of the random numbers of virtual ranks; of no use without them.
        compress: send gradients in fewer bytes over a network that is slower than encoding:
            ``"bfloat16"`` (a half of float32's, the range is kept), ``"float16"``, ``"int8"`` or
            ``"fp8"`` (a quarter; what a step rounds away is added to the next one), or a
            `PowerSGD`. Sums are in float32, and all ranks get the same bits. Gradients of a group
            of their own travel whole. What is kept for the next step is in no checkpoint.

    Raises:
        UsageError: no trainable parameter, this rank is not in the group, or a parameter's group is
            not a part of it; `compress` is unknown, comes with virtual ranks or with
            ``HPCDIST_REDUCTIONS=ordered``, or a parameter is complex or on a GPU.
        MismatchError: the parameters of two ranks differ in name, order, shape or dtype.

    Reference: Li et al., PyTorch Distributed, VLDB 2020; Paddle's ``paddle.DataParallel``.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> class Model:
        ...     def __init__(self):
        ...         self.w = dist.Parameter(np.ones(2))
        ...     def named_parameters(self):
        ...         yield "w", self.w
        >>> def averaged():
        ...     model = dist.DataParallel(Model())
        ...     model.w.grad = np.full(2, float(dist.get_rank()))  # the backward pass
        ...     return model.w.grad.tolist()
        >>> dist.simulate(3, averaged)
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]

    """

    def __new__(
        cls,
        layers: Any = None,
        *args: Any,
        virtual_ranks: Any = None,
        compress: Any = None,
        **kwargs: Any,
    ) -> DataParallel:
        """Make an instance of the engine for `layers`."""
        if virtual_ranks is not None and compress is not None:
            raise UsageError(
                f"compress={compress!r} rounds gradients as the ranks share them, and "
                "virtual_ranks promises the same bits on any number of ranks; leave one out"
            )
        for name in kwargs.keys() & _OF_TORCH.keys():
            raise TypeError(f"DataParallel takes no {name}: {_OF_TORCH[name]}")
        if isinstance(layers, DataParallel):
            raise UsageError(
                "DataParallel got a model that is data-parallel already; call it as it is, or give "
                "the module that it holds"
            )
        engine = cls
        if cls is DataParallel:
            table = _ENGINES if virtual_ranks is None else _ON_VIRTUAL_RANKS
            engine = engine_for(layers, table, "DataParallel")
        made: DataParallel = super().__new__(engine)
        return made

    @abstractmethod
    def __init__(
        self,
        layers: Any,
        strategy: Any = None,
        comm_buffer_size: float = DEFAULT_MB,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
        *,
        check_nan: bool | None = None,
        virtual_ranks: int | None = None,
        seed: int = 0,
        compress: Any = None,
    ) -> None: ...

    __signature__ = _without_self(__init__)

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of forwards inside the context on this rank, without averaging.

        The forward decides: the next backward of a forward outside averages what has gathered.
        """

    @abstractmethod
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> AbstractContextManager[None]:
        """Allow ranks to have different numbers of batches. Collective over the group.

        A rank that has left its loop contributes zeros until all have; then every rank gets the
        parameters of one that was last. Where a rank leaves with an error, the others get
        `RemoteError` in their next batch.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks; if
                False, by the number of ranks that still have batches.
            enable: False makes the context do nothing.

        """

    @abstractmethod
    def comm_stats(self) -> CommStats:
        """Return the cost of exchanging gradients so far, and the hidden share of it. Local."""

    @abstractmethod
    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Load what `state_dict` returned. Local: do the same on every rank.

        Args:
            state_dict: arrays or tensors by name.
            use_structured_name: accepted: names are always those of `state_dict`.

        """

    def set_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Alias of `set_state_dict`."""
        return self.set_state_dict(state_dict, use_structured_name)

    def load_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Alias of `set_state_dict`."""
        return self.set_state_dict(state_dict, use_structured_name)

    def scale_loss(self, loss: Any) -> Any:
        """Return `loss`: the mean over ranks needs no scaling (kept for Paddle's sake).

        Args:
            loss: any value.

        """
        return loss

    @abstractmethod
    def apply_collective_grads(self) -> None:
        """Finish averaging the gradients of the last backward pass."""


_OF_TORCH = {
    **dict.fromkeys(("model", "module"), "the model is its first argument, layers"),
    **dict.fromkeys(
        ("device_ids", "output_device"),
        "leave it out; a module trains on the device where its parameters are",
    ),
    "process_group": "the ranks that train together are its argument group",
    "bucket_cap_mb": "the size of a bucket in MiB is its argument comm_buffer_size",
}
"""What to do about arguments that torch's classes have."""

_ENGINES = {
    ("torch", "Module"): "hpcdist.torch.data_parallel:TorchDataParallel",
    ARRAYS: "hpcdist.parallel.arrays:ArrayDataParallel",
}

_ON_VIRTUAL_RANKS = {
    ("torch", "Module"): "hpcdist.torch.virtual_ranks:TorchVirtualRanks",
    ARRAYS: "hpcdist.parallel.virtual.arrays:ArrayVirtualRanks",
}
