"""Shows a job on Kubernetes, and the output of its workers, until it is over or the person leaves. The job does not depend on
this.

A pod's own log has the agent's messages and the output of rank 0. Each worker's log file is in its pod, and ends with it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.engines import jobs
from holdfast.engines.client import JobClient
from holdfast.engines.jobs import read_allocation
from holdfast.engines.shown import View
from holdfast.errors import UsageError
from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer, connect
from holdfast.kubernetes.commands.reach import KubernetesReach
from holdfast.kubernetes.objects.resource import GROUP, PLURAL, VERSION, WORKER
from holdfast.kubernetes.objects.status import ConditionType, JobStatus, status_of
from holdfast.protocol.job import DEFAULT_LOG_LIMIT, LOG_KEPT_SHARE
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.notices import NoticeCause

LAST_WORDS_S = 5.0
"""Seconds to wait for the second of the two reports of the job's end, the coordinator's and the operator's."""
AGAIN_S = 1.0


class Follower:
    """Follows one job. `run` returns its report, whose `outcome` is `left` if the person left."""

    def __init__(self, folder: Path, view: View) -> None:
        allocation = jobs.read_allocation(folder)
        assert allocation is not None
        self._folder, self._view, self._allocation = folder, view, allocation
        self._ended_report: JobReport | None = None
        self._last_note = ""

    async def run(self) -> JobReport:
        """Shows the job until it is over; returns its report. Ctrl-C or a closed terminal ends only this command.

        Raises:
            UsageError: a request was refused.
        """
        leaves = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # By default the signal would end this process at once, without a message that the job continues.
            loop.add_signal_handler(number, leaves.set)
        watching = asyncio.create_task(self._watch())
        looking = asyncio.create_task(self._look())
        leaving = asyncio.create_task(leaves.wait())
        tasks = {watching, looking, leaving}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Checked first, so that a person who leaves does not wait for the other tasks.
            if leaving.done():
                name = self._folder.name
                self._view.note(
                    f"the job continues without this command: `holdfast attach --job {name}` shows it again, "
                    f"`holdfast stop --job {name}` ends it"
                )
                return JobReport(job=name, incidents=[], outcome=jobs.LEFT)
            # An error such as a refusal, which would not be seen if the operator's report were awaited instead.
            if watching.done() and watching.exception() is not None:
                watching.result()
            # Either of the two may report the end first. The coordinator's report has more information; the operator also knows
            # of an end that the coordinator did not survive.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.wait({watching, looking})
            return self._report(looking.result() if looking.done() else None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self, status: JobStatus | None) -> JobReport:
        if self._ended_report is not None:
            return self._ended_report
        if status is None:
            return JobReport(
                job=self._folder.name, incidents=[], outcome="failed", reason="the job was deleted"
            )
        failed = status.condition(ConditionType.FAILED)
        outcome = "finished" if status.holds(ConditionType.COMPLETE) else "failed"
        # The object counts a stopped job as failed, but for the person who stopped it this is not a failure.
        if failed is not None and failed.reason == "Stopped":
            outcome = "stopped"
        return JobReport(job=self._folder.name, incidents=[], outcome=outcome, reason=status.reason or "")

    async def _watch(self) -> None:
        reach = KubernetesReach(self._folder, self._allocation)
        async with JobClient(self._folder, reach) as client:
            printed = Printed(reach, self._view.output)
            try:
                while await self._watch_run(client, printed):
                    pass
            finally:
                await printed.close()

    async def _watch_run(self, client: JobClient, printed: Printed) -> bool:
        """Shows one run. Returns whether another run follows, because Kueue took the quota back and the job waits for it."""
        async for announcement in client.watch():
            if announcement.kind == "event":
                self._view.event(announcement.value)
                printed.heard(announcement.value["kind"], announcement.value["fields"])
            elif announcement.kind == "status":
                self._view.status(announcement.value)
            elif announcement.kind == "log":
                self._view.note(announcement.value["text"])
            elif announcement.kind == "ended":
                if announcement.value.cause == NoticeCause.PREEMPTION:
                    return True
                self._ended_report = announcement.value
        return False

    async def _look(self) -> JobStatus | None:
        """Shows the operator's status until the job is over; returns the last one. None: the job was deleted."""
        async with connect(self._allocation.context or None) as client:
            while True:
                try:
                    return await self._look_on(client)
                except NoApiAnswer as error:
                    self._note(f"the API server does not answer; training does not need it ({error})")
                except ApiError as error:
                    # After an outdated version the object is listed again, and temporary errors pass. Other errors are permanent,
                    # and have to be reported.
                    if not error.is_gone and not error.may_pass:
                        raise UsageError(f"the API server refused the request: {error}") from None
                except (aiohttp.ClientError, OSError) as error:
                    self._note(f"the API server cannot be reached: {error}")
                await asyncio.sleep(AGAIN_S)

    async def _look_on(self, client: Api) -> JobStatus | None:
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self._allocation.namespace}/{PLURAL}"
        only = {"fieldSelector": f"metadata.name={self._allocation.name or self._folder.name}"}
        # The watch continues from the version of this list, so that nothing in between is missed.
        there, version = await client.list_all(path, only)
        if not there:
            return None
        if (status := self._saw(there[0])) is not None:
            return status
        async for event in client.watch(path, only, version):
            if event["type"] == "DELETED":
                return None
            if event["type"] != "BOOKMARK" and (status := self._saw(event["object"])) is not None:
                return status
        return await self._look_on(client)

    def _saw(self, raw: dict[str, Any]) -> JobStatus | None:
        """Shows what is new in an object's status. Returns the status if it is final, else None."""
        status = status_of(raw, UsageError)
        # While the job trains, the coordinator's own events have more information.
        if not status.holds(ConditionType.TRAINING) and status.state:
            self._note(f"{status.state}: {status.reason}" if status.reason else status.state)
        return status if status.has_ended else None

    def _note(self, text: str) -> None:
        if text != self._last_note:
            self._last_note = text
            self._view.note(text)


