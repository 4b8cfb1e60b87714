"""Defines a check, a function that yields results, and runs one so that its failure ends nothing but itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.messages import Peer

SECONDS = 2.0
"""Default for the approximate duration of a check that takes measurements, in seconds."""


class CannotCheck(Exception):
    """The check cannot be made here, because a tool, a permission or memory is missing. Its result is unknown, neither
    healthy nor faulty."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run checks, as it is passed to the child process."""

    node: str = ""
    host: str = "127.0.0.1"
    """The address that other nodes use."""
    folder: str = "."
    """A folder that the checks may write into."""
    seconds: float = SECONDS
    """Approximate duration of a measurement."""
    only: tuple[str, ...] = ()
    """Names of the checks to run; empty: all checks that concern this node alone."""
    peers: tuple[Peer, ...] = ()
    """The other nodes of a check between nodes, as in RunChecks."""
    port: int = 0
    """The port to listen on, as in RunChecks; 0: this end connects."""
    token: str = ""
    """The job's token, with which the two ends of a check between nodes prove to each other that they belong to the
    same job."""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)


class CheckProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a running suite. With neither field set, the suite waits for its turn."""

    running: str = ""
    """The check that begins."""
    result: CheckResult | None = None
    """A result of the check under way."""


Check = Callable[[Task], Iterable[CheckResult]]
"""A check: the function that an entry point of the group `holdfast.checks` names."""


def attempt(name: str, check: Check, task: Task) -> list[CheckResult]:
    """Runs a check. An error in the check says nothing about the node, so its result is unknown then."""
    began_s = time.monotonic()
    results: list[CheckResult] = []
    try:
        for result in check(task):
            took_s = round(time.monotonic() - began_s, 4)
            # A generator yields results as it goes, so a check that fails half-way keeps those that it
            # already has.
            results.append(msgspec.structs.replace(result, took_s=result.took_s or took_s))
            began_s = time.monotonic()
    except CannotCheck as why:
        results.append(unknown(name, str(why), time.monotonic() - began_s))
    except Exception as error:  # noqa: BLE001 a check is the boundary: its own mistakes must not blame a node
        results.append(unknown(name, f"{type(error).__name__}: {error}", time.monotonic() - began_s))
    return results


def unknown(name: str, why: str, took_s: float = 0.0) -> CheckResult:
    """The result for a check that could not be made."""
    return CheckResult(name=name, condition=Condition.UNKNOWN, detail=why, took_s=round(took_s, 4))


def failed(results: Iterable[CheckResult]) -> list[CheckResult]:
    """The results whose condition is faulty."""
    return [r for r in results if r.condition is Condition.FAULTY]


def is_of(name: str, result: CheckResult) -> bool:
    """Whether a result belongs to the check `name`: it has this name, or one that begins with it (`disk`,
    `disk-write`)."""
    return result.name == name or result.name.startswith(f"{name}-")
