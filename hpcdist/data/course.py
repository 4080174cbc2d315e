"""`Course`: how far a dataset is in an epoch, after steps that all ranks take together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hpcdist.data.order import Blocks, Natural, Order, Shuffled
from hpcdist.data.shares import Shares, plan_shares
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Kind = Literal["natural", "local", "global"]
KINDS: tuple[Kind, ...] = ("natural", "local", "global")


class Course(NamedTuple):
    """Where all ranks are: the order of an epoch, where in it they began, and how far they are.

    Attributes:
        total: the samples.
        seed: of the order.
        kind: how it is made; "local" with blocks for `ranks` ranks.
        ranks: that there were when the order was made.
        epoch: from 0.
        begun: the position of the order at which this loop over it began.
        taken: the positions of the order that have been handed out on all ranks.
        ended: whether these are all that are handed out.
        digest: of the files; see `Reading.digest`.

    """

    total: int
    seed: int
    kind: Kind = "natural"
    ranks: int = 1
    epoch: int = 0
    begun: int = 0
    taken: int = 0
    ended: bool = False
    digest: int = 0

    def order(self) -> Order:
        """Return the order of the samples in this epoch."""
        if self.kind == "global":
            return Shuffled(self.total, self.seed, self.epoch)
        if self.kind == "local":
            return Blocks(self.total, self.seed, self.epoch, self.ranks)
        return Natural(self.total)

    def shares(self, size: int, tail: str) -> Shares:
        """Return whose the positions are that were left when the loop began."""
        return plan_shares(self.total, self.begun, size, tail)

    def at(self, epoch: int) -> Course:
        """Return the start of an epoch; where the latest loop began, if it is in this one."""
        begun = self.begun if epoch == self.epoch and not self.ended else 0
        return self._replace(epoch=epoch, begun=begun, taken=begun, ended=False)

    def after(self, step: int, of_all: int, length: int) -> Course:
        """Return where the ranks are after `step` of `length` steps of `of_all` samples each."""
        taken = min(self.begun + step * of_all, self.total)
        return self._replace(taken=taken, ended=step == length)

    def standing(self) -> dict[str, Any]:
        """Return where the ranks stand, in plain numbers; the end of an epoch starts the next."""
        epoch, taken = (self.epoch + 1, 0) if self.ended else (self.epoch, self.taken)
        return {"epoch": epoch, "consumed": taken, **self._identity()}

    def length(self, size: int, tail: str, batch_size: int) -> int:
        """Return the batches of every rank from where the loop began."""
        return -(-len(self.shares(size, tail).positions(0)) // batch_size)

    def resumed(self, state: Any) -> Course:
        """Return the course that goes on where `state` was made.

        Raises:
            UsageError: it is not a state, or one of another dataset or seed.

        """
        own = {"length": self.total, "seed": self.seed}
        names = {"epoch", "consumed", *self._identity()}
        if not isinstance(state, Mapping) or not names <= {*state}:
            raise UsageError(
                f"this is not a state of a dataset: {state!r}; pass what state_dict() returned"
            )
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"this state was made with {name}={state[name]!r}, but here it is {value!r}, "
                    "so the rest of the epoch would be another one; use the same files and seed"
                )
        if state["digest"] != self.digest:
            raise UsageError(
                "this state was made with other files, or with these in another order, so the rest "
                "of the epoch would be another one; use the same files, in the same order"
            )
        numbers = [state[name] for name in ("epoch", "consumed", "ranks")]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if not whole or state["order"] not in KINDS or numbers[1] > self.total or not numbers[2]:
            raise UsageError(
                f"this is not a possible state: {dict(state)!r}; pass what state_dict() returned"
            )
        epoch, consumed, ranks = numbers
        told = {"epoch": epoch, "begun": consumed, "taken": consumed, "ended": False}
        return self._replace(kind=state["order"], ranks=ranks, **told)

    def _identity(self) -> dict[str, Any]:
        own = {"length": self.total, "seed": self.seed, "order": self.kind, "ranks": self.ranks}
        return {**own, "digest": self.digest}
