"""What one seed means: the shape of the job, of its cluster and of its bad luck."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import HealthSpec, SnapshotOptions, Timing
from holdfast.protocol.snapshots import DurableTier, Saving

FOREVER = 1 << 40


@dataclass
class Plan:
    """One schedule, apart from the random numbers that it draws while it runs."""

    seed: int
    spec: JobSpec
    level: int = 2
    steps: int = FOREVER
    equal_starts: bool = True
    durable_step: int | None = None
    micro_batches: int = 6
    tells_micro_batches: bool = False  # so there may be fewer than workers
    step_s: float = 0.2
    compile_s: float = 0.0
    asides: float = 0.0  # how often a worker does work of the script's own after a step
    aside_s: float = 0.0
    torn_end: bool = False
    start_s: float = 1.0
    latency_s: float = 0.002
    slow_messages: float = 0.0
    parks_itself: bool = True
    repeats: bool = True  # agents say again how workers ended and who waits, after every Hello
    closes_released: bool = False
    script_s: float = 6.0
    faults_until_s: float = 12.0
    faults: list[tuple[float, str]] = field(default_factory=list)
    triggers: list[tuple[str, int, str]] = field(default_factory=list)
    stop_after_s: float | None = None
    bug: str | None = None
    bug_step: int = 0
    engine_refuses: float = 0.0
    release_fails: float = 0.0
    tells_injections: float = 1.0
    snapshot_every: int = 0  # steps; 0: never
    copy_s: float = 0.05
    pull_s: float = 0.2
    store_s: float = 0.5
    hold_fails: float = 0.0  # how often a copy into snapshot memory comes to nothing
    tier_fails: float = 0.0
    no_memory: float = 0.0  # how many nodes have no snapshot memory
    racks: int = 0  # that nodes stand in; 0: nobody knows
    halls: int = 0  # that racks stand in, so that places have two levels; 0: they have one
    unplaced: float = 0.0  # of how many nodes nobody knows where they stand, although of others it is known
    changes: list[tuple[float, str]] = field(default_factory=list)  # planned ones of the membership
    findings: list[tuple[float, str]] = field(default_factory=list)
    clears: list[float] = field(
        default_factory=list
    )  # when a person calls a machine well, or a rule wrong about it
    repair_fails: float = 0.0
    repair_silent: float = 0.0  # how often an agent never answers
    check_fails: float = 0.0
    check_silent: float = 0.0
    comes_back: float = 0.0  # how often a machine that was replaced comes back under another name
    lemons: float = 0.0  # how many machines have a bad history
    refused_checks: float = 0.0  # how often the basic checks of a new node are faulty
    shape: tuple[int, int] = (1, 1)  # of a replica: shard degree, and tensor degree
    hanging_starts: int = 0  # of the first starts at level 0, in which one rank stays out of a collective
    disturbed: bool = False  # by what is around the core
    only_planned: bool = False  # nodes are found to need something that can wait, and nothing fails

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]

    @property
    def least_nodes(self) -> int:
        """Of one replica."""
        return -(-self.shard_count // self.spec.nproc)

    @property
    def coordinator_dies(self) -> bool:
        """The coordinator's state must be kept."""
        return any(kind == "kill-coordinator" for *_, kind in [*self.faults, *self.triggers])

    @property
    def only_changes(self) -> bool:
        """Nothing ever breaks: only the membership is changed, as planned."""
        broken = (
            self.faults or self.triggers or self.bug or self.engine_refuses or self.torn_end or self.findings
        )
        return not broken and not self.disturbed and self.stop_after_s is None

    @property
    def budget_is_small(self) -> bool:
        """The job may run out of restarts."""
        return self.spec.max_restarts < 100


FAULTS = {
    "kill-worker": 10,
    "kill-node": 6,
    "kill-spare": 2,
    "silent-node": 4,
    "cut-node": 3,
    "stop-worker": 4,
    "hang-worker": 4,
    "freeze-worker": 3,
    "lose-reduce": 2,
    "raise": 4,
    "raise-again": 2,
    "torn": 3,
    "nan": 2,
    "flaky-network": 2,
    "slow-network": 2,
    "torn-links": 2,
    "kill-coordinator": 8,
    "join-node": 3,
    "bad-node": 1,
}
"""Every fault, with its weight in the draw."""

SINGLE = ("kill-worker", "kill-node", "kill-coordinator", "stop-worker", "hang-worker", "torn", "silent-node")
MOMENTS = (
    "formed",
    "broke",
    "parked",
    "ready",
    "prepared",
    "voted",
    "joined",
    "done",
    "yield",
    "stopping",
    "saved",
    "transfer",
)
"""Points at which a second fault hurts most: a trigger strikes there instead of at a time."""


