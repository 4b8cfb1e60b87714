"""Where a real scheduler puts the nodes of a job among 4,096 machines in racks, and what the core makes of their places."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bench.kubernetes import plane, racks
from bench.kubernetes.stage import NAMESPACE, PODS, Measured, Stage, cpu_s, job
from holdfast.coordinator.membership.policy import assign_ranks
from holdfast.coordinator.membership.rank_assignment import path
from holdfast.kubernetes import names
from holdfast.kubernetes.objects.resource import job_path
from holdfast.protocol.place import NodePlace, nearness, parse_place

TOPOLOGY: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "rack preferred": {"preferred": racks.RACK},
    "block required": {"required": racks.BLOCK},
}
ROOM = {"cpu": "60", "memory": "400Gi"}
"""Of a node: it does not fit beside somebody else's pod."""
EVERY_MACHINE = 100
LOST_TAINT = {"key": "bench/lost", "effect": "NoSchedule"}
"""Keeps the pod in its place away, and means nothing to the operator."""


def table() -> Table:
    """Of where the nodes stand."""
    shown = Table(
        "job", "scheduler looks at", "pods bound/s", "its CPU, ms/pod", title="Where the nodes stand"
    )
    for level in racks.LEVELS:
        shown.add_column(f"{level}s (fewest possible)")
    shown.add_column("of neighbours in the ring, in another block")
    shown.add_column("... rack")
    return shown


