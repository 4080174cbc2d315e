"""How it travels: run, start or plan one `Call`.

Read in this order: `call` (the description), `waiting` (collectives of a group, one after the
other), `base` (the interfaces), then one transport: `threads`, or `mpi` (host memory), with `shm`
(the memory of a node) and `device`. `presence` tells who is there, `flight` records what happens.
"""