SAVED_MOMENTS = (*MOMENTS, "published", "held")

SHARDED = 10_000_000
"""From this seed on replicas are several workers."""
PLACED = 20_000_000
"""From this seed on nodes stand in racks of halls, which are lost as one; in every other schedule replicas are several
workers."""
FEW = 30_000_000
"""From this seed on a global batch may have fewer micro-batches than the job has workers."""

SHARDED_MOMENTS = (*SAVED_MOMENTS, "rebuilt", "rebuilds")
SHARDED_FAULTS = (
    "kill-worker",
    "kill-worker",
    "kill-node",
    "kill-shard",
    "kill-replica",
    "torn",
    "kill-coordinator",
)


def plan_for(seed: int, level: int | None = None) -> Plan:
    """The schedule of a seed. One in eight is at level 0."""
    rng = random.Random(seed)
    drawn = 0 if rng.random() < 0.12 else 2
    level = drawn if level is None else level
    max_nodes = rng.choice((1, 2, 2, 3, 3, 4, 5))
    nproc = rng.choice((1, 1, 2)) if max_nodes <= 3 else 1
    spec = JobSpec(
        name="sim",
        script="train.py",
        min_nodes=rng.randint(1, max_nodes),
        max_nodes=max_nodes,
        nproc=nproc,
        spares=rng.choice((0, 0, 1, 1, 2)),
        wait_for_spare=rng.random() < 0.15,
        max_restarts=rng.choice((0, 2, 6)) if rng.random() < 0.1 else 100,
        timing=Timing(detection_s=2.0),
        saving=Saving(SnapshotOptions("0"), tiers=(DurableTier("checkpoint", "0"),)),
    )
    window = rng.choice((4.0, 8.0, 12.0))
    plan = Plan(
        seed=seed,
        spec=spec,
        level=level,
        steps=rng.randint(3, 40) if rng.random() < 0.4 else FOREVER,
        equal_starts=rng.random() < 0.6,
        durable_step=rng.randint(1, 50) if rng.random() < 0.15 else None,
        micro_batches=rng.randint(1, 9),
        step_s=rng.choice((0.05, 0.2, 0.2, 0.5)),
        compile_s=rng.choice((0.0, 0.0, 0.0, 4.0, 30.0)),
        torn_end=rng.random() < 0.3,
        start_s=rng.choice((0.1, 0.5, 2.0, 5.0)),
        latency_s=rng.choice((0.0005, 0.002, 0.02)),
        slow_messages=rng.choice((0.0, 0.0, 0.02)),
        parks_itself=rng.random() < 0.2,
        repeats=rng.random() < 0.8,
        closes_released=rng.random() < 0.5,
        script_s=rng.uniform(1.0, 10.0),
        faults_until_s=window,
        stop_after_s=rng.uniform(0.5, window) if rng.random() < 0.08 else None,
        bug=rng.choice(("start", "step")) if rng.random() < 0.05 else None,
        bug_step=rng.randint(0, 12),
        engine_refuses=rng.choice((0.0, 0.0, 0.3)),
        release_fails=rng.choice((0.0, 0.5)),
        tells_injections=rng.choice((1.0, 1.0, 0.5)),
    )
    own = random.Random(-1 - seed)  # drawn apart: the schedules of the seeds stay what they were
    if own.random() < 0.15:
        plan.asides, plan.aside_s = own.choice((0.02, 0.1)), own.choice((2.0, 10.0, 30.0))
    kinds, weights = list(FAULTS), list(FAULTS.values())
    if rng.random() < 0.25:
        kinds, weights = [rng.choice(SINGLE)], [1]
    for kind in rng.choices(kinds, weights, k=rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        plan.faults.append((rng.uniform(0.0, window), kind))
    for kind in rng.choices(kinds, weights, k=rng.choice((0, 0, 1, 1, 2, 3))):
        plan.triggers.append((rng.choice(MOMENTS), rng.randint(1, 6), kind))
    if level == 2:
        _draw_saving(plan, window)
    _draw_changes(plan, window)
    _draw_health(plan, window)
    if SHARDED <= seed < PLACED or (seed >= PLACED and seed % 2):
        _draw_shape(plan, window)
    if seed >= PLACED:
        _draw_places(plan, window)
    if seed >= FEW:
        rng = random.Random(-13_000_003 - seed)
        replicas = -(-plan.spec.minimum // plan.shard_count)  # fewer are refused before a worker is ready
        plan.level, plan.micro_batches = 2, plan.shape[0] * (replicas + rng.choice((0, 0, 1)))
        plan.tells_micro_batches = True
    return plan


def _draw_places(plan: Plan, window: float) -> None:
    """More nodes than elsewhere, or there would be nothing to place near each other."""
    rng = random.Random(-11_000_027 - plan.seed)
    most = max(plan.spec.max_nodes, plan.least_nodes * rng.choice((2, 3)), rng.choice((3, 4, 6)))
    plan.spec = msgspec.structs.replace(
        plan.spec, max_nodes=most, min_nodes=rng.randint(1, most), spares=rng.choice((0, 1, 2, 3))
    )
    plan.halls, plan.racks = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 3))
    plan.unplaced = rng.choice((0.0, 0.0, 0.0, 0.2))
    if not plan.only_planned:
        for _ in range(rng.choice((0, 1, 1, 2))):
            plan.faults.append((rng.uniform(0.0, window), "lose-rack"))


