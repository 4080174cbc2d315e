"""Tests that ship with the package: a transport of your own can be held to the same contract.

Subclass `contract.TransportContract`, say how to run a function on ranks, and run pytest.
`on_device` gives its arrays to a device; `slow_device` is one, made of host memory, that completes
late.
"""
