"""Machines of a real Kubernetes that freeze, come back, are lost together, are sick, or cannot run the job's agent."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from realkube import (
    FOLDER,
    IMAGE,
    MACHINES,
    PACE_S,
    PATIENCE_S,
    STEPS,
    TRAIN,
    Job,
    Scene,
    Undisturbed,
    cluster,
    cordon,
    evict,
    gone,
    is_true,
    machines_of,
    node_of,
    pair,
    pods_of,
    shared_folder,
    trained_apart,
    until,
    word,
)

from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.objects.resource import quantity
from holdfast.kubernetes.policy.machines import SICK_HELD

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
NODES = "/api/v1/nodes"
LIBRARIES = str(Path(sys.prefix, "lib").resolve())
"""Of this environment, which all containers of the test cluster have mounted."""


def template(home: Path, name: str, **worker: Any) -> Path:
    """A pod template whose container has these fields."""
    path = home / f"{name}.yaml"
    container = {"name": "worker", "image": IMAGE} | worker
    path.write_text(yaml.safe_dump({"spec": {"containers": [container]}}))
    return path


def test_a_machine_that_freezes_and_thaws(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Its kernel answers all the time. What thaws is turned away, and nothing of it is taken for the job's."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "frozen") as (job, status):
            lost, machine = await trained_apart(job, status)
            cluster("freeze", machine)

            try:
                status = await job.training(2, beyond=status.step + 5)
                assert lost not in [node_of(status, rank) for rank in (0, 1)]
                # One that thaws before its pod is deleted may join again, as a spare.
                await job.gives_up(lost)
            finally:
                cluster("thaw", machine)
            await until(lambda: gone(api, f"{FOLDER}/pods/{lost}"), f"the pod of {lost} is gone")
            await job.training(2, beyond=status.step + 5)
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_a_coordinator_whose_machine_freezes(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The kernel there keeps its connections. The nodes go over to its successor, which goes on from their copy of the ledger."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "stiff") as (job, status):
            first = await job.coordinator()
            machine = await job.machine(first)
            cluster("freeze", machine)
            try:
                await job.succeeds(first)
                status = await job.training(2, beyond=status.step + 5)
            finally:
                cluster("thaw", machine)
            await until(lambda: gone(api, f"{FOLDER}/pods/{first}"), "the first coordinator is gone")
            await job.training(2, beyond=status.step + 5)
            assert (await job.object())["status"]["run"] == 1
            # The coordinator's, and a node's that stood on the same machine.
            await job.stops_as(undisturbed, incidents=(1, 2))

    play(scene)


def test_a_machine_that_comes_back_after_its_power_loss_is_used_again(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The kubelet that comes back ends its old pod itself, so nobody has to delete it by force."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "returns") as (job, status):
            lost, machine = await trained_apart(job, status)
            cluster("kill", machine)
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert "deletionTimestamp" in (await job.pod(lost))["metadata"]
            cluster("boot", machine)
            await until(lambda: gone(api, f"{FOLDER}/pods/{lost}"), f"the old pod on {machine} is gone")
            # All others have a node, or are not to have one: the next one has to go there.
            there = await machines_of(api)
            moved = next(node for node in there if node in [node_of(status, rank) for rank in (0, 1)])
            await cordon(api, there[moved])

            async def has_moved() -> bool:
                now = await machines_of(api)
                return machine in now.values() and moved not in now

            await until(has_moved, f"another node is on {machine} in the place of {moved}")
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert moved not in [node_of(status, rank) for rank in (0, 1)]
            await job.stops_as(undisturbed, incidents=(1,))

    play(scene)


def test_two_of_four_machines_are_lost_at_once(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """One spare cannot stand for both: the job goes on with fewer nodes, and grows back without a restart."""

    async def scene(api: Api) -> None:
        options = ("--nnodes", "2:3", "--spares", 1)
        async with Job(api, home, "halved", *options, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(3, beyond=3, spares=1)
            seat = await job.machine(await job.coordinator())
            lost = [machine for machine in MACHINES if machine != seat][:2]
            for machine in lost:
                cluster("kill", machine)
            status = await job.training(2, beyond=status.step + 5)
            for machine in lost:
                cluster("boot", machine)
            await job.training(3, beyond=status.step + 5, spares=1)
            after = (await job.object())["status"]
            assert (after["run"], after["term"]) == (1, 1)
            await job.stops_as(undisturbed, incidents=(1, 2))

    play(scene)


def test_all_nodes_are_lost_at_once(play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed):
    """The memory of all is gone. New pods go on from the newest checkpoint, under the same coordinator."""

    async def scene(api: Api) -> None:
        mount = {"name": "shared", "mountPath": "/shared"}
        path = template(home, "shared", volumeMounts=[mount])
        pod = yaml.safe_load(path.read_text())
        pod["spec"]["volumes"] = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": await shared_folder(api, "shared")}}
        ]
        path.write_text(yaml.safe_dump(pod))
        options = ("--nnodes", 2, "--pod-template", path, "--checkpoint", "/shared/all,every=10")
        async with Job(api, home, "erased", *options, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=12)
            while (seat := await job.machine(await job.coordinator())) in (
                there := await machines_of(api)
            ).values():
                # It moves, and so does the node: neither goes to a machine that is not to be used.
                await cordon(api, seat)
                mover, before = await job.coordinator(), status.step

                async def has_moved(mover: str = mover) -> bool:
                    await evict(api, mover)
                    return await job.coordinator() != mover

                async def node_has_moved(seat: str = seat) -> bool:
                    now = await machines_of(api)
                    return len(now) == 2 and seat not in now.values()

                await until(has_moved, "the coordinator has moved")
                status = await job.training(2, beyond=before + 3)
                # And its machine is not one of those that are to lose power.
                await until(node_has_moved, "the node has moved, too")
                await cordon(api, seat, on=False)
            term = (await job.object())["status"]["term"]
            for machine in set(there.values()):
                cluster("kill", machine)
            # Only then: until they are missed the job seems to train, and beyond the step that was seen last.
            for node in there:
                await job.gives_up(node)
            await job.training(2, beyond=status.step + 5)
            assert (await job.object())["status"]["term"] == term
            assert not set(there) & set(await machines_of(api))
            await job.stops_as(undisturbed, incidents=(1, 2))

    play(scene)


def test_all_agents_end_at_once(play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed):
    """As when all grow out of their memory in one step. There is no durable tier: what the pods' memory has is all that there is."""

    async def scene(api: Api) -> None:
        async with Job(api, home, "together", "--nnodes", 2, steps=STEPS, pace_s=PACE_S) as job:
            status = await job.training(2, beyond=30)
            there = await machines_of(api)
            await asyncio.gather(*map(job.kill_container, there))
            await job.training(2, beyond=status.step + 5)
            assert await machines_of(api) == there
            await job.stops_as(undisturbed)
            incidents = json.loads((job.dir / "report.json").read_text())["incidents"]
            assert sum(one["lost_steps"] for one in incidents) < status.step

    play(scene)


