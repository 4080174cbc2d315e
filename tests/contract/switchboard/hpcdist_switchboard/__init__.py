"""A transport that another package brings: what a third party needs to write, and no more.

Read `transport` first (what hpcdist asks for), then `board` (the server); ``python -m
hpcdist_switchboard 3 program`` starts the server and three ranks.
"""
