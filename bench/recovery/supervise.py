"""Keeps one command running: starts it again at once whenever it ends.

usage: python -m bench.recovery.supervise COMMAND...

Stands for the scheduler that torchft leaves the restart to. It asks no questions and waits for nothing,
which is the fastest that any scheduler could be.
"""

from __future__ import annotations

import signal
import subprocess
import sys

LIMIT = 1000
"""Starts before it gives up: a command that ends at once must not keep a core busy for ever."""


def main() -> None:
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: object) -> None:
        if child is not None:
            child.kill()
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    for _ in range(LIMIT):
        child = subprocess.Popen(sys.argv[1:])
        child.wait()


if __name__ == "__main__":
    main()
