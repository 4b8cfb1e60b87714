"""The API server refuses by the definition what this code refuses by the same rules, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
import yaml
from kubejobs import job, put
from test_kube_check import WRONG

from holdfast.kubernetes.client.api import Api, ApiError
from holdfast.kubernetes.objects.check import check
from holdfast.kubernetes.objects.schema import crd_text

pytestmark = pytest.mark.kube
FOLDER = "/apis/holdfast.dev/v1alpha1/namespaces/default/holdfastjobs"
NOT_SAID = {
    "spec.health.blastRadius",  # 0% and 101%
    "spec.health.replaceSlow",  # what may be noise
    "spec.procsPerNode",  # gpu without a GPU in the template
    "spec.scheduling.gang",  # in a queue of Kueue's, which is a label
    "spec.scheduling.queueTopology",  # without one
    "spec.snapshots.every",  # 0s
    "spec.snapshots.memory",  # more than the template's container has
}
"""Refused here, and taken by the server: the definition cannot look into the template, nor at labels."""
TRIES = 400


@asynccontextmanager
async def defined(alone: bool = False) -> AsyncIterator[Api]:
    """The API server with the definition. alone: without an operator, which would act on jobs that are made here."""
    from realkube import no_operator, path_of, reached, until

    if "HOLDFAST_KUBE_DIR" not in os.environ:
        pytest.skip("there is no Kubernetes: make kube-test starts one")
    async with reached() as api:
        made = yaml.safe_load(crd_text())
        await api.apply(path_of(made), made, manager="tests")

        async def served() -> bool:
            await api.list_all(FOLDER, {})
            return True

        await until(served, "the definition is served")
        async with no_operator(api) if alone else nullcontext():
            yield api


def plain(made: dict[str, Any]) -> dict[str, Any]:
    """As a person would apply it."""
    metadata = {key: value for key, value in made["metadata"].items() if key in ("name", "labels")}
    return {**made, "metadata": {**metadata, "namespace": "default"}}


async def refusal(api: Api, made: dict[str, Any]) -> str | None:
    """The server's words about an object that it does not take; None: it would."""
    try:
        # As kubectl does: a field that is not declared is an error, and not dropped.
        await api.request("POST", FOLDER, {"dryRun": "All", "fieldValidation": "Strict"}, plain(made))
    except ApiError as error:
        if error.status not in (400, 422):
            raise
        return str(error)
    return None


def tried(dice: random.Random) -> dict[str, Any]:
    """A job of which each field by itself is right."""
    made = job(spec__nodes=dice.randint(1, 4), spec__spares=dice.randint(0, 2))
    for path, values in {
        "spec.minNodes": [None, 1, 2, 3, 4],
        "spec.waitForSpare": [None, True, False],
        "spec.snapshots.copies": [None, 0, 1, 2, 4],
        "spec.scheduling.gang": [None, None, "KAI", "PodGroup", "Volcano"],
        "spec.scheduling.queue": [None, None, "team-a"],
        "spec.template.spec.containers.0.name": ["worker", "worker", "worker", "main"],
    }.items():
        if (value := dice.choice(values)) is not None:
            put(made, path, value)
    if dice.random() < 0.3:
        put(made, "metadata.labels", {"kueue.x-k8s.io/queue-name": "q"})
        made["spec"].get("scheduling", {}).pop("gang", None)
        levels = {key: "rack" for key in ("required", "preferred") if dice.random() < 0.5}
        put(made, "spec.scheduling.queueTopology", levels)
    if dice.random() < 0.2:
        names = dice.choice(["worker", "sidecar"])
        made["spec"]["template"]["spec"]["containers"].append({"name": names, "image": "i:1"})
    return made


def test_what_is_refused_here_is_refused_by_the_server() -> None:
    """Each field of these jobs is right, and together they may not be: it is the rules alone that say so."""

    async def run() -> None:
        counts = {True: 0, False: 0}
        async with defined() as api:
            dice = random.Random(49)
            for _ in range(TRIES):
                made = tried(dice)
                ours, theirs = check(made), await refusal(api, made)
                assert bool(ours) == (theirs is not None), (made["spec"], ours, theirs)
                for problem in ours:
                    assert problem.accepted in str(theirs), (problem, theirs)
                counts[bool(ours)] += 1
        assert min(counts.values()) > TRIES / 10, counts

    asyncio.run(run())


