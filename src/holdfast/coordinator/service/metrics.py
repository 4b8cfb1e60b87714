"""The job's figures for Prometheus, from the core's state and the ledger. `docs/metrics.md` has the table.

Nothing is counted twice: what the state and the ledger hold is turned into figures when somebody asks.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import holdfast
from holdfast.coordinator.kernel.incidents import kind_of
from holdfast.coordinator.kernel.index import Index
from holdfast.coordinator.kernel.phases import JobPhase, WorkerPhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import pace, step_accounting
from holdfast.coordinator.service import goodput, metrics_health, metrics_storage
from holdfast.coordinator.service.metric_families import counter, gauge, histogram, with_unit
from holdfast.coordinator.service.metrics_rows import Rows
from holdfast.coordinator.service.tally import Tally
from holdfast.protocol import ledger
from holdfast.protocol.phases import TimeClass

OLD_SERIES = "text/plain"
"""What is answered to whoever says nothing of OpenMetrics."""


class Figures(Collector):
    """What is known at one moment. Made on the loop that changes the state, and encoded wherever there is time."""

    def __init__(
        self,
        state: CoreState,
        index: Index,
        tally: Tally,
        now: float,
        writable: bool = True,
        readings: Mapping[str, metrics_health.Readings] | None = None,
    ) -> None:
        """tally: of the ledger. writable: the ledger takes what is written. readings: node to what its agent told last."""
        self._families = list(_families(state, tally, now))
        self._families.append(
            gauge("holdfast_ledger_writable", "1 while the ledger can be written, else 0.", float(writable))
        )
        self._incidents = Counter(state.forgotten_kinds)
        self._incidents.update(map(kind_of, state.incidents))
        # Of these there may be ten thousand. Copied here and made into families by `collect`, in another thread:
        # the loop must answer heartbeats meanwhile.
        self._rows = Rows(state, index.count_workers(WorkerPhase.READY))
        self._readings = dict(readings or {})

    def collect(self) -> Iterator[Metric]:
        """For `encode`."""
        return map(with_unit, self._all())

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
        yield from metrics_health.readings(self._readings)

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
    index = Index(state.membership, state.spec.nproc)
    return Figures(state, index, tally, now, writable).encode()[0]


def _families(state: CoreState, tally: Tally, now: float) -> Iterator[Metric]:
    job = {"holdfast_job": state.spec.name, "engine": state.spec.engine}
    yield InfoMetricFamily("holdfast_job", "Always 1; the labels name the job and its engine.", job)
    yield from _training(state, tally, now)
    yield from _figures(state)
    yield from _incidents(state, tally)
    yield from metrics_health.changes(state)
    yield from metrics_health.health(state)
    yield gauge("holdfast_wanted_spares", "Spares that the job was started with.", state.spec.spares)
    yield from metrics_health.slow(state)
    yield from metrics_storage.snapshots(state, now)
    yield from metrics_storage.tiers(state, now)
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
    yield gauge("holdfast_world_size", "Workers that compute in the newest generation.", world)
    yield gauge("holdfast_target_world_size", "Workers at full strength.", state.target)
    yield counter("holdfast_generations", "Generations that were formed.", state.membership.number)
    wall_s = max(0.0, now - state.began_s)
    yield counter("holdfast_wall_seconds", "Time since the job's start.", wall_s)
    yield from _time(state, now)


def _steps(state: CoreState, tally: Tally, now: float) -> Iterator[Metric]:
    # Left out while it is not known. Prometheus would draw a 0 as a job that lost everything, and an
    # alert would fire for it.
    if state.step is not None:
        yield gauge("holdfast_step", "Committed steps of the current state.", state.step)
    steps = step_accounting.shown(state, tally.steps)
    if state.membership.counts_steps or tally.steps:
        steps["committed"] = tally.steps
    texts = {
        "committed": "Steps committed since the job's start.",
        "lost": "Committed steps that had to be computed again.",
        "computed": "Steps computed since the job's start, repeated ones included.",
    }
    for name, text in texts.items():
        if steps[name] is not None:
            yield counter(f"holdfast_steps_{name}", text, steps[name])
    if tally.weight is not None:
        text = "Weight (samples, tokens) of all commits, those of repeated steps included."
        yield counter("holdfast_weight", text, tally.weight)
    paced = pace.shown(state, now)
    texts = {
        "step_rate": "Steps that stayed per second of wall time, lately.",
        "remaining_seconds": "Time until all steps are committed at that rate.",
    }
    for (name, text), value in zip(texts.items(), (paced["steps_per_s"], paced["eta_s"]), strict=True):
        if value is not None:
            yield gauge(f"holdfast_{name}", text, value)
    if tally.newest is not None:
        age_s = max(0.0, now - state.began_s - tally.newest.t_s)
        yield gauge("holdfast_step_age_seconds", "Time since the newest commit.", age_s)
        newest = {
            "loss": ("Mean loss over the global batch of the newest step.", tally.newest.loss),
            "gradient_norm": ("Norm of the newest step's gradient before clipping.", tally.newest.grad_norm),
            "learning_rate": ("The newest step's learning rate, of the first group.", tally.newest.lr),
        }
        for name, (text, value) in newest.items():
            if value is not None:
                yield gauge(f"holdfast_{name}", text, value)


def _time(state: CoreState, now: float) -> Iterator[Metric]:
    # A gauge: a restart from an older state moves seconds from one class to another. What is unknown is
    # left out, for 0 would look like a job that makes no progress.
    told = goodput.shown(state, now)
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
        yield gauge("holdfast_recent_goodput", "Share of productive time in the last hour.", share)


def _figures(state: CoreState) -> Iterator[Metric]:
    value = GaugeMetricFamily(
        "holdfast_run_value", "The newest value that the script logged, by its name.", labels=["name"]
    )
    for name, (_, newest) in sorted(state.membership.figures.items()):
        value.add_metric([name], newest)
    yield value


def _incidents(state: CoreState, tally: Tally) -> Iterator[Metric]:
    stall = "Time from each fault to the next commit by any worker."
    yield histogram("holdfast_incident_stall_seconds", stall, "kind", tally.stalls, tally.ledger)
    full = "Time from each fault to the first commit at full strength."
    yield histogram(
        "holdfast_incident_full_strength_seconds", full, "kind", tally.full_strength, tally.ledger
    )
    phase = "How long each phase of an incident took."
    yield histogram("holdfast_incident_phase_seconds", phase, "phase", tally.phases, tally.ledger)
    recoveries = CounterMetricFamily(
        "holdfast_recoveries", "Incidents that came back to full strength, by who acted.", labels=["by"]
    )
    for by, number in sorted(tally.recovered.items()):
        recoveries.add_metric([by], number)
    yield recoveries
    is_open = sum(i.open for i in state.incidents)
    yield gauge("holdfast_open_incidents", "Incidents not yet back at full strength.", is_open)
    yield counter(
        "holdfast_restarts",
        "Workers that were started again; at level 0, complete jobs.",
        state.membership.restarts_used,
    )
