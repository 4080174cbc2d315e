"""`hpcdist bench`: what communication costs on a machine, beside other libraries.

Read in this order: `race` (how two things are compared), `memories` (where arrays are), `task`
(what is measured, and what a library is), `own` and `peers` (the libraries), `cases` (the table of
measurements), `rows` (what is kept of each), `stage` and `plan` (the loops), `limits` (what no
library can beat), `baseline` and `plots` (what is made of it), `command`.
"""
