"""The watch of machines on a real Kubernetes: one pod on each, with its own account. What it finds empties a machine, it may change no
other Node, and neither its end nor its successor's start loses or invents anything.

The kernel's log is this machine's own and stays as it is: a file of each node stands in for it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from fakeapi import Transport
from realkube import (
    FOLDER,
    IMAGE,
    MACHINES,
    PATIENCE_S,
    Job,
    Scene,
    Undisturbed,
    gone,
    machines_of,
    node_of,
    pair,
    path_of,
    trained_apart,
    until,
    word,
)
from rights import WATCH, objects

from holdfast.agent.simulated_sources import append_kernel_lines
from holdfast.health.kmsg import boot_id
from holdfast.kubernetes.client.api import Api, ApiError
from holdfast.kubernetes.names import HEALTH_CONDITION, NOTE_WATCH
from holdfast.kubernetes.objects.machine import HealthNote, health_note_on

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/holdfast-watch/pods"
ACCOUNT = "/api/v1/namespaces/holdfast-watch/serviceaccounts/holdfast-watch"
POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/holdfast-watch"
DAEMONSET = "/apis/apps/v1/namespaces/holdfast-watch/daemonsets/holdfast-watch"
STATE = "/var/lib/holdfast"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
LINE = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_a_machine_whose_kernel_says_that_it_is_broken(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Its Node gets the condition, and the job leaves it with the replacement first: no step is lost, and there is no incident. New
    nodes keep away until a person says that the machine is well, which a watch hears that began after the finding."""

    async def scene(api: Api) -> None:
        async with watched(api) as logs, pair(api, home, "watched") as (job, status):
            node, machine = await trained_apart(job, status)
            await asyncio.to_thread(append_kernel_lines, logs[machine], (LINE,))
            await until(lambda: is_sick(api, machine), f"{machine} has the condition")
            said = word(await api.get(f"{NODES}/{machine}"), HEALTH_CONDITION) or {}
            assert (said["reason"], said["message"]) == ("Xid79", f"gpu 0000:05:00: {LINE}")
            assert [one for one in MACHINES if await is_sick(api, one)] == [machine]

            async def has_left() -> bool:
                return machine not in (await machines_of(api)).values()

            await until(has_left, f"{node} has left {machine}", 2 * PATIENCE_S)
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert node not in [node_of(status, rank) for rank in (0, 1)]
            await keeps_away(api, job, machine, status)
            await successor(api, machine)
            assert await is_sick(api, machine)
            await api.merge(f"{NODES}/{machine}", annotation(None))
            await until(lambda: is_well(api, machine), f"{machine} is well")
            await job.training(2, beyond=status.step + 5, spares=1)
            assert await is_well(api, machine), "the line of before is found again"
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_a_watch_may_change_its_own_node_alone_and_of_that_what_is_its_own(play: Callable[[Scene], None]):
    """By the admission policy of the manifest, with the tokens that the kubelets give to the pods."""

    async def scene(api: Api) -> None:
        async with watched(api):
            own, other = MACHINES[:2]
            pod = await pod_on(api, own)
            sick = {"type": HEALTH_CONDITION, "status": "True", "reason": "Xid79", "message": "it is a test"}
            ready = {"type": "Ready", "status": "False", "reason": "Test"}
            async with as_account(api, pod) as account:
                assert (await account.get(f"{NODES}/{own}"))["metadata"]["name"] == own
                await tries(account, own, annotation("it is a test"))
                await tries(account, f"{own}/status", {"status": {"conditions": [sick]}})
                for refused_, at, patch in (
                    ("its own Node alone", other, annotation("it is a test")),
                    ("its own Node alone", f"{other}/status", {"status": {"conditions": [sick]}}),
                    ("the annotation", own, {"spec": {"unschedulable": True}}),
                    ("the annotation", own, {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}),
                    ("the annotation", own, {"metadata": {"labels": {"pool": "other"}}}),
                    ("the annotation", own, {"metadata": {"annotations": {"holdfast.dev/fault": "it"}}}),
                    ("the condition", f"{own}/status", {"status": {"conditions": [ready]}}),
                    ("the condition", f"{own}/status", {"status": {"conditions": [sick, ready]}}),
                    ("the condition", f"{own}/status", {"status": {"capacity": {"nvidia.com/gpu": "8"}}}),
                ):
                    with pytest.raises(ApiError, match=refused_) as refusal:
                        await tries(account, at, patch)
                    assert refusal.value.status == 403, (at, patch)
                # Nor may it do anything else with machines.
                with pytest.raises(ApiError, match="forbidden"):
                    await account.delete(f"{NODES}/{own}", "a-uid")
            checked = await until(lambda: type_checked(api), "the policy's expressions are checked")
            assert not checked.get("typeChecking", {}).get("expressionWarnings"), checked
            # A token of the account that no pod has says no machine.
            async with as_account(api, None) as account:
                with pytest.raises(ApiError, match="its own Node alone"):
                    await tries(account, own, annotation("it is a test"))

    play(scene)


