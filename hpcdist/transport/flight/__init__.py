"""The flight recorder as its readers see it: the last operations of each rank, in mapped files.

`layout` says how a file is laid out, `rings` where the files are and whose processes live,
`recording` what one of them says, `analysis` who waits for whom. `transport.recorder` writes them.
"""
