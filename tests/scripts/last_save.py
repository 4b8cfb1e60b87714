"""What people leave to the end of the process: open files, exit functions, a save that still runs."""

import atexit
import ctypes
import gzip
import os
import pickle
import sys
import tempfile
import threading
import weakref
import zipfile
from pathlib import Path

RANK = os.environ["RANK"]
ended = threading.Event()


class State:
    """Of the script: what unpickles it looks for it in `__main__`."""

    def __init__(self) -> None:
        self.steps = 3


class Closing:
    """Is let go with the script's globals."""

    def __del__(self) -> None:
        os.write(1, f"[{RANK}] its globals are gone: {State is None}\n".encode())


def save() -> None:
    """A last checkpoint, which is still being written when the last line has run."""
    ended.wait()
    with Path(f"{RANK}.pkl").open("wb") as file:
        pickle.dump(State(), file)
    print(f"[{RANK}] saved", flush=True)


def at_exit() -> None:
    print(f"[{RANK}] at exit: {len(pickle.dumps(State()))} bytes, {__name__}", flush=True)


packed = gzip.open(f"{RANK}.gz", "wt")  # noqa: SIM115
packed.write("packed\n" * 1000)
archive = zipfile.ZipFile(f"{RANK}.zip", "w")
archive.writestr("inside.txt", "archived")
plain = open(f"{RANK}.txt", "w")  # noqa: SIM115
plain.write("never closed")
scratch = tempfile.NamedTemporaryFile(dir=".", suffix=".tmp")  # noqa: SIM115
folder = tempfile.TemporaryDirectory(dir=".")
closing = Closing()
weakref.finalize(closing, print, f"[{RANK}] finalized", flush=True)
atexit.register(at_exit)
threading.Thread(target=save).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
ctypes.CDLL(None).printf(f"[{RANK}] from C\n".encode())
print(f"[{RANK}] the last line, {Path(sys.argv[0]).name} {sys.argv[1:]}, {Path(__file__).name}")
ended.set()
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
