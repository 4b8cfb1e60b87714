"""One seed from start to end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simcluster.checks import Violation
from simcluster.plan import SHARDED, Plan, plan_for

from holdfast.coordinator.health.admission import CHECKS_S
from virtual.cluster import VirtualCluster
from virtual.luck import Luck, luck_for

LIMIT_S = 900.0
SHARDED_EVERY = 4
"""In one of so many schedules replicas are several workers."""
ROOM = "/dev/shm"
"""Where the ledgers of schedules are written, if it is there: they are thrown away with the schedule."""


@dataclass(frozen=True)
class Story:
    """What one schedule was."""

    seed: int
    luck: tuple[str, ...]
    outcome: str
    virtual_s: float
    events: int
    frames: int
    generations: int
    incidents: int
    starts: int
    committed: int
    lost: tuple[tuple[str, int], ...]
    asked_for_whole: int
    digest: str
    lines: tuple[str, ...] = ()


def run_seed(seed: int, without: Iterable[str] = (), tells: bool = False) -> Story:
    """Runs the schedule of a seed. without: classes of luck that are left out.

    Raises:
        Violation: an invariant does not hold.
    """
    plan = plan_of(seed)
    luck = luck_for(seed, plan.faults_until_s, frozenset(without))
    tame(plan, luck)
    return run(plan, luck, tells)


def plan_of(seed: int) -> Plan:
    """The job and its cluster, as `simcluster` draws them."""
    sharded = seed % SHARDED_EVERY == SHARDED_EVERY - 1
    plan = plan_for(SHARDED + seed) if sharded else plan_for(seed)
    plan.seed = seed
    # What a real agent repeats is in its hello.
    plan.repeats = False
    return plan


def tame(plan: Plan, luck: Luck) -> None:
    """Takes out of a plan what is not in its luck."""
    plan.disturbed = bool(luck.strikes or luck.moments) or luck.power_fails
    plan.only_planned = plan.only_planned and not plan.disturbed
    if "cluster" not in luck.there:
        plan.faults, plan.triggers, plan.torn_end = [], [], False
        plan.bug, plan.stop_after_s, plan.engine_refuses, plan.release_fails = None, None, 0.0, 0.0
    if "changes" not in luck.there:
        plan.changes = []
    if "findings" not in luck.there:
        plan.findings, plan.clears, plan.lemons, plan.refused_checks = [], [], 0.0, 0.0
        plan.repair_silent = plan.check_silent = plan.comes_back = 0.0


def run(plan: Plan, luck: Luck, tells: bool = False) -> Story:
    """Runs one schedule."""
    room = ROOM if Path(ROOM).is_dir() else None
    with tempfile.TemporaryDirectory(dir=room, prefix="virtual") as home:
        job_dir = Path(home) / "jobs" / "job"
        job_dir.mkdir(parents=True)
        cluster = VirtualCluster(plan, luck, job_dir, tells)
        try:
            cluster.run(LIMIT_S + (2 * CHECKS_S if plan.check_silent else 0.0))
        except Violation:
            raise
        except Exception as error:
            cluster.broke(repr(error), error)
            assert cluster.violation is not None
            raise cluster.violation from error
        finally:
            cluster.bury()
        state = cluster.checks.last_state()
        return Story(
            plan.seed,
            tuple(sorted(luck.there)),
            cluster.service.ended or "",
            cluster.clock.now - cluster.began_s,
            cluster.clock.events,
            cluster.network.frames,
            cluster.checks.formed,
            len(state.incidents),
            cluster.service.starts,
            state.membership.committed,
            tuple(sorted(cluster.invariants.lost.items())),
            cluster.asked_for_whole,
            cluster.trace_digest,
            tuple(cluster.story),
        )
