"""A build that is killed; run by test_build_killed.py.

python killed_build.py event N PREFIX INPUT...    at the N-th thing that it does to the file system, by SIGKILL
python killed_build.py size N PREFIX INPUT...     while it writes byte N of a file, by SIGXFSZ
"""

import os
import resource
import signal
import sys
from pathlib import Path

from holdfast.data.build import Wanted, build

how, left, prefix = sys.argv[1], int(sys.argv[2]), os.path.abspath(sys.argv[3])
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def watch(event, args):
    """Called before each of these is done."""
    global left
    within = event in ("os.remove", "os.rmdir") and not os.path.isabs(
        args[0]
    )  # rmtree names files in its folder
    if event in CHANGES and (within or str(args[0]).startswith(prefix)):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)


if how == "event":
    sys.addaudithook(watch)
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, left))
build(Wanted(tuple(sys.argv[4:]), Path(prefix), unit_bytes=200))
