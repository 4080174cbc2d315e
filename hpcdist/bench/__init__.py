"""`hpcdist bench`: what communication costs on a machine, beside other libraries.

Read in this order: `interleaved` (how two things are compared), `memory_kinds` (where arrays are),
`task` (what is measured, and what a library is), `libraries`, `cases` (the table of
measurements), `rows` (what is kept of each), `harness` and `plan` (the loops),
`memcpy_bound` (what no library can beat), `baseline` and `plots` (what is made of it), `command`.
"""
