"""One seed from start to end."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordinator.health.admission import CHECKS_S
from simcluster.checks import Violation
from simcluster.cluster import Cluster
from simcluster.plan import plan_for

LIMIT_S = 900.0


@dataclass(frozen=True)
class Summary:
    """What one schedule was."""

    seed: int
    level: int
    outcome: str
    virtual_s: float
    events: int
    generations: int
    incidents: int
    crashes: int
    committed: int
    restored: tuple[tuple[str, int], ...] = ()
    snapshots: int = 0
    checkpoints: int = 0
    verdicts: int = 0
    acts: int = 0
    withheld: int = 0
    readmitted: int = 0
    swaps: int = 0
    rebuilt: int = 0
    beside: int = 0
    kept: int = 0
    named: int = 0


def run_seed(seed: int, level: int | None = None, hanging_starts: int = 0) -> Summary:
    """Runs the schedule of a seed.

    Raises:
        Violation: an invariant does not hold.
    """
    plan = plan_for(seed, level)
    plan.hanging_starts = hanging_starts
    cluster = Cluster(plan)
    try:
        cluster.run(LIMIT_S + (2 * CHECKS_S if cluster.plan.check_silent else 0.0))
    except Violation:
        raise
    except Exception as error:
        cluster.checks.fail("%r", error)
    service = cluster.service
    state = cluster.checks.last_state()
    return Summary(
        seed,
        cluster.plan.level,
        service.ended or "",
        cluster.clock.now - cluster.began_s,
        cluster.clock.events,
        cluster.checks.formed,
        len(state.incidents),
        service.crashes,
        state.membership.committed,
        tuple(sorted(cluster.checks.saved.restored_from.items())),
        cluster.checks.records.get("snapshot", 0),
        cluster.checks.records.get("saved", 0),
        cluster.checks.records.get("verdict", 0),
        sum(state.health.totals.acts.values()),
        sum(state.health.totals.withheld.values()),
        cluster.checks.records.get("readmitted", 0),
        cluster.ailments.swaps,
        cluster.checks.records.get("rebuild", 0),
        cluster.checks.beside,
        cluster.checks.kept,
        cluster.checks.named,
    )
