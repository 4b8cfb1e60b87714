"""Writes marks on Nodes, one at a time for the whole cluster: two jobs that each had room for one more would be one too many.

Where the site wants it, another machine is asked for when a mark has stood for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from holdfast.kubernetes import marks, replacement
from holdfast.kubernetes.api import Api, ApiError, Backoff, NoAnswer, Object
from holdfast.kubernetes.marks import Mark, Marking
from holdfast.kubernetes.node_replacement import Held, NodeReplacement
from holdfast.kubernetes.observed import MachineSeen

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
        replaces: NodeReplacement | None = None,
    ) -> None:
        """machines: all of the cluster. saw: takes a Node in that a request brought. replaces: None: the site wants none."""
        self._api, self._machines, self._saw = api, machines, saw
        self._marking: Marking = marking
        self._most_percent = most_percent
        self._replaces = replaces
        self._held_until_s: dict[str, float | None] = {}
        self._one_at_a_time = asyncio.Lock()
        self._awake = asyncio.Event()
        self.refused: str | None = None

    def wake(self) -> None:
        """A Node has changed, or a pod that was on one is gone."""
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
            await self._rest()
            try:
                for machine in [
                    one for one in self._machines.values() if marks.lags(one.marks, self._marking)
                ]:
                    await self._follow(machine.name)
                for name in self._due():
                    await self._replace(name)
                backoff.reset()
            except (ApiError, NoAnswer) as error:
                _log.warning("a mark is not shown on its machine: %s; it is tried again", error)
                await backoff.wait(error)
                self.wake()

    async def _rest(self) -> None:
        """Until a Node changes, or another machine is due."""
        moments = [at_s for machine in self._machines if (at_s := self._due_s(machine)) is not None]
        rest_s = max(0.0, min(moments) - self._api.now_s()) if moments else None
        try:
            async with asyncio.timeout(rest_s):
                await self._awake.wait()
        except TimeoutError:
            return
        self._awake.clear()
        # What held may be over.
        self._held_until_s = {name: at_s for name, at_s in self._held_until_s.items() if at_s is not None}

    async def _follow(self, machine: str) -> None:
        path = f"{FOLDER}/{machine}"
        way = self._replaces.way if self._replaces is not None else None
        try:
            node = await self._api.get(path)
            back = replacement.label_back(way, node) if way is not None else None
            if marks.marks_of(node).mark is None and back is not None:
                node = await self._api.merge(path, back)
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

    # ------------------------------------------------------------ another machine in its place

    def _due_s(self, machine: str) -> float | None:
        """When another one is to be asked for, or what holds it is over; None: never, or nobody knows when."""
        seen = self._machines.get(machine)
        if self._replaces is None or seen is None:
            return None
        due_s = self._replaces.due_s(seen.marks.mark)
        if due_s is None or machine not in self._held_until_s:
            return due_s
        held_s = self._held_until_s[machine]
        return None if held_s is None else max(due_s, held_s)

    def _due(self) -> list[str]:
        now_s = self._api.now_s()
        return [name for name in self._machines if (at_s := self._due_s(name)) is not None and at_s <= now_s]

    async def _replace(self, machine: str) -> None:
        assert self._replaces is not None, "nothing is due without it"
        path = f"{FOLDER}/{machine}"
        try:
            node = await self._api.get(path)
            if self._replaces.due_s(marks.marks_of(node).mark) is None:
                self._saw(node)
                return
            # Not one at a time with the marks: a site's program may take a minute, and jobs wait for their marks.
            told = await self._replaces.ask(node)
            async with self._one_at_a_time:
                node = await self._api.get(path)
                if (mark := marks.marks_of(node).mark) is None:  # taken back meanwhile
                    self._saw(node)
                    return
                mark = msgspec.structs.replace(mark, replacement=told)
                self._saw(await self._api.merge(path, marks.note(mark)))
                # Its condition may be still to come.
                held = marks.marks_of(node).condition
                shown = marks.shown(mark, self._api.now_s(), changed=not held)
                self._saw(await self._api.strategic(f"{path}/status", shown))
        except Held as why:
            _log.warning("no other machine is asked for: %s", why, extra={"machine": machine})
            self._held_until_s[machine] = why.until_s
        except ApiError as error:
            if error.status != 404:
                raise
            # It is gone, and the watch will say so. Due all the time until then, it would be asked for again and again
            # without a pause.
            self._held_until_s[machine] = None
