"""Arrays across ranks: which part of an array each rank of a mesh holds, and how parts move.

Read in this order: `placements` (what users write), `process_mesh` (ranks on a grid), `layout`
(which part lies where), `reads` and `planner` (how one layout becomes another), `dist_array` (a
part and its layout), `reshard` (which way an array takes) with `routes` and `steps` (the ways),
`windows` (what a rank takes around its part), `api` and `local_map` (what users call), `rules` (how
functions of NumPy are computed), `stencil` (functions of neighbours), `policy` (what happens to
those without a rule), `protocols` and `operators` (how NumPy and Python come to them), `namespace`
(`hpcdist.array`).
"""

from hpcdist.mesh import operators as operators  # puts operators and methods into `DistArray`
