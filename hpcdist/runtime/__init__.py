"""Where am I: the rank's place, MPI itself, and what happens when a rank fails.

Read in this order: `place` (pure), `torchrun`, `process`, `mpi` (start and end), `failure`,
`late_imports`.
"""
