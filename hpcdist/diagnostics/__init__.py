"""What is the matter: `hpcdist doctor`. Read `facts`, then `problems` and `ways`, then `doctor`.

`facts` looks around, `problems` and `ways` are pure functions of what it found.
"""
