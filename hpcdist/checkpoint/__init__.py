"""Checkpoints: what all ranks hold, in few files, whole at every moment, for any number of ranks.

Read in this order: `boxes` (parts of arrays; `cover`: whether they are all of one; `copies`: from
one to another), `local_slice` (what a rank holds; `dtensor`: torch's, `dist_arrays`: ours,
`sharded_weight`: Paddle's), `nodes` (a state as plain data), `objects` (what has a state of its
own), `plan` (who writes what), `holdings` (what a rank has of each array, and the bytes of it),
`state` (how it is taken apart), `formats` and `blocks` (data files), `schema` and `manifest`,
`claim` and `storage` (how it is made whole), `together` (ranks that agree), then `saving` and
`background`; `matching`, `reading` and `loading`; `inspection` and `command`; `persistables`;
`array_files` (files of one array each); `memory`, a package of its own (checkpoints that no disk
sees). All but `LocalSlice` is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdist.checkpoint.local_slice import LocalSlice as LocalSlice
from hpcdist.lazy import lazily

if TYPE_CHECKING:
    from hpcdist.checkpoint.inspection import (
        Summary as Summary,
        consolidate as consolidate,
        latest as latest,
        verify as verify,
    )
    from hpcdist.checkpoint.loading import load as load
    from hpcdist.checkpoint.paddle import (
        load_merged_state_dict as load_merged_state_dict,
        load_state_dict as load_state_dict,
        save_group_sharded_model as save_group_sharded_model,
        save_state_dict as save_state_dict,
    )
    from hpcdist.checkpoint.saving import save as save

Shard = LocalSlice
"""The former name of `LocalSlice`."""

_LAZY = {
    "save": "hpcdist.checkpoint.saving",
    "load": "hpcdist.checkpoint.loading",
    "latest": "hpcdist.checkpoint.inspection",
    "verify": "hpcdist.checkpoint.inspection",
    "consolidate": "hpcdist.checkpoint.inspection",
    "Summary": "hpcdist.checkpoint.inspection",
    "save_group_sharded_model": "hpcdist.checkpoint.paddle",
    "save_state_dict": "hpcdist.checkpoint.paddle",
    "load_state_dict": "hpcdist.checkpoint.paddle",
    "load_merged_state_dict": "hpcdist.checkpoint.paddle",
}
"""For each name the module that has it."""

if not TYPE_CHECKING:  # or no checker would find a misspelt name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
