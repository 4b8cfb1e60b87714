"""Leader election: of several operators, the holder of a Lease acts.

The holder renews the Lease, and stops its work before another operator may take it. A waiting operator measures with its own
clock how long the Lease has not changed, so that the clocks of two machines are never compared. A former leader that was
suspended and resumed is not fenced by the Lease but by the versions and uids in its writes.
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


# There are never two leaders, because deadline_s is less than duration_s and both sides measure conservatively. The holder counts
# from before its request, which may have been carried out immediately. A waiting operator counts from when it saw the change,
# which is after it was made. So the holder's work is cancelled before another operator may take the Lease.
class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals of a Lease, in seconds."""

    duration_s: float = 15.0
    """Time without a change after which another operator may take it."""
    deadline_s: float = 10.0
    """Time without a successful renewal after which its holder stops."""
    every_s: float = 2.0
    """Time between two attempts to take or renew it."""


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
        """Waits for the Lease, and runs `work` while it is held. Returns when it is lost, or when the work ends.

        Raises:
            ApiError: the Lease was refused.
            Exception: whatever `work` raises.
        """
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
        """Gives the Lease back, if it is held, so that the next operator need not wait until it expires."""
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
                        # Counted from before the request, which may have been carried out long before it was answered.
                        renewed_s = began_s
            except TimeoutError:
                pass
            if time.monotonic() - renewed_s >= self._times.deadline_s:
                _log.warning("the lease could not be renewed in time")
                return

    async def _try(self) -> bool | None:
        """Takes or renews the Lease. False: another operator holds it; None: there was no answer, so that is not known."""
        try:
            return await self._take()
        except NoApiAnswer as error:
            _log.info("%s", error)
        except ApiError as error:
            if error.is_unknown:
                # After an outage the kubelet may take some minutes to provide a new token. If this process ended, the next one
                # would read the same file, and the kubelet would wait longer and longer before each restart.
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
        # Only by this machine's clock, however old `renewTime` is, which was written by another machine's. So an operator that
        # has just started waits a whole duration for a Lease that has a holder.
        if version != self._version:
            self._version, self._since_s = version, now_s
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and now_s - self._since_s < self._times.duration_s:
            return False
        # Refused if another operator was quicker, because it has the version that was read.
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
