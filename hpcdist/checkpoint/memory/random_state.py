"""The states of random numbers of a process, as plain data: Python's, NumPy's and torch's."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

State = dict[str, Any]


def random_state() -> State:
    """Return the states of the generators that belong to the process.

    They are those of Python's ``random``, of ``numpy.random`` and, once torch is imported, torch's
    of the host and of this process's GPU. Generators of your own belong in the state that you give.
    """
    state = {name: take() for name, (take, _) in _GENERATORS.items()}
    torch = _torch()
    return {**state, "torch": torch.random_state()} if torch is not None else state


def set_random_state(state: State) -> None:
    """Let the generators go on from a state that `random_state` has returned."""
    for name, (_, give) in _GENERATORS.items():
        give(state[name])
    torch = _torch()
    if torch is not None and "torch" in state:
        torch.set_random_state(state["torch"])


def plan_streams(before: Sequence[int], size: int) -> list[int | None]:
    """Return for each rank whose random numbers it goes on with. Pure.

    A rank goes on with its own. One that has none takes those of the rank that had its number, or
    else of another one that is gone; None if there are no more.

    Args:
        before: for each rank which one it was; -1 for a new one.
        size: how many there were.

    """
    free = [rank for rank in range(size) if rank not in set(before)]
    streams: list[int | None] = []
    for rank, was in enumerate(before):
        if was < 0 and free:
            was = free.pop(free.index(rank) if rank in free else 0)
        streams.append(was if was >= 0 else None)
    return streams


def _torch() -> Any:
    """Return what knows torch's generators, where torch is in use."""
    if "torch" not in sys.modules:
        return None
    return importlib.import_module("hpcdist.arrays.torch")


def _python() -> State:
    version, words, gauss = random.getstate()
    return {"version": version, "words": np.array(words, np.uint32).tobytes(), "gauss": gauss}


def _set_python(state: State) -> None:
    words = np.frombuffer(state["words"], np.uint32).tolist()
    random.setstate((state["version"], tuple(words), state["gauss"]))


def _numpy() -> State:
    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != _USUAL:
        return {}
    key, pos = state["state"]["key"], state["state"]["pos"]
    return {
        "key": key.tobytes(),
        "pos": int(pos),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _set_numpy(state: State) -> None:
    if state:
        key = np.frombuffer(state["key"], np.uint32)
        rest = (state["pos"], state["has_gauss"], state["gauss"])
        np.random.set_state((_USUAL, key, *rest))


_USUAL = "MT19937"
"""NumPy's generator, unless a program has replaced it; then its state is the program's affair."""

_GENERATORS = {"python": (_python, _set_python), "numpy": (_numpy, _set_numpy)}
"""By name: how a generator's state is taken, and given back."""
