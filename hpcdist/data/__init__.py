"""Data: every rank works on its own share of a dataset, in an order all ranks agree on.

Read in this order: `shares` (which samples belong to which rank; pure), `sampler` (the indices
of one rank, and where it stands), `sources` (how samples are taken from arrays and datasets),
`sharded` (the samples themselves, one by one or in batches), `shard_loader` (batches of a loader as
arrays across the ranks of a mesh).

Files of records, in this order: `columns` (rows of any length in flat arrays), `slots` (which
columns are wanted), `files` (which files, and who reads what of them), `formats` (the table of
formats; `multislot`, `text`, `arrow`, `npy`, `tar` read them, `lines` cuts text into blocks),
`packed`, `bad_records`, `pipe` (files through a command), `generators` (programs that write
multislot text).

Datasets, in this order: `order` (which sample is where; pure), `nodes` (who keeps rows together;
pure), `exchange` (how rows change ranks), `layout` and `spill` (memory for rows), `store` (where
they are), `settle` (how they get there), `settings`, `course` (how far a loop is; pure), `dataset`,
`reading`, `tables`, `ahead` (what a thread makes), `in_memory`, `stream` (the rows of one pass),
`queue_dataset`, `progress`.
"""
