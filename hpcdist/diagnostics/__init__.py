"""What is the matter: `hpcdist doctor`. Read `probe`, `problems`, `checks`, `algorithms`, `doctor`.

`probe` looks around, with `installation`, `machine`, `gpus` and `network`; `problems`, `hardware`,
`checks` and `algorithms` are pure functions of what it found.
"""
