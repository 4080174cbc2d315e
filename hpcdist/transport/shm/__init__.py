"""Shared memory of a node: no module here knows MPI.

Read in this order: `kernel` (memory of several ranks is combined and copied), `boxes` (so are boxes
of arrays), `segment` (memory that processes map), `heap` (blocks of it), `control` (the flags by
which ranks agree), `node` (who maps what), `collectives` (what is taken from where), `hot` (what
the hot path has of all that). Ranks as threads see each other's memory anyway: they use the first
two.
"""
