"""`plan_reshard`: the cheapest steps from one layout to another. Pure."""

from __future__ import annotations

from hpcdist.mesh.reads import (
    Gift as Gift,
    Piece as Piece,
    gives_of as gives_of,
    reads_of as reads_of,
)
