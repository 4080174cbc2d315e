"""What is the matter: `hpcdist doctor`. Read `facts`, `problems`, `checks`, `ways`, then `doctor`.

`facts` looks around, with `installation`, `machine`, `gpus` and `network`; `problems`, `hardware`,
`checks` and `ways` are pure functions of what it found.
"""
