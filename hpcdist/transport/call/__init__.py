"""What is to be done: a `Call` and all that is computed from it; nothing moves here.

Read in this order: `kinds` (the operations there are), `call` (one operation, described),
`reduction` (how each dtype is reduced), `runs` (what goes from rank to rank, as flat memory).
"""
