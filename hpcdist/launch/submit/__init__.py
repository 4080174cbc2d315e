"""A job handed to Slurm: `hpcdist submit`."""
