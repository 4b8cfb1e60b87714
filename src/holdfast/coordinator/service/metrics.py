"""The job's figures for Prometheus, from the core's state and the ledger. `docs/metrics.md` has the table.

Nothing is counted twice: what the state and the ledger hold is turned into figures when somebody asks.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import holdfast
from holdfast.coordinator.kernel.incidents import kind_of
from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import CoreState, JobPhase, MemorySnapshot, NodePhase, WorkerPhase
from holdfast.coordinator.service import job_view
from holdfast.coordinator.service.tally import BOUNDS_S, Durations, Tally
from holdfast.observe.traces import trace_id
from holdfast.protocol import ledger
from holdfast.protocol.health import NODE_FIGURES
from holdfast.protocol.phases import TimeClass

OLD_SERIES = "text/plain"
"""What is answered to whoever says nothing of OpenMetrics."""

Readings = Sequence[tuple[str, str, float]]
"""Name, subject and value of each, see `protocol.health`."""

UNITS = frozenset({"seconds", "bytes", "ratio", "celsius", "watts"})
"""Units that a figure may have. By Prometheus' rules they are base units, in the plural, at the end of the name."""


class Scrape(Collector):
    """What is known at one moment. Made on the loop that changes the state, and encoded wherever there is time."""

    def __init__(
        self,
        state: CoreState,
        index: PhaseIndex,
        tally: Tally,
        now: float,
        writable: bool = True,
        readings: Mapping[str, Readings] | None = None,
    ) -> None:
        """tally: of the ledger. writable: the ledger takes what is written. readings: node to what its agent told last."""
        self._families = list(_families(state, tally, now))
        self._families.append(
            _gauge("holdfast_ledger_writable", "1 while the ledger can be written, else 0.", float(writable))
        )
        self._incidents = Counter(state.forgotten_kinds)
        self._incidents.update(map(kind_of, state.incidents))
        # Of these there may be ten thousand. Copied here and made into families by `collect`, in another thread:
        # the loop must answer heartbeats meanwhile.
        self._rows = _Rows(state, index.count_workers(WorkerPhase.READY))
        self._readings = dict(readings or {})

    def collect(self) -> Iterator[Metric]:
        """For `encode`."""
        return map(_with_unit, self._all())

    def _all(self) -> Iterator[Metric]:
        # The versions here and not with the others: the first time they are read from files.
        yield InfoMetricFamily("holdfast_build", "Always 1; the versions.", _versions())
        yield from self._families
        incidents = CounterMetricFamily(
            "holdfast_incidents", "Incidents by the kind of cause.", labels=["kind"]
        )
        for kind, number in sorted(self._incidents.items()):
            incidents.add_metric([kind], number)
        yield incidents
        yield from self._rows.families()
        yield from _readings(self._readings)

    def encode(self, accept: str = OLD_SERIES) -> tuple[bytes, str]:
        """accept: the request's header. Returns the text and its content type: OpenMetrics, with exemplars, for whoever asks for
        it, as Prometheus does; else Prometheus' text format."""
        # A registry per scrape. The global one would keep series of workers that are long gone, and mix two jobs
        # in one test process.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encoder: Callable[[Collector], bytes]
        encoder, content_type = choose_encoder(accept)
        return encoder(registry), content_type


def metrics_text(state: CoreState, tally: Tally, now: float, writable: bool = True) -> bytes:
    """The figures in Prometheus' text format."""
    index = PhaseIndex(state.membership, state.spec.nproc)
    return Scrape(state, index, tally, now, writable).encode()[0]


def _families(state: CoreState, tally: Tally, now: float) -> Iterator[Metric]:
    job = {"holdfast_job": state.spec.name, "engine": state.spec.engine}
    yield InfoMetricFamily("holdfast_job", "Always 1; the labels name the job and its engine.", job)
    yield from _training(state, tally, now)
    yield from _figures(state)
    yield from _incidents(state, tally)
    yield from _changes(state)
    yield from _health(state)
    yield _gauge("holdfast_wanted_spares", "Spares that the job was started with.", state.spec.spares)
    yield from _slow(state)
    yield from _snapshots(state, now)
    yield from _tiers(state, now)
    events = CounterMetricFamily("holdfast_events", "Events of the ledger.", labels=["kind"])
    # Also those that have not happened: an increase from nothing to one is none for Prometheus. Kinds are fixed,
    # so the number of series is bounded.
    for kind in sorted({*ledger.EVENTS, *tally.kinds}):
        events.add_metric([kind], tally.kinds.get(kind, 0))
    yield events


