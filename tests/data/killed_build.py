"""A build that is killed; run by test_build_killed.py.

python killed_build.py event N WORKERS PREFIX INPUT...    at the N-th thing that it does to the file system, by SIGKILL
python killed_build.py size N WORKERS PREFIX INPUT...     while it writes byte N of a file, by SIGXFSZ
"""

import os
import resource
import signal
import sys
from pathlib import Path

from holdfast.tools.corpora.build import build
from holdfast.tools.corpora.options import BuildOptions

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def kill_at_event(left, prefix):
    """Before the `left`-th of the changes is done."""

    def watch(event, args):
        nonlocal left
        within = event in ("os.remove", "os.rmdir") and not os.path.isabs(args[0])  # rmtree's, in its folder
        if event in CHANGES and (within or str(args[0]).startswith(prefix)):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def kill_at_size(nbytes):
    """While a file grows beyond this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


if __name__ == "__main__":  # processes of the pool import this
    how, number, workers, prefix = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        os.path.abspath(sys.argv[4]),
    )
    if how == "event":
        kill_at_event(number, prefix)
    else:
        kill_at_size(number)
    build(BuildOptions(inputs=tuple(sys.argv[5:]), prefix=Path(prefix), unit_bytes=200), workers)
