"""Defines a source: a small piece of code that reads one part of the machine, for rules to judge.

A source reads and names values; it decides nothing and keeps no more than it needs to continue reading. The watcher
calls it on a thread of its own, so it may block. One that hangs (a driver call that never returns) is Unknown after
three of its periods, while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.health.samples import LogLine, Reading


class Source(Protocol):
    """Reads values when it is asked to, every `every_s` seconds (whole seconds, so that several sources share one wake-up).

    `read` returns all present values of the source. It raises nothing: a value that cannot be read now is a Reading with
    value None and `why`; a property that the machine does not have gives no Reading. Lines among the readings are allowed,
    for sources that collect events (NVML's, DCGM's).

    A source that the kernel or a driver wakes also has a method `fileno() -> int`: readable when there is something new before
    the period is over, -1 if there never is. `read` is then called as well, and may return only the new values.

    A source with a thread of its own has a method `trouble() -> str`, which returns at once why that thread watches no more;
    empty: it still does.
    """

    @property
    def name(self) -> str:
        """`sysfs`, `nvml`, ...: the `source` of its readings."""
        ...

    @property
    def every_s(self) -> float:
        """The period."""
        ...

    def read(self) -> Iterable[Reading | LogLine]:
        """All values as they are now."""
        ...

    def close(self) -> None:
        """Closes and releases what it holds."""
        ...


class MachineRoot(msgspec.Struct, frozen=True):
    """The root of a machine's files: the real machine, or a folder that stands in for it."""

    root: Path = Path("/")
    """The folder in front of `/proc`, `/sys` and `/dev`."""
    nvml: Path | None = None
    """A folder that stands in for the GPUs (`INDEX/KEY` files); None: the machine's driver."""
    job_dirs: tuple[Path, ...] = ()
    """Folders that the job writes into; their file systems are watched."""

    @property
    def stand_in(self) -> bool:
        """Whether it is not a real machine but a folder into which tests write faults."""
        return self.root != Path("/")


# A factory finds the devices that exist when the agent starts, and a source those that come later: a machine
# without RDMA has no source for it at all, and no Unknown either.
Factory = Callable[[MachineRoot], Iterable[Source]]
"""Makes the sources of one kind that this machine has; none if there is nothing to read."""
