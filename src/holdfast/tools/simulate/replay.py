"""One trial again, with its ledger in a job's folder: what shows jobs shows it too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from holdfast.coordinator.kernel.state import JobPhase
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.store import Store
from holdfast.coordinator.service.tally import StepSummary
from holdfast.errors import UsageError
from holdfast.protocol.ledger import LedgerEvent
from holdfast.tools.simulate.cluster import Cluster
from holdfast.tools.simulate.machine import BEGIN_S
from holdfast.tools.simulate.scenario import Scenario
from holdfast.tools.simulate.trace import Trace
from holdfast.tools.simulate.trial import Trial, result, run

STARTED = datetime(2000, 1, 1, tzinfo=UTC)
"""When every simulated job began, in its ledger."""


def replay(scenario: Scenario, seed: int, folder: Path, trace: Trace | None = None) -> Trial:
    """Runs a trial again and writes `job.sqlite`, `spec.json` and `report.json` as a real job does.

    Raises:
        UsageError: the folder has a job already.
    """
    # Refused before anything is simulated: a replay must not write into the folder of a real job.
    if (folder / "spec.json").exists():
        raise UsageError(f"{folder} has a job already; choose another --job")
    entries: list[tuple[float, LedgerEvent]] = []
    kept: list[Cluster] = []
    # Run again and not recorded the first time: thousands of trials are run for statistics, and one of them
    # is looked at.
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
        told = store.incidents(state.forgotten)
    finally:
        store.close()
    report = build_report(state, StepSummary(), BEGIN_S + trial.wall_s, told)
    report["goodput"] = {
        "wall_s": round(trial.wall_s, 3),
        "productive_s": round(trial.spent.training, 3),
        "share": round(trial.goodput, 4),
    }
    (folder / "report.json").write_bytes(msgspec.json.encode(report))
    (folder / "spec.json").write_bytes(msgspec.json.encode(state.spec))
    return trial
