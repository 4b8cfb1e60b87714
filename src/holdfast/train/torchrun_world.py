"""torchrun's variables of a worker, while the job's process groups are Holdfast's.

A library that finds them calls `init_process_group()` on sight. A group over all workers could not lose one of them, and a
spare that comes late would wait in it for ever.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What torchrun's habits put into a worker's environment."""


_hidden: list[bool] = []
"""Not empty where this process has an adapter of a framework."""


def hide() -> None:
    """For a framework whose adapter answers what it asks: it finds no launcher, and makes no process group at all. For as
    long as this process lives, also in `main` and after `run.mesh()`."""
    _hidden[:] = [True]
    _remove()


def _remove() -> None:
    for name in NAMES:
        os.environ.pop(name, None)


@contextmanager
def world_of_one(given: Mapping[str, str]) -> Iterator[None]:
    """Inside, the variables are those of a torchrun that has started this process alone; behind it they are as before.
    given: as for `show`."""
    before = {name: os.environ[name] for name in NAMES if name in os.environ}
    show(0, 1, given)
    try:
        yield
    finally:
        # An adapter may have hidden them meanwhile, and that is for good: what was there must not come back.
        if not _hidden:
            _remove()
            os.environ.update(before)


def show(rank: int, size: int, given: Mapping[str, str]) -> None:
    """From here on the variables are those of a world of `size` workers, where this one is `rank`. given: the variables with
    which the worker was started."""
    if _hidden:
        return
    # A replica may be smaller than a node: a local world that is larger than the world
    # makes no sense to a library.
    on_node = max(1, min(size, int(given.get("LOCAL_WORLD_SIZE", "1"))))
    _remove()
    os.environ.update(
        {
            "RANK": str(rank),
            # Scripts take their device by it, so it stays the worker's number on its node, also in a world of one.
            "LOCAL_RANK": given.get("LOCAL_RANK", "0"),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(on_node),
            "GROUP_RANK": str(rank // on_node),
            "GROUP_WORLD_SIZE": str(max(1, size // on_node)),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(size),
            # Of a replica the group exists, so nobody asks for it here. A group of one has its store in this process, at a
            # port that is free: two workers of a node would else ask for the same one. TORCHELASTIC_USE_AGENT_STORE is
            # away, which would have it look for the launcher's store.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    )
