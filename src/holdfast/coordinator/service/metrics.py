"""The job's figures for Prometheus, from the core's state and the ledger. `docs/metrics.md` has the table.

Nothing is counted twice: what the state and the ledger hold is turned into figures when somebody asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from holdfast.coordinator.kernel.incidents import kind_of, stall_s
from holdfast.coordinator.kernel.phases import JobPhase, WorkerPhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.kernel.storage_state import Snapshot
from holdfast.coordinator.membership import step_accounting
from holdfast.coordinator.service import goodput
from holdfast.protocol.time_classes import TimeClass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(state: CoreState, steps: int, now: float, writable: bool = True) -> bytes:
    """The figures in Prometheus' text format.

    Args:
        steps: committed steps that the ledger has.
        writable: the ledger takes what is written.
    """
    # A registry per scrape. The global one would keep series of workers that are long gone, and mix two jobs
    # in one test process.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Job(state, steps, now, writable))
    return generate_latest(registry)


class _Job(Collector):
    def __init__(self, state: CoreState, steps: int, now: float, writable: bool) -> None:
        self._state, self._steps, self._now = state, steps, now
        self._writable = writable

    def collect(self) -> Iterator[Metric]:
        yield from self._training()
        yield from self._figures()
        yield from self._incidents()
        yield from self._changes()
        yield from self._health()
        yield from self._snapshots()
        yield from self._tiers()
        yield from self._slow()

    def _training(self) -> Iterator[Metric]:
        s = self._state
        info = GaugeMetricFamily(
            "holdfast_job_info",
            "Always 1; the labels name the job and its engine.",
            labels=["holdfast_job", "engine"],
        )
        info.add_metric([s.spec.name, s.spec.engine], 1)
        yield info
        phase = GaugeMetricFamily("holdfast_phase", "1 for the job's phase, else 0.", labels=["phase"])
        # All phases, also those at 0: a query that sums over time needs a series for each, from the first
        # scrape on.
        for name in JobPhase:
            phase.add_metric([name.value], float(s.membership.phase is name))
        yield phase
        # Left out while it is not known. Prometheus would draw a 0 as a job that lost everything, and an
        # alert would fire for it.
        if s.step is not None:
            yield _gauge("holdfast_step", "Committed steps of the current state.", s.step)
        steps = step_accounting.shown(s, self._steps)
        if s.membership.counts_steps or self._steps:
            steps["committed"] = self._steps
        if steps["committed"] is not None:
            text = "Steps committed since the job's start."
            yield _counter("holdfast_steps_committed", text, steps["committed"])
        if steps["lost"] is not None:
            text = "Committed steps that had to be computed again."
            yield _counter("holdfast_steps_lost", text, steps["lost"])
        if steps["computed"] is not None:
            text = "Steps computed since the job's start, repeated ones included."
            yield _counter("holdfast_steps_computed", text, steps["computed"])
        world = s.membership.generation.strength if s.membership.generation else 0
        yield _gauge("holdfast_world_size", "Workers that compute in the newest generation.", world)
        yield _gauge("holdfast_target_world_size", "Workers at full strength.", s.target)
        nodes = sum(n.alive for n in s.membership.nodes.values())
        yield _gauge("holdfast_nodes", "Connected nodes, spares included.", nodes)
        ready = sum(w.phase is WorkerPhase.READY for w in s.membership.workers.values())
        yield _gauge("holdfast_ready_workers", "Warm workers that wait to be used.", ready)
        yield _counter("holdfast_generations", "Generations that were formed.", s.membership.number)
        writable = float(self._writable)
        yield _gauge("holdfast_ledger_writable", "1 while the ledger can be written, else 0.", writable)
        wall_s = max(0.0, self._now - s.began_s)
        yield _counter("holdfast_wall_seconds", "Time since the job's start.", wall_s)
        yield from self._time()

    def _time(self) -> Iterator[Metric]:
        # A gauge: a restart from an older state moves seconds from one class to another. What is unknown is
        # left out, for 0 would look like a job that makes no progress.
        told = goodput.shown(self._state, self._now)
        time = GaugeMetricFamily(
            "holdfast_time_seconds",
            "Time since the job's start by what it was spent on; the classes add up to the wall time.",
            labels=["class"],
        )
        for kind, seconds in told["classes"].items():
            time.add_metric([kind], seconds)
        if told["productive_s"] == 0.0:
            time.add_metric([TimeClass.PRODUCTIVE.value], 0.0)
        yield time
        if (share := told["recent"]["share"]) is not None:
            yield _gauge("holdfast_recent_goodput", "Share of productive time in the last hour.", share)

    def _figures(self) -> Iterator[Metric]:
        value = GaugeMetricFamily(
            "holdfast_run_value", "The newest value that the script logged, by its name.", labels=["name"]
        )
        for name, (_, newest) in sorted(self._state.membership.figures.items()):
            value.add_metric([name], newest)
        yield value

    def _incidents(self) -> Iterator[Metric]:
        s = self._state
        count: dict[str, int] = defaultdict(int)
        stalls: dict[str, int] = defaultdict(int)
        stalled_s: dict[str, float] = defaultdict(float)
        for incident in s.incidents:
            kind = kind_of(incident)
            last_s = stall_s(incident)
            count[kind] += 1
            stalls[kind] += incident.earlier_stalls + (last_s is not None)
            stalled_s[kind] += incident.earlier_stall_s + (last_s or 0.0)
        incidents = CounterMetricFamily(
            "holdfast_incidents", "Incidents by the kind of cause.", labels=["kind"]
        )
        stall = SummaryMetricFamily(
            "holdfast_incident_stall_seconds",
            "Time from each fault to the next commit by any worker.",
            labels=["kind"],
        )
        for kind, number in sorted(count.items()):
            incidents.add_metric([kind], number)
            stall.add_metric([kind], stalls[kind], stalled_s[kind])
        yield incidents
        yield stall
        still_open = sum(i.open for i in s.incidents)
        yield _gauge("holdfast_open_incidents", "Incidents not yet back at full strength.", still_open)
        yield _counter(
            "holdfast_restarts",
            "Workers that were started again; at level 0, complete jobs.",
            s.membership.restarts_used,
        )

    def _slow(self) -> Iterator[Metric]:
        # Only ranks that are slow now: a gauge that stayed after the rank recovered would keep its alert
        # firing.
        now = [x for x in self._state.health.slow if x.until_step is None]
        ratio = GaugeMetricFamily(
            "holdfast_slow_rank_ratio",
            "A slow rank's computing time over that of its peers.",
            labels=["rank", "node", "part"],
        )
        for x in now:
            ratio.add_metric([str(x.rank), x.node, x.part], x.ratio)
        yield ratio
        yield _gauge(
            "holdfast_slow_ranks",
            "Ranks that compute longer than their peers, so that all wait for them.",
            len(now),
        )
        lost_s = sum(x.lost_s for x in self._state.health.slow)
        yield _counter("holdfast_slow_seconds", "Training time spent waiting for slow ranks.", lost_s)

    def _changes(self) -> Iterator[Metric]:
        s = self._state
        done = s.membership.changed
        yield _summary(
            "holdfast_change_stall_seconds",
            "The stall of each planned change of the membership.",
            done.count,
            done.stall_s,
        )
        yield _gauge("holdfast_wanted_nodes", "Nodes that the job wants to train on now.", s.wanted_nodes)
        leaving = sum(n.alive and n.leaving is not None for n in s.membership.nodes.values())
        yield _gauge("holdfast_leaving_nodes", "Nodes that are to leave and are still connected.", leaving)

    def _health(self) -> Iterator[Metric]:
        health = self._state.health
        tables = (
            ("holdfast_findings", "Findings of each rule.", "rule", health.totals.findings),
            ("holdfast_health_actions", "Remedies that were carried out.", "remedy", health.totals.acts),
            (
                "holdfast_health_withheld",
                "Findings without action, by the reason against it.",
                "against",
                health.totals.withheld,
            ),
        )
        for name, text, label, table in tables:
            family = CounterMetricFamily(name, text, labels=[label])
            for key, number in sorted(table.items()):
                family.add_metric([key], number)
            yield family
        yield _gauge(
            "holdfast_quarantined_machines",
            "Machines that are not used until they have passed the deep checks.",
            len(health.quarantine),
        )
        held = sum(n.alive and n.held is not None for n in self._state.membership.nodes.values())
        yield _gauge("holdfast_held_nodes", "Connected nodes that are not used now.", held)
        unknown = sum(n.alive and bool(n.unknown) for n in self._state.membership.nodes.values())
        yield _gauge(
            "holdfast_unwatched_nodes",
            "Nodes with a source of readings that does not answer or cannot be read.",
            unknown,
        )
        yield _gauge("holdfast_health_asks", "Matters that a person has to inspect.", len(health.asks))

    def _snapshots(self) -> Iterator[Metric]:
        totals = self._state.storage.totals
        yield _counter(
            "holdfast_snapshot_bytes", "Bytes of complete snapshots, each counted once.", totals.nbytes
        )
        yield _summary(
            "holdfast_snapshot_duration_seconds",
            "Time from the first copy until a snapshot was complete.",
            totals.snapshots,
            totals.took_s,
        )
        yield _summary(
            "holdfast_snapshot_stall_seconds",
            "How long training stood still for a snapshot.",
            totals.snapshots,
            totals.stall_s,
        )
        yield _counter(
            "holdfast_snapshot_copies", "Shards copied to the memory of another node.", totals.copies
        )
        yield _counter(
            "holdfast_snapshot_copied_bytes",
            "Bytes of shards copied to the memory of another node.",
            totals.copied_bytes,
        )
        yield _counter("holdfast_snapshots_skipped", "Shards that a node had no room for.", totals.skipped)
        yield _counter("holdfast_saves_unreadable", "Snapshots and checkpoints found damaged.", totals.unread)
        yield from self._lag()

    def _lag(self) -> Iterator[Metric]:
        there = self._state.storage.snapshots
        complete = max((x.step for x in there if x.complete), default=None)
        if complete is not None:
            newest = max(x.step for x in there)
            yield _gauge(
                "holdfast_replication_lag_steps",
                "Steps from the newest complete snapshot to the newest one.",
                newest - complete,
            )
        waiting = [x for x in there if complete is None or x.step > complete]
        yield _gauge(
            "holdfast_replication_lag_seconds",
            "How long the oldest snapshot after the newest complete one has waited for its copies.",
            max((self._now - x.began_s for x in waiting), default=0.0),
        )

    def _newest(self, held_by: int) -> Snapshot | None:
        """The newest snapshot of which every shard is in the memory of so many nodes."""
        there = []
        for snapshot in self._state.storage.snapshots:
            nodes: dict[int, set[str]] = defaultdict(set)
            for entry in snapshot.shards:
                nodes[entry.copy.key.rank].update(entry.nodes)
            if len(nodes) == snapshot.world and all(len(n) >= held_by for n in nodes.values()):
                there.append(snapshot)
        return max(there, key=lambda x: (x.step, x.generation), default=None)

    def _tiers(self) -> Iterator[Metric]:
        s = self._state
        step = GaugeMetricFamily("holdfast_saved_step", "Step of the newest save in a tier.", labels=["tier"])
        age = GaugeMetricFamily(
            "holdfast_saved_age_seconds", "Time since the newest state in a tier was copied.", labels=["tier"]
        )
        for tier, nodes in (("memory", 1), ("peer", 2)):
            snapshot = self._newest(nodes)
            if snapshot is not None:
                step.add_metric([tier], snapshot.step)
                age.add_metric([tier], self._now - snapshot.began_s)
        nbytes = CounterMetricFamily("holdfast_checkpoint_bytes", "Bytes written to a tier.", labels=["tier"])
        took = SummaryMetricFamily(
            "holdfast_checkpoint_duration_seconds",
            "Time from the beginning of a checkpoint until it was complete in its tier.",
            labels=["tier"],
        )
        failures = CounterMetricFamily(
            "holdfast_checkpoint_failures",
            "Checkpoints that could not be written to a tier.",
            labels=["tier"],
        )
        skipped = CounterMetricFamily(
            "holdfast_checkpoints_skipped",
            "Checkpoints that were due while an older one was on its way.",
            labels=["tier"],
        )
        failing = GaugeMetricFamily(
            "holdfast_tier_failing", "1 while the newest attempt at a tier failed.", labels=["tier"]
        )
        slow = GaugeMetricFamily(
            "holdfast_tier_slow",
            "1 while a checkpoint is on its way and no byte of it arrives.",
            labels=["tier"],
        )
        for url in (t.url for t in s.spec.saving.tiers):
            last, totals = s.storage.stored.get(url), s.storage.totals.tiers.get(url)
            if last is not None and last.took_s is not None:
                step.add_metric([url], last.step)
                age.add_metric([url], self._now - last.began_s)
            nbytes.add_metric([url], totals.nbytes if totals else 0)
            took.add_metric([url], totals.checkpoints if totals else 0, totals.took_s if totals else 0.0)
            failures.add_metric([url], totals.failures if totals else 0)
            skipped.add_metric([url], totals.skipped if totals else 0)
            failing.add_metric([url], float(url in s.storage.failing_tiers))
            slow.add_metric([url], float(any(x.tier == url and x.slow for x in s.storage.storing)))
        yield from (step, age, nbytes, took, failures, skipped, failing, slow)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _summary(name: str, text: str, count: int, total: float) -> SummaryMetricFamily:
    return SummaryMetricFamily(name, text, count_value=count, sum_value=total)
