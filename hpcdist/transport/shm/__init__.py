"""Shared memory of a node: no module here knows MPI.

Read in this order: `segment` (memory that processes map), `heap` (blocks of it), `control` (the
flags by which ranks agree), `node` (who maps what), `collectives` (what is taken from where).
"""
