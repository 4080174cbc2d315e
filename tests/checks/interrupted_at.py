"""`interrupted_at`: an exception at any one opcode, as a signal handler may raise it."""

import sys
from contextlib import contextmanager


class InterruptError(Exception):
    """What a signal handler raises."""


@contextmanager
def interrupted_at(opcode, *modules):
    """Raise an InterruptError before the opcode of that number, counted from 0.

    Only what this thread does in the modules counts. Yields a list: empty as long as it has not
    come to that opcode.
    """
    files, seen, raised = {module.__file__ for module in modules}, [], []

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not raised:
            if len(seen) == opcode:
                raised.append(None)
                raise InterruptError
            seen.append(None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)
