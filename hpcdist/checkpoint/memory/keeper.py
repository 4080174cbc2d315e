"""`Memory`: checkpoints of a training in the memory of its ranks, taken often and restored fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, final

from hpcdist.checkpoint.memory.choice import Choice, Nothing
from hpcdist.checkpoint.memory.committing import commit
from hpcdist.checkpoint.memory.on_disk import load_last, save_step
from hpcdist.checkpoint.memory.restoring import find, restore
from hpcdist.checkpoint.memory.vault import Vault
from hpcdist.checkpoint.storage import named
from hpcdist.checkpoint.together import writing_together
from hpcdist.comm.group import Group
from hpcdist.comm.session import Session, Slot, require_session, resolve_group
from hpcdist.comm.together import Together
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.integers import integer


@final
class Memory:
    """Keep the state of a training in the memory of the ranks, with copies on other ranks.

    When ranks have died, the others bring back the last step that was committed,
    bit for bit, without a disk. What several ranks have is kept in parts, one on each of them;
    every part has a copy on another rank, on another node if there is one. Besides what is given
    here, the random numbers of Python, NumPy and torch continue where they were.

    A new `Memory` takes over what an earlier one of the same name has kept if ranks have been lost
    since; so a function that `survive` calls again finds it. Otherwise it begins anew. Every rank
    makes one, with the same arguments; nothing is communicated then.

    Args:
        model: what `checkpoint.save` takes: a model, a sharded one too, or a dict of arrays.
        optimizer: the same.
        sampler: a `DistributedSampler`, or another object with ``state_dict`` and
            ``load_state_dict``.
        every: `steps` commits after this many steps.
        state: a dict of more arrays, numbers and objects with a state.
        copies: how many ranks have a copy of each part, beside the one that keeps it. This many
            ranks may die at once without a loss.
        path: a folder, or its URL, for a series of checkpoints on disk, of which the last two stay.
            The last one is loaded where memory has nothing: at the start, or when a rank died
            together with all that had its copies.
        every_on_disk: write one after this many steps; default: ten times `every`.
        group: the ranks that train together; None for all.
        name: tells several of these apart that are in use at once.

    Raises:
        UsageError: an argument is wrong.

    Example:
        >>> import numpy as np
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> weights = {"w": np.zeros(3)}
        >>> memory = dist.Memory(model=weights, every=2)
        >>> for step in memory.steps(3):
        ...     weights["w"] += 1
        >>> weights["w"][:] = -1
        >>> memory.restore(), weights["w"]
        (3, array([3., 3., 3.]))

    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        sampler: Any = None,
        *,
        every: int = 10,
        state: dict[str, Any] | None = None,
        copies: int = 1,
        path: str | os.PathLike[str] | None = None,
        every_on_disk: int | None = None,
        group: Group | None = None,
        name: str = "memory",
    ) -> None:
        given = {"model": model, "optimizer": optimizer, "sampler": sampler, "state": state}
        self._state = {key: each for key, each in given.items() if each is not None}
        if not self._state:
            raise UsageError("Memory has nothing to keep; give it model=, optimizer= or state=")
        self.every = integer(every, "every", 1)
        self.copies = integer(copies, "copies", 0)
        self.path = None if path is None else named(path)
        self.every_on_disk = integer(every_on_disk or 10 * self.every, "every_on_disk", 1)
        self.group = resolve_group(group)
        if not self.group.is_member():
            raise UsageError(
                f"rank {self.group.world_rank} is not in group {self.group.name}, whose ranks keep "
                "this state; make the Memory on its members only"
            )
        self.name = name
        self._vault = _vault(require_session(), name)
        self._last_on_disk = 0
        self._is_new = True  # the state is as it was made: this one has kept nothing

    def commit(self, step: int) -> None:
        """Keep the state as it is now, after `step` steps. Collective.

        Two commits are kept; the older one is dropped when the next begins, so that one is complete
        at any time. Every `every_on_disk` steps it is written to `path`, too, if there is one.

        Args:
            step: how many steps have been done; the same on all ranks.

        Raises:
            UsageError: something in the state cannot be kept; on every rank.
            MismatchError: the ranks disagree about the step, or about the contents of the state.
            RankFailure: a rank has died; what was committed before is still there.

        """
        self._commit(integer(step, "step", 0))
        if self.path is not None and step - self._last_on_disk >= self.every_on_disk:
            self._save(step)

    def restore(self) -> int:
        """Bring the state back to the last step that all ranks have committed. Collective.

        Call it on every rank, after a recovery or at any other time. Arrays are filled where they
        are, objects load their state. If memory does not have all of a step any more, the last
        checkpoint on disk is loaded. If there is a `path`, but no checkpoint in it yet, and all
        ranks have made the state anew, as in a function that `survive` calls again, the training
        begins again.

        Returns:
            How many steps have been done; 0, with nothing changed, if nothing was committed, or if
            the training begins again.

        Raises:
            CheckpointError: what was committed is lost, and there is nothing on disk; or the state
                is not like what was committed. On every rank.
            RankFailure: another rank has died meanwhile; call `recover` and this again.

        """
        ranks, known = writing_together(self.group), list[Choice]()
        found = find(ranks, self._vault, known)
        now = _recoveries()
        if isinstance(found, Nothing):
            step = self._from_disk(found, ranks)
            is_full = step is None
        else:
            restore(ranks, self._vault, self._state, found, known)
            step, is_full = found.step, found.is_full
        self._vault.world_generation = now
        self._last_on_disk = step or 0
        self._is_new = self._is_new and step is None
        if step is not None and not is_full:
            self._commit(step)  # so that the next rank may die
        return step or 0

    def steps(self, stop: int) -> Iterator[int]:
        """Iterate over the remaining steps: from the next one up to `stop`, which is excluded.

        Collective: every rank goes through all of it. It restores first, then commits after every
        `every` steps, and at the end, when the last step is written to `path`, too.

        Args:
            stop: the number of steps of the whole training.

        """
        step = self.restore()
        if step == 0:
            self.commit(0)
        while step < stop:
            yield step
            step += 1
            if step % self.every == 0 or step == stop:
                self.commit(step)
        if self.path is not None and self._last_on_disk < step:
            self._save(step)

    def __repr__(self) -> str:
        kept = [each.step for each in self._vault.generations]
        return (
            f"<Memory {self.name!r}: {', '.join(self._state)} of {self.group.nranks} ranks, "
            f"{self._vault.nbytes} bytes here of steps {kept}>"
        )

    def _commit(self, step: int) -> None:
        self._vault.world_generation = _recoveries()
        self._is_new = False
        commit(writing_together(self.group), self._vault, self._state, step, self.copies)

    def _save(self, step: int) -> None:
        assert self.path is not None
        save_step(self._state, self.path, self.group, self.group.rank, step)
        self._last_on_disk = step

    def _from_disk(self, nothing: Nothing, ranks: Together) -> int | None:
        """Load what is on disk, if memory has nothing; None if there was nothing ever."""
        step = None
        if self.path is not None:
            step = load_last(self._state, self.path, self.group, self.group.rank)
        if not nothing.was_there:
            return step
        if step is not None:
            then = f"going on with step {step}, the last one in {self.path}"
        elif self.path is not None and all(ranks.share(lambda: self._is_new)):
            then = f"{self.path} has no checkpoint yet, so the training begins again"
        else:
            remedy = f"and {self.path} has no checkpoint" if self.path else "and there is no path="
            raise CheckpointError(
                f"the training cannot go on: {nothing.why}, {remedy}; give Memory a folder as "
                "path=, or more copies="
            )
        if ranks.leads:
            sys.stderr.write(f"hpcdist: {nothing.why}; {then}\n")
        return step


_VAULTS: Slot[dict[str, Vault]] = Slot(dict, kept=True)
"""What this rank keeps of the states of training, by the name of the `Memory`."""


def _vault(session: Session, name: str) -> Vault:
    """Return what was kept under a name before the last recovery, or an empty vault."""
    known = session[_VAULTS].get(name)
    if known is None or known.world_generation == _recoveries():
        known = session[_VAULTS][name] = Vault(0 if known is None else known.run + 1)
        known.world_generation = _recoveries()
    return known


def _recoveries() -> int:
    """Return how often ranks have been lost so far."""
    count: int = getattr(require_session().world, "generation", 0)
    return count
