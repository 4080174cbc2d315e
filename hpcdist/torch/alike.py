"""What ranks that train one model must have alike besides its parameters: layers, and samples.

`states_of_layers` is of what has no parameters, such as a Dropout: those that have some are
compared by their shapes. `Inputs` compares the batches of ranks that share each layer: where they
differ, weights that all of them have whole would part without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.states import State, verify_states
from hpcdist.errors import MismatchError
from hpcdist.transport.call.reduction import ReduceOp

_SAMPLED = 2048
"""Elements of a tensor that are compared; as many are read in some microseconds."""
_TOGETHER = 4
"""Tensors that are compared in the one exchange that there always is."""
_CHUNKS = 8
_TOLERANCE = 1e-3
"""How far sums may be apart, of what ranks have computed alike; those of other samples are more."""


def value_in_words(value: Any) -> str:
    """Return an argument as all ranks that were given the same write it: not by its address."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_in_words, value))})"
    plain = isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype))
    return repr(value) if plain else str(getattr(value, "__name__", type(value).__name__))


def module_in_words(module: torch.nn.Module) -> str:
    """Return the classes of a module and of its parts, and the arguments of torch's own ones."""
    return ", ".join(map(_describe_module, module.modules()))


def _describe_module(module: torch.nn.Module) -> str:
    kind = type(module)
    told = module.extra_repr() if kind.__module__.startswith("torch.nn.modules.") else ""
    return f"{kind.__name__}({told})"


def states_of_layers(module: torch.nn.Module) -> list[State]:
    """Return what ranks compare of a module besides its parameters that they have whole.

    That is layers of torch without parameters, by name, with their arguments, and the whole of
    which a parameter is a part.
    """
    layers = [
        (f"{name}: {_describe_module(each)}", (), "")
        for name, each in module.named_modules()
        if type(each).__module__.startswith("torch.nn.modules.")
        and next(each.parameters(), None) is None
        and next(each.children(), None) is None
    ]
    cut = [
        (f"{name}, cut over ranks", tuple(each.global_shape), f"{each.dtype}"[6:])
        for name, each in module.named_parameters()
        if "global_shape" in vars(each)
    ]
    return layers + cut


@final
class Inputs:
    """Compares the inputs that the ranks of a group give to a model.

    Args:
        group: ranks that share each layer, and so the samples.

    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def check(self, inputs: Any) -> None:
        """Refuse other samples than the other ranks have. Collective.

        Shapes and dtypes are compared, and of each tensor some elements: of integers exactly, of
        others by their sums, for ranks may have computed them in different ways.

        Args:
            inputs: tensors, in tuples, lists and dicts.

        Raises:
            MismatchError: ranks differ; on all of them.

        """
        named = list(_tensors(inputs))
        described = [
            (name, tuple(each.shape), f"{each.dtype}".removeprefix("torch."))
            for name, each in named
        ]
        rows = np.zeros((max(len(named), _TOGETHER), _CHUNKS + 2))
        for place, (_, each) in enumerate(named):
            rows[place] = _fingerprint(each)
        mark = np.full((1, rows.shape[1]), crc32(repr(described).encode()), np.float64)
        highest, lowest = self._extremes(np.concatenate([mark, rows[:_TOGETHER]]))
        if highest[0, 0] != lowest[0, 0]:
            verify_states(described, self._group, "input")  # raises, and says which
        highest, lowest = highest[1:], lowest[1:]
        if len(rows) > _TOGETHER:
            more = self._extremes(rows[_TOGETHER:])
            highest, lowest = np.concatenate([highest, more[0]]), np.concatenate([lowest, more[1]])
        allowed = np.repeat(_TOLERANCE * highest[:, -1:], rows.shape[1], axis=1)
        allowed[:, 0] = 0.0  # checksums
        wrong = (highest - lowest > allowed).any(axis=1)
        if wrong.any():
            raise MismatchError(
                f"the ranks {self._group.ranks} share each layer of the model (mp), but their "
                f"{named[int(wrong.argmax())][0]} has different values: their weights would part. "
                "Let them read the same samples: give the sampler the rank along dp "
                "(hcg.get_data_parallel_rank()), and the same seed to what changes samples; or "
                "set hybrid_configs['mp_configs'] = {'need_broadcast_data': False} if they are "
                "meant to differ"
            )

    def _extremes(self, rows: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """Return the greatest and the least of all ranks. Collective."""
        both = np.stack([rows, -rows])
        all_reduce(both, ReduceOp.MAX, self._group)
        return both[0], -both[1]


def _tensors(inputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors whose elements can be compared, with their places."""
    for path, each in tree_flatten_with_path(inputs)[0]:
        plain = isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
        if plain and each.layout == torch.strided and not each.is_meta:
            yield f"input{keystr(path)}", each.detach()


def _fingerprint(tensor: torch.Tensor) -> NumpyArray:
    """Return a checksum, sums of some elements, and the sum of their magnitudes."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    some = flat[:: max(1, flat.numel() // _SAMPLED)].cpu()
    found = np.zeros(_CHUNKS + 2)
    if not (some.is_floating_point() or some.is_complex()):
        found[0] = crc32(some.contiguous().view(torch.uint8).numpy())
        return found
    numbers = some.to(torch.complex128).view(torch.float64) if some.is_complex() else some.double()
    values = numbers.reshape(-1).numpy()
    total = np.abs(values).sum()
    if not np.isfinite(total):
        values = np.nan_to_num(values, nan=1e30, posinf=2e30, neginf=-2e30)
        total = np.abs(values).sum()
    if values.size:
        length = -(-values.size // _CHUNKS)
        sums = np.add.reduceat(values, np.arange(0, values.size, length))
        found[1 : 1 + sums.size] = sums
    found[-1] = total
    return found
