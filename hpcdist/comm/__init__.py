"""What users call: groups, collectives, messages, objects and plans.

Read in this order: `group`, `session` (the groups of this process), `environment` (start and
end), `describe` (a call becomes a `Call`), `dispatch` (hands it down), then the verbs:
`collectives`, `messages`, `objects`, `stream`, `plans`; `together` (what fails on one rank is
raised on all); and `simulate` (ranks as threads).
"""
