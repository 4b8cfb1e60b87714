"""`python -m bench.kubernetes`: what the operator costs with many nodes, and where a real scheduler puts them.

A real etcd, API server, controllers and scheduler on this machine, machines without kubelets (kwok), the operator as it is, and
the real coordinator of each job, without agents: nothing trains. A pod is deleted for a node that is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.kubernetes import many, plane, topology
from bench.kubernetes.stage import Stage
from bench.processes import Children, Group, stop_signals
from holdfast.kubernetes.client.api import connect
from holdfast.kubernetes.objects.schema import crd_text

PARTS = ("operator", "topology")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kubernetes", description=__doc__)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--nodes", type=int, default=1010, help="machines (default: 1010)")
    parser.add_argument("--size", type=int, default=1000, help="nodes of the large job (default: 1000)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of 4 nodes (default: 200)")
    parser.add_argument(
        "--machines", type=int, default=4096, help="of the part topology, in racks of 64 (default: 4096)"
    )
    parser.add_argument(
        "--sizes", type=int, nargs=2, default=(256, 1024), help="nodes of its two jobs (default: 256 1024)"
    )
    parser.add_argument("--losses", type=int, default=8, help="nodes that each large job loses (default: 8)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of what others have of its machines (default: 1)"
    )
    chosen = parser.parse_args()
    chosen.parts = chosen.parts.split(",")
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if chosen.losses < 1:
        parser.error(f"--losses {chosen.losses}: at least 1")
    if lacks := plane.missing():
        parser.error(f"KUBE_BIN is to have {', '.join(lacks)}: tests/kubernetes/programs/build.sh makes them")
    return chosen


def main() -> int:
    given = options()
    console = Console(width=180)
    machine.introduce(console, {}, "no training")
    stands = topology.table()
    parts: dict[str, Callable[[Stage], Awaitable[None]]] = {
        "operator": lambda stage: many.run(stage, given),
        "topology": lambda stage: topology.Topology(stage, given, stands).run(),
    }
    with stop_signals(), machine.ForeignCpu() as cpu, Children() as children:
        for part in given.parts:
            table = Table("what", "s", "operator, of a core", "requests", "the most frequent", title=part)
            with (
                tempfile.TemporaryDirectory(prefix="holdfast-bench-") as work,
                children.group() as group,
            ):
                asyncio.run(_measure(Path(work), group, table, parts[part]))
            console.print(table)
    if stands.row_count:
        console.print(stands)
    machine.conclude(console, cpu)
    return 0


async def _measure(
    folder: Path, group: Group, table: Table, part: Callable[[Stage], Awaitable[None]]
) -> None:
    made = plane.Plane(folder, group)
    made.start()
    os.environ["KUBECONFIG"] = str(made.kubeconfig)
    async with connect() as api:
        await made.ready(api)
        made.start_rest()
        definition = yaml.safe_load(crd_text())
        await api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        await asyncio.sleep(3)
        await part(Stage(api, made, folder, table))


if __name__ == "__main__":
    sys.exit(main())
