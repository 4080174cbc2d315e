"""`Steps`: operations one after the other, of which each rank calls off the rest after an error.

The ranks of several groups take part in one average. Whoever has failed, or has heard so, calls the
next operation off: so all hear of it by the end, every rank has done every operation, and the next
average begins in step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.errors import ENDS_ALL, UsageError
from hpcdist.transport.call.kinds import Kind

T = TypeVar("T")


@final
class Steps:
    """Begin with `error` if this rank cannot take part.

    Attributes:
        error: the first one, of this rank or of another one.

    """

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def compute(self, function: Callable[..., T], *args: Any) -> T | None:
        """Return what `function` does, which communicates nothing; None after an error."""
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    def communicate(
        self, kind: Kind, group: Group, operation: Callable[..., Any], *args: Any
    ) -> None:
        """Do an operation of `kind`, or call it off after an error. Collective over `group`.

        Raises:
            CollectiveTimeout: a rank did not come.
            RankFailure: a rank has died.

        """
        try:
            if self.error is None:
                operation(*args, group=group)
            else:
                decline(group, kind, _to_tell(self.error))
        except ENDS_ALL:
            raise
        except Exception as error:
            self.error = self.error or error


def _to_tell(error: Exception) -> UsageError:
    """Return what the other ranks are told."""
    if isinstance(error, UsageError):
        return error
    return UsageError(f"a compressed bucket has failed: {error}")
