"""Random states beside torch's default ones: `get_rng_state_tracker`.

What all ranks of "mp" have alike, such as a whole activation, must be dropped out alike, with
torch's default generator. What each has a part of must not: that is done with a state that the
tracker keeps, which has another seed on each of these ranks.

`snapshot` and `AsOf` take and bring back all states at once, for what is computed again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from hpcdist.comm.group import Group
from hpcdist.comm.objects import broadcast_object_list
from hpcdist.comm.session import Slot, current_session, is_simulated
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple
from hpcdist.torch.model_parallel.axes import axis_group

MODEL_PARALLEL_RNG = "model_parallel_rng"
"""The state that differs between the ranks of "mp"; see `model_parallel_random_seed`."""

State = Mapping[str, torch.Tensor]
"""Of torch's default generators, by the kind of device: of the CPU, and of the GPU where in use."""


@final
class RNGStatesTracker:
    """Random states by name, each with a seed of its own.

    Example:
        >>> import torch
        >>> tracker = RNGStatesTracker()
        >>> tracker.add("dropout", 7)
        >>> with tracker.rng_state("dropout"):
        ...     x = torch.rand(1)
        >>> bool(x == torch.rand(1, generator=torch.Generator().manual_seed(7)))
        True

    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}
        self._states: dict[str, State] = {}

    def reset(self) -> None:
        """Forget all states."""
        self._seeds, self._states = {}, {}

    def add(self, name: str, seed: int) -> None:
        """Make a state. Torch's own stays as it is.

        Args:
            name: of the state.
            seed: an integer that no other state has.

        Raises:
            UsageError: there is one of this name, or of this seed, or the seed is no integer.

        """
        seed = integer(seed, "the seed of a random state")
        for known, of_known in self._seeds.items():
            if name == known or seed == of_known:
                raise UsageError(
                    f"the random state {known!r}, of seed {of_known}, already exists, got "
                    f"{name!r} of seed {seed}; use another name and seed, or reset() before"
                )
        self._seeds[name] = seed
        self._states[name] = {}

    def get_states_tracker(self) -> dict[str, State]:
        """Return all states by name, each by the kind of device. Local."""
        return {name: self._complete(name) for name in self._states}

    def set_states_tracker(self, states: Mapping[str, State]) -> None:
        """Set the states to those that `get_states_tracker` returned.

        Args:
            states: by name; others stay.

        Raises:
            UsageError: there is no state of a name.

        """
        for name in states:
            self._check_name(name)
        self._states.update({name: dict(state) for name, state in states.items()})

    @contextmanager
    def rng_state(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Make torch draw from a state in a ``with`` block; the next block continues there.

        Args:
            name: of the state.

        Raises:
            UsageError: there is no state of this name.

        """
        self._check_name(name)
        before = default_state()
        _set_default(self._complete(name))
        try:
            yield
        finally:
            if name in self._states:  # else it was reset meanwhile
                self._states[name] = default_state()
            _set_default(before)

    def _check_name(self, name: str) -> None:
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise UsageError(
                f"the random state {name!r} does not exist; there are {known}: add(name, seed) or "
                "model_parallel_random_seed(seed) makes one"
            )

    def _complete(self, name: str) -> State:
        """Return a state on all devices in use; on those it has not been used on yet, anew."""
        known = self._states[name]
        return {
            kind: known[kind] if kind in known else _seeded(kind, self._seeds[name])
            for kind in default_state()
        }

    # ---- all at once

    def all_states(self) -> dict[str, State]:
        """Return all states, for `bring_back`; neither function changes memory."""
        return dict(self._states)

    def bring_back(self, states: Mapping[str, State]) -> None:
        """Reset the states of these names to earlier ones; states added since then stay.

        Args:
            states: what `all_states` returned.

        """
        self._states.update({name: states[name] for name in states if name in self._states})


_TRACKER = RNGStatesTracker()
_OF_A_SIMULATED_RANK = Slot(RNGStatesTracker, kept=True)
"""Of this process, as torch's default generators are."""


def get_rng_state_tracker() -> RNGStatesTracker:
    """Return the random states of this process, or of this rank of `simulate`.

    Torch's default generators are still those of all simulated ranks, which are threads: what they
    draw at once comes in any order.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch import model_parallel as mp
        >>> mp.model_parallel_random_seed(7, mp_group=dist.init_parallel_env())
        >>> with mp.get_rng_state_tracker().rng_state():
        ...     x = torch.nn.functional.dropout(torch.ones(4))  # other zeros on each rank of mp

    """
    session = current_session() if is_simulated() else None
    return _TRACKER if session is None else session[_OF_A_SIMULATED_RANK]


def model_parallel_random_seed(seed: int | None = None, *, mp_group: Group | None = None) -> None:
    """Seed torch alike on the ranks of "mp", and the tracker differently.

    The tracker forgets what it had, and has `MODEL_PARALLEL_RNG`. With a seed it is local.

    Args:
        seed: the same on all ranks; None: the first rank of the group draws one, and tells it.
        mp_group: the ranks; None for the axis "mp" of the grid of `fleet.init`.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import model_parallel_random_seed
        >>> model_parallel_random_seed(7, mp_group=dist.init_parallel_env())
        >>> x = torch.rand(2)  # the same on all ranks of mp

    """
    group = axis_group("mp", mp_group)
    if seed is None:
        told = [random.SystemRandom().randrange(1 << 31)]
        broadcast_object_list(told, group.ranks[0], group)
        seed = told[0]
    seed = integer(seed, "the seed")
    tracker = get_rng_state_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_RNG, seed + _APART + group.rank)
    torch.manual_seed(seed)


_APART = 2718
"""Between the seed that all ranks have and that of the first one's own."""


# ---- torch's default generators


def default_state() -> State:
    """Return the states of torch's default generators that are in use, of the current GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_default(state: State) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _seeded(kind: str, seed: int) -> torch.Tensor:
    state: torch.Tensor = torch.Generator(kind).manual_seed(seed).get_state()
    return state


class Snapshot(NamedTuple):
    """All random states of a moment, and whose those of a tracker are."""

    default: State
    tracked: dict[str, State]
    tracker: RNGStatesTracker

    def bring_back(self) -> None:
        """Make all random states those of the moment, in whatever thread."""
        _set_default(self.default)
        self.tracker.bring_back(self.tracked)


def snapshot(tracker: RNGStatesTracker | None = None) -> Snapshot:
    """Return all random states of now."""
    tracker = get_rng_state_tracker() if tracker is None else tracker
    return Snapshot(default_state(), tracker.all_states(), tracker)


@final
class AsOf:
    """A context in which all random states are those of a moment before; may be entered again."""

    def __init__(self, then: Snapshot) -> None:
        self._then = then
        self._outside: list[Snapshot] = []

    def __enter__(self) -> None:
        self._outside.append(snapshot(self._then.tracker))
        self._then.bring_back()

    def __exit__(self, *_: Any) -> None:
        self._outside.pop().bring_back()
