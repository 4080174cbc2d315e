"""Which algorithm is fastest here: `hpcdist tune`."""
