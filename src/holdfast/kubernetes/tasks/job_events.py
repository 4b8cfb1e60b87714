"""Events of one job, which `kubectl describe hj` shows. They are only for people: nothing waits for them, and an Event that
cannot be written is dropped.

As in Kubernetes' own components, a repetition is counted in the existing Event, and a job may post `BURST` Events at once and
then one per `EVERY_S`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable

import msgspec

from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer, Object
from holdfast.kubernetes.objects.resource import API_VERSION, KIND, ObjectName
from holdfast.kubernetes.objects.status import timestamp
from holdfast.kubernetes.policy.conditions import JobNews

_log = logging.getLogger(__name__)
BURST, EVERY_S = 25, 60.0
MOST_KNOWN = 64
"""Number of Events whose repetition is counted instead of posted as a new Event."""
TEXT_CHARS = 1000
CLOSE_S = 2.0
"""Seconds that the last Events of a job may take."""


class _Written(msgspec.Struct):
    path: str
    count: int = 1


class JobEvents:
    """Posts Events. `tell` returns at once; a task writes them."""

    def __init__(self, api: Api, job: ObjectName, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._job, self._clock = api, job, clock
        self._folder = f"/api/v1/namespaces/{job.namespace}/events"
        self._known: dict[JobNews, _Written] = {}
        self._waiting: deque[JobNews] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._namespace_ends = False
        self._left, self._filled_s = float(BURST), clock()

    def tell(self, news: JobNews) -> None:
        """Queues an Event, unless the job has exceeded its rate."""
        if self._namespace_ends:
            return
        now_s = self._clock()
        self._left = min(float(BURST), self._left + (now_s - self._filled_s) / EVERY_S)
        self._filled_s = now_s
        if self._left < 1:
            _log.info("no Event, there were many: %s: %s", news.reason, news.text, extra=self._extra)
            return
        self._left -= 1
        self._waiting.append(news)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())

    async def close(self) -> None:
        """Waits until queued Events are written, for at most `CLOSE_S`."""
        if self._writing is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._writing
            except TimeoutError:  # the writing task was cancelled with the wait for it
                _log.warning("the last Events of the job are not written", extra=self._extra)

    @property
    def _extra(self) -> dict[str, str]:
        return {"job": self._job.name}

    async def _write_all(self) -> None:
        while self._waiting:
            news = self._waiting.popleft()
            try:
                await self._write(news)
            except (ApiError, NoApiAnswer) as error:
                self._namespace_ends |= isinstance(error, ApiError) and error.namespace_ends
                # Not tried again: the permission may be missing for good, and the conditions have the state anyway.
                _log.warning("it is no Event of the job's: %s", error, extra=self._extra)

    async def _write(self, news: JobNews) -> None:
        now_s = self._api.now_s()
        known = self._known.pop(news, None)
        if known is not None and await self._count(known, now_s):
            self._known[news] = known
            return
        name = f"{self._job.name}.{secrets.token_hex(8)}"
        await self._api.create(self._folder, event_object(self._job, name, news, now_s))
        self._known[news] = _Written(f"{self._folder}/{name}")
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    async def _count(self, known: _Written, now_s: float) -> bool:
        """Counts a repetition. False: the Event is gone; the API server keeps them for an hour."""
        change: Object = {"count": known.count + 1, "lastTimestamp": timestamp(now_s)}
        try:
            await self._api.merge(known.path, change)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        known.count += 1
        return True


def event_object(job: ObjectName, name: str, news: JobNews, now_s: float) -> Object:
    """The Event object for a job. name: the Event's, which must be unique."""
    at = timestamp(now_s)
    about = {"apiVersion": API_VERSION, "kind": KIND, **msgspec.structs.asdict(job)}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": job.namespace},
        "involvedObject": about,
        "type": news.type,
        "reason": news.reason,
        "message": news.text[:TEXT_CHARS],
        "source": {"component": "holdfast-operator"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
