"""`hpcdist ps`, `top` and `dump`: what the ranks of a job do, read from outside.

`jobs` finds the recordings of a job on this node, `across` those of its other nodes; `commands` are
the commands, `activity` and `timeline` what `top` and `dump` show, `clocks` puts all on one clock.
"""
