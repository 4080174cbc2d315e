"""Tests that ship with the package: a transport of your own can be held to the same contract.

Subclass `contract.TransportContract`, say how to run a function on ranks, and run pytest.
`programs` makes random programs of collectives and computes what they must give, `array_programs`
those of arrays across ranks.
"""
