"""What every transport must do, as tests.

A subclass of `TransportContract` implements `run`; every check is a function that runs on each
rank, through the public API. Checks hold at any number of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from hpcdist.testing.contract import (
    agreement,
    exchanges,
    groups,
    lists,
    messages,
    movement,
    objects,
    reductions,
    works,
)

_PARTS = (reductions, movement, lists, messages, objects, works, groups, agreement, exchanges)


class TransportContract(
    reductions.Reductions,
    movement.Movement,
    lists.Lists,
    messages.Messages,
    objects.ObjectCollectives,
    works.Works,
    groups.Groups,
    agreement.Agreement,
    exchanges.Exchanges,
):
    """Subclass this and implement `run`."""


def call_instead(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    """Make the checks call `library`, as `on_device.OnDevice`, in the place of hpcdist."""
    for part in _PARTS:
        monkeypatch.setattr(part, "dist", library)
    monkeypatch.setattr(exchanges, "exchange", library.exchange)
