"""`interrupted_at`: an exception at any one moment at which a signal handler may raise it."""

import dis
import sys
from contextlib import contextmanager


class InterruptError(Exception):
    """What a signal handler raises."""


@contextmanager
def interrupted_at(moment, *modules):
    """Raise an InterruptError at the moment of that number, counted from 0.

    Python runs signal handlers where a function begins, where a loop turns, and after a call. Only
    what this thread does in the modules counts. Yields a list: empty as long as it has not come to
    that moment.
    """
    files, seen, raised, last = {module.__file__ for module in modules}, [], [], {}

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "return":
            last.pop(frame, None)
        elif event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            before = last.get(frame, "RESUME")
            last[frame] = name
            if not raised and (before.startswith(("CALL", "RESUME")) or "BACKWARD" in before):
                if len(seen) == moment:
                    raised.append(None)
                    raise InterruptError
                seen.append(None)
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 tells of none the first time
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)
