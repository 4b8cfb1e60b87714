"""What the operator does, and what it needs for it, with one job of many nodes and many jobs of few."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from bench.kubernetes import plane
from bench.kubernetes.stage import NAMESPACE, Measured, Stage, job
from holdfast.kubernetes import names
from holdfast.kubernetes.objects.resource import job_path

LARGE = "large"
IDLE_S = 60.0


async def run(stage: Stage, given: argparse.Namespace) -> None:
    """A row for each thing that is done."""
    await stage.machines([plane.machine(number, _labels(number)) for number in range(given.nodes)])
    async with stage.operated() as operator:
        await _scenes(stage, given, operator)


def _labels(number: int) -> dict[str, str]:
    return {"topology.kubernetes.io/zone": f"z{number % 2}", "topology.holdfast.dev/rack": f"r{number // 16}"}


async def _scenes(stage: Stage, given: argparse.Namespace, operator: Measured) -> None:
    pods, api = stage.pods, stage.api
    small = [f"small{number}" for number in range(given.jobs)]
    await stage.put(job_path(NAMESPACE, LARGE), job(LARGE, given.size))
    took = await pods.until(lambda: len(pods.nodes(LARGE, running=False)) == given.size, "pods are made")
    stage.row(f"one job of {given.size}: pods made", took, *await operator.since())
    took = await pods.until(lambda: len(pods.nodes(LARGE)) == given.size, "pods run")
    stage.row("... and run", took, *await operator.since())
    await asyncio.gather(*(stage.put(job_path(NAMESPACE, one), job(one, 4)) for one in small))
    took = await pods.until(lambda: all(len(pods.nodes(one)) == 4 for one in small), "pods run")
    stage.row(f"{given.jobs} jobs of 4: pods run", took, *await operator.since())
    await asyncio.sleep(10)  # statuses are written at most every 5 s
    await operator.since()
    await asyncio.sleep(IDLE_S)
    stage.row(f"idle for {IDLE_S:g} s", IDLE_S, *await operator.since())
    lost = list[float]()
    for number in range(given.losses):
        began_s = time.monotonic()
        await stage.lose(max(pods.nodes(LARGE), key=lambda name: names.number_of(LARGE, name) or 0))
        next_ = names.node_name(LARGE, given.size + number)
        await pods.until(lambda new=next_: new in pods.all, "a pod in its place")  # type: ignore[misc]
        lost.append(time.monotonic() - began_s)
        await pods.until(lambda: len(pods.nodes(LARGE)) == given.size, "it runs")
    told = ", ".join(f"{one:.2f}" for one in sorted(lost))
    what = f"{len(lost)} pods deleted, one after another: another made after {told}"
    stage.row(what, statistics.median(lost), *await operator.since())
    await asyncio.sleep(10)
    stage.row("... and 10 s later", 10.0, *await operator.since())
    await stage.asked(api.merge, job_path(NAMESPACE, LARGE), {"spec": {"nodes": given.size - 10}})
    await asyncio.sleep(10)
    stage.row("10 nodes fewer asked for", 10.0, *await operator.since())
    stage.memory(operator)
    took = await stage.end([LARGE, *small])
    stage.row("all jobs deleted: no pod left", took, *await operator.since())
    stage.memory(operator)
