"""Arrays across ranks: which part of an array each rank of a mesh holds, and how parts move.

Read in this order: `placements` (what users write), `process_mesh` (ranks on a grid), `boxes` and
`layout` (which part lies where), `reads` (who takes what from whom) and `planner` (by which steps
one layout becomes another).
"""

from hpcdist.mesh import operators as operators  # puts operators and methods into `DistArray`
