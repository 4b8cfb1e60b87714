"""`python -m holdfast.tools.checks`: deep checks in a process of their own. A Task comes as JSON on stdin; every check
that begins, and every result, goes as a line of JSON to stdout. Started by agents and by `holdfast check`."""

from __future__ import annotations

import os
import sys

import msgspec

from holdfast.health.checks.check import CheckProgress, Task
from holdfast.tools.checks.suite import run_checks


def main() -> int:
    """Runs the checks of the task."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    # Duplicated before any library is loaded: NCCL and drivers print to descriptor 1 itself, past sys.stdout.
    # Their output goes to stderr, because it is not a result.
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "wb", buffering=0) as results:

        def say(progress: CheckProgress) -> None:
            results.write(msgspec.json.encode(progress) + b"\n")

        run_checks(task, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
