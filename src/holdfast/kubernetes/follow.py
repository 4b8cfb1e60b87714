"""Shows a job on Kubernetes to a person until it is over, or the person leaves. The job needs nobody who looks on."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.engines import jobs
from holdfast.engines.client import JobClient
from holdfast.engines.shown import View
from holdfast.errors import UsageError
from holdfast.kubernetes import api
from holdfast.kubernetes.api import Api, ApiError
from holdfast.kubernetes.cluster import connect
from holdfast.kubernetes.printed import Printed
from holdfast.kubernetes.reach import KubernetesReach, has_ended
from holdfast.kubernetes.resource import GROUP, PLURAL, VERSION
from holdfast.kubernetes.status import ConditionType, JobStatus, status_of
from holdfast.protocol.notices import NoticeCause

LAST_WORDS_S = 5.0
"""Between the operator's word that the job is over and the coordinator's own report of it."""
AGAIN_S = 1.0


class Follower:
    """One job. `run` returns its report; `outcome` is `left` where the person left."""

    def __init__(self, folder: Path, view: View) -> None:
        allocation = jobs.read_allocation(folder)
        assert allocation is not None
        self._folder, self._view, self._allocation = folder, view, allocation
        self._told: dict[str, Any] | None = None
        self._said = ""

    async def run(self) -> dict[str, Any]:
        """Ctrl-C, and a closed terminal, leave the job as it is."""
        leaves = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # By default the signal would end this process at once, and nobody would say that the job goes on.
            loop.add_signal_handler(number, leaves.set)
        watching = asyncio.create_task(self._watch())
        looking = asyncio.create_task(self._look())
        leaving = asyncio.create_task(leaves.wait())
        tasks = {watching, looking, leaving}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Before the others are asked: a person who leaves gets out at once, whatever they still do.
            if leaving.done():
                name = self._folder.name
                self._view.note(
                    f"the job continues without this command: `holdfast attach --job {name}` shows it again, "
                    f"`holdfast stop --job {name}` ends it"
                )
                return {"outcome": jobs.LEFT, "reason": "", "incidents": []}
            # A refusal, for example. Whoever waited for the operator's word instead would never see it.
            if watching.done() and watching.exception() is not None:
                watching.result()
            # Both say it, and either may be first. The coordinator's report has more; the operator also knows of an end
            # that the coordinator did not survive.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.wait({watching, looking})
            return self._report(looking.result() if looking.done() else None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self, status: JobStatus | None) -> dict[str, Any]:
        if self._told is not None:
            return self._told
        if status is None:
            return {"outcome": "failed", "reason": "the job was deleted", "incidents": []}
        failed = status.condition(ConditionType.FAILED)
        outcome = "finished" if status.holds(ConditionType.COMPLETE) else "failed"
        # To the object a job that was stopped has not done what it is for. Who stopped it asked for that.
        if failed is not None and failed.reason == "Stopped":
            outcome = "stopped"
        return {"outcome": outcome, "reason": status.reason or "", "incidents": []}

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
        """Whether another run follows: Kueue took the quota back, and the job waits for it."""
        async for announcement in client.watch():
            if announcement.kind == "event":
                self._view.event(announcement.value)
                printed.heard(announcement.value["kind"], announcement.value["fields"])
            elif announcement.kind == "status":
                self._view.status(announcement.value)
            elif announcement.kind == "log":
                self._view.note(announcement.value["text"])
            elif announcement.kind == "ended":
                if announcement.value.get("cause") == NoticeCause.PREEMPTION:
                    return True
                self._told = announcement.value
        return False

    async def _look(self) -> JobStatus | None:
        """Says what the operator says, until the job is over; None: it was deleted."""
        async with connect(self._allocation.context or None) as client:
            while True:
                try:
                    return await self._look_on(client)
                except api.NoAnswer as error:
                    self._note(f"the API server does not answer; training does not need it ({error})")
                except ApiError as error:
                    # A version that is too old is listed anew, and a passing trouble passes. Anything else
                    # stays, and has to be told.
                    if not error.is_gone and not error.may_pass:
                        raise UsageError(f"the API server refused the request: {error}") from None
                except (aiohttp.ClientError, OSError) as error:
                    self._note(f"the API server cannot be reached: {error}")
                await asyncio.sleep(AGAIN_S)

    async def _look_on(self, client: Api) -> JobStatus | None:
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self._allocation.namespace}/{PLURAL}"
        only = {"fieldSelector": f"metadata.name={self._allocation.name or self._folder.name}"}
        # The watch goes on from the version of this list, so nothing between the two is missed.
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
        """Tells what is new. Returns a status that will not change any more."""
        status = status_of(raw, UsageError)
        # While the coordinator answers, its own events say more.
        if not status.holds(ConditionType.TRAINING) and status.state:
            self._note(f"{status.state}: {status.reason}" if status.reason else status.state)
        return status if has_ended(status) else None

    def _note(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._view.note(text)
