"""`hpcdist bench`: what communication costs on a machine, beside other libraries.

Read in this order: `race` (how two things are compared), `task` (what is measured, and what a
library is), `own` and `peers` (the libraries), `cases` (the table of measurements), `rows` (what is
kept of each), `measure` (the loops), `baseline` and `plots` (what is made of it), `command`.
"""
