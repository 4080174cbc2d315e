"""Rules: how each function of NumPy is computed on arrays that are cut.

One file for each family of functions. A rule takes NumPy's arguments; where its result lies is a
function of the layouts of the arguments alone, so that all ranks know it without asking. Read
`basis` and `pointwise` first; `table` says which function is where.
"""
