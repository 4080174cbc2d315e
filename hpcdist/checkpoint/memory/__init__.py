"""Checkpoints in the memory of the ranks, with a copy of every part at a buddy.

Read in this order: `buddies` (whose copies a rank keeps), `keeping` (which parts of which arrays a
rank keeps, and what it is sent for that), `vault` (what it has kept), `random_state`, `committing`;
`choice` (which step all go back to), `moves` (what travels to whom), `restoring`; `on_disk` (what
is left when memory is not enough), and `keeper`, with the class `Memory`.
"""

from __future__ import annotations
