"""Start a server and N ranks of a program: ``python -m hpcdist_switchboard N program ...``."""

import os
import secrets
import signal
import subprocess
import sys

from hpcdist_switchboard.board import BoardManager


def main(size: int, command: list[str]) -> int:
    """Run `command` on `size` ranks; return the first exit status that is not 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # ends the server too
    key = secrets.token_hex()
    with BoardManager(authkey=key.encode()) as manager:
        common = {**os.environ, "SWITCHBOARD": f"{manager.address} {key} {size}"}
        ranks = [
            subprocess.Popen(command, env={**common, "SWITCHBOARD_RANK": str(rank)})
            for rank in range(size)
        ]
        try:
            return max(abs(rank.wait()) for rank in ranks)
        finally:
            for rank in ranks:
                rank.terminate()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
