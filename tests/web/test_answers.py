"""Answers of the page that it works out itself: when the job is done, who holds it up, what changed, what safety costs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service import job_view
from holdfast.coordinator.service.all_starts import differences, launches
from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, Store
from holdfast.health import stacks
from holdfast.protocol.job import JobSpec
from holdfast.protocol.snapshots import DurableTier
from holdfast.web import views
from holdfast.web.timeline import JobTimeline
from holdfast.web.views import cost

UTC = "2026-01-02T03:04:05.000+00:00"


STACK = '  File "/x/site-packages/holdfast/train/generation_group.py", line 7 in wait\n  File "/home/a/train.py", line 9 in main\n'
BUSY = '  File "/home/a/train.py", line 33 in load\n'


def test_who_holds_it_up() -> None:
    ranks = {"n0.0#1": 0, "n1.0#2": 1, "n2.0#3": 2}
    groups = stacks.cluster({"n0.0#1": STACK, "n1.0#2": STACK, "n2.0#3": BUSY, "n9.0#9": ""})
    assert stacks.lines(groups, ranks) == [
        "ranks 0-1 wait in a reduction: wait (holdfast/train/generation_group.py) < main (a/train.py:9)",
        "rank 2 is in load (a/train.py:33): load (a/train.py:33)",
    ]
    timeline = JobTimeline()
    assert views.stall(timeline) == {"stall": None}
    judged = {
        "workers": ["n2.0#3"],
        "reason": "it loads",
        "where": "2 ranks in a reduction, 1 in load (rank 2)",
    }
    opened = {"id": 1, "t_s": 5.0, "cause": "a hang", "cause_kind": "hang", "ranks": [2]}
    timeline.add(1, 5.0, UTC, "stall-judged", msgspec.json.encode(judged).decode())
    timeline.add(2, 5.0, UTC, "incident-opened", msgspec.json.encode(opened).decode())
    told = views.stall(timeline)["stall"]
    assert told["lines"] == []
    assert told["incident"] == 1
    timeline.add(3, 9.0, UTC, "stall-judged", msgspec.json.encode(judged | {"evidence": ["a", "b"]}).decode())
    told = views.stall(timeline)["stall"]
    assert (told["lines"], told["incident"]) == (["a", "b"], None)


def start(folder: Path, spec: JobSpec, outcome: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = CoreState(spec=spec)
    state.membership.outcome = outcome
    with closing(Store(folder / "job.sqlite")) as store:
        fields = {"node": "n0", "host": "h", "slots": 1}
        store.write(
            LedgerBatch(entries=[LedgerEntry(seq=1, t_s=0.0, utc=UTC, kind="node-joined", fields=fields)])
        )
        store.save(state)


def test_what_a_start_was_asked_for_differently(tmp_path: Path) -> None:
    first = JobSpec(name="job", script="train.py", args=("--lr", "0.1"), max_nodes=2)
    second = msgspec.structs.replace(first, args=("--lr", "0.2"), spares=1)
    start(tmp_path / "runs/9", first, None)
    (tmp_path / "runs/10").mkdir()
    (tmp_path / "runs/10/job.sqlite").write_bytes(b"no ledger")
    start(tmp_path / "runs/11", first, "stopped")
    start(tmp_path, second, None)
    with closing(Store(tmp_path / "job.sqlite", read_only=True)) as store:
        found = launches(tmp_path, second, store)["launches"]
    assert [(x["number"], x["outcome"]) for x in found] == [
        (12, None),
        (11, "stopped"),
        (10, None),
        (9, "killed"),
    ]
    assert found[0]["changes"] == [["args", "--lr 0.1", "--lr 0.2"], ["spares", "0", "1"]]
    # The one before it cannot be read, so what changed is not known.
    assert [x["changes"] for x in found[1:]] == [None, None, None]


def test_groups_of_options_are_looked_into() -> None:
    one, other = (
        {"saving": {"every": "1", "tiers": []}, "log": ""},
        {"saving": {"every": "2", "tiers": []}, "log": "debug"},
    )
    assert differences(one, other) == [["log", "–", "debug"], ["saving.every", "1", "2"]]
    assert differences(one, one) == []


def test_what_safety_costs() -> None:
    timeline = JobTimeline()
    assert cost(timeline, {})["words"].startswith("No failure so far")
    for number in range(4):
        timeline.incidents[number] = {"quiet": number == 3, "lost_steps": 0}
    for n in range(101):
        timeline.add(n + 1, 10.0 * n, UTC, "snapshot", '{"step": 1}')
    classes = {
        "detect": 3.0,
        "recomputed": 15.0,
        "restore": 12.0,
        "snapshot_stall": 101.0,
        "productive": 800.0,
    }
    found = cost(timeline, {"wall_s": 3000.0, "classes": classes})
    assert (found["incidents"], found["mtbf_s"], found["each_s"], found["every_s"]) == (3, 1000.0, 10.0, 10.0)
    assert found["snapshot_s"] == pytest.approx(1.0)
    # No step was lost: the interval has cost nothing but the snapshots.
    assert (found["best"], "no more" in found["words"]) == (None, True)
    for number in range(3):
        timeline.incidents[number]["lost_steps"] = 5
    found = cost(timeline, {"wall_s": 3000.0, "classes": classes})
    # A snapshot that holds up a second is worth less often than every ten at one failure in a thousand.
    assert found["best"]["every_s"] == pytest.approx(44.0, abs=1.0)
    assert found["best"]["share"] > found["now"]["share"]
    assert "would be" in found["words"]


def test_only_checkpoints_that_a_tier_still_has_are_listed() -> None:
    timeline = JobTimeline()
    saves = [(10, "a"), (20, "a"), (10, "b"), (30, "a"), (20, "a"), (40, "a"), (20, "b"), (30, "b")]
    for seq, (step, url) in enumerate(saves, 1):
        fields = {"step": step, "url": url, "took_s": 1.0, "skipped": 0}
        timeline.add(seq, float(seq), UTC, "saved", msgspec.json.encode(fields).decode())
    tiers = (DurableTier("a", keep=2), DurableTier("b", keep=1, keep_every=20))
    there = job_view.kept_checkpoints(timeline.checkpoints, tiers)
    assert [(one["step"], one["url"]) for one in there] == [(30, "b"), (20, "b"), (40, "a"), (30, "a")]
