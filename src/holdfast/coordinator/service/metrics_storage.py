"""What is saved where, as figures for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.kernel.storage_state import Snapshot
from holdfast.coordinator.service.metric_families import counter, gauge, summary


def snapshots(state: CoreState, now: float) -> Iterator[Metric]:
    """Those in the nodes' memory, and how far their copies are behind."""
    totals = state.storage.totals
    yield counter("holdfast_snapshot_bytes", "Bytes of complete snapshots, each counted once.", totals.nbytes)
    yield summary(
        "holdfast_snapshot_duration_seconds",
        "Time from the first copy until a snapshot was complete.",
        totals.snapshots,
        totals.took_s,
    )
    yield summary(
        "holdfast_snapshot_stall_seconds",
        "How long training stood still for a snapshot.",
        totals.snapshots,
        totals.stall_s,
    )
    yield counter("holdfast_snapshot_copies", "Shards copied to the memory of another node.", totals.copies)
    yield counter(
        "holdfast_snapshot_copied_bytes",
        "Bytes of shards copied to the memory of another node.",
        totals.copied_bytes,
    )
    yield counter("holdfast_snapshots_skipped", "Shards that a node had no room for.", totals.skipped)
    yield counter("holdfast_saves_unreadable", "Snapshots and checkpoints found damaged.", totals.unread)
    yield from _lag(state, now)


def _lag(state: CoreState, now: float) -> Iterator[Metric]:
    there = state.storage.snapshots
    complete = max((x.step for x in there if x.complete), default=None)
    # Without a complete snapshot there is no distance. A 0 would say that all copies are there.
    if complete is not None:
        newest = max(x.step for x in there)
        yield gauge(
            "holdfast_replication_lag_steps",
            "Steps from the newest complete snapshot to the newest one.",
            newest - complete,
        )
    # An older one that never became complete is not waited for: the complete one has taken its place.
    waiting = [x for x in there if complete is None or x.step > complete]
    yield gauge(
        "holdfast_replication_lag_seconds",
        "How long the oldest snapshot after the newest complete one has waited for its copies.",
        max((now - x.began_s for x in waiting), default=0.0),
    )


def _newest(state: CoreState, held_by: int) -> Snapshot | None:
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


def tiers(state: CoreState, now: float) -> Iterator[Metric]:
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
    for url in (t.url for t in state.spec.saving.tiers):
        last, totals = state.storage.stored.get(url), state.storage.totals.tiers.get(url)
        if last is not None and last.took_s is not None:
            step.add_metric([url], last.step)
            age.add_metric([url], now - last.began_s)
        # Here 0 is known, for nothing was written. A rate needs the series from the first scrape on.
        nbytes.add_metric([url], totals.nbytes if totals else 0)
        took.add_metric([url], totals.checkpoints if totals else 0, totals.took_s if totals else 0.0)
        failures.add_metric([url], totals.failures if totals else 0)
        skipped.add_metric([url], totals.skipped if totals else 0)
        failing.add_metric([url], float(url in state.storage.failing_tiers))
        slow.add_metric([url], float(any(x.tier == url and x.slow for x in state.storage.storing)))
    yield from (step, age, nbytes, took, failures, skipped, failing, slow)