def test_a_boot_ends_it(play: Callable[[Scene], None]):
    """As the next watch of the machine sees it. All machines of this cluster have one kernel, so the note is of another boot."""

    async def scene(api: Api) -> None:
        async with watched(api) as logs:
            machine = MACHINES[-1]
            await asyncio.to_thread(append_kernel_lines, logs[machine], (LINE,))
            await until(lambda: is_sick(api, machine), f"{machine} has the condition")
            note = health_note_on(await api.get(f"{NODES}/{machine}"))
            assert note is not None
            assert note.boot == boot_id()
            before = HealthNote(rule=note.rule, reason=note.reason, boot="of-another-boot", at=note.at)
            await api.merge(f"{NODES}/{machine}", annotation(msgspec.json.encode(before).decode()))
            await successor(api, machine)
            await until(lambda: is_well(api, machine), f"{machine} is well")

    play(scene)


def test_the_privileged_pod_reads_the_kernels_own_log(play: Callable[[Scene], None]):
    """The manifest's patch makes such pods, and their sources are those of the machine."""

    async def scene(api: Api) -> None:
        async with watched(api, stand_in=False):
            changed = await api.strategic(DAEMONSET, privileged())
            generation = changed["metadata"]["generation"]

            async def rolled_out() -> bool:
                status = (await api.get(DAEMONSET))["status"]
                done = status["observedGeneration"] >= generation
                return done and status.get("updatedNumberScheduled") == status.get("numberReady") == len(
                    MACHINES
                )

            await until(rolled_out, "all pods are privileged", 4 * PATIENCE_S)
            for machine in MACHINES:
                pod = await pod_on(api, machine)
                assert pod["spec"]["hostNetwork"]
                assert {one["name"] for one in pod["spec"]["volumes"] if "hostPath" in one} == {
                    "kmsg",
                    "state",
                }
                told = await until(partial(said_sources, machine, pod), f"the watch of {machine} reads")
                assert "kmsg" in told.split("sources=")[1].split()[0].split(","), told

    play(scene)


def privileged() -> dict[str, Any]:
    """The patch, with what a watch remembers in a folder of the test's."""
    patch: dict[str, Any] = yaml.safe_load(WATCH.with_name("watch-kmsg.yaml").read_text())
    volumes = patch["spec"]["template"]["spec"]["volumes"]
    (state,) = [volume for volume in volumes if volume["name"] == "state"]
    state["hostPath"]["path"] = f"{os.environ['HOLDFAST_KUBE_DIR']}/watch-state"
    return patch


# ------------------------------------------------------------ the DaemonSet


