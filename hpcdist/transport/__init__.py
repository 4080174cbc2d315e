"""How it travels: run, start or plan one `Call`.

Read in this order: `call` (the description), `reduction` (how each dtype is reduced), `base`
(the interfaces), `queue` (collectives of a group, one after the other), then one transport:
`threads`, or `mpi` (host memory), with `shm` (the memory of a node) and `device`.
"""
