"""Which of several operators acts: the holder of a Lease.

The holder renews it, and stops what it does before another one may take it. Who waits measures with its own clock for how
long the Lease has not changed: clocks of two machines are never compared. What fences a leader that was stopped and thaws is
not this, but the versions and uids in its writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec

from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer, Object

_log = logging.getLogger(__name__)


# Two never lead, because deadline_s is less than duration_s and each measures to its own disadvantage. The holder counts
# from before its request, which may have been carried out at once. Who waits counts from when it saw the change, which is
# after it was made. So the holder's work is cancelled before anybody else may take the Lease.
class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long a Lease lives."""

    duration_s: float = 15.0
    """Unchanged for so long, it can be taken."""
    deadline_s: float = 10.0
    """A holder that could not renew it for so long stops."""
    every_s: float = 2.0
    """Between two looks."""


class Lease:
    """One Lease object, as one operator sees it."""

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, times: LeaseTimes | None = None
    ) -> None:
        self._api, self._name, self._identity = api, name, identity
        self._times = times or LeaseTimes()
        self._namespace = namespace
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._version, self._since_s = "", 0.0

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Waits for the Lease and works for as long as it is held. Returns when it was lost; raises what the work raises, and
        ApiError where the Lease is refused."""
        while not await self._try():  # noqa: ASYNC110 - another machine's Lease
            await asyncio.sleep(self._times.every_s)
        _log.info("leading", extra={"identity": self._identity})
        working = asyncio.ensure_future(work())
        keeping = asyncio.create_task(self._keep())
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, keeping):
                if task.done():
                    task.result()
        finally:
            for task in (working, keeping):
                task.cancel()
            await asyncio.gather(working, keeping, return_exceptions=True)

    async def release(self) -> None:
        """Gives it back, if it is held, so that the next operator need not wait until it is out of date."""
        try:
            there = await self._api.get(f"{self._folder}/{self._name}")
            if there.get("spec", {}).get("holderIdentity") == self._identity:
                given_back = self._object(there)
                given_back["spec"]["holderIdentity"] = ""
                await self._api.request("PUT", f"{self._folder}/{self._name}", None, given_back)
        except (ApiError, NoApiAnswer) as error:
            _log.info("the lease is not given back: %s", error)

    async def _keep(self) -> None:
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(self._times.every_s)
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(self._times.deadline_s - (began_s - renewed_s)):
                    held = await self._try()
                    if held is False:
                        _log.warning("another operator leads now")
                        return
                    if held:
                        # From before the request: it may have been carried out long before it was answered.
                        renewed_s = began_s
            except TimeoutError:
                pass
            if time.monotonic() - renewed_s >= self._times.deadline_s:
                _log.warning("the lease could not be renewed in time")
                return

    async def _try(self) -> bool | None:
        """Takes or renews it; False: it is another's; None: nobody answers, so whose it is is not known."""
        try:
            return await self._take()
        except NoApiAnswer as error:
            _log.info("%s", error)
        except ApiError as error:
            if error.is_unknown:
                # After an outage the kubelet takes up to some minutes to bring the next token. A process that ended would read
                # the same file, and wait ever longer to be started again.
                _log.warning("the API server does not know this operator's token: %s", error)
            elif error.status not in (404, 409) and not error.may_pass:
                raise
        return None

    async def _take(self) -> bool:
        try:
            there = await self._api.get(f"{self._folder}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            made = await self._api.create(self._folder, self._object(None))
            return self._is_held(made)
        version = there["metadata"]["resourceVersion"]
        spec = there.get("spec", {})
        now_s = time.monotonic()
        # By this machine's clock alone, however old `renewTime` is: it was written by another one's. An operator that has
        # just started therefore waits a whole duration for a Lease that somebody holds.
        if version != self._version:
            self._version, self._since_s = version, now_s
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and now_s - self._since_s < self._times.duration_s:
            return False
        # Refused where somebody else was quicker: the version is that of what was read.
        taken = await self._api.request("PUT", f"{self._folder}/{self._name}", None, self._object(there))
        return self._is_held(taken)

    def _is_held(self, lease: Object) -> bool:
        self._version, self._since_s = lease["metadata"]["resourceVersion"], time.monotonic()
        return bool(lease["spec"]["holderIdentity"] == self._identity)

    def _object(self, before: Object | None) -> Object:
        old = (before or {}).get("spec", {})
        changes = old.get("holderIdentity") != self._identity
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
        metadata: Object = {"name": self._name, "namespace": self._namespace}
        if before is not None:
            metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._times.duration_s)),
                "acquireTime": now if changes else old.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": old.get("leaseTransitions", 0) + (changes and before is not None),
            },
        }
