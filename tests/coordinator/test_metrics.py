"""The figures for Prometheus, of jobs that went through this and that."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from desk import TIER, Desk, copy_of, running
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.service.job_view import build_status
from holdfast.coordinator.service.metrics import Scrape, metrics_text
from holdfast.coordinator.service.tally import NewestStep, Tally, happened
from holdfast.observe.traces import trace_id
from holdfast.protocol import messages as m
from holdfast.protocol.health import Condition, Finding, Remedy, Severity
from holdfast.protocol.snapshots import DurableTier, Saving

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
EVERY_WHOLE = Saving(tiers=(DurableTier(TIER.url, "1"), DurableTier("s3://bucket/run", "1")))


def figures(desk: Desk, steps: int = 0) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values."""
    text = metrics_text(desk.state, desk.tally(steps), desk.now).decode()
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
    assert ("holdfast_incident_stall_seconds_count", "script") not in seen  # it has not ended


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
    counted = [
        k
        for k in before
        if k[0].endswith(("_total", "_count", "_sum")) and "wall" not in k[0] and "events" not in k[0]
    ]
    assert {k: after[k] for k in counted} == {k: before[k] for k in counted}


def everything(desk: Desk) -> bytes:
    """Of a job of which all is known that can be."""
    tally = desk.tally(1)
    tally.weight, tally.newest = 8.0, NewestStep(t_s=1.0, loss=2.0, grad_norm=1.0, lr=0.1, weight=8.0)
    for worker in desk.state.membership.workers.values():
        worker.median_s = 0.2
    return metrics_text(desk.state, tally, desk.now)


def test_the_table_in_the_documentation_names_every_figure_with_its_type():
    desk = running(2, saving=EVERY_WHOLE)
    desk.snapshot(6, "n0", "n1")
    desk.state.membership.until = 10
    desk.commit(6)
    said = re.findall(r"^# TYPE (\S+) (\S+)$", everything(desk).decode(), re.M)
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
    told = {n.node: n.unknown for n in build_status(desk.state, desk.now).nodes}
    assert told == {"n0": [], "n1": ["watch-ended"], "n2": []}
    well = msgspec.structs.replace(unknown, condition=Condition.HEALTHY)
    desk.do(e.NodeSays("n1", m.FindingsReported((well,))))
    assert figures(desk)[("holdfast_unwatched_nodes",)] == 0


def test_what_is_not_known_of_the_newest_step_is_left_out():
    desk = running(2, committed=3)
    tally = Tally(commits=3, newest=NewestStep(t_s=1.0, loss=None, grad_norm=None, lr=0.5, weight=None))
    text = metrics_text(desk.state, tally, desk.state.began_s + 4.0).decode()
    names = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert (names["holdfast_step_age_seconds"], names["holdfast_learning_rate"]) == (3.0, 0.5)
    assert not {"holdfast_loss", "holdfast_gradient_norm", "holdfast_weight_total"} & names.keys()


def test_exemplars_are_for_those_who_ask_for_openmetrics():
    desk = running(3, spares=1)
    desk.lose("n1")
    for worker in ("n0.0#1", "n2.0#3"):
        desk.parks(worker, 5)
    desk.commit(6)
    figures = Scrape(desk.state, desk.core.index, desk.tally(6), desk.now)
    prometheus = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    text, content_type = figures.encode(prometheus)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    samples = [s for f in openmetrics.text_string_to_metric_families(text.decode()) for s in f.samples]
    [told] = [
        s.exemplar for s in samples if s.name == "holdfast_incident_stall_seconds_bucket" and s.exemplar
    ]
    assert told.labels == {"incident": "1", "trace_id": trace_id(desk.tally().ledger, 1)}
    plain, content_type = figures.encode("text/html")
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b"trace_id" not in plain


def test_who_brought_the_job_back():
    desk = running(3, spares=1)
    desk.lose("n1")
    for worker in ("n0.0#1", "n2.0#3"):
        desk.parks(worker, 5)
    desk.commit(6)
    assert figures(desk)[("holdfast_recoveries_total", "job")] == 1
    tally = Tally()
    for kind, fields in (("asked", {"incident": 3}), ("incident-closed", {"id": 3, "full_strength_s": 9.0})):
        happened(tally, kind, fields, 0.0)
    assert tally.recovered == {"job": 0, "person": 1}


def test_nodes_are_named_with_their_place_and_what_they_carry():
    desk = Desk(2, spares=1)
    desk.node("n0", place=("zone-a", "rack7"))
    text = metrics_text(desk.state, desk.tally(), desk.now).decode()
    [info] = [
        s for f in text_string_to_metric_families(text) for s in f.samples if s.name == "holdfast_node_info"
    ]
    assert info.labels == {
        "node": "n0",
        "host": "n0",
        "place": "zone-a/rack7",
        "rack": "rack7",
        "identity": "",
    }
    seen = figures(running(3, spares=1))
    assert [seen[("holdfast_node_ranks", n)] for n in ("n0", "n3")] == [1, 0]
    assert (seen[("holdfast_spares",)], seen[("holdfast_wanted_spares",)]) == (1, 1)


class Counted(tuple[m.Member, ...]):
    """Members that know how often all of them were gone through."""

    looks = 0

    def __iter__(self) -> Iterator[m.Member]:
        self.looks += 1
        return super().__iter__()


def test_ranks_are_counted_where_the_figures_are_encoded_and_not_where_they_are_taken():
    desk = running(3, spares=1)
    generation = desk.state.membership.generation
    assert generation is not None
    members = Counted(generation.members)
    desk.state.membership.generation = msgspec.structs.replace(generation, members=members)
    figures = Scrape(desk.state, desk.core.index, desk.tally(6), desk.now)
    assert members.looks == 0
    # What happens meanwhile is of another moment.
    desk.state.membership.nodes["n0"].failures = 77
    desk.state.membership.generation = None
    text = figures.encode()[0].decode()
    assert members.looks > 0
    assert 'holdfast_node_ranks{node="n0"} 1.0' in text
    assert 'holdfast_node_failures_total{node="n0"} 0.0' in text
