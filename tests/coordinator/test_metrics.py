"""The figures for Prometheus, of jobs that went through this and that."""

import re
from pathlib import Path

import msgspec
import pytest
from desk import TIER, Desk, copy_of, running
from prometheus_client.parser import text_string_to_metric_families

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.coordinator.service.report import build_status
from holdfast.protocol import messages as m
from holdfast.protocol.health import Condition, Finding, Remedy, Severity
from holdfast.protocol.snapshots import DurableTier, Saving

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
EVERY_WHOLE = Saving(tiers=(DurableTier(TIER.url, "1"), DurableTier("s3://bucket/run", "1")))


def figures(desk: Desk, steps: int = 0) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values."""
    text = metrics_text(desk.state, steps, desk.now).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    # A scrape has these of its own, and renames those of the job.
    assert not any({"job", "instance"} & s.labels.keys() for s in samples)
    return {(s.name, *s.labels.values()): s.value for s in samples}


def test_training():
    desk = running(3, spares=1, committed=7)
    seen = figures(desk, steps=7)
    expected = {
        ("holdfast_phase", "running"): 1, ("holdfast_phase", "ended"): 0, ("holdfast_step",): 7,
        ("holdfast_steps_committed_total",): 7, ("holdfast_world_size",): 3, ("holdfast_target_world_size",): 3,
        ("holdfast_nodes",): 4, ("holdfast_ready_workers",): 1, ("holdfast_generations_total",): 1,
        ("holdfast_job_info", "local", "job"): 1,
    }  # fmt: skip
    assert {k: seen[k] for k in expected} == expected
    assert seen[("holdfast_wall_seconds_total",)] == pytest.approx(desk.now - desk.state.began_s)


def test_incidents_by_what_was_seen_of_them():
    desk = running(3, spares=1)
    desk.do(e.NodeLost("n1", desk.state.membership.nodes["n1"].session))
    for worker in ("n0.0#1", "n2.0#3"):
        desk.parks(worker, 5)
    desk.commit(6)
    seen = figures(desk)
    assert seen[("holdfast_incidents_total", "node")] == 1
    assert seen[("holdfast_incident_stall_seconds_count", "node")] == 1
    assert 0 < seen[("holdfast_incident_stall_seconds_sum", "node")] < 1
    desk.fails(desk.members()[0], 6)
    seen = figures(desk)
    assert [seen[("holdfast_incidents_total", "script")], seen[("holdfast_open_incidents",)]] == [1, 1]
    assert seen[("holdfast_incident_stall_seconds_count", "script")] == 0


def test_snapshots_their_copies_and_what_they_cost():
    desk = running(1, spares=1)
    copy = copy_of(6)
    desk.do(e.NodeSays("n0", m.SnapshotStored(copy, stall_s=0.25)))
    seen = figures(desk)
    assert seen[("holdfast_saved_step", "memory")] == 6
    assert ("holdfast_saved_step", "peer") not in seen
    assert seen[("holdfast_snapshot_duration_seconds_count",)] == 0
    desk.now += 1.5
    seen = figures(desk)
    assert seen[("holdfast_replication_lag_seconds",)] == pytest.approx(1.5)
    assert seen[("holdfast_saved_age_seconds", "memory")] == pytest.approx(1.5)
    desk.holds("n1", copy)
    desk.do(e.NodeSays("n0", m.SnapshotStored(copy_of(9))))
    seen = figures(desk)
    expected = {
        ("holdfast_saved_step", "memory"): 9, ("holdfast_saved_step", "peer"): 6,
        ("holdfast_replication_lag_steps",): 3, ("holdfast_snapshot_bytes_total",): 1000,
        ("holdfast_snapshot_copies_total",): 1, ("holdfast_snapshot_copied_bytes_total",): 1000,
        ("holdfast_snapshot_duration_seconds_count",): 1, ("holdfast_snapshot_stall_seconds_sum",): 0.25,
        ("holdfast_snapshots_skipped_total",): 0,
    }  # fmt: skip
    assert {k: seen[k] for k in expected} == expected
    desk.refuses("n1", copy_of(9))
    assert figures(desk)[("holdfast_snapshots_skipped_total",)] == 1


def test_durable_tiers():
    desk = running(2, saving=EVERY_WHOLE)
    seen = figures(desk)
    assert ("holdfast_saved_step", TIER.url) not in seen
    desk.snapshot(6, "n0", "n1")
    desk.stores(tier=TIER.url)
    desk.stores(reason="the bucket does not exist", tier="s3://bucket/run")
    seen = figures(desk)
    expected = {
        ("holdfast_saved_step", TIER.url): 6, ("holdfast_checkpoint_bytes_total", TIER.url): 1000,
        ("holdfast_checkpoint_duration_seconds_count", TIER.url): 1,
        ("holdfast_checkpoint_failures_total", TIER.url): 0,
        ("holdfast_checkpoint_failures_total", "s3://bucket/run"): 1,
        ("holdfast_tier_failing", TIER.url): 0, ("holdfast_tier_failing", "s3://bucket/run"): 1,
    }  # fmt: skip
    assert {k: seen[k] for k in expected} == expected
    assert ("holdfast_saved_step", "s3://bucket/run") not in seen
    desk.now += 60
    assert figures(desk)[("holdfast_saved_age_seconds", TIER.url)] > 60


def test_counters_outlive_the_coordinator():
    desk = running(2, saving=EVERY_WHOLE)
    desk.snapshot(6, "n0", "n1")
    desk.stores(tier=TIER.url)
    before = figures(desk)
    desk.crash()
    after = figures(desk)
    counted = [k for k in before if k[0].endswith(("_total", "_count", "_sum")) and "wall" not in k[0]]
    assert {k: after[k] for k in counted} == {k: before[k] for k in counted}


def test_the_table_in_the_documentation_names_every_figure_with_its_type():
    desk = running(2, saving=EVERY_WHOLE)
    desk.snapshot(6, "n0", "n1")
    said = re.findall(r"^# TYPE (\S+) (\S+)$", metrics_text(desk.state, 1, desk.now).decode(), re.M)
    documented = re.findall(r"^\| `(holdfast_\S+)` \| (\w+) \|", DOCS.read_text(), re.M)
    assert sorted(documented) == sorted(said)


def test_nodes_of_which_something_cannot_be_told():
    desk = running(3)
    assert figures(desk)[("holdfast_unwatched_nodes",)] == 0
    unknown = Finding(
        rule="watch-ended",
        severity=Severity.WARNING,
        remedy=Remedy.WATCH,
        source="agent",
        condition=Condition.UNKNOWN,
        evidence="its thread",
    )
    desk.do(e.NodeSays("n1", m.FindingsReported((unknown,))))
    assert figures(desk)[("holdfast_unwatched_nodes",)] == 1
    told = {n["node"]: n.get("unknown") for n in build_status(desk.state, desk.now)["nodes"]}
    assert told == {"n0": None, "n1": ["watch-ended"], "n2": None}
    well = msgspec.structs.replace(unknown, condition=Condition.HEALTHY)
    desk.do(e.NodeSays("n1", m.FindingsReported((well,))))
    assert figures(desk)[("holdfast_unwatched_nodes",)] == 0
