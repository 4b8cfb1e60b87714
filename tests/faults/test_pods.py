"""The programs in a job's pods, started as the operator renders them."""

import importlib.util
import json
import os
import signal
import socket

import pytest
from conftest import STEPS
from drive import Deed, Driver
from harness import TINY, Ran, leftovers
from pods import NAME, Pods, job_of

from families import needs_ipv6
from holdfast.kubernetes import names
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.pod import TerminationMessage
from holdfast.protocol.network.endpoint import read_endpoint


def test_what_the_pods_start_is_there(tmp_path):
    job = job_of(TINY, (), tmp_path)
    for pod in (render.agent_pod(job, 0), render.coordinator_pod(job, 1)):
        _, safe, dash_m, module, *_ = pod["spec"]["containers"][0]["command"]
        assert (safe, dash_m) == ("-P", "-m")
        assert importlib.util.find_spec(module) is not None


@pytest.fixture
def pods(tmp_path):
    made = Pods(job_of(TINY, (STEPS, "--device-s", 0.02), tmp_path, nodes=3), tmp_path)
    yield made
    made.end()


def ends(pods, coordinator) -> Ran:
    """Waits for the job's end, and looks at what its coordinator leaves."""
    code = coordinator.code(90)
    folder = coordinator.folder / "jobs" / NAME
    report = folder / "report.json"
    return Ran(code, coordinator.out(), json.loads(report.read_text()), folder)


@pytest.mark.nightly
def test_a_node_and_a_coordinator_are_lost_and_nothing_of_the_training_is(tmp_path, pods, undisturbed):
    coordinator = pods.coordinator(1)
    coordinator.until("started a coordinator")
    nodes = [pods.node(number) for number in range(3)]
    job_dir = coordinator.folder / "jobs" / NAME

    async def kill_process(client, status):
        os.kill(read_endpoint(job_dir).pid, signal.SIGKILL)

    async def restart_container(client, status):
        coordinator.kill()
        coordinator.start()

    async def lose_machine(client, status):
        nodes[1].kill()
        nodes.append(pods.node(3))

    async def restart_node(client, status):
        with socket.create_connection((nodes[0].address, names.AGENT_PORT), timeout=5):
            pass  # ready
        nodes[0].kill()
        nodes[0].start(**{names.COORDINATOR_VARIABLE: f"{pods.coordinator_address}:{names.COORDINATOR_PORT}"})

    with Driver(job_dir, [Deed(kill_process, 20), Deed(restart_container, 20)]) as first:
        for times in (2, 3):  # the process is killed, and then the container
            coordinator.until("started a coordinator", times)
    with Driver(job_dir, [Deed(lose_machine, 0), Deed(restart_node, 20)]) as second:
        ran = ends(pods, coordinator)
    assert not first.left
    assert not second.left, [pod.out()[-2000:] for pod in pods.all]
    assert (ran.code, ran.report["outcome"]) == (0, "finished"), ran.output[-3000:]
    assert coordinator.termination_message() == TerminationMessage(
        outcome="finished", step=ran.report["steps"]["committed"]
    )
    assert ran.report["steps"]["lost"] == 0
    assert ran.report["final"] == undisturbed.report["final"]
    assert [node.code() for node in (nodes[0], *nodes[2:])] == [0, 0, 0]
    assert not any(leftovers(pod.folder) for pod in pods.all)


@pytest.mark.nightly
def test_the_coordinator_s_machine_is_lost_and_the_ledger_goes_on_in_another_pod(tmp_path, pods, undisturbed):
    first = pods.coordinator(1)
    first.until("started a coordinator")
    nodes = [pods.node(number) for number in range(3)]

    async def lose_coordinator(client, status):
        first.kill()

    with Driver(first.folder / "jobs" / NAME, [Deed(lose_coordinator, 40)]) as early:
        assert first.process.wait(60) == -signal.SIGKILL
    second = pods.coordinator(2)
    second.until("started a coordinator")

    async def lose_machine(client, status):
        nodes[1].kill()
        nodes.append(pods.node(3))

    job_dir = second.folder / "jobs" / NAME
    with Driver(job_dir, [Deed(lose_machine, 60)]) as late:
        ran = ends(pods, second)
    assert not early.left
    assert not late.left, [pod.out()[-2000:] for pod in pods.all]
    assert (ran.code, ran.report["outcome"]) == (0, "finished"), ran.output[-3000:]
    assert ran.report["steps"]["lost"] == 0
    # The whole of it, from the first step on, although its file was lost.
    assert ran.losses() == undisturbed.losses()
    assert ran.report["final"] == undisturbed.report["final"]
    assert len(ran.report["incidents"]) == 2


@needs_ipv6
@pytest.mark.nightly
def test_pods_that_have_addresses_of_ipv6_alone(tmp_path):
    faults = ["kill-worker:rank=1,step=40", "kill-coordinator:step=80"]
    job = job_of(TINY, (STEPS, "--device-s", 0.02), tmp_path, nodes=1, procsPerNode=2, faults=faults)
    pods = Pods(job, tmp_path, "::1")
    try:
        coordinator = pods.coordinator(1)
        node = pods.node(0)
        ran = ends(pods, coordinator)
        assert (ran.code, ran.report["outcome"]) == (0, "finished"), ran.output[-3000:]
        assert ran.report["steps"]["lost"] == 0
        assert [one["fault"] for one in ran.report["incidents"]] == faults
        coordinator.until("started a coordinator", 2)
        assert node.code() == 0
    finally:
        pods.end()
