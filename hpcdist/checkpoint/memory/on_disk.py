"""What is left when memory is not enough: the same state in a series of checkpoints on disk."""

from __future__ import annotations

from typing import Any

from hpcdist.checkpoint.inspection import latest
from hpcdist.checkpoint.loading import load_into, what_is_wanted
from hpcdist.checkpoint.matching import GROWING
from hpcdist.checkpoint.memory.random_state import random_state, set_random_state
from hpcdist.checkpoint.saving import save
from hpcdist.comm.group import Group

KEEP = 2
"""So many checkpoints of the series stay."""


def save_step(state: dict[str, Any], path: str, group: Group | None, rank: int, step: int) -> None:
    """Write the state of `step`, and each rank's random state. Collective."""
    own = {str(rank): random_state()}
    save({**state, "step": step, "random": own}, path, group, step=step, keep=KEEP).wait()


def load_last(state: dict[str, Any], path: str, group: Group | None, rank: int) -> int | None:
    """Load the last step that was written; return it, or None if there is none. Collective.

    A rank whose number there was not then goes on with the random numbers that it has.
    """
    folder = latest(path, group)
    if folder is None:
        return None
    given = {**state, "step": None, "random": None}
    found, _ = load_into(given, folder, group, None, what_is_wanted, rule=GROWING)
    own = found["random"].get(str(rank))
    if own is not None:
        set_random_state(own)
    return int(found["step"])
