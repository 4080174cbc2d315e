"""Arrays across ranks: which part of an array each rank of a mesh holds, and how parts move.

Read in this order: `placements` (what users write), `process_mesh` (ranks on a grid), `boxes` and
`layout` (which part lies where), `reads` and `planner` (how one layout becomes another),
`dist_array` (a part and its layout), `reshard` (which way an array takes) with `routes` and `steps`
(the ways), `api` (what users call).
"""
