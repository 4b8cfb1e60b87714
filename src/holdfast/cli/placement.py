"""`holdfast plan placement`: what it costs and saves that nodes stand where they stand."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path as File
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import AsJson, Output, width_of, write_as

if TYPE_CHECKING:
    from holdfast.protocol.place import NodePlace
    from holdfast.tools.plan.crossing import Crossing, Path


def placement(
    topology: Annotated[
        File,
        typer.Option(
            "--topology", metavar="FILE", help="File with the location of each host, as for `holdfast run`."
        ),
    ],
    nnodes: Annotated[
        int | None,
        typer.Option(
            "--nnodes",
            metavar="N",
            min=1,
            help="Number of nodes of the job. By default all hosts in the file.",
            show_default=False,
        ),
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", metavar="N", min=1, help="Workers on each node.")
    ] = 1,
    shards: Annotated[
        int,
        typer.Option(
            "--shards", metavar="N", min=1, help="Workers in a replica: shard degree times tensor degree."
        ),
    ] = 1,
    copies: Annotated[
        int,
        typer.Option(
            "--copies",
            metavar="N",
            min=0,
            help="Number of other nodes that keep a copy of each node's snapshots.",
        ),
    ] = 1,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Shows which share of the collectives' bytes crosses each level of the topology, and how far copies go."""
    from holdfast.engines.topology import read_topology
    from holdfast.errors import UsageError
    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.protocol import units

    places = read_topology(topology)
    count = nnodes or len(places)
    if count > len(places):
        raise UsageError(f"--nnodes {count}: {topology} names only {len(places)} hosts")
    if count * nproc_per_node < shards:
        raise UsageError(
            f"--shards {shards}: {count} nodes have only {count * nproc_per_node} workers; use more nodes"
        )
    found = crossings(places, count, nproc_per_node, shards, copies)
    if write_as(found, as_json, output):
        return
    rows = [
        (
            str(c.level),
            str(c.places),
            units.share(c.gradients),
            units.share(c.gradients_unplaced),
            *(
                (units.share(c.shards), units.share(c.shards_unplaced or 0.0))
                if c.shards is not None
                else ("-", "-")
            ),
            units.share(c.copies),
        )
        for c in found
    ]
    heads = ("level", "places", "gradients", "by name", "shards", "by name", "copies elsewhere")
    print_table(sys.stdout, heads, rows, right=7, width=width_of(output, WIDTH))


def crossings(
    places: dict[str, NodePlace], count: int, nproc: int, shards: int, copies: int
) -> list[Crossing]:
    """Of each level, with the coordinator's own decisions. count: of nodes."""
    from holdfast.checkpoint.placement import place
    from holdfast.coordinator.membership.rank_assignment import WorkerPlaces, path, pick
    from holdfast.tools.plan.crossing import Crossing, crossing_share, replica_groups

    by_name = sorted(places, key=_natural)
    paths = {host: path(places[host], host) for host in by_name}
    every = WorkerPlaces(paths, dict.fromkeys(by_name, (False, 0)))
    # The coordinator's own functions, here and below: a plan that placed nodes by rules of its own would be
    # right about a job that does not exist.
    chosen = set(pick(every, by_name, count, (), ()))
    hosts = [h for h in by_name if h in chosen]
    workers = {f"{h} {slot}": paths[h] for h in hosts for slot in range(nproc)}
    near = [[workers[w] for w in row] for row in _replicas(workers, shards)]
    names = list(workers.values())
    plain = [names[i : i + shards] for i in range(0, len(names) - shards + 1, shards)]
    placed = place({h: places[h] for h in hosts}, copies)
    held = [(paths[n], paths[b]) for n, buddies in placed.buddies.items() for b in buddies]
    return [
        Crossing(
            level=level - 1,
            places=len({p[:level] for p in workers.values()}),
            gradients=crossing_share(replica_groups(near), level),
            gradients_unplaced=crossing_share(replica_groups(plain), level),
            shards=crossing_share(near, level) if shards > 1 else None,
            shards_unplaced=crossing_share(plain, level) if shards > 1 else None,
            copies=sum(a[:level] != b[:level] for a, b in held) / len(held) if held else 0.0,
        )
        for level in range(2, max(map(len, workers.values())))
    ]


def _replicas(workers: dict[str, Path], shards: int) -> list[tuple[str, ...]]:
    """As the coordinator assigns them at the start of a job: workers are built for shards that are counted on within each
    place, and those that are too many there are built again for a replica across places."""
    from holdfast.coordinator.membership.rank_assignment import WorkerPlaces, assign, in_order, middle

    if shards == 1:
        return [(w,) for w in in_order(list(workers), workers)]
    used: Counter[Path] = Counter()
    built: dict[str, int] = {}
    for worker, at in workers.items():
        built[worker] = used[at[:-1]] % shards
        used[at[:-1]] += 1
    standing = WorkerPlaces(workers, dict.fromkeys(workers, (False, 0)))
    replicas = list(assign(None, {}, built, shards, len(workers), standing).replicas)
    assigned = {w for row in replicas for w in row}
    rest = in_order([w for w in workers if w not in assigned], workers)
    replicas += [tuple(rest[i : i + shards]) for i in range(0, len(rest) - shards + 1, shards)]
    by_first = {row[0]: row for row in replicas}
    middles = {row[0]: middle([workers[w] for w in row]) for row in replicas}
    return [by_first[w] for w in in_order(list(by_first), middles)]


def _natural(host: str) -> list[tuple[int, str]]:
    """`n2` before `n10`."""
    return [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", host)]