@asynccontextmanager
async def watched(api: Api, stand_in: bool = True) -> AsyncIterator[dict[str, Path]]:
    """The manifest with the image of the tests, and on each machine a file in the place of the kernel's log. Nothing of it is left."""
    made = objects(WATCH)
    folder = Path(os.environ["HOLDFAST_KUBE_DIR"]) / "watch"
    logs = {machine: folder / machine / "kmsg" for machine in MACHINES}
    for file in logs.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.parent.chmod(0o777)
        file.unlink(missing_ok=True)
    for one in made:
        if one["kind"] == "DaemonSet":
            pod = one["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            container["image"] = IMAGE
            if stand_in:
                (state,) = [volume for volume in pod["volumes"] if volume["name"] == "state"]
                state["hostPath"] = {"path": str(folder)}
                del state["emptyDir"]
                (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "state"]
                assert mount["mountPath"] == STATE
                mount["subPathExpr"] = "$(HOLDFAST_MACHINE)"
        await until(lambda one=one: api.apply(path_of(one), one, manager="tests"), f"{path_of(one)} is made")
    try:

        async def all_watch() -> bool:
            there = {pod["spec"].get("nodeName") for pod in await watch_pods(api) if is_running(pod)}
            return there == set(MACHINES) and (not stand_in or all(file.exists() for file in logs.values()))

        await until(all_watch, "all machines are watched", 2 * PATIENCE_S)
        yield logs
    finally:
        for one in reversed(made):
            found = await api.get(path_of(one))
            await api.delete(path_of(one), found["metadata"]["uid"])
            if one["kind"] == "DaemonSet":
                await until(lambda: no_pods(api), "no watch is left")
        await until(lambda: gone(api, "/api/v1/namespaces/holdfast-watch"), "the namespace is gone")
        for machine in MACHINES:
            await api.merge(f"{NODES}/{machine}", annotation(None))
            well = {"type": HEALTH_CONDITION, "status": "False", "reason": "Cleared"}
            if await is_sick(api, machine):
                await api.strategic(f"{NODES}/{machine}/status", {"status": {"conditions": [well]}})


async def watch_pods(api: Api) -> list[dict[str, Any]]:
    return (await api.list_all(PODS, {}))[0]


async def no_pods(api: Api) -> bool:
    return not await watch_pods(api)


def is_running(pod: dict[str, Any]) -> bool:
    ready = word(pod, "Ready")
    return "deletionTimestamp" not in pod["metadata"] and ready is not None and ready["status"] == "True"


async def pod_on(api: Api, machine: str) -> dict[str, Any]:
    """The watch of a machine, when it runs."""

    async def there() -> Any:
        here = [pod for pod in await watch_pods(api) if pod["spec"].get("nodeName") == machine]
        return next(filter(is_running, here), None)

    found: dict[str, Any] = await until(there, f"{machine} is watched")
    return found


async def successor(api: Api, machine: str) -> None:
    """The watch's pod is deleted, and another one is there."""
    pod = await pod_on(api, machine)
    await api.delete(f"{PODS}/{pod['metadata']['name']}", pod["metadata"]["uid"])

    async def another() -> bool:
        return (await pod_on(api, machine))["metadata"]["uid"] != pod["metadata"]["uid"]

    await until(another, f"{machine} has another watch")


async def said_sources(machine: str, pod: dict[str, Any]) -> str | None:
    """The line with which the watch of a machine begins."""
    name = f"holdfast-watch_{pod['metadata']['name']}_{pod['metadata']['uid']}"
    logs = sorted((Path(os.environ["HOLDFAST_KUBE_DIR"]) / machine / "pods" / name).glob("watch/*.log"))
    lines = [line for file in logs for line in file.read_text().splitlines()]
    return next((line for line in lines if "watches this machine" in line), None)


# ------------------------------------------------------------ its account


@asynccontextmanager
async def as_account(api: Api, pod: dict[str, Any] | None) -> AsyncIterator[Api]:
    """With a token as the kubelet asks for one for this pod; None: for none."""
    bound = {} if pod is None else {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", **who(pod)}}
    asked = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [], **bound},
    }
    token = (await api.create(f"{ACCOUNT}/token", asked))["status"]["token"]
    config = await asyncio.to_thread(server)
    known = ssl.create_default_context(cafile=config["certificate-authority"])
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=known)) as session:
        yield Api(Transport(session, config["server"]))


def server() -> dict[str, Any]:
    """The API server, with the file of its authority."""
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    return dict(config["clusters"][0]["cluster"])


def who(pod: dict[str, Any]) -> dict[str, str]:
    return {key: pod["metadata"][key] for key in ("name", "uid")}


async def type_checked(api: Api) -> dict[str, Any] | None:
    """What the controller-manager says of the policy, when it has looked at its expressions."""
    policy = await api.get(POLICY)
    status: dict[str, Any] = policy.get("status", {})
    return status if status.get("observedGeneration") == policy["metadata"]["generation"] else None


async def tries(account: Api, at: str, patch: dict[str, Any]) -> None:
    """A patch of a Node that changes nothing in the end: it is admitted, or refused."""
    kind = STRATEGIC if at.endswith("/status") else MERGE
    await account.request("PATCH", f"{NODES}/{at}", {"dryRun": "All"}, patch, kind)


# ------------------------------------------------------------ machines and nodes


def annotation(text: str | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {NOTE_WATCH: text}}}


async def is_sick(api: Api, machine: str) -> bool:
    found = word(await api.get(f"{NODES}/{machine}"), HEALTH_CONDITION)
    return found is not None and found["status"] == "True"


async def is_well(api: Api, machine: str) -> bool:
    """It was sick, and nothing of that is left."""
    made = await api.get(f"{NODES}/{machine}")
    return health_note_on(made) is None and (word(made, HEALTH_CONDITION) or {}).get("status") == "False"


async def keeps_away(api: Api, job: Job, machine: str, status: dict[str, Any]) -> None:
    """The machine is the emptiest of all now, and yet the next spare goes elsewhere."""
    ranks = [node_of(status, rank) for rank in (0, 1)]
    spare = next(w.node for w in status.workers if w.rank is None and w.state == "ready")
    assert spare not in ranks
    pod = await job.pod(spare)
    await api.delete(f"{FOLDER}/pods/{spare}", pod["metadata"]["uid"])
    await until(lambda: gone(api, f"{FOLDER}/pods/{spare}"), "the spare is gone")

    async def three() -> bool:
        there = set((await machines_of(api)).values())
        return len(there) == 3 and "" not in there

    await until(three, "another spare has a machine")
    assert machine not in (await machines_of(api)).values()