# ------------------------------------------------------------ the workers' output, from the files in their pods


def tail_command(path: Path, lines: int, follow: bool) -> list[str]:
    """The command that prints a log in a pod. lines: number of last lines; 0: everything."""
    # By name (-F), so that a log that does not exist yet or is replaced is still followed. "Everything" is what the agent keeps
    # for certain: the hole that it leaves in place of older output would be printed as zeros.
    part = ["-n", str(lines)] if lines else ["-c", str(int(LOG_KEPT_SHARE * DEFAULT_LOG_LIMIT))]
    return ["tail", *(["-F"] if follow else []), *part, str(path)]


class Printed:
    """Follows the output of rank 0. `heard` takes the ledger's events; `close` ends it."""

    def __init__(self, reach: KubernetesReach, output: Callable[[bytes], None]) -> None:
        self._reach, self._output = reach, output
        self._logs: dict[str, tuple[str, Path]] = {}
        self._following: dict[str, asyncio.Task[None]] = {}

    def heard(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes one event of the ledger."""
        if kind == "worker-started":
            self._logs[fields["worker"]] = fields["node"], Path(fields["log"])
        elif kind in ("formed", "started") and fields["workers"]:
            # Rank 0 may be another worker in each generation. Earlier ones are still followed, because their last lines say why
            # they died.
            first = fields["workers"][0]
            if first in self._logs and first not in self._following:
                self._following[first] = asyncio.create_task(self._follow(*self._logs[first]))

    async def close(self) -> None:
        """Stops following."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, node: str, path: Path) -> None:
        # Errors are ignored: a pod that is gone has no more output, and without the permission for pods/exec only this is
        # missing.
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
                    # Only whole lines, because output of several logs is interleaved, and half a line would be continued by
                    # another log.
                    whole, newline, rest = (rest + data).rpartition(b"\n")
                    if newline:
                        write(label, whole + newline)
            except (aiohttp.ClientError, OSError) as error:
                # Reported at the end: one pod that is gone must not hide the logs of all others.
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