def _draw_shape(plan: Plan, window: float) -> None:
    """Replicas of two to four workers; faults that leave complementary shards, or none of one."""
    rng = random.Random(-7_000_003 - plan.seed)
    plan.level, plan.shape = 2, rng.choice(((2, 1), (2, 1), (3, 1), (2, 2)))
    if not plan.snapshot_every and rng.random() < 0.8:
        plan.snapshot_every, plan.copy_s, plan.pull_s = rng.choice((1, 1, 2)), 0.02, rng.choice((0.05, 0.3))
        saving = Saving(
            SnapshotOptions(str(plan.snapshot_every), rng.choice((0, 1, 1))), 0, plan.spec.saving.tiers
        )
        plan.spec = msgspec.structs.replace(plan.spec, saving=saving)
    workers = plan.shard_count * rng.choice((1, 2, 2, 3) if plan.shard_count < 4 else (1, 2))
    nproc = rng.choice((1, 1, 2)) if workers % 2 == 0 else 1
    most = workers // nproc
    plan.spec = msgspec.structs.replace(
        plan.spec,
        max_nodes=most,
        min_nodes=rng.randint(1, most),
        nproc=nproc,
        spares=rng.choice((0, 0, 1, 1, 2)),
    )
    plan.micro_batches = plan.shape[0] * rng.randint(1, 4)
    for _ in range(rng.choice((0, 1, 1, 2))):
        plan.faults.append((rng.uniform(0.0, window), rng.choice(SHARDED_FAULTS)))
    if rng.random() < 0.4:
        plan.faults.append((rng.uniform(0.6, 1.0) * window, "kill-shard"))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        kind = rng.choice(SHARDED_FAULTS)
        plan.triggers.append((rng.choice(SHARDED_MOMENTS), rng.randint(1, 6), kind))
    _draw_planned(plan, window)


PLANNED_FINDINGS = (
    "replace-later",
    "reset-later",
    "reboot-later",
    "storm-later",
    "well-again",
    "trial",
    "unknown",
)
PLANNED_CHANGES = ("drain", "drain", "resize", "join", "no-capacity-limit")


def _draw_planned(plan: Plan, window: float) -> None:
    """In one of five sharded schedules nodes leave one after the other, for their health, their history or because they are
    to, and nothing fails: no step may be lost, and of no snapshot the only copy of a part."""
    rng = random.Random(-9_000_049 - plan.seed)
    if rng.random() >= 0.2:
        return
    plan.only_planned = True
    plan.faults, plan.triggers, plan.bug, plan.stop_after_s = [], [], None, None
    plan.torn_end, plan.asides, plan.compile_s, plan.slow_messages = False, 0.0, 0.0, 0.0
    plan.findings = [
        (rng.uniform(0.5, window), rng.choice(PLANNED_FINDINGS)) for _ in range(rng.choice((1, 2, 4, 8)))
    ]
    changes = rng.choice((0, 0, 1, 2, 4))
    plan.changes = [(rng.uniform(0.5, window), rng.choice(PLANNED_CHANGES)) for _ in range(changes)]
    plan.lemons, plan.comes_back = rng.choice((0.0, 0.3, 0.6)), rng.choice((0.0, 1.0))
    plan.repair_silent = 0.0
    health = HealthSpec(
        blast_radius="100%", blast_window_s=rng.choice((1.0, 5.0)), reboot_s=rng.choice((5.0, 2700.0))
    )
    plan.spec = msgspec.structs.replace(plan.spec, health=health, max_restarts=100)


FINDINGS = {
    "replace-now": 4,
    "reset-now": 3,
    "reboot-now": 3,
    "restart-now": 2,
    "replace-later": 4,
    "reset-later": 3,
    "reboot-later": 2,
    "restart-later": 2,
    "and-dies": 3,
    "dies-and": 3,
    "storm-now": 1,
    "storm-later": 2,
    "shared": 1,
    "trial": 2,
    "unknown": 2,
    "warning": 2,
    "ask": 1,
    "soft": 2,
    "said": 3,
    "well-again": 1,
}
"""What may be found on a node, with its weight in the draw."""


