"""What is done to a job on the test cluster by more than one: scenes, and `bench.replace`."""

from __future__ import annotations

import base64
import time

import msgspec
from realkube import (
    FOLDER,
    MACHINES,
    PATIENCE_S,
    Job,
    cluster,
    cordon,
    evict,
    node_of,
    pods_of,
    until,
)

from holdfast.kubernetes.client.api import Api
from holdfast.protocol.job_view import JobView
from holdfast.protocol.network.http_client import request
from holdfast.protocol.network.lookup import AddressLookup


async def drain_every_machine(api: Api) -> None:
    """One by one, as `kubectl drain` does; each may be used again before the next one is drained."""
    for machine in MACHINES:
        await cordon(api, machine)
        for pod in await pods_of(api, {"fieldSelector": f"spec.nodeName={machine}"}):
            name = pod["metadata"]["name"]
            await until(lambda name=name: evict(api, name), f"{name} has left {machine}")
        await cordon(api, machine, on=False)


async def lose_node_without_api_server(api: Api, job: Job, status: JobView, outage_s: float) -> None:
    """Stops the API server for so long. In that time a machine whose node trains loses power, and the spare takes over.

    job: two nodes and a spare. status: as the job trains.
    """
    seat = await job.pod(await job.coordinator())
    # Of the two one may share the coordinator's machine, which is to stay.
    nodes = {node: await job.machine(node) for node in (node_of(status, 0), node_of(status, 1))}
    lost, machine = next(one for one in nodes.items() if one[1] != seat["spec"]["nodeName"])
    where = await AddressLookup(seat["status"]["podIP"], 7077).find()
    secret = await api.get(f"{FOLDER}/secrets/{job.name}-holdfast")
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert where is not None
    cluster("apiserver", "stop")
    over_s = time.monotonic() + outage_s
    try:
        cluster("kill", machine)

        async def trains_on() -> bool:
            answer = await request(token, where, "GET", "/status", limit_s=5)
            now = msgspec.json.decode(answer.body)
            ranks = [w["node"] for w in now["workers"] if w["rank"] is not None]
            whole = lost not in ranks and len(ranks) == 2 and now["step"] > status.step + 10
            return whole and time.monotonic() >= over_s

        await until(trains_on, "the spare trains, without an API server", outage_s + PATIENCE_S)
    finally:
        cluster("apiserver", "start")
