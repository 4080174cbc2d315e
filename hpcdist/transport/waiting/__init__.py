"""Order and patience: works, the queue of a group, and all that a rank does while it waits.

Read in this order: `activity` (what threads wait for, in words), `polling` (how they wait, and what
they do for others meanwhile), `work` (an operation under way), `queue` (the collectives of a group,
one after the other), `works` (several at once). `coroutines` waits in those; `watchdog` speaks
when a wait is long.
"""
