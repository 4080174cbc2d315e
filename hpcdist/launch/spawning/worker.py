"""What runs in each rank that `spawn` starts: load the call, make it, leave the answer.

MPI is not touched: whether and when the function initialises it is its own affair.
"""

from __future__ import annotations

import os
import traceback

from hpcdist.launch.spawning.pickled_call import read_call, write_error, write_result
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot


def main(directory: str) -> None:
    """Run the call that lies in the job's folder and store what comes of it.

    An exception is stored and raised on, so that an excepthook which ends the job still sees it.

    Args:
        directory: the folder that `spawn` made.

    """
    rank = read_place(snapshot()).rank
    try:
        function, arguments = read_call(directory).unpack()
        write_result(directory, rank, function(*arguments))
    except Exception as error:
        # The first frame is this function, of no interest to the caller.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        write_error(directory, rank, "".join(traceback.format_exception(error)))
        _tell_raised(directory, rank)
        raise


def _tell_raised(directory: str, rank: int) -> None:
    """Make the job end even where this rank cannot: MPI's own end waits for the other ranks."""
    try:
        events = os.open(f"{directory}/events", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    os.write(events, f"raise {rank}\n".encode())
    os.close(events)
