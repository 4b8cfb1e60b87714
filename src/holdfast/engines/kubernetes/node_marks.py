"""Writes marks on Nodes, one at a time for the whole cluster: two jobs that each had room for one more would be one too many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from holdfast.engines.kubernetes import marks
from holdfast.engines.kubernetes.api import Api, ApiError, Backoff, NoAnswer, Object
from holdfast.engines.kubernetes.marks import Mark, Marking
from holdfast.engines.kubernetes.observed import MachineSeen

_log = logging.getLogger(__name__)
FOLDER = "/api/v1/nodes"


class NodeMarks:
    """`put` and `take_back` are for jobs' tasks; `run` has conditions and taints follow.

    Attributes:
        refused: why the API server takes no marks; None: it does.
    """

    def __init__(
        self,
        api: Api,
        machines: Mapping[str, MachineSeen],
        saw: Callable[[Object], None],
        marking: Marking,
        most_percent: int,
    ) -> None:
        """machines: all of the cluster. saw: takes a Node in that a request brought."""
        self._api, self._machines, self._saw = api, machines, saw
        self._marking: Marking = marking
        self._most_percent = most_percent
        self._one_at_a_time = asyncio.Lock()
        self._awake = asyncio.Event()
        self.refused: str | None = None

    def wake(self) -> None:
        """A Node has changed."""
        self._awake.set()

    async def put(self, machine: str, mark: Mark) -> None:
        """Marks it, if the brake lets it. Raises ApiError and NoAnswer."""
        async with self._one_at_a_time:
            seen = self._machines.get(machine)
            # Looked at again: another job may have marked one since this one was decided. The next look of the job's
            # task says so.
            if seen is None or (self._held() if seen.marks.mark is None else seen.marks.mark.uid != mark.uid):
                return
            _log.warning("marks a machine: %s", mark.reason, extra={"machine": machine, "job": mark.job})
            await self._write(machine, mark)

    async def take_back(self, machine: str, uid: str) -> None:
        """If it is this job's. Raises ApiError and NoAnswer."""
        async with self._one_at_a_time:
            seen = self._machines.get(machine)
            if seen is None or seen.marks.mark is None or seen.marks.mark.uid != uid:
                return
            _log.info("takes a mark back", extra={"machine": machine, "job": seen.marks.mark.job})
            await self._write(machine, None)

    async def _write(self, machine: str, mark: Mark | None) -> None:
        try:
            self._saw(await self._api.merge(f"{FOLDER}/{machine}", marks.note(mark)))
        except ApiError as error:
            # A right that is missing must hold up nothing: jobs avoid the machine by themselves.
            if error.status == 403:
                self.refused = f"machines may not be marked: {error}"
                _log.warning("%s", self.refused)
            elif error.status != 404:
                raise

    def _held(self) -> bool:
        there = {name: one.marks for name, one in self._machines.items()}
        return marks.brake(there, self._most_percent) is not None

    async def run(self) -> None:
        """Until it is cancelled."""
        backoff = Backoff()
        while self.refused is None:
            await self._awake.wait()
            self._awake.clear()
            try:
                for machine in [
                    one for one in self._machines.values() if marks.lags(one.marks, self._marking)
                ]:
                    await self._follow(machine.name)
                backoff.reset()
            except (ApiError, NoAnswer) as error:
                _log.warning("a mark is not shown on its machine: %s; it is tried again", error)
                await backoff.wait(error)
                self.wake()

    async def _follow(self, machine: str) -> None:
        path = f"{FOLDER}/{machine}"
        try:
            node = await self._api.get(path)
            for below, patch in marks.patches(node, self._marking, time.time()):
                write = self._api.strategic if below else self._api.merge
                self._saw(await write(path + below, patch))
        except ApiError as error:
            if error.status == 403:
                self.refused = f"marks may not be shown on machines: {error}"
                _log.warning("%s", self.refused)
            elif error.status == 409:  # it has changed meanwhile, and is looked at anew
                self.wake()
            elif error.status != 404:
                raise
