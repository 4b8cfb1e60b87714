"""Another user of this machine, who has nothing to do with the job: `nobody`, in a process of his own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
_fork = multiprocessing.get_context("fork")  # another user may not read the interpreter


def as_stranger(deed: Callable[..., Any], *args: Any) -> Any:
    """What `deed(*args)` returns when he does it."""
    with stranger(lambda told: told.send(deed(*args))) as said:
        return said.recv()


@contextmanager
def stranger(deed: Callable[[Connection], None]) -> Iterator[Connection]:
    """He runs `deed` with his end of a connection; yields ours. He is ended with the block."""
    ours, theirs = _fork.Pipe()

    def be_nobody() -> None:
        ours.close()
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.chdir("/")
        deed(theirs)

    process = _fork.Process(target=be_nobody, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()