def test_a_machine_on_which_the_agent_cannot_start(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """Its libraries are not there. Another machine is asked for, and nobody is marked."""

    async def scene(api: Api) -> None:
        async with pair(api, home, "crashes") as (job, status):
            there = await machines_of(api)
            seat = await job.machine(await job.coordinator())
            (empty,) = set(MACHINES) - set(there.values())
            node = next(name for name, machine in there.items() if machine != seat)
            # Containers that run have them mounted, and new ones on this machine find an empty folder.
            cluster("exec", empty, "mount", "-t", "tmpfs", "tmpfs", LIBRARIES)
            try:
                # So the one in its place goes to the only machine that is left.
                await cordon(api, there[node])

                async def crashes() -> bool:
                    return await job.says("times, the last time with exit code")

                await until(crashes, "the status has the last words of the one that crashes")
                await cordon(api, there[node], on=False)

                async def is_elsewhere() -> bool:
                    now = await machines_of(api)
                    return len(now) == 3 and empty not in now.values()

                await until(is_elsewhere, f"it is on another machine than {empty}", 2 * PATIENCE_S)
                status = await job.training(2, beyond=status.step + 5, spares=1)
            finally:
                cluster("exec", empty, "umount", LIBRARIES)
            spec = (await api.get(f"{NODES}/{empty}"))["spec"]
            assert not spec.get("taints")
            assert not spec.get("unschedulable")
            await job.stops_as(undisturbed, incidents=(0,))

    play(scene)


def test_an_image_without_holdfast(play: Callable[[Scene], None], home: Path):
    """The job ends after some minutes and says what is missing; its pods do not start anew for ever."""

    async def scene(api: Api) -> None:
        bare = template(home, "bare", env=[{"name": "PYTHONPATH", "value": "/nowhere"}])
        options = ("--nnodes", 2, "--pod-template", bare)
        async with Job(api, home, "bare", *options, steps=STEPS, pace_s=PACE_S) as job:
            failed = word(await job.condition("Failed", 3 * PATIENCE_S), "Failed") or {}
            assert failed["reason"] == "ImageWithoutHoldfast"
            assert "No module named 'holdfast" in failed["message"]
            assert IMAGE in failed["message"]
            assert await job.wait() != 0

            async def nothing_left() -> bool:
                return not await machines_of(api)

            await until(nothing_left, "its pods are gone")

    play(scene)


def test_a_script_that_is_not_in_the_image(play: Callable[[Scene], None], home: Path):
    """No agent can start on any machine. The job ends after some minutes, with what each of them says."""

    async def scene(api: Api) -> None:
        options = ("--nnodes", 2, "--spares", 1, "--in-image")
        script = Path("/opt/holdfast/nothing.py")
        async with Job(api, home, "nothing", *options, steps=STEPS, pace_s=PACE_S, script=script) as job:
            failed = word(await job.condition("Failed", 4 * PATIENCE_S), "Failed") or {}
            words = f"{script}: No such file or directory"
            assert failed["reason"] == "AgentsCrash"
            assert words in failed["message"]
            await ends_without_a_trace(api, job, words)

    play(scene)


def test_a_script_that_crashes_at_its_import(play: Callable[[Scene], None], home: Path):
    """Its agents work. So the coordinator decides, within seconds: the same error on two machines is the script's."""

    async def scene(api: Api) -> None:
        script = home / "imports.py"
        script.write_text("import no_such_library\n")
        options = ("--nnodes", 2, "--spares", 1)
        async with Job(api, home, "imports", *options, steps=STEPS, pace_s=PACE_S, script=script) as job:
            failed = word(await job.condition("Failed"), "Failed") or {}
            words = "No module named 'no_such_library'"
            assert failed["reason"] == "ScriptFailed"
            assert words in failed["message"]
            await ends_without_a_trace(api, job, words)

    play(scene)


async def ends_without_a_trace(api: Api, job: Job, words: str) -> None:
    """The command fails with these words, no pod is left but those that have ended in order, which are kept for their logs, and
    no machine is blamed."""
    assert await job.wait() != 0
    assert words in job.log.read_text()

    async def nothing_left() -> bool:
        return all(pod["status"].get("phase") == "Succeeded" for pod in await pods_of(api))

    await until(nothing_left, "its pods are gone")
    for machine in (await api.list_all(NODES, {}))[0]:
        assert is_untouched(machine)


def is_untouched(machine: dict[str, Any]) -> bool:
    """A Node that nobody has cordoned or tainted, and that has no mark of ours."""
    spec, notes = machine["spec"], machine["metadata"].get("annotations", {})
    return not (spec.get("unschedulable") or spec.get("taints") or any("holdfast" in note for note in notes))


FILLS = """\
        if step.index == 20 and run.rank == 1:
            Path("/tmp/large").write_bytes(bytes(300 << 20))
"""


def test_a_kubelet_that_evicts_a_pod_which_fills_its_disk(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """It is asked to leave, so no step is lost; the pod's Event has the kubelet's words, and there is no incident."""

    async def scene(api: Api) -> None:
        text, after = TRAIN.read_text(), "        run.log(loss=step.loss)\n"
        assert after in text
        script = home / "fills.py"
        script.write_text(text.replace(after, after + FILLS))
        limits = {"limits": {"ephemeral-storage": "200Mi"}}
        path = template(home, "fills", resources=limits)
        async with pair(api, home, "fills", "--pod-template", path, script=script) as (job, status):
            full = node_of(status, 1)

            async def replaced() -> bool:
                return full not in await machines_of(api)

            await until(replaced, f"{full} is evicted", 2 * PATIENCE_S)
            status = await job.training(2, beyond=status.step + 5, spares=1)
            assert full not in [node_of(status, rank) for rank in (0, 1)]
            await job.stops_as(undisturbed, incidents=(0,))
            # Its agent has ended in order, so its pod's status says nothing, and the kubelet's own Event does.
            about = f"reason=Evicted,involvedObject.name={full}"
            events = (await api.list_all(f"{FOLDER}/events", {"fieldSelector": about}))[0]
            assert "ephemeral local storage usage exceeds" in events[0]["message"]

    play(scene)


DISK = str(1 << 30)
"""Bytes."""
OTHERS = "{folder}/others"
FILL = f"fallocate -l $(($(stat -f -c '%a * %S' {{folder}}) - (6 << 20))) {OTHERS}"
"""With somebody else's file, but for less than the one percent that the kubelets of the test cluster want to be free."""


def test_a_machine_whose_disk_is_full(play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed):
    """Its kubelet evicts what runs there, and the spare takes the node's place. Nobody is blamed: when there is room again, the
    next spare goes there."""

    async def scene(api: Api) -> None:
        full, last = MACHINES[-1], MACHINES[0]
        folder = f"{os.environ['HOLDFAST_KUBE_DIR']}/{full}/kubelet"
        ordinary = (await api.get(f"{NODES}/{full}"))["status"]["capacity"]["ephemeral-storage"]
        await has_disk(api, full, DISK, DISK)
        try:
            for machine in (full, last):
                await cordon(api, machine)
            options = ("--nnodes", 3, "--spares", 1)
            async with Job(api, home, "full", *options, steps=STEPS, pace_s=PACE_S) as job:
                # A node that trains is to be there alone: the coordinator has a machine before this one may be used, and the
                # spare has none before the others train.
                seat = await job.coordinator()

                async def is_seated() -> Any:
                    return (await job.pod(seat))["spec"].get("nodeName")

                await until(is_seated, "the coordinator has a machine")
                await cordon(api, full, on=False)
                status = await job.training(3, beyond=3)
                await cordon(api, last, on=False)
                status = await job.training(3, beyond=status.step, spares=1)
                there = await machines_of(api)
                (node,) = (name for name, machine in there.items() if machine == full)
                assert node in [node_of(status, rank) for rank in range(3)]
                cluster("exec", full, "sh", "-c", FILL.format(folder=folder))
                await until(lambda: has(api, full, "DiskPressure"), f"{full} has DiskPressure")

                async def has_left() -> bool:
                    return node not in await machines_of(api)

                await until(has_left, f"{node} is evicted")
                status = await job.training(3, beyond=status.step + 5)
                assert node not in [node_of(status, rank) for rank in range(3)]
                assert full not in (await machines_of(api)).values()
                about = f"reason=Evicted,involvedObject.name={node}"
                events = (await api.list_all(f"{FOLDER}/events", {"fieldSelector": about}))[0]
                assert "low on resource: ephemeral-storage" in events[0]["message"]
                cluster("exec", full, "rm", OTHERS.format(folder=folder))
                status = await job.training(3, beyond=status.step + 5, spares=1)
                assert full in (await machines_of(api)).values()
                assert is_untouched(await api.get(f"{NODES}/{full}"))
                assert not status.health.quarantine
                await job.stops_as(undisturbed, incidents=(0, 1))
        finally:
            await has_disk(api, full, ordinary)

    play(scene)


async def has_disk(api: Api, machine: str, capacity: str, *size: str) -> None:
    """It starts anew with a disk of this size, or with its own."""
    cluster("kill", machine)
    cluster("boot", machine, *size)

    async def is_known() -> bool:
        node = await api.get(f"{NODES}/{machine}")
        # Kubernetes 1.34 writes it as 1Gi.
        seen = quantity(node["status"]["capacity"]["ephemeral-storage"])
        return is_true(node, "Ready") and seen == quantity(capacity)

    await until(is_known, f"{machine} has a disk of {capacity}")


async def has(api: Api, machine: str, condition: str) -> bool:
    return is_true(await api.get(f"{NODES}/{machine}"), condition)


@pytest.mark.parametrize("by", ["condition", "taint"])
def test_somebody_else_calls_a_machine_sick(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed, by: str
):
    """node-problem-detector, NVSentinel or a cloud: the node leaves it with their words, its replacement first; no mark of ours."""

    async def scene(api: Api) -> None:
        async with pair(api, home, f"sick-{by}") as (job, status):
            node, machine = await trained_apart(job, status)
            path = f"{NODES}/{machine}"
            words = "task blocked for more than 120 seconds"
            if by == "condition":
                sick = {"type": "KernelDeadlock", "status": "True", "reason": "DockerHung", "message": words}
                await api.strategic(f"{path}/status", {"status": {"conditions": [sick]}})
            else:
                taint = {"key": "nvsentinel.dgxc.nvidia.com/GpuXid", "value": "79", "effect": "NoExecute"}
                await api.merge(path, {"spec": {"taints": [taint]}})
            try:

                async def has_left() -> bool:
                    return machine not in (await machines_of(api)).values()

                await until(has_left, f"{node} has left {machine}")
                status = await job.training(2, beyond=status.step + 5, spares=1)
                metadata = (await api.get(path))["metadata"]
                assert not [name for name in metadata.get("annotations", {}) if "holdfast" in name]
                assert node not in [node_of(status, rank) for rank in (0, 1)]
                await job.stops_as(undisturbed, incidents=(0,))
            finally:
                if by == "condition":
                    well = {"type": "KernelDeadlock", "status": "False", "reason": "KernelHasNoDeadlock"}
                    await api.strategic(f"{path}/status", {"status": {"conditions": [well]}})
                else:
                    await api.merge(path, {"spec": {"taints": None}})
                await until(lambda: has(api, machine, "Ready"), f"{machine} is ready")

    play(scene)


def test_a_rule_that_calls_every_machine_sick(
    play: Callable[[Scene], None], home: Path, undisturbed: Undisturbed
):
    """The machine that it found first is left. On the others the job trains on, and says so."""

    async def say(api: Api, machine: str, status: str, since: str) -> None:
        said = {
            "type": "KernelDeadlock",
            "status": status,
            "reason": "DockerHung",
            "lastTransitionTime": since,
        }
        await api.strategic(f"{NODES}/{machine}/status", {"status": {"conditions": [said]}})

    async def scene(api: Api) -> None:
        async with pair(api, home, "rule") as (job, status):
            node, machine = await trained_apart(job, status)
            others = [one for one in MACHINES if one != machine]
            try:
                await say(api, machine, "True", "2026-01-01T00:00:00Z")
                for other in others:
                    await say(api, other, "True", "2026-01-01T00:01:00Z")

                async def told() -> bool:
                    there = (await machines_of(api)).values()
                    events = await api.list_all(f"{FOLDER}/events", {"fieldSelector": f"reason={SICK_HELD}"})
                    held = {one["message"].split()[0] for one in events[0]}
                    return machine not in there and held == set(others)

                await until(
                    told, f"{node} has left {machine}, and of the others it is said that they stay in use"
                )
                status = await job.training(2, beyond=status.step + 5, spares=1)
                assert node not in [node_of(status, rank) for rank in (0, 1)]
                await job.stops_as(undisturbed, incidents=(0,))
            finally:
                for one in MACHINES:
                    await say(api, one, "False", "2026-01-01T00:02:00Z")

    play(scene)
