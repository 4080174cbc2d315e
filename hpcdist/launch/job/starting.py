"""The start of a job's launcher: `start_launcher`, and `meeting_point` for torch on its ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from hpcdist.launch.command import Command
from hpcdist.launch.job import shim
from hpcdist.runtime.torchrun import NOTE


def start_launcher(
    command: Command, environ: Mapping[str, str], has_input: bool
) -> subprocess.Popen[bytes]:
    """Start a launcher in a session of its own, with pipes for what it says.

    One whose ranks are on other machines ends with us.

    Args:
        command: what to start.
        environ: its environment, without what the command adds.
        has_input: whether it gets a pipe for its input.

    Raises:
        OSError: it could not be started.

    """
    argv = list(command.argv)
    if not command.local:
        ends_with_us = ("die_with_parent", str(os.getpid()))
        argv = [sys.executable, "-I", "-S", shim.__file__, *ends_with_us, *argv]
    return subprocess.Popen(
        argv,
        env={**environ, **command.env},
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def meeting_point(environ: Mapping[str, str]) -> tuple[dict[str, str], socket.socket | None]:
    """Return what is not set of torchrun's address, and a socket that keeps its port for the job.

    Args:
        environ: the environment of the job.

    """
    if "MASTER_PORT" in environ:
        return {}, None
    # Bound, but not listening: who binds it, too, may listen, and nobody else gets the number.
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    number = port.getsockname()[1]
    point = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number)}
    found = {name: value for name, value in point.items() if name not in environ}
    return {**found, NOTE: ",".join(found)}, port
