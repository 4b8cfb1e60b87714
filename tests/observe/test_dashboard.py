"""A running job in characters."""

import io

import msgspec
import pytest
from rich.console import Console

from holdfast.observe.dashboard import board, headline, progress_line, remaining_words, saved_line
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_view import JobView


def view(status):
    return msgspec.convert(status, JobView)


def drawn(picture, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width).print(picture)
    return stream.getvalue()


def test_it_shows_ranks_spares_and_lost_nodes(status):
    lines = [line.split() for line in drawn(board(view(status))).splitlines()]
    assert ["0", "node0", "node0.0#1", "training", "1,234"] in lines
    assert ["1", "node2", "node2.0#3", "training", "1,234"] in lines
    assert ["–", "node3", "node3.0#4", "spare,", "warm", "–"] in lines
    assert ["–", "node4", "–", "spare", "–"] in lines
    assert ["–", "node1", "–", "lost", "–"] in lines
    gone = next(n for n in status["nodes"] if n["node"] == "node1")
    assert "left" in drawn(board(view(status | {"nodes": [gone | {"left": True}]})))
    assert "lost" not in drawn(board(view(status | {"nodes": [gone | {"left": True}]})))
    order = [line[0] for line in lines if line and line[0] in ("0", "1")]
    assert order[0] == "0"


def test_it_fits_100_columns(status):
    status["job"] = "a-rather-long-name-of-a-job"
    assert max(map(len, drawn(board(view(status))).splitlines())) <= 100


def test_the_headline_has_the_state_of_training(status):
    text = headline(view(status)).plain
    for words in (
        "training",
        "step 1,234",
        "loss 2.6190",
        "5.00 steps/s",
        "generation 2",
        "2 of 2 workers",
        "1:01",
    ):
        assert words in text


def test_the_headline_says_how_long_it_takes_while_it_trains(status):
    to_go = status | {"pace": {"steps_per_s": 5.0, "until": 2234, "left": 1000, "eta_s": 200.0}}
    assert "  3 min 20 s left  2 of 2 workers" in headline(view(to_go)).plain
    assert "left" not in headline(view(status)).plain
    assert "left" not in headline(view(to_go | {"phase": "ended", "outcome": "failed"})).plain


@pytest.mark.parametrize(
    ("pace", "words"),
    [
        ({}, ""),  # a coordinator of another version
        ({"left": None, "eta_s": None}, ""),
        ({"left": 5, "eta_s": None}, "5 steps left"),
        ({"left": 1, "eta_s": 1.0}, "1.00 s left"),
        ({"left": 0, "eta_s": 0.0}, "all steps are done"),
    ],
)
def test_what_is_left_as_far_as_it_is_known(status, pace, words):
    assert remaining_words(view(status | {"pace": pace})) == words


def test_an_open_incident_counts_up(status):
    status["incidents"][0] |= {"stall_s": None, "full_strength_s": None}
    assert "0:19 …" in drawn(board(view(status)))


def test_many_ranks_are_summed_up(status):
    status["workers"] = [
        {
            "worker": f"node{i}.0#{i}",
            "node": f"node{i}",
            "rank": i,
            "state": "member",
            "restored": None,
            "step": 1,
            "log": "",
        }
        for i in range(100)
    ]
    status["nodes"] = []
    text = drawn(board(view(status), rows=10))
    assert "… and 90 more" in text


def test_it_says_what_is_saved_and_how_old_it_is(status):
    assert saved_line(view(status)) is None
    status["saving"] = {
        "snapshot": {"step": 1200, "nodes": 2, "nbytes": 5, "took_s": 0.1, "age_s": 1.2},
        "tiers": [
            {"url": "/scratch/run", "step": 1000, "age_s": 45.0, "failing": False, "under_way": None},
            {"url": "s3://bucket/run", "step": None, "age_s": None, "failing": True, "under_way": None},
        ],
    }
    said = saved_line(view(status)).plain
    assert "step 1,200 in the memory of 2 nodes, 0:01 ago" in said
    assert "step 1,000 in /scratch/run, 0:45 ago; s3://bucket/run FAILS" in said
    assert max(map(len, drawn(board(view(status))).splitlines())) <= 100
    status["saving"]["tiers"][0] |= {"under_way": 1200, "written": [300_000_000, 4_000_000_000]}
    assert "step 1,200 being written to /scratch/run: 300 MB of 4.00 GB" in saved_line(view(status)).plain
    status["workers"] = []
    assert progress_line(SPEC, view(status)) == "saving step 1,200 in /scratch/run: 300 MB of 4.00 GB"


def test_unknown_is_a_dash(status):
    status |= {"loss": None, "pace": {"steps_per_s": None}}
    assert "loss –  – steps/s" in headline(view(status)).plain


SPEC = JobSpec(name="demo", script="train.py", max_nodes=2, spares=1, preload=("torch", "numpy"))


def test_progress_before_there_is_any():
    assert progress_line(SPEC, None) == "nodes warming up: importing torch, numpy (0 of 3 are here)"


def test_progress_while_workers_start(status):
    workers = [w | {"state": "starting"} for w in status["workers"]]
    here = [n | {"alive": True} for n in status["nodes"][:3]]
    line = progress_line(SPEC, view(status | {"generation": 0, "workers": workers, "nodes": here}))
    assert line == "workers start the script (0 of 2 workers ready)"


def test_progress_while_it_trains(status):
    assert progress_line(SPEC, view(status)) == "step 1,234, loss 2.6190, 5.00 steps/s"
    assert progress_line(SPEC, view(status | {"world": 1})).endswith(", 1 of 2 workers")
    assert progress_line(SPEC, view(status | {"phase": "breaking"})).startswith("recovering: step 1,234, ")


def test_what_it_says_while_it_trains_fits_80_columns(status):
    pace = {"steps_per_s": 15.25, "until": 1_000_000, "left": 876_544, "eta_s": 57_477.0}
    status |= {"step": 123_456, "pace": pace}
    begins = len("[holdfast]     8.82 s  ")
    assert begins + len(progress_line(SPEC, view(status))) <= 80
    first = drawn(board(view(status | {"job": "fox"})), width=80).splitlines()[0]
    assert "15 h 57 min left" in first
    assert progress_line(SPEC, view(status | {"phase": "gathering"})).startswith(
        "waiting for workers: 2 of 2"
    )
