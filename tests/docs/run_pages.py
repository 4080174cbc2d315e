"""Run all pages (and docstrings) as one rank of a job: `run_pages.py WAY RESULTS`.

Each thing that was run is a line of the file RESULTS: its name, and its failure or "".
"""

import contextlib
import doctest
import importlib
import io
import json
import sys
import traceback
import warnings

import docs_pages

import hpcdist as dist
from hpcdist.comm.session import current_session
from hpcdist.fleet.placement import FLEET
from hpcdist.parallel.hybrid import GRID


def main(way, results, modules):
    for page in docs_pages.PAGES:
        failure = ""
        try:
            docs_pages.run_page(page, way)
        except AssertionError:
            failure = traceback.format_exc()
            if way == "mpi":
                raise  # the other ranks cannot go on
        dist.init_parallel_env()
        dist.barrier()
        forget_grid()
        if dist.get_rank() == 0:
            tell(results, page, failure)
    for name in modules:
        tell(results, name, run_docstrings(name))
        forget_grid()


def forget_grid():
    """Let the next page, as if it were the only one, choose a grid of its own."""
    session = current_session()
    if session is not None:
        session[FLEET] = session[GRID] = None


def run_docstrings(name):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        failed, _ = doctest.testmod(importlib.import_module(name))
    return said.getvalue() if failed else ""


def tell(results, name, failure):
    with open(results, "a") as file:
        file.write(json.dumps([name, failure]) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(*sys.argv[1:3], sys.argv[3:])