def test_the_server_refuses_no_job_that_is_taken_here() -> None:
    """Of the jobs that are wrong here the server takes those whose fault is in the pod's template, and a few more."""

    async def run() -> None:
        passed = []
        async with defined() as api:
            assert await refusal(api, job(spec__nodes=4, spec__minNodes=2, spec__spares=1)) is None
            for changes, path, _ in WRONG:
                made = job()
                for at, value in changes.items():
                    put(made, at, value)
                if await refusal(api, made) is None:
                    passed.append(path)
        parts = ("spec.template.", "spec.coordinator.", "spec.faults[")
        beyond = {one for one in passed if not one.startswith(parts)}
        assert beyond == NOT_SAID, beyond ^ NOT_SAID

    asyncio.run(run())


def test_a_status_is_written_on_an_object_that_an_earlier_definition_took() -> None:
    """Rules are about changes of the part that they are about: an operator that is upgraded must not find its jobs frozen."""

    async def run() -> None:
        from realkube import path_of

        async with defined(alone=True) as api:
            strict = yaml.safe_load(crd_text())
            loose = yaml.safe_load(crd_text())
            spec = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
            del spec["x-kubernetes-validations"]
            wrong = plain(job(spec__nodes=1, spec__minNodes=2))
            wrong["metadata"]["name"] = "early"
            path = f"{FOLDER}/early"
            try:
                await api.apply(path_of(loose), loose, manager="tests")

                async def taken() -> Any:
                    return await api.create(FOLDER, wrong)

                from realkube import until

                made = await until(taken, "the loose definition is served")
                await api.apply(path_of(strict), strict, manager="tests")

                async def refuses() -> bool:
                    return await refusal(api, job(spec__nodes=1, spec__minNodes=2)) is not None

                await until(refuses, "the rules are served")
                patch = [{"op": "add", "path": "/status", "value": {"state": "Running", "revision": 1}}]
                written = await api.test_and_set(f"{path}/status", patch)
                assert written["status"]["state"] == "Running"
                await api.merge(path, {"metadata": {"finalizers": ["holdfast.dev/save"]}})
                await api.merge(path, {"metadata": {"finalizers": None}})
                with pytest.raises(ApiError, match="at most nodes"):
                    await api.merge(path, {"spec": {"minNodes": 3}})
                await api.delete(path, made["metadata"]["uid"])
            finally:
                await api.apply(path_of(strict), strict, manager="tests")

    asyncio.run(run())


def test_a_size_that_a_run_cannot_have_is_refused_at_once_and_a_suspended_job_s_is_not() -> None:
    """What `kubectl scale` asks for. Everything else is written whatever the size is."""

    async def run() -> None:
        async with defined(alone=True) as api:
            made = plain(job(spec__nodes=4, spec__minNodes=2))
            made["metadata"]["name"] = "sized"
            path = f"{FOLDER}/sized"
            made = await api.create(FOLDER, made)
            try:
                await api.merge(f"{path}/scale", {"spec": {"replicas": 9}})  # no run yet
                await api.merge(path, {"spec": {"nodes": 4}})
                status = {"state": "Running", "revision": 1, "fewest": 2, "most": 4}
                patch = [{"op": "add", "path": "/status", "value": status}]
                await api.test_and_set(f"{path}/status", patch)
                await api.merge(f"{path}/scale", {"spec": {"replicas": 2}})
                for nodes in (1, 5):
                    with pytest.raises(ApiError, match=r"from status\.fewest to status\.most"):
                        await api.merge(f"{path}/scale", {"spec": {"replicas": nodes}})
                await api.merge(path, {"spec": {"nodes": 5, "runPolicy": {"suspend": True}}})
                # As it is now it could not be asked for, and the job's object is not frozen by that.
                await api.merge(path, {"spec": {"runPolicy": {"suspend": False}}})
                state = [{"op": "add", "path": "/status/state", "value": "Degraded"}]
                written = await api.test_and_set(f"{path}/status", state)
                assert (written["status"]["state"], written["spec"]["nodes"]) == ("Degraded", 5)
                ends = [{"op": "remove", "path": "/status/fewest"}, {"op": "remove", "path": "/status/most"}]
                await api.test_and_set(f"{path}/status", ends)
                await api.merge(f"{path}/scale", {"spec": {"replicas": 9}})
            finally:
                await api.delete(path, made["metadata"]["uid"])

    asyncio.run(run())
