"""Coordinators of all jobs in one process: the real ones, each on a socket, without agents. They answer the operator."""

from __future__ import annotations

import asyncio
import base64
import signal
import socket
import sys
from pathlib import Path

import msgspec

from holdfast.coordinator.service.server import Coordinator
from holdfast.kubernetes import names
from holdfast.kubernetes.client.api import Api, Object, connect
from holdfast.kubernetes.client.informer import Informer
from holdfast.protocol.job import JobSpec, Resume


class Coordinators:
    """Starts one for each coordinator's pod that has an address."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_pod(self, pod: Object) -> None:
        name, address = pod["metadata"]["name"], pod.get("status", {}).get("podIP")
        if address and pod["status"].get("phase") == "Running" and name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._serve(pod, address))

    def on_list(self, pods: list[Object], version: str) -> None:
        for pod in pods:
            self.on_pod(pod)

    def on_gone(self, pod: Object) -> None:
        if (task := self._tasks.get(pod["metadata"]["name"])) is not None:
            task.cancel()

    async def _serve(self, pod: Object, address: str) -> None:
        labels, namespace = pod["metadata"]["labels"], pod["metadata"]["namespace"]
        name = names.config_name(labels[names.LABEL_JOB])
        secret = await self._api.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        config = await self._api.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")
        job_dir = self._folder / "jobs" / pod["metadata"]["name"]
        job_dir.mkdir(parents=True)
        token = job_dir / "token"
        token.touch(mode=0o600)
        token.write_bytes(base64.b64decode(secret["data"][names.TOKEN_FILE]))
        spec = msgspec.json.decode(config["data"][names.SPEC_FILE], type=JobSpec)
        coordinator = Coordinator(job_dir, spec, Resume(), term=int(labels[names.LABEL_TERM]))
        link = self._folder / "coordinators" / address
        link.unlink(missing_ok=True)
        link.symlink_to(job_dir)
        await coordinator.serve(socket.create_server(("127.0.0.1", 0)), "127.0.0.1")


async def serve(folder: Path) -> None:
    """Until SIGTERM."""
    (folder / "coordinators").mkdir(exist_ok=True)
    ends = asyncio.Event()
    async with connect() as api:
        all_ = Coordinators(api, folder)
        informer = Informer(
            api=api,
            path="/api/v1/pods",
            query={"labelSelector": f"{names.LABEL_ROLE}={names.COORDINATOR_ROLE}"},
            on_list=all_.on_list,
            on_change=all_.on_pod,
            on_gone=all_.on_gone,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
        watching = asyncio.create_task(informer.run())
        await ends.wait()
        watching.cancel()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
