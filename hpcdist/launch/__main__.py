"""`python -m hpcdist.launch` is `hpcdist run`."""

from hpcdist.launch import launch

launch()
