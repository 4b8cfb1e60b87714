"""What workers printed, out of the files in their pods: rank 0's as it comes, and any on request.

A pod's own log has what its agent says and what rank 0 printed. Each worker's file is in its pod, and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.engines.jobs import read_allocation
from holdfast.errors import UsageError
from holdfast.kubernetes.reach import KubernetesReach
from holdfast.kubernetes.resource import WORKER
from holdfast.protocol.job import DEFAULT_LOG_LIMIT, LOG_KEPT_SHARE


def tail_command(path: Path, lines: int, follow: bool) -> list[str]:
    """lines: the last so many; 0: all."""
    # By its name (-F): a log that is not there yet, or is replaced, is still found. All: what its agent keeps for certain, since
    # a hole over the oldest part would come as zeros.
    part = ["-n", str(lines)] if lines else ["-c", str(int(LOG_KEPT_SHARE * DEFAULT_LOG_LIMIT))]
    return ["tail", *(["-F"] if follow else []), *part, str(path)]


class Printed:
    """Follows rank 0. `heard` takes the ledger's events; `close` ends it."""

    def __init__(self, reach: KubernetesReach, output: Callable[[bytes], None]) -> None:
        self._reach, self._output = reach, output
        self._logs: dict[str, tuple[str, Path]] = {}
        self._following: dict[str, asyncio.Task[None]] = {}

    def heard(self, kind: str, fields: Mapping[str, Any]) -> None:
        """One event."""
        if kind == "worker-started":
            self._logs[fields["worker"]] = fields["node"], Path(fields["log"])
        elif kind in ("formed", "started") and fields["workers"]:
            # Rank 0 may be another worker in each generation. Those before are followed on: last
            # lines say why a worker died.
            first = fields["workers"][0]
            if first in self._logs and first not in self._following:
                self._following[first] = asyncio.create_task(self._follow(*self._logs[first]))

    async def close(self) -> None:
        """Nothing more is shown."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, node: str, path: Path) -> None:
        # A pod that is gone has no output any more, and a person who may not use pods/exec sees the rest.
        with suppress(aiohttp.ClientError, OSError):
            async for data in self._reach.tunnel.run(node, WORKER, tail_command(path, 0, follow=True)):
                self._output(data)


def show_logs(
    folder: Path,
    logs: list[tuple[str, Path, str]],
    lines: int,
    write: Callable[[str, bytes], None],
    *,
    follow: bool,
) -> None:
    """Writes the logs, each a node, a path in its pod and a label. write: takes the label and whole lines.

    Raises:
        UsageError: the job is over, so its pods are gone; or the API server refuses.
    """
    asyncio.run(_show_logs(folder, logs, lines, write, follow))


async def _show_logs(
    folder: Path,
    logs: list[tuple[str, Path, str]],
    lines: int,
    write: Callable[[str, bytes], None],
    follow: bool,
) -> None:
    allocation = read_allocation(folder)
    assert allocation is not None
    if allocation.over:
        raise UsageError(
            f"the job {folder.name!r} has ended, and the output of its workers was deleted with their pods; the "
            "output of rank 0 is in the log collection of your cluster, if it has one"
        )
    async with KubernetesReach(folder, allocation) as reach:
        unreached: list[str] = []

        async def one(node: str, path: Path, label: str) -> None:
            rest = b""
            try:
                async for data in reach.tunnel.run(node, WORKER, tail_command(path, lines, follow)):
                    # Whole lines only: pieces of several logs come mixed, and half a line would
                    # be completed by another log.
                    whole, newline, rest = (rest + data).rpartition(b"\n")
                    if newline:
                        write(label, whole + newline)
            except (aiohttp.ClientError, OSError) as error:
                # Told at the end: one pod that is gone must not hide the logs of all others.
                unreached.append(f"{label}: the pod {node} cannot be reached: {error}")
            if rest:
                write(label, rest + b"\n")

        if follow:
            await asyncio.gather(*(one(*log) for log in logs))
        else:
            # One after the other, so that the lines of two logs are not mixed.
            for log in logs:
                await one(*log)
    if unreached:
        raise UsageError("; ".join(unreached))
