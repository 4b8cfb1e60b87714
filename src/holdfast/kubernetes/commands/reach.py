"""How commands outside of the cluster reach a job's coordinator: its pod is in the object's status, and the API server proxies to
it.

Nothing of the job is needed on this machine. The token is read from the job's Secret each time and kept in no file, so that
exactly those who may read the Secret can control the job.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from holdfast.coordinator.service.store import FIRST
from holdfast.engines import jobs
from holdfast.engines.client import PATIENCE_S, NoAnswer, RequestNotTaken
from holdfast.engines.jobs import Allocation
from holdfast.errors import Damaged, UsageError
from holdfast.kubernetes import names
from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer, open_client
from holdfast.kubernetes.client.tunnel import Tunnel
from holdfast.kubernetes.objects.render import token_in
from holdfast.kubernetes.objects.resource import job_path
from holdfast.kubernetes.objects.status import QUEUED, ConditionType, JobStatus, status_of
from holdfast.protocol.job_view import LEDGER_KEPT
from holdfast.protocol.network.endpoint import NAME_PATH, CoordinatorName, Endpoint
from holdfast.protocol.network.http_client import Answer, Unproven
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.decoding import decode

AGAIN_S = 0.5
"""Seconds between two tries, each of which is a request to the API server."""
NAME_S = 4.0
"""Seconds that a pod may take to report its name. The API server tries for much longer to reach a machine that is gone, while
there may already be another coordinator."""
_ENDED = '{"kind":"ended"'
_names = msgspec.json.Decoder(CoordinatorName)


class KubernetesReach:
    """See `engines.client.Reach`."""

    def __init__(
        self,
        folder: Path,
        allocation: Allocation,
        opened: Callable[[str | None], AbstractAsyncContextManager[Any]] = open_client,
        port: int = names.COORDINATOR_PORT,
    ) -> None:
        """Connects in `__aenter__`.

        Args:
            folder: the job's, on this machine.
            opened: opens a `kubernetes_asyncio.client.ApiClient` for a context of the kubeconfig.
            port: of the coordinator.
        """
        self._opened, self._port = opened, port
        self._folder, self._allocation = folder, allocation
        self._name, self._namespace = allocation.name or folder.name, allocation.namespace
        self._open = AsyncExitStack()
        self._token = ""
        self._keeper = secrets.token_hex(8)
        self._where: tuple[str, Endpoint] | None = None

    async def __aenter__(self) -> KubernetesReach:
        client = await self._open.enter_async_context(self._opened(self._allocation.context or None))
        self._api, self.tunnel = Api(client), Tunnel(client, self._namespace, names.COORDINATOR_PORT)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    async def is_running(self) -> bool:
        """See `Reach`. True if the API server does not answer, since the job can run without it."""
        try:
            await self._status()
        except NoAnswer:
            return False
        except RequestNotTaken:
            return True
        return True

    async def send(self, method: str, path: str, body: str) -> Answer:
        """See `Reach`."""
        try:
            pod, where = await self._find()
            return await self.tunnel.request(pod, where, self._token, method, path, body, PATIENCE_S)
        # With these errors the coordinator has not accepted the request. Other errors leave that open, and are handled by the
        # caller.
        except (aiohttp.ClientConnectorError, Unproven, RequestNotTaken) as error:
            self._where = None
            await asyncio.sleep(AGAIN_S)
            raise RequestNotTaken(str(error)) from error

    async def listen(self, after: int) -> AsyncGenerator[str]:
        """See `Reach`. At the job's end its ledger and report are stored in the folder, since they end with the coordinator's
        pod."""
        try:
            pod, where = await self._find()
            async with self.tunnel.socket(
                pod, where, self._token, f"/watch/{after}/keep/{self._keeper}", PATIENCE_S
            ) as socket:
                async for frame in socket:
                    if frame.type is not aiohttp.WSMsgType.TEXT:
                        continue
                    if frame.data.startswith(_ENDED):
                        # Before it is passed on, because the receiver leaves then.
                        await self._keep(socket, frame.data)
                    yield frame.data
        except (aiohttp.ClientError, OSError, TimeoutError, RequestNotTaken, NoAnswer):
            pass
        self._where = None
        # Another coordinator may have the job by now. The pause is because each further call is a request to the API server.
        await asyncio.sleep(AGAIN_S)

    async def _keep(self, socket: aiohttp.ClientWebSocketResponse, ended: str) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            follows = await socket.receive(PATIENCE_S)
            if follows.type is aiohttp.WSMsgType.BINARY:
                report = decode(_report, ended, "the report", error=NoAnswer)
                await asyncio.to_thread(self._write, follows.data, report)
                # The coordinator waits for this message, so that the ledger does not end with its pod.
                await socket.send_str(LEDGER_KEPT)

    def _write(self, ledger: bytes, report: Any) -> None:
        # The ledger first, so that a command that finds the report also finds the ledger.
        work = self._folder / f".{FIRST}.kept"
        work.write_bytes(ledger)
        work.replace(self._folder / FIRST)
        (self._folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))

    # ------------------------------------------------------------ where it is

    async def _find(self) -> tuple[str, Endpoint]:
        """The coordinator's pod and endpoint.

        Raises:
            RequestNotTaken: there is none now.
            NoAnswer: there will be none.
        """
        if self._where is None:
            status = await self._status()
            seen = status.coordinator
            if seen is None or seen.pod is None or seen.address is None:
                raise RequestNotTaken(
                    f"it does not have a coordinator yet; state reported by the operator: {status.state or 'none'}"
                )
            self._token = self._token or await self._read_token()
            self._where = seen.pod, await self._ask_name(seen.pod, seen.address)
        return self._where

    async def _ask_name(self, pod: str, address: str) -> Endpoint:
        try:
            answer = await self.tunnel.ask_openly(pod, NAME_PATH, NAME_S)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RequestNotTaken(str(error) or type(error).__name__) from error
        # If the pod cannot be reached, the API server answers by itself. That must not be read as a coordinator's name.
        if answer.status != 200:
            raise RequestNotTaken(f"{pod} cannot be reached: {_message_in(answer)}")
        named = decode(
            _names.decode, answer.body, f"the name of the coordinator in {pod}", error=RequestNotTaken
        )
        # With its own address, as for clients within the cluster, see `Endpoint.dialled`. That the answer is this pod's is
        # vouched for by the API server.
        return Endpoint(
            host=address,
            port=self._port,
            pid=0,
            instance=named.instance,
            term=named.term,
            dialled=host_and_port(address, self._port),
        )

    async def _status(self) -> JobStatus:
        there = await self._get(job_path(self._namespace, self._name), "the job is deleted")
        status = status_of(there, NoAnswer)
        if status.has_ended:
            self._is_over()
            raise NoAnswer(
                f"the job {self._name!r} is not running: {status.state}. {status.reason or ''}".strip()
            )
        suspended = status.condition(ConditionType.SUSPENDED)
        # A queued job continues by itself, so the caller waits.
        if status.holds(ConditionType.SUSPENDED) and suspended is not None and suspended.reason == QUEUED:
            raise RequestNotTaken(f"the job {self._name!r} has no pods: {suspended.message}")
        if status.holds(ConditionType.SUSPENDED):
            # Either a person wants it suspended, or the operator has not noticed yet that it is to be resumed.
            if there.get("spec", {}).get("runPolicy", {}).get("suspend"):
                raise NoAnswer(
                    f"the job {self._name!r} is suspended: it continues when spec.runPolicy.suspend is false"
                )
            raise RequestNotTaken(f"the job {self._name!r} is being resumed")
        return status

    async def _read_token(self) -> str:
        path = f"/api/v1/namespaces/{self._namespace}/secrets/{names.config_name(self._name)}"
        secret = await self._get(path, "its Secret does not exist yet")
        return token_in(secret, UsageError)

    async def _get(self, path: str, gone: str) -> dict[str, Any]:
        try:
            return await self._api.get(path)
        except NoApiAnswer as error:
            raise RequestNotTaken(f"the API server does not answer: {error}") from error
        except ApiError as error:
            if error.status == 404:
                # A new job has no Secret yet, so the caller waits. A missing job object was deleted and does not come back.
                if "secrets" in path:
                    raise RequestNotTaken(gone) from error
                self._is_over()
                raise NoAnswer(f"the job {self._name!r} is not running: {gone}") from None
            if error.may_pass:
                raise RequestNotTaken(str(error)) from error
            raise UsageError(f"the API server refused the request: {error}") from None

    def _is_over(self) -> None:
        """Records in the folder that the job is over, so that later commands need not ask."""
        # If the folder cannot be written, the next command merely makes one more request.
        with suppress(OSError):
            jobs.write_allocation(self._folder, msgspec.structs.replace(self._allocation, over=True))


def _report(ended: str) -> Any:
    return msgspec.json.decode(ended)["value"]


def _message(body: bytes) -> str:
    return str(msgspec.json.decode(body)["message"])


def _message_in(answer: Answer) -> str:
    """The message in an answer of the API server itself."""
    try:
        return decode(_message, answer.body, "the answer")
    except Damaged:
        return answer.words[:200]
