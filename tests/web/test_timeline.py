"""What the page makes of a ledger: pure, so every case is one line of entries."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.protocol import ledger
from holdfast.web import timeline as timeline_module
from holdfast.web import views
from holdfast.web.timeline import STATES, JobTimeline, _Members


class Told:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.timeline, self.seq = JobTimeline(), 0

    def say(self, t_s: float, kind: str, /, **fields: Any) -> Told:
        self.seq += 1
        self.timeline.add(
            self.seq,
            t_s,
            f"2026-01-01T00:00:{self.seq % 60:02d}",
            kind,
            json.dumps(fields, separators=(",", ":")),
        )
        return self

    def formed(self, t_s: float, number: int, *nodes: str, start: int = 0) -> Told:
        names = [f"{node}.0#{number}" for node in nodes]
        return self.say(
            t_s, "formed", generation=number, start=start, world=len(names), workers=names, restore=[], applied=False,
            source="live",
        )  # fmt: skip

    def incident(self, number: int, t_s: float, stall_s: float = 0.5, **more: Any) -> Told:
        status: dict[str, Any] = {
            "id": number, "fault": None, "injected": False, "node": "node1", "ranks": [1], "at_step": int(t_s * 10),
            "t_s": t_s, "detect_s": 0.1, "decide_s": 0.1, "replace_s": None, "join_s": 0.1, "restore_s": 0.1,
            "first_step_s": 0.1, "stall_s": None, "earlier_stalls": 0, "earlier_stall_s": 0.0, "full_strength_s": None,
            "lost_steps": None, "rung": None, "cause": "killed", "cause_kind": "process", "rule": None, "quiet": False,
            "verdict": None, "where": None,
        } | more  # fmt: skip
        self.say(t_s, "incident-opened", **status)
        done = {"stall_s": stall_s, "full_strength_s": stall_s, "lost_steps": 0, "rung": "spare"}
        return self.say(t_s + stall_s, "incident-closed", **(status | done))


GOLDEN = json.loads(
    (Path(__file__).parents[1] / "protocol" / "golden" / f"ledger-{ledger.VERSION}.json").read_text()
)
"""By the names of their types, entries with all fields."""


@pytest.mark.parametrize("kind", ledger.EVENTS)
def test_an_entry_with_other_fields_than_its_kind_has_costs_no_page(kind: str) -> None:
    """A ledger may be damaged so that it is JSON still."""
    whole = GOLDEN[ledger.EVENTS[kind].__name__]
    wrong: list[dict[str, Any]] = [{}, *({k: v for k, v in whole.items() if k != name} for name in whole)]
    for name in whole:
        wrong += [
            whole | {name: value} for value in (None, 7, -1.5, "x", "", [], [[]], [7], {}, {"a": []}, True)
        ]
    told = Told().formed(1.0, 1, "node0").incident(1, 2.0)
    for at, fields in enumerate(wrong):
        told.seq += 1
        told.timeline.add(
            told.seq, 3.0 + at, "2026-01-01T00:00:00", kind, json.dumps(fields, separators=(",", ":"))
        )
        if at % 7 == 0:
            look_at(told.timeline)
    look_at(told.timeline)
    assert told.timeline.worlds[0][0] == 1.0


def look_at(timeline: JobTimeline) -> None:
    """Everything that the page shows of it, as it is sent."""
    shown = [
        views.todo(FACTS, timeline),
        views.now(FACTS | {"leave": {"yes": True, "text": ""}}, timeline),
        views.tiers(FACTS, timeline),
        views.typical(timeline),
        views.incidents(timeline),
        views.findings(timeline),
        views.incident_timeline(timeline, timeline.t_s),
        views.decisions(timeline),
        views.lines(timeline),
        views.strip(timeline, timeline.t_s),
        views.checkpoints(timeline, FACTS, list(reversed(timeline.checkpoints)), {}),
        views.stall(timeline),
        views.marks(timeline),
    ]
    msgspec.json.encode(shown)


FACTS: dict[str, Any] = {
    "job": "j", "engine": "local", "phase": "running", "outcome": None, "reason": None, "level": 2, "generation": 1,
    "world": 2, "target": 2, "least": {"nodes": 1, "wanted": 2, "most": 2}, "step": 10, "steps": {}, "goodput": {"classes": {}},
    "t_s": 100.0, "nodes": {}, "phases": {}, "spares": 1, "wants_spares": True, "ready": 2, "coming": 0,
    "health": {"asks": [], "quarantine": {}}, "saving": {"snapshot": None, "skipped": 0, "tiers": []}, "incidents": [], "slow": [], "figures": {}, "blame": None, "loss": 1.0,
    "pace": {"steps_per_s": 2.0, "until": None, "left": None, "eta_s": None},
    "weight_per_s": None, "last_step_t_s": 99.5, "ledger_trouble": None, "ledger": "x", "ledger_seq": 1, "live": True,
    "micro_batches": 6, "began_utc_s": 1767225600.0,
}  # fmt: skip


def test_an_entry_counts_once() -> None:
    told = Told().incident(1, 5.0)
    before = dict(told.timeline.incidents)
    told.timeline.add(1, 5.0, "x", "incident-opened", json.dumps({"id": 9}))
    assert told.timeline.incidents == before


def test_an_incident_is_told_to_its_end() -> None:
    told = Told().say(0.0, "node-joined", node="node1", host="h", slots=1).incident(1, 5.0)
    told.say(6.0, "incident-explained", id=1, node="node1", cause="its disk broke", was="killed")
    told.say(6.5, "incident-joined", id=1, node="node2", cause="also lost")
    (shown,) = views.incidents(told.timeline)["incidents"]
    assert (shown["cause"], shown["also"], shown["open"], shown["stall_s"]) == (
        "its disk broke",
        ["also lost"],
        False,
        0.5,
    )
    assert told.timeline.incidents[1]["seqs"] == [2, 5]
    (bar,) = views.incident_timeline(told.timeline, 10.0)["bars"]
    assert (bar["t_s"], bar["end_s"], bar["kind"]) == (5.0, 5.5, "process")
    assert [name for name, _ in bar["phases"]] == ["detect", "decide", "join", "restore", "first_step"]


FOUND: dict[str, Any] = {
    "node": "node1", "incident": None, "rule": "row-remapping", "severity": "warning", "remedy": "watch", "source": "log",
    "condition": "faulty", "subject": "gpu 0", "device": "", "worker": "", "evidence": "a\x1b[2Jline", "count": 2, "shared": False,
    "dry_run": False, "age_s": 0.0, "firm": False,
}  # fmt: skip


def test_findings_are_told_with_what_their_words_mean() -> None:
    told = (
        Told().say(3.0, "finding", **FOUND).say(4.0, "finding", **FOUND | {"dry_run": True, "rule": "other"})
    )
    newest, oldest = views.findings(told.timeline)["findings"]
    assert (newest["rule"], newest["dry_run"], oldest["t_s"], oldest["evidence"]) == (
        "other",
        True,
        3.0,
        "a\\x1b[2Jline",
    )
    assert (oldest["severity_what"], oldest["remedy_what"]) == ("may become a fault", "nothing is done")
    page = views.findings(told.timeline, before=2, count=1)
    assert ([f["rule"] for f in page["findings"]], page["more"], page["older"]) == (
        ["row-remapping"],
        False,
        False,
    )
    # Curves are marked where the step is known, and not for a rule on trial.
    assert views.marks(told.timeline) == []
    for finding in told.timeline.findings:
        finding["at_step"] = 30
    (mark,) = views.marks(told.timeline)
    assert (mark["step"], mark["what"], mark["text"]) == (30, "finding", "node1 row-remapping: a\\x1b[2Jline")


def test_a_timeline_keeps_the_newest_incidents_and_counts_the_others() -> None:
    told, many = Told(), timeline_module.INCIDENTS_KEPT + 300
    told.incident(1, 0.5, open=True)
    told.say(0.6, "incident-opened", id=2, t_s=0.6, cause="still open", cause_kind="process", quiet=False)
    for number in range(3, many + 1):
        told.incident(number, float(number), quiet=number % 2 == 0)
    timeline = told.timeline
    assert len(timeline.incidents) == timeline_module.INCIDENTS_KEPT
    assert (timeline.newest, timeline.forgotten) == (many, 300)
    # One that is open has more to come.
    assert 2 in timeline.incidents
    assert 3 not in timeline.incidents
    assert timeline.forgotten_failures == 1 + sum(n % 2 for n in range(3, 302))
    listed = views.incidents(timeline, count=50)
    assert (listed["all"], listed["more"]) == (many, True)
    assert views.incident_timeline(timeline, float(many))["older"] == 300
    # A late word of one that was let go changes nothing.
    told.say(9_999.0, "incident-explained", id=5, node="n", cause="late", was="x")
    told.say(9_999.0, "incident-settled", id=5, t_s=5.0, cause="late", quiet=True)
    assert (len(timeline.incidents), timeline.forgotten) == (timeline_module.INCIDENTS_KEPT, 300)
    # Where the ledger tells of an old one.
    assert views.wanted(timeline, 60, 50) == list(range(10, 60))
    assert 0 <= timeline.before(10).seq < 2 * 10
    assert len(timeline.bookmarks) <= timeline_module.BOOKMARKS_KEPT


def test_bookmarks_have_a_bound_however_many_incidents_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "BOOKMARKS_KEPT", 8)
    told = Told()
    for number in range(1, 2_001):
        told.incident(number, float(number))
    assert len(told.timeline.bookmarks) <= 8
    for number in (1, 700, 2_000):
        assert told.timeline.before(number).seq < 2 * number - 1


def test_a_large_loss_is_something_to_do() -> None:
    goodput = {
        "wall_s": 7200.0,
        "classes": {"productive": 4000.0, "idle_division": 2304.0, "data_wait": 896.0},
    }
    status = FACTS | {"goodput": goodput}
    idle, wait = views.todo(status, JobTimeline())
    assert idle["text"].startswith(
        "idle division takes 32.0% of 2 h 00 min: workers wait in each step, because 6 micro-batches"
    )
    assert idle["text"].endswith("that divides them: 1, 2, 3, 6.")
    assert idle["how"].startswith("holdfast plan division")
    assert "workers=N" in wait["text"]
    # Of a job of many hours the last one counts: what was mended is no more to be done.
    mended = goodput | {"recent": {"wall_s": 3600.0, "classes": {"productive": 3600.0}}}
    assert views.todo(FACTS | {"goodput": mended}, JobTimeline()) == []
    # Of one that is over nothing is to be done now, and where the time went says what to set for the next start.
    ended = status | {"phase": "ended", "outcome": "finished", "leave": None}
    assert views.todo(ended, JobTimeline()) == []
    assert [x["class"] for x in views.now(ended, JobTimeline())["goodput"]["losses"]] == [
        "idle_division",
        "data_wait",
    ]


def test_what_a_node_did() -> None:
    told = Told()
    for node in ("a", "b", "c"):
        told.say(0.0, "node-joined", node=node, host="h", slots=1)
    told.formed(1.0, 1, "a", "b").say(5.0, "node-lost", node="b", cause="gone").formed(6.0, 2, "a", "c")
    told.say(8.0, "node-held", node="c", reason="checked").formed(9.0, 3, "a")
    states = {node: [STATES[s] for _, s in runs] for node, runs in told.timeline.runs.items()}
    assert states == {
        "a": ["waits", "trains"],
        "b": ["waits", "trains", "lost"],
        "c": ["waits", "trains", "held"],
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_difference_of_two_generations_is_that_of_their_names(seed: int) -> None:
    """However the lists differ: names that begin or end alike, none, all."""
    rng, members, before = random.Random(seed), _Members(), set()
    names = [f"n{a}.{b}#{c}" for a in (1, 11, 111, 2) for b in (0, 1) for c in (1, 11)]
    for _ in range(300):
        chosen = rng.sample(names, rng.randrange(len(names)))
        text, came, left = members.changed(
            json.dumps({"world": 1, "workers": chosen, "z": "]"}, separators=(",", ":"))
        )
        nodes = {name.rpartition(".")[0] for name in chosen}
        assert (came, left) == (nodes - before, before - nodes)
        assert set(members.nodes) == nodes
        assert json.loads(text) == {"world": 1, "workers": [], "z": "]"}
        before = nodes


def test_the_strip_has_the_worst_first_and_folds_the_rest() -> None:
    told = Told()
    nodes = [f"n{k}" for k in range(200)]
    for node in nodes:
        told.say(0.0, "node-joined", node=node, host="h", slots=1)
    told.formed(1.0, 1, *nodes).incident(1, 5.0, node="n7").incident(2, 7.0, node="n7").incident(
        3, 9.0, node="n9"
    )
    told.say(9.0, "node-lost", node="n9", cause="gone")
    strip = views.strip(told.timeline, 20.0)
    assert [(row[0], row[1]) for row in strip["rows"]] == [("n7", 2), ("n9", 1)]
    assert (strip["plain"], strip["hidden"], len(strip["stops"])) == (198, 0, 3)


def test_thousands_of_incidents_are_a_few_hundred_bars_and_none_is_left_out() -> None:
    told = Told()
    for number in range(1, 2_001):
        told.incident(number, float(number), stall_s=1.0 + number % 7)
    bars = views.incident_timeline(told.timeline, 2_010.0)["bars"]
    assert len(bars) <= 2 * views.BARS
    assert sum(b["n"] for b in bars) == 2_000
    assert len(views.marks(told.timeline)) <= views.MARKS
    page = views.incidents(told.timeline, count=50)
    assert (page["incidents"][0]["id"], page["more"], page["all"]) == (2_000, True, 2_000)
    assert views.incidents(told.timeline, before=51, count=50)["incidents"][0]["id"] == 50


@pytest.mark.parametrize(
    ("changes", "tone", "why"),
    [
        ({}, "good", ""),
        ({"world": 1}, "busy", "1 worker fewer than wanted"),
        ({"phase": "gathering", "ready": 1}, "busy", "1 worker of 2 are ready"),
        ({"phase": "ended", "outcome": "finished"}, "over", ""),
        ({"phase": "ended", "outcome": "failed", "reason": "too few"}, "bad", "too few"),
        (
            {"phase": "breaking", "incidents": [{"id": 3, "cause": "killed", "quiet": False}]},
            "busy",
            "incident 3: killed",
        ),
    ],
)
def test_the_headline_says_what_and_why(changes: dict[str, Any], tone: str, why: str) -> None:
    shown = views.headline(FACTS | changes)
    assert (shown["tone"], shown["why"]) == (tone, why)
    assert "of 2 workers" in shown["text"]


TIER = {"url": "/t", "step": 4, "age_s": 9.0, "failing": False, "slow": False, "under_way": None}


@pytest.mark.parametrize(
    ("changes", "urgent", "words"),
    [
        ({"ledger_trouble": "disk full"}, True, "disk full"),
        ({"saving": {"tiers": [TIER | {"failing": True}]}}, True, "do not reach /t"),
        ({"saving": {"tiers": [TIER | {"slow": True}]}}, True, "stands still"),
        ({"phase": "gathering", "ready": 1}, True, "Add nodes: 1 worker"),
        ({"spares": 0}, False, "no spare is left"),
        (
            {"health": {"asks": [{"node": "n3", "text": "look at its fan", "incident": 2}]}},
            False,
            "Inspect n3",
        ),
        ({"slow": [{"rank": 1, "node": "n", "ratio": 1.5, "share": 0.3}]}, False, "1.50 times"),
        ({"phase": "ended", "outcome": "failed", "blame": {"cause": "ImportError"}}, True, "ImportError"),
    ],
)
def test_a_person_is_told_what_to_do(changes: dict[str, Any], urgent: bool, words: str) -> None:
    assert views.todo(FACTS, JobTimeline()) == []
    (one,) = views.todo(FACTS | changes, JobTimeline())
    assert one["urgent"] is urgent
    assert words in one["text"]


def test_an_empty_list_says_so() -> None:
    assert views.nothing(FACTS) == "Nothing."
    assert "by itself" in views.nothing(FACTS | {"incidents": [{"quiet": False}]})


def test_what_would_be_lost() -> None:
    snapshot = {"step": 9, "nodes": 1, "nbytes": 5, "age_s": 1.0}
    memory, tier = views.tiers(FACTS | {"saving": {"snapshot": snapshot, "tiers": [TIER]}}, JobTimeline())
    assert (memory["state"], memory["lag_steps"], memory["lag_s"]) == ("one copy", 1, 0.5)
    assert (tier["state"], tier["lag_steps"], tier["copies"]) == ("good", 6, None)
    unknown = views.tiers(
        FACTS | {"saving": {"snapshot": None, "tiers": [TIER | {"step": None, "age_s": None}]}}, JobTimeline()
    )[0]
    assert (unknown["state"], unknown["lag_steps"]) == ("nothing yet", None)


def test_of_a_job_that_has_ended_the_last_save_counts_and_no_memory() -> None:
    told = Told().say(40.0, "saved", step=4, url="/t", took_s=0.1, skipped=0)
    told.say(98.0, "saved", step=10, url="/t", took_s=None, skipped=None)
    snapshot = {"step": 9, "nodes": 2, "nbytes": 5, "age_s": 1.0}
    tiers = [TIER, TIER | {"url": "/other"}]
    ended = FACTS | {"phase": "ended", "saving": {"snapshot": snapshot, "tiers": tiers}}
    here, other = views.tiers(ended, told.timeline)
    assert (here["name"], here["step"], here["age_s"], here["lag_steps"]) == ("/t", 10, 2.0, 0)
    assert (other["step"], other["lag_steps"]) == (4, 6)


def test_ranks_are_chosen_by_words() -> None:
    rows = [
        {
            "rank": n,
            "worker": f"w{n}",
            "node": f"node{n % 3}",
            "state": "training" if n else "spare",
            "ratio": 2.0 if n == 4 else None,
        }
        for n in range(100)
    ]
    assert views.ranks(rows, "slow")["ranks"][0]["rank"] == 4
    assert views.ranks(rows, "waits")["count"] == 1
    assert views.ranks(rows, "node:node1")["count"] == 33
    window = views.ranks(rows, "", 90, 40)
    assert (len(window["ranks"]), window["count"], window["first"]) == (10, 100, 90)


def test_nodes_of_a_job_that_begins_are_on_their_way() -> None:
    begins = FACTS | {"phase": "gathering", "ready": 0, "generation": 0, "spares": 0, "t_s": 5.0}
    assert views.todo(begins, JobTimeline()) == []
    # Not for ever: then somebody has to look.
    assert views.todo(begins | {"t_s": views.BEGINS_S}, JobTimeline())[0]["urgent"] is True