def _draw_health(plan: Plan, window: float) -> None:
    """Findings of all kinds, and repairs and checks that go wrong. Drawn apart, too."""
    rng = random.Random(-5_000_011 - plan.seed)
    if rng.random() < 0.5:
        return
    kinds, weights = list(FINDINGS), list(FINDINGS.values())
    for kind in rng.choices(kinds, weights, k=rng.choice((1, 2, 4, 8))):
        plan.findings.append((rng.uniform(0.5, window), kind))
    plan.repair_fails = rng.choice((0.0, 0.3, 1.0))
    plan.repair_silent = rng.choice((0.0, 0.0, 0.3))
    plan.check_fails = rng.choice((0.0, 0.0, 0.5))
    plan.check_silent = rng.choice((0.0, 0.0, 0.2))
    plan.comes_back = rng.choice((0.0, 0.5, 1.0))
    plan.refused_checks = rng.choice((0.0, 0.0, 0.2))
    own = random.Random(-7_000_003 - plan.seed)
    plan.lemons = own.choice((0.0, 0.0, 0.3, 0.6))
    people = random.Random(-8_000_009 - plan.seed)
    plan.clears = [people.uniform(1.0, window + 10.0) for _ in range(people.choice((0, 0, 1, 3)))]
    health = HealthSpec(
        blast_radius=rng.choice(("25%", "50%", "100%")),
        blast_window_s=rng.choice((5.0, 600.0)),
        deep_checks=rng.random() < 0.1,
        reboot_s=own.choice((5.0, 2700.0)),
    )
    plan.spec = msgspec.structs.replace(plan.spec, health=health)
    if rng.random() < 0.3:
        plan.faults, plan.triggers, plan.changes = [], [], []


CHANGES = {
    "resize": 4,
    "drain": 3,
    "drain-soon": 2,
    "preempt": 3,
    "preempt-soon": 1,
    "capacity": 2,
    "no-capacity-limit": 1,
    "join": 2,
}
"""Every planned change, with its weight in the draw."""


def _draw_changes(plan: Plan, window: float) -> None:
    """Nodes that come and go as planned, drawn apart as well; in some schedules nothing else happens."""
    rng = random.Random(-3_000_017 - plan.seed)
    if rng.random() < 0.4:
        return
    kinds, weights = list(CHANGES), list(CHANGES.values())
    for kind in rng.choices(kinds, weights, k=rng.choice((1, 2, 4, 8))):
        plan.changes.append((rng.uniform(0.0, window), kind))
    if rng.random() < 0.3:
        plan.faults, plan.triggers, plan.bug, plan.stop_after_s = [], [], None, None
        plan.engine_refuses, plan.slow_messages, plan.torn_end = 0.0, 0.0, False


def _draw_saving(plan: Plan, window: float) -> None:
    """Snapshots, tiers, and faults that leave nothing else to go on from. Drawn apart, too."""
    rng = random.Random(-1_000_003 - plan.seed)
    if rng.random() < 0.35:
        return
    cadences = ("1", "2", "5", "0.5s", "3s", "auto", "0")
    urls = ("checkpoint", "archive")[: rng.choice((0, 1, 1, 1, 2))]
    tiers = tuple(DurableTier(url, rng.choice(cadences)) for url in urls)
    plan.snapshot_every = rng.choice((1, 1, 2, 4))
    plan.copy_s = rng.choice((0.01, 0.05, 0.5))
    plan.pull_s = rng.choice((0.05, 0.3, 2.0))
    plan.store_s = rng.choice((0.05, 0.5, 2.0))
    plan.hold_fails = rng.choice((0.0, 0.0, 0.1, 0.3))
    plan.tier_fails = rng.choice((0.0, 0.0, 0.2))
    plan.no_memory = rng.choice((0.0, 0.0, 0.0, 0.3))
    plan.racks = rng.choice((0, 0, 1, 2))
    saving = Saving(SnapshotOptions(str(plan.snapshot_every), rng.choice((0, 1, 1, 1, 2))), 0, tiers)
    plan.spec = msgspec.structs.replace(plan.spec, saving=saving)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        plan.faults.append((rng.uniform(0.0, window), "kill-all-workers"))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        kind = rng.choice(("kill-all-workers", "kill-all-workers", "kill-node", "kill-coordinator", "torn"))
        plan.triggers.append((rng.choice(SAVED_MOMENTS), rng.randint(1, 6), kind))
    if rng.random() < 0.3:
        plan.faults.append((rng.uniform(0.3, 1.0) * window, "silence-holders"))
