"""Trials of a scenario: run, counted, replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.kernel.state import JobPhase
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.store import Store
from holdfast.coordinator.service.tally import StepSummary
from holdfast.errors import UsageError
from holdfast.protocol.job_report import encode_report
from holdfast.protocol.job_view import Goodput
from holdfast.protocol.ledger import LedgerEvent
from holdfast.tools.simulate.cluster import Cluster
from holdfast.tools.simulate.machine import BEGIN_S, FewNames
from holdfast.tools.simulate.scenario import Scenario
from holdfast.tools.simulate.steps import WallTime
from holdfast.tools.simulate.trace import NodeTrace

NAMES = 24
"""Number of names that machines use in turn, at first: enough for the failures of the near future."""


WHOLE = 96
"""Up to this many nodes, each has a name of its own."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trial."""

    seed: int
    wall_s: float
    goodput: float
    """Training at full size divided by wall time."""
    spent: WallTime
    failures: dict[str, int]
    incidents: int
    lost_steps: int
    new_nodes: int
    given_up: list[str]
    """The reason of each end of the job before its work was done, after which it was started again."""
    node_hours: float
    """Node-seconds of all nodes."""
    done: float
    """The share of the work that was done; less than 1 if a trace ended before it."""


def run(
    scenario: Scenario,
    seed: int,
    fold: bool = True,
    one_by_one: bool = False,
    trace: NodeTrace | None = None,
    note: Callable[[float, LedgerEvent], None] | None = None,
    keep: Callable[[Cluster], None] | None = None,
) -> Trial:
    """Runs one trial. fold: many machines share few names. one_by_one, trace, note: see `Cluster`. Neither `fold` nor
    `one_by_one` changes the result. keep: called with the cluster at the end."""
    names = NAMES if fold and scenario.nodes > WHOLE else 0
    while True:
        # Collected per attempt and passed on at the end: an attempt with too few names is discarded together
        # with its entries.
        entries: list[tuple[float, LedgerEvent]] = []

        def book(t_s: float, event: LedgerEvent, to: list[Any] = entries) -> None:
            to.append((t_s, event))

        try:
            cluster = Cluster(
                scenario=scenario,
                seed=seed,
                names=names,
                one_by_one=one_by_one,
                trace=trace,
                note=book if note is not None else None,
            )
            cluster.run()
        except FewNames:
            # With the same seed, so with the same failures. The doubling ends after a few rounds, at the
            # latest when every machine has a name.
            names *= 2
            continue
        if note is not None:
            for entry in entries:
                note(*entry)
        if keep is not None:
            keep(cluster)
        return result(cluster)


def run_all(
    scenario: Scenario, trials: int, seed: int = 0, trace: NodeTrace | None = None
) -> Iterator[Trial]:
    """Runs trials with seeds from `seed` on. Their garbage is freed at the end of each one: they make no cycles before
    that, so the garbage collector is paused meanwhile."""
    for number in range(trials):
        # Trials make cycles only at their end. Looking for some before that would only cost time.
        gc.disable()
        try:
            yield run(scenario, seed + number, trace=trace)
        finally:
            gc.enable()
            gc.collect()


def result(cluster: Cluster) -> Trial:
    """The result of a trial."""
    wall_s = cluster.finished_s if cluster.finished_s is not None else float("inf")
    return Trial(
        seed=cluster.seed,
        wall_s=wall_s,
        goodput=cluster.steps.spent.training / wall_s,
        spent=cluster.steps.spent,
        failures=dict(sorted(cluster.failures.items())),
        incidents=cluster.incidents,
        lost_steps=cluster.steps.lost,
        new_nodes=cluster.nodes_new,
        given_up=cluster.given_up,
        node_hours=cluster.node_s / 3600,
        done=min(1.0, cluster.steps.committed / cluster.scenario.steps),
    )


STARTED = datetime(2000, 1, 1, tzinfo=UTC)
"""The start time of every simulated job in its ledger."""


def replay(scenario: Scenario, seed: int, folder: Path, trace: NodeTrace | None = None) -> Trial:
    """Runs a trial again and writes `job.sqlite`, `spec.json` and `report.json` as a real job does.

    Raises:
        UsageError: the folder has a job already.
    """
    # Refused before the simulation: a replay must not write into the folder of a real job.
    if (folder / "spec.json").exists():
        raise UsageError(f"{folder} has a job already; choose another --job")
    entries: list[tuple[float, LedgerEvent]] = []
    kept: list[Cluster] = []
    # Run again instead of being recorded the first time: thousands of trials are run for statistics, and one
    # of them is looked at.
    run(scenario, seed, trace=trace, note=lambda *entry: entries.append(entry), keep=kept.append)
    (cluster,) = kept
    trial, state = result(cluster), cluster.core.state
    state.membership.phase = JobPhase.ENDED
    state.membership.outcome = state.membership.outcome or "finished"
    state.membership.committed = cluster.steps.committed
    state.spec = msgspec.structs.replace(state.spec, name=folder.name)
    for node in state.membership.nodes.values():
        node.last_seen_s = min(node.last_seen_s, BEGIN_S + trial.wall_s)
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "job.sqlite")
    try:
        store.begin()
        for t_s, event in entries:
            utc = (STARTED + timedelta(seconds=t_s)).isoformat(timespec="milliseconds")
            store.add_event(round(t_s, 4), utc, event.kind, event)
        store.save(state)
        store.commit()
        incidents = store.incidents(state.forgotten)
    finally:
        store.close()
    report = build_report(state, StepSummary(), BEGIN_S + trial.wall_s, incidents)
    goodput = Goodput(
        wall_s=round(trial.wall_s, 3),
        productive_s=round(trial.spent.training, 3),
        share=round(trial.goodput, 4),
    )
    report = msgspec.structs.replace(report, goodput=goodput)
    (folder / "report.json").write_bytes(encode_report(report))
    (folder / "spec.json").write_bytes(msgspec.json.encode(state.spec))
    return trial