@cache
def _versions() -> dict[str, str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:  # a coordinator of its own needs none
        torch = ""
    return {"version": holdfast.__version__, "python": platform.python_version(), "torch": torch}


def _training(state: CoreState, tally: Tally, now: float) -> Iterator[Metric]:
    phase = GaugeMetricFamily("holdfast_phase", "1 for the job's phase, else 0.", labels=["phase"])
    # All phases, also those at 0: a query that sums over time needs a series for each, from the first
    # scrape on.
    for name in JobPhase:
        phase.add_metric([name.value], float(state.membership.phase is name))
    yield phase
    yield from _steps(state, tally, now)
    world = state.membership.generation.strength if state.membership.generation else 0
    yield _gauge("holdfast_world_size", "Workers that compute in the newest generation.", world)
    yield _gauge("holdfast_target_world_size", "Workers at full strength.", state.target)
    yield _counter("holdfast_generations", "Generations that were formed.", state.membership.number)
    wall_s = max(0.0, now - state.began_s)
    yield _counter("holdfast_wall_seconds", "Time since the job's start.", wall_s)
    yield from _time(state, now)


def _steps(state: CoreState, tally: Tally, now: float) -> Iterator[Metric]:
    # Left out while it is not known. Prometheus would draw a 0 as a job that lost everything, and an
    # alert would fire for it.
    if state.step is not None:
        yield _gauge("holdfast_step", "Committed steps of the current state.", state.step)
    steps = msgspec.structs.asdict(job_view.step_counts(state, tally.steps))
    if state.membership.counts_steps or tally.steps:
        steps["committed"] = tally.steps
    texts = {
        "committed": "Steps committed since the job's start.",
        "lost": "Committed steps that had to be computed again.",
        "computed": "Steps computed since the job's start, repeated ones included.",
    }
    for name, text in texts.items():
        if steps[name] is not None:
            yield _counter(f"holdfast_steps_{name}", text, steps[name])
    if tally.weight is not None:
        text = "Weight (samples, tokens) of all commits, those of repeated steps included."
        yield _counter("holdfast_weight", text, tally.weight)
    paced = job_view.pace_of(state, now)
    texts = {
        "step_rate": "Steps that stayed per second of wall time, lately.",
        "remaining_seconds": "Time until all steps are committed at that rate.",
    }
    for (name, text), value in zip(texts.items(), (paced.steps_per_s, paced.eta_s), strict=True):
        if value is not None:
            yield _gauge(f"holdfast_{name}", text, value)
    if tally.newest is not None:
        age_s = max(0.0, now - state.began_s - tally.newest.t_s)
        yield _gauge("holdfast_step_age_seconds", "Time since the newest commit.", age_s)
        newest = {
            "loss": ("Mean loss over the global batch of the newest step.", tally.newest.loss),
            "gradient_norm": ("Norm of the newest step's gradient before clipping.", tally.newest.grad_norm),
            "learning_rate": ("The newest step's learning rate, of the first group.", tally.newest.lr),
        }
        for name, (text, value) in newest.items():
            if value is not None:
                yield _gauge(f"holdfast_{name}", text, value)


def _time(state: CoreState, now: float) -> Iterator[Metric]:
    # A gauge: a restart from an older state moves seconds from one class to another. What is unknown is
    # left out, for 0 would look like a job that makes no progress.
    told = job_view.goodput_of(state, now)
    time = GaugeMetricFamily(
        "holdfast_time_seconds",
        "Time since the job's start by what it was spent on; the classes add up to the wall time.",
        labels=["class"],
    )
    for kind, seconds in told.classes.items():
        time.add_metric([kind], seconds)
    if told.productive_s == 0.0:
        time.add_metric([TimeClass.PRODUCTIVE.value], 0.0)
    yield time
    if (share := told.recent.share) is not None:
        yield _gauge("holdfast_recent_goodput", "Share of productive time in the last hour.", share)


def _figures(state: CoreState) -> Iterator[Metric]:
    value = GaugeMetricFamily(
        "holdfast_run_value", "The newest value that the script logged, by its name.", labels=["name"]
    )
    for name, (_, newest) in sorted(state.membership.figures.items()):
        value.add_metric([name], newest)
    yield value


def _incidents(state: CoreState, tally: Tally) -> Iterator[Metric]:
    stall = "Time from each fault to the next commit by any worker."
    yield _histogram("holdfast_incident_stall_seconds", stall, "kind", tally.stalls, tally.ledger)
    full = "Time from each fault to the first commit at full strength."
    yield _histogram(
        "holdfast_incident_full_strength_seconds", full, "kind", tally.full_strength, tally.ledger
    )
    phase = "How long each phase of an incident took."
    yield _histogram("holdfast_incident_phase_seconds", phase, "phase", tally.phases, tally.ledger)
    recoveries = CounterMetricFamily(
        "holdfast_recoveries", "Incidents that came back to full strength, by who acted.", labels=["by"]
    )
    for by, number in sorted(tally.recovered.items()):
        recoveries.add_metric([by], number)
    yield recoveries
    is_open = sum(i.open for i in state.incidents)
    yield _gauge("holdfast_open_incidents", "Incidents not yet back at full strength.", is_open)
    yield _counter(
        "holdfast_restarts",
        "Workers that were started again; at level 0, complete jobs.",
        state.membership.restarts_used,
    )


def _snapshots(state: CoreState, now: float) -> Iterator[Metric]:
    """Those in the nodes' memory, and how far their copies are behind."""
    totals = state.storage.totals
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
    yield _counter("holdfast_snapshot_copies", "Shards copied to the memory of another node.", totals.copies)
    yield _counter(
        "holdfast_snapshot_copied_bytes",
        "Bytes of shards copied to the memory of another node.",
        totals.copied_bytes,
    )
    yield _counter("holdfast_snapshots_skipped", "Shards that a node had no room for.", totals.skipped)
    yield _counter("holdfast_saves_unreadable", "Snapshots and checkpoints found damaged.", totals.unread)
    yield from _lag(state, now)


def _lag(state: CoreState, now: float) -> Iterator[Metric]:
    there = state.storage.snapshots
    complete = max((x.step for x in there if x.complete), default=None)
    # Without a complete snapshot there is no distance. A 0 would say that all copies are there.
    if complete is not None:
        newest = max(x.step for x in there)
        yield _gauge(
            "holdfast_replication_lag_steps",
            "Steps from the newest complete snapshot to the newest one.",
            newest - complete,
        )
    # An older one that never became complete is not waited for: the complete one has taken its place.
    waiting = [x for x in there if complete is None or x.step > complete]
    yield _gauge(
        "holdfast_replication_lag_seconds",
        "How long the oldest snapshot after the newest complete one has waited for its copies.",
        max((now - x.began_s for x in waiting), default=0.0),
    )


def _newest(state: CoreState, held_by: int) -> MemorySnapshot | None:
    """The newest snapshot of which every shard is in the memory of so many nodes."""
    there = []
    for snapshot in state.storage.snapshots:
        nodes: dict[int, set[str]] = defaultdict(set)
        for entry in snapshot.shards:
            nodes[entry.copy.key.rank].update(entry.nodes)
        # Of every rank: with one shard missing, nothing of the state can be restored.
        if len(nodes) == snapshot.world and all(len(n) >= held_by for n in nodes.values()):
            there.append(snapshot)
    return max(there, key=lambda x: (x.step, x.generation), default=None)


def _tiers(state: CoreState, now: float) -> Iterator[Metric]:
    """What each tier has, and what was written there. A tier without a save has no step and no age."""
    step = GaugeMetricFamily("holdfast_saved_step", "Step of the newest save in a tier.", labels=["tier"])
    age = GaugeMetricFamily(
        "holdfast_saved_age_seconds", "Time since the newest state in a tier was copied.", labels=["tier"]
    )
    for tier, nodes in (("memory", 1), ("peer", 2)):
        snapshot = _newest(state, nodes)
        if snapshot is not None:
            step.add_metric([tier], snapshot.step)
            age.add_metric([tier], now - snapshot.began_s)
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
    # Tiers of the specification only: their number is fixed, and with it the number of series.
    for has in job_view.saving(state, now).tiers:
        url, totals = has.url, state.storage.totals.tiers.get(has.url)
        if has.step is not None and has.age_s is not None:
            step.add_metric([url], has.step)
            age.add_metric([url], has.age_s)
        # Here 0 is known, for nothing was written. A rate needs the series from the first scrape on.
        nbytes.add_metric([url], totals.nbytes if totals else 0)
        took.add_metric([url], totals.checkpoints if totals else 0, totals.took_s if totals else 0.0)
        failures.add_metric([url], totals.failures if totals else 0)
        skipped.add_metric([url], totals.skipped if totals else 0)
        failing.add_metric([url], float(has.failing))
        slow.add_metric([url], float(has.slow))
    yield from (step, age, nbytes, took, failures, skipped, failing, slow)


def _readings(of: Mapping[str, Readings]) -> Iterator[Metric]:
    """What machines read of themselves and told; of one that has left there is nothing."""
    for reading, figure in NODE_FIGURES.items():
        kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
        family = kind(figure.metric, figure.text, labels=["node", figure.label])
        for node, told in of.items():
            for name, subject, value in told:
                if name == reading:
                    family.add_metric([node, subject.removeprefix("gpu ")], value * figure.scale)
        yield family


def _changes(state: CoreState) -> Iterator[Metric]:
    """Planned changes of the membership."""
    done = state.membership.changed
    yield _summary(
        "holdfast_change_stall_seconds",
        "The stall of each planned change of the membership.",
        done.count,
        done.stall_s,
    )
    yield _gauge("holdfast_wanted_nodes", "Nodes that the job wants to train on now.", state.wanted_nodes)


def _health(state: CoreState) -> Iterator[Metric]:
    """Findings, remedies, and machines that are not used."""
    known = state.health
    tables = (
        ("holdfast_findings", "Findings of each rule.", "rule", known.totals.findings),
        ("holdfast_health_actions", "Remedies that were carried out.", "remedy", known.totals.acts),
        (
            "holdfast_health_withheld",
            "Findings without action, by the reason against it.",
            "against",
            known.totals.withheld,
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
        len(known.quarantine),
    )
    yield _gauge("holdfast_health_asks", "Matters that a person has to inspect.", len(known.asks))


def _slow(state: CoreState) -> Iterator[Metric]:
    """Ranks that others wait for."""
    # Only ranks that are slow now: a gauge that stayed after the rank recovered would keep its alert
    # firing.
    now = [x for x in state.health.slow if x.until_step is None]
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
    lost_s = sum(x.lost_s for x in state.health.slow)
    yield _counter("holdfast_slow_seconds", "Training time spent waiting for slow ranks.", lost_s)


_node_facts = attrgetter("name", "host", "place", "identity", "failures", "held", "leaving", "phase")


class _Rows:
    """What is counted over all nodes, workers and ranks at one moment, of which a large job has thousands.

    The loop must answer heartbeats, so this only copies there what may change. The rest is counted where the answer is encoded,
    in another thread.
    """

    def __init__(self, state: CoreState, ready: int) -> None:
        """ready: workers that wait to be used."""
        there = state.membership.nodes.values()
        # Members of a generation never change, so they are not copied.
        self._generation = state.membership.generation
        self._nodes = list(map(_node_facts, there))
        self._unknown = sum(bool(n.health.unknown) and n.alive for n in there)
        self._ready = ready
        # By reference: a look at each took 3 ms of 16,000. Of them only the medians are read, each of which is its worker's
        # own and agrees with nothing else; one that is some milliseconds younger is as true.
        self._everybody = dict(state.membership.workers)

    def families(self) -> Iterator[Metric]:
        """For the thread that encodes."""
        members = self._generation.members if self._generation else ()
        ranks = Counter(m.worker.partition(".")[0] for m in members)
        yield _gauge("holdfast_ready_workers", "Warm workers that wait to be used.", self._ready)
        there = (self._everybody.get(m.worker) for m in members)
        medians = [w.median_s for w in there if w is not None and w.median_s is not None]
        if medians:
            text = "The median time of a step, on the slowest rank."
            yield _gauge("holdfast_step_median_seconds", text, max(medians))
        alive = [row for row in self._nodes if row[-1] is not NodePhase.LOST]
        yield _gauge("holdfast_nodes", "Connected nodes, spares included.", len(alive))
        # By the generation and not by what workers do now: while all start again, their nodes are no spares.
        free = sum(
            name not in ranks and held is None and leaving is None
            for name, *_, held, leaving, _phase in alive
        )
        yield _gauge("holdfast_spares", "Connected nodes that may be used and on which no rank is.", free)
        counts = {"leaving": 0, "held": 0}
        for *_, held, leaving, _phase in alive:
            counts["held"] += held is not None
            counts["leaving"] += leaving is not None
        text = "Nodes that are to leave and are still connected."
        yield _gauge("holdfast_leaving_nodes", text, counts["leaving"])
        yield _gauge("holdfast_held_nodes", "Connected nodes that are not used now.", counts["held"])
        yield _gauge(
            "holdfast_unwatched_nodes",
            "Nodes with a source of readings that does not answer or cannot be read.",
            self._unknown,
        )
        # Four series for each connected node; one that has left has none.
        info = InfoMetricFamily("holdfast_node", "Always 1; the labels say where the node is.")
        has = GaugeMetricFamily(
            "holdfast_node_ranks", "Ranks of the newest generation on the node.", labels=["node"]
        )
        failures = CounterMetricFamily(
            "holdfast_node_failures", "Failures of the node's workers.", labels=["node"]
        )
        unused = GaugeMetricFamily(
            "holdfast_node_held", "1 while the node is not used, else 0.", labels=["node"]
        )
        for name, host, place, identity, failed, held, *_ in alive:
            where = {"place": "/".join(place), "rack": place[-1] if place else ""}
            info.add_metric([], {"node": name, "host": host, **where, "identity": identity})
            has.add_metric([name], ranks[name])
            failures.add_metric([name], failed)
            unused.add_metric([name], float(held is not None))
        yield from (info, has, failures, unused)


def _with_unit(family: Metric) -> Metric:
    """The same family, which now says its unit to whoever asks for OpenMetrics."""
    # Read from the name and never written beside it. OpenMetrics refuses a whole scrape in which the two differ.
    unit = family.name.rpartition("_")[2]
    if unit in UNITS:
        family.unit = unit
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """One value."""
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """One count."""
    return CounterMetricFamily(name, text, value=value)


def _summary(name: str, text: str, count: int, total: float) -> SummaryMetricFamily:
    """How many, and their sum."""
    return SummaryMetricFamily(name, text, count_value=count, sum_value=total)


def _histogram(
    name: str, text: str, label: str, found: Mapping[str, Durations], ledger: str
) -> HistogramMetricFamily:
    """Durations by a label. ledger: of the incidents, for the ids of their traces."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for key, durations in sorted(found.items()):
        below = 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for i, bound in enumerate((*BOUNDS_S, float("inf"))):
            below += durations.counts[i]  # Prometheus' buckets are cumulative
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            newest = durations.newest.get(i)
            if newest is None:
                buckets.append((le, below))
                continue
            incident, seconds, utc_s = newest
            # The same id as the trace has, so a point of a chart leads to its trace.
            labels = {"incident": str(incident), "trace_id": trace_id(ledger, incident)}
            buckets.append((le, below, Exemplar(labels, seconds, utc_s)))
        family.add_metric([key], buckets, durations.total_s)
    return family
