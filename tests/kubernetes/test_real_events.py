"""What a person sees of a job beside its conditions, on a real Kubernetes: Events, the columns of one that is over, and two jobs of
one name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
from kubejobs import job as asked
from realkube import (
    FOLDER,
    NAMESPACE,
    PACE_S,
    STEPS,
    Job,
    Scene,
    Undisturbed,
    gone,
    holdfast,
    pair,
    until,
    word,
)

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.resource import job_path

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


async def told(api: Api, name: str) -> dict[str, dict[str, Any]]:
    """The Events of a job, by their reasons."""
    about = f"involvedObject.kind=HoldfastJob,involvedObject.name={name}"
    events = (await api.list_all(f"{FOLDER}/events", {"fieldSelector": about}))[0]
    return {one["reason"]: one for one in events}


def test_a_job_s_life_is_told_by_events_and_its_end_stays_to_be_read(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    async def scene(api: Api) -> None:
        async with pair(api, home, "told") as (job, status):
            nodes = sorted(one.node for one in status.workers if one.rank is not None)
            await job.kill_container(nodes[0])
            await job.training(2, beyond=status.step + 10, spares=1)

            async def heard() -> bool:
                return {"Started", "Incident", "Recovered"} <= (await told(api, "told")).keys()

            await until(heard, "the incident and its end are Events")
            await job.stops_as(undisturbed, incidents=(1,))
            ended = (await job.condition("Failed"))["status"]

            async def is_told() -> bool:
                return "Stopped" in await told(api, "told")

            await until(is_told, "the end is an Event")
            assert (await told(api, "told"))["Stopped"]["type"] == "Normal"
            report = json.loads((job.dir / "report.json").read_text())
            assert ended["progress"]["step"] == report["steps"]["committed"]
            assert (ended["nodes"]["summary"], ended["nodes"]["present"]) == ("0/2", 0)
            saved = word({"status": ended}, "StateSaved")
            assert saved is not None
            # It had snapshots in memory alone.
            assert (saved["status"], saved["reason"]) == ("False", "NothingLeft")

    play(scene)


def test_an_image_that_is_not_there_is_told_in_the_kubelet_s_words(play: Callable[[Scene], None], home: Path):
    async def scene(api: Api) -> None:
        made = asked(spec__template__spec__containers__0__image="holdfast.test/none:1")
        made["metadata"] = {"name": "bare", "namespace": NAMESPACE}
        made = await api.create(job_path(NAMESPACE, "").rstrip("/"), made)

        async def heard() -> bool:
            said = (await told(api, "bare")).get("CannotStart")
            return said is not None and "holdfast.test/none:1" in said["message"]

        await until(heard, "what is in the way is an Event")
        await api.delete(job_path(NAMESPACE, "bare"), made["metadata"]["uid"])
        await until(lambda: gone(api, job_path(NAMESPACE, "bare")), "it is gone")

    play(scene)


def test_two_jobs_of_one_name_train_side_by_side(play: Callable[[Scene], None], home: Path):
    async def scene(api: Api) -> None:
        other = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}}
        at = "/api/v1/namespaces/other"
        made = await api.apply(at, other, manager="tests")
        given = {"steps": STEPS, "pace_s": PACE_S}
        async with Job(api, home, "twin", "--nnodes", 1, **given) as first:
            await first.training(1, beyond=3)
            async with Job(api, home, "twin", "--nnodes", 1, "-n", "other", **given) as second:

                async def step() -> int:
                    ran = await asyncio.to_thread(
                        holdfast, home, "status", "--job", "twin", "-n", "other", "--json"
                    )
                    return int(json.loads(ran.stdout)["step"] or 0) if ran.returncode == 0 else 0

                await until(step, "the second one trains")
                printed = await asyncio.to_thread(holdfast, home, "logs", "--job", "twin", "-n", "other")
                assert printed.returncode == 0, printed.stderr
                listed = json.loads((await asyncio.to_thread(holdfast, home, "ls", "--json")).stdout)
                assert {"twin", "twin.other"} <= {one["job"] for one in listed}
                stopped = await asyncio.to_thread(holdfast, home, "stop", "--job", "twin", "-n", "other")
                assert stopped.returncode == 0, stopped.stderr
                assert await second.wait() != 0

                async def is_over() -> bool:
                    made = await api.get(job_path("other", "twin"))
                    return bool(made["status"]["state"] == "Failed")

                await until(is_over, "the operator has seen its end")
            status = await first.training(1)
            await first.training(1, beyond=status.step + 3)
            await first.stop()
            assert await first.wait() != 0
        await api.delete(at, made["metadata"]["uid"])
        await until(lambda: gone(api, at), "the namespace is gone")

    play(scene)
