"""Data: every rank works on its own share of a dataset, in an order all ranks agree on.

Read in this order: `shares` (which samples belong to which rank; pure), `sampler` (the indices
of one rank, and where it stands), `sources` (how samples are taken from arrays and datasets),
`sharded` (the samples themselves, one by one or in batches), `shard_loader` (batches of a loader as
arrays across the ranks of a mesh).
"""