class Topology:
    """One cluster. `stands` gets a row for each job."""

    def __init__(self, stage: Stage, given: argparse.Namespace, stands: Table) -> None:
        self._stage, self._given, self._stands = stage, given, stands
        self._free = {
            f"m{number}": racks.place_of(number)
            for number in set(range(given.machines)) - racks.taken(given.machines, given.seed)
        }
        self._looks = "its default"
        self._numbers = itertools.count()
        self._random = random.Random(given.seed)

    async def run(self) -> None:
        stage, given = self._stage, self._given
        there = {number: racks.place_of(number) for number in range(given.machines)}
        await stage.machines(
            [plane.machine(n, _labels(place), run=f"m{n}" in self._free) for n, place in there.items()]
        )
        others = [name for name in (f"m{n}" for n in there) if name not in self._free]
        await asyncio.gather(*(stage.make(PODS, _other(name)) for name in others))
        print(f"{len(others)} of {given.machines} machines are taken", file=sys.stderr, flush=True)
        async with stage.operated() as operator:
            # Of the small job: no block has room for all nodes of the large one.
            for topology in ("none", "block required"):
                await stage.end([await self._job(operator, given.sizes[0], topology)])
            await self._both(operator)
            stage.plane.schedule(look_at_percent=EVERY_MACHINE)
            self._looks = "every machine"
            await self._both(operator)
            stage.memory(operator)

    async def _both(self, operator: Measured) -> None:
        """Two jobs beside each other; each loses machines."""
        stage, made = self._stage, list[str]()
        for size in self._given.sizes:
            made.append(await self._job(operator, size, "rack preferred"))
            await self._losses(operator, made[-1], size)
        took = await stage.end(made)
        stage.row(
            f"jobs of {' and '.join(map(str, self._given.sizes))} deleted", took, *await operator.since()
        )

    async def _job(self, operator: Measured, size: int, topology: str) -> str:
        """Returns its name, when the operator has noted all places."""
        stage, pods = self._stage, self._stage.pods
        name = f"job{next(self._numbers)}"
        free = self._free_now()
        await operator.since()
        scheduler = stage.plane.scheduler
        assert scheduler is not None, "a plane that is ready has one"
        before = cpu_s(scheduler)
        made = job(name, size, ROOM, topology=dict(TOPOLOGY[topology]))
        await stage.put(job_path(NAMESPACE, name), made)
        took = await pods.until(lambda: len(pods.bound(name)) == size, f"the nodes of {name} are bound")
        spent = cpu_s(scheduler) - before
        noted = await pods.until(lambda: len(pods.places(name)) == size, f"the places of {name} are noted")
        what = f"{size} nodes, {topology}, scheduler looks at {self._looks}: all bound"
        stage.row(what, took, *await operator.since())
        stage.row("... and the last place is noted", noted)
        self._row(f"{size} nodes, {topology}", size / took, 1000 * spent / size, name, free)
        return name

    def _row(self, what: str, rate: float, cpu_ms: float, name: str, free: Mapping[str, NodePlace]) -> None:
        places = self._noted(name)
        best = racks.fewest(free.values(), len(places))
        stand = [f"{n} ({few})" for n, few in zip(racks.spans(places.values()), best, strict=True)]
        come = list(places)
        self._random.shuffle(come)
        paths = {pod: path(place, pod) for pod, place in places.items()}
        seats = assign_ranks(None, [], come, paths)
        rings = zip(
            *(racks.crossings([places[pod] for pod in order]) for order in (seats, come)), strict=True
        )
        _, *crossed = [f"{seated}; {at_random} at random" for seated, at_random in rings]
        self._stands.add_row(what, self._looks, f"{rate:.1f}", f"{cpu_ms:.0f}", *stand, *crossed)
        print(what, f"{rate:.1f} pods/s, {cpu_ms:.0f} ms", stand, crossed, file=sys.stderr, flush=True)

    def _noted(self, name: str) -> dict[str, NodePlace]:
        """What the operator noted of a job's pods, which is to be where their machines stand."""
        bound = self._stage.pods.bound(name)
        places = {pod: parse_place(text) for pod, text in self._stage.pods.places(name).items()}
        if wrong := [pod for pod, place in places.items() if place != self._free[bound[pod]]]:
            raise SystemExit(f"the operator has noted other places than their machines': {wrong[:5]}")
        return places

    def _free_now(self) -> dict[str, NodePlace]:
        used = {pod["spec"].get("nodeName") for pod in self._stage.pods.all.values() if _is_node(pod)}
        return {machine: place for machine, place in self._free.items() if machine not in used}

    async def _losses(self, operator: Measured, name: str, size: int) -> None:
        """Machines, one after another: where the pod in the place of each goes."""
        stage, pods, took = self._stage, self._stage.pods, list[float]()
        near, could = [0] * len(racks.LEVELS), 0
        for number in range(self._given.losses):
            lost, machine = self._random.choice(sorted(pods.bound(name).items()))
            free, next_ = set(self._free_now().values()), names.node_name(name, size + number)
            await stage.asked(stage.api.merge, f"/api/v1/nodes/{machine}", {"spec": {"taints": [LOST_TAINT]}})
            await stage.lose(lost)
            took.append(await pods.until(lambda new=next_: new in pods.bound(name), f"{next_} is bound"))  # type: ignore[misc]
            place = self._free.pop(machine)
            levels = nearness(self._free[pods.bound(name)[next_]], place)
            near = [count + (levels > level) for level, count in enumerate(near)]
            could += place in free
        told = ", ".join(f"{count} in its {level}" for level, count in zip(racks.LEVELS, near, strict=True))
        what = f"{len(took)} of its machines lost: {told}; {could} racks had a free one"
        stage.row(what, sorted(took)[len(took) // 2], *await operator.since())


def _is_node(pod: Mapping[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"].get(names.LABEL_ROLE) == names.NODE_ROLE)


def _labels(place: NodePlace) -> dict[str, str]:
    return dict(zip(racks.LEVELS.values(), place, strict=True))


def _other(machine: str) -> dict[str, Any]:
    """Somebody else's pod, which has all of a machine. Nobody schedules it: that is not what is measured."""
    container = {"name": "other", "image": "none", "resources": {"requests": {"cpu": "60"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"other-{machine}", "namespace": NAMESPACE},
        "spec": {"nodeName": machine, "containers": [container]},
    }
