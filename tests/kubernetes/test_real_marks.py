"""Marks on real Nodes: a machine that a job's coordinator blames has what the site asked for, the brake holds, and it ends with the
quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
pytest.importorskip("yaml")
from apiproxy import behind_proxy
from realkube import (
    FOLDER,
    MACHINES,
    Job,
    Scene,
    Undisturbed,
    holdfast,
    pair,
    trained_apart,
    until,
    word,
)

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.names import NOTE_FAULT, TAINT_UNHEALTHY
from holdfast.kubernetes.objects.machine import FAULT_CONDITION

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
NODES = "/api/v1/nodes"
SHOWN = {"none": set[str](), "condition": {"note", "condition"}, "taint": {"note", "condition", "taint"}}
"""What a machine with a mark has."""


@pytest.mark.parametrize("marking", list(SHOWN))
def test_a_machine_that_a_job_blames(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, marking: str
):
    """A fatal Xid on one of four machines, and then on another. One may have a mark, until it passes the deep checks or is cleared."""

    async def scene(api: Api) -> None:
        async with (
            behind_proxy(api, home, "--mark", marking, "--mark-at-most", "25"),
            # The job's own limit would leave the second machine alone.
            pair(api, home, f"marks-{marking}", "--blast-radius", "100%") as (job, status),
            nodes_seen(api) as shown,
        ):
            first = await breaks(job, status)
            if marking != "none":

                async def marked() -> bool:
                    return set(shown[first]) == SHOWN[marking]

                await until(marked, f"{first} has its mark")
                assert all("79" in words for name, words in shown[first].items() if name != "taint")
                second = await breaks(job, await job.training(2))
                await until(lambda: is_held(api, job), "the brake is told")
                assert not shown[second]
                told = await asyncio.to_thread(holdfast, home, "node", "clear", first)
                assert f"k8s:{first}" in told.stdout, told.stderr
                assert f"is cleared in {job.name}" in told.stdout
            # Both have passed or were cleared: they are used again.
            await job.training(2, beyond=status.step + 5, spares=1)

            async def unmarked() -> bool:
                return not any([on(await api.get(f"{NODES}/{machine}")) for machine in MACHINES])

            await until(unmarked, "no machine has a mark")
            assert [machine for machine in MACHINES if shown[machine]] == (
                [] if marking == "none" else [first]
            )
            await job.stops_as(undisturbed, incidents=(1 if marking == "none" else 2,))

    play(scene)


@asynccontextmanager
async def nodes_seen(api: Api) -> AsyncIterator[dict[str, dict[str, str]]]:
    """All that machines have ever had of a mark since then, with its words."""
    shown: dict[str, dict[str, str]] = {machine: {} for machine in MACHINES}
    _, version = await api.list_all(NODES, {})

    async def look() -> None:
        async for event in api.watch(NODES, {}, version):
            if event["type"] != "BOOKMARK":
                shown[event["object"]["metadata"]["name"]].update(on(event["object"]))

    looking = asyncio.create_task(look())
    try:
        yield shown
    finally:
        looking.cancel()
        (found,) = await asyncio.gather(looking, return_exceptions=True)
    assert isinstance(found, asyncio.CancelledError), found


async def breaks(job: Job, status: dict[str, Any]) -> str:
    """The GPU of a machine that trains falls off the bus. Returns the machine."""
    node, machine = await trained_apart(job, status)
    told = await asyncio.to_thread(holdfast, job.home, "fault", "xid=79", f"node={node}", "--job", job.name)
    assert told.returncode == 0, told.stdout + told.stderr
    return machine


def on(node: dict[str, Any]) -> dict[str, str]:
    """What of a mark a machine has, with its words."""
    found = {}
    if note := node["metadata"].get("annotations", {}).get(NOTE_FAULT):
        found["note"] = note
    if (condition := word(node, FAULT_CONDITION)) and condition["status"] == "True":
        found["condition"] = condition["message"]
    for taint in node["spec"].get("taints", ()):
        if taint["key"] == TAINT_UNHEALTHY:
            found["taint"] = taint["effect"]
    return found


async def is_held(api: Api, job: Job) -> bool:
    """Whether the job has an Event of the brake."""
    about = f"reason=MarkHeld,involvedObject.name={job.name}"
    return bool((await api.list_all(f"{FOLDER}/events", {"fieldSelector": about}))[0])
