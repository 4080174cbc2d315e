"""Which parameters of a test `make test` tries, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(values: Iterable[Any]) -> list[Any]:
    """Return parameters, all but the first of which are thorough: they take seconds each."""
    first, *others = values
    return [first, *(pytest.param(each, marks=pytest.mark.thorough) for each in others)]
