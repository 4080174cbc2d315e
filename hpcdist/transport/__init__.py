"""How it travels: run, start or plan one `Call`.

Read in this order: `call` (the description), `recipes` (how each dtype is reduced), `base`
(the interfaces), `queue` (operations of a group, one after the other), then one transport:
`local` (ranks are threads) or `mpi_host` with `mpi_meeting`, `mpi_agreement`, `mpi_collectives`,
`mpi_objects`, `mpi_messages`, `mpi_transfers` (host memory over MPI).
"""
