"""`python -m hpcdist` is the command `hpcdist`."""

from hpcdist.launch.cli import main

main(prog_name="python -m hpcdist")
