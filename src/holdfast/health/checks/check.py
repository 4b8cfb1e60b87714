"""What a check is: a function that yields results; and how one is run so that it never ends anything but itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.messages import Peer

SECONDS = 2.0
"""About how long a check that takes measurements goes on, unless it is told otherwise."""


class CannotCheck(Exception):
    """The check cannot be made here: a tool, a permission or memory is missing. Neither healthy nor faulty."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be checked."""

    node: str = ""
    host: str = "127.0.0.1"
    """The address that other nodes use."""
    folder: str = "."
    """A folder that the checks may write into."""
    seconds: float = SECONDS
    """About how long a measurement goes on."""
    only: tuple[str, ...] = ()
    """Names of checks; empty: all that concern the node alone."""
    peers: tuple[Peer, ...] = ()
    """The other nodes of a check between nodes, as in RunChecks."""
    port: int = 0
    """The port to listen on, as in RunChecks; 0: this end connects."""
    token: str = ""
    """Proves to a peer that the other end is of the same job."""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)


class CheckProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a running suite reports. Neither field: it waits for its turn."""

    running: str = ""
    """A check that begins."""
    result: CheckResult | None = None
    """A result."""


Check = Callable[[Task], Iterable[CheckResult]]
"""What an entry point of the group `holdfast.checks` names."""


def attempt(name: str, check: Check, task: Task) -> list[CheckResult]:
    """Runs a check. Whatever goes wrong in it says nothing about the node: the result is unknown then."""
    began_s = time.monotonic()
    results: list[CheckResult] = []
    try:
        for result in check(task):
            took_s = round(time.monotonic() - began_s, 4)
            # Generators yield as they go, so a check that fails half-way keeps the results that it had.
            results.append(msgspec.structs.replace(result, took_s=result.took_s or took_s))
            began_s = time.monotonic()
    except CannotCheck as why:
        results.append(unknown(name, str(why), time.monotonic() - began_s))
    except Exception as error:  # noqa: BLE001 a check is the boundary: its own mistakes must not blame a node
        results.append(unknown(name, f"{type(error).__name__}: {error}", time.monotonic() - began_s))
    return results


def unknown(name: str, why: str, took_s: float = 0.0) -> CheckResult:
    """The result of a check that could not be made."""
    return CheckResult(name=name, condition=Condition.UNKNOWN, detail=why, took_s=round(took_s, 4))


def failed(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Those that say that something is faulty."""
    return [r for r in results if r.condition is Condition.FAULTY]


def is_of(name: str, result: CheckResult) -> bool:
    """Whether a result is one of the check `name`: it bears its name, or one that begins so (`disk`, `disk-write`)."""
    return result.name == name or result.name.startswith(f"{name}-")
