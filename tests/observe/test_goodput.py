"""Goodput in words and as a table."""

import io

import pytest
import typer
from rich.console import Console

from holdfast.cli.app import app
from holdfast.observe.goodput import (
    WORDS,
    goodput_line,
    goodput_table,
    goodput_words,
    losses,
    losses_lines,
)
from holdfast.protocol.phases import TimeClass

KNOWN = {
    "wall_s": 100.0,
    "productive_s": 80.0,
    "share": 0.8,
    "recomputed_s": 5.0,
    "computed_s": 85.0,
    "classes": {"start": 9.0, "productive": 80.0, "recomputed": 5.0, "restart": 4.0, "first_step": 2.0},
    "unknown": [],
}
UNTOLD = KNOWN | {
    "productive_s": None,
    "share": None,
    "recomputed_s": None,
    "classes": {"start": 9.0, "computed": 85.0, "restart": 6.0},
    "unknown": ["productive", "recomputed"],
}
SILENT = UNTOLD | {"computed_s": None, "classes": {"start": 1.0, "unexplained": 99.0}}
EARLY = KNOWN | {"productive_s": 0.0, "share": 0.0, "classes": {"start": 100.0}}


@pytest.mark.parametrize(
    ("goodput", "words"),
    [
        (KNOWN, "80.0% of 100.0 s wall time"),
        (EARLY, "0.0% of 100.0 s wall time"),
        (
            UNTOLD,
            "– of 100.0 s wall time: only the script knows which steps it repeated in 85.0 s of computing",
        ),
        (
            SILENT,
            "– of 100.0 s wall time: the script did not report steps to Holdfast",
        ),
        (
            KNOWN | {"wall_s": 9000.0, "recent": {"wall_s": 3600.0, "share": 0.91}},
            "80.0% of 2 h 30 min wall time, 91.0% of the last 60 min",
        ),
        (KNOWN | {"recent": {"wall_s": 100.0, "share": 0.8}}, "80.0% of 100.0 s wall time"),
        (
            KNOWN | {"wall_s": 9000.0, "recent": {"wall_s": 3600.0, "share": None}},
            "80.0% of 2 h 30 min wall time",
        ),
        ({"wall_s": None, "productive_s": None, "share": None}, "– of – wall time"),  # a report of before
    ],
)
def test_what_is_known_and_what_is_not(goodput, words):
    assert goodput_words(goodput) == words


def test_the_line_has_the_largest_losses():
    assert goodput_line(KNOWN).plain == (
        "goodput  80.0% of 100.0 s wall time; 9.00 s start, 5.00 s recomputed, 4.00 s restart"
    )
    assert "computed" not in goodput_line(UNTOLD).plain.partition(";")[2]


def test_the_table_has_every_class():
    stream = io.StringIO()
    Console(file=stream, width=100).print(goodput_table(KNOWN))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert [row[-3:] for row in rows if row and row[-1].endswith("%")] == [
        ["9.00", "s", "9.0%"],
        ["80.0", "s", "80.0%"],
        ["5.00", "s", "5.0%"],
        ["4.00", "s", "4.0%"],
        ["2.00", "s", "2.0%"],
    ]


def test_every_class_that_a_report_may_have_has_words():
    assert WORDS.keys() == set(TimeClass) - {TimeClass.LAUNCH}


@pytest.mark.parametrize("kind", TimeClass)
def test_a_loss_is_told_if_a_setting_mends_it(kind):
    found = losses({"wall_s": 600.0, "classes": {kind.value: 200.0}})
    without = {
        TimeClass.START, TimeClass.LAUNCH, TimeClass.COMPUTED, TimeClass.PRODUCTIVE, TimeClass.INTERRUPTED, TimeClass.DECIDE,
        TimeClass.JOIN, TimeClass.RESTORE, TimeClass.FIRST_STEP, TimeClass.PLANNED, TimeClass.SAVING, TimeClass.UNEXPLAINED,
    }  # fmt: skip
    assert [one["class"] for one in found] == ([] if kind in without else [kind.value])
    assert all("33.3% of 10 min 00 s" in one["text"] for one in found)


def test_a_command_that_a_loss_names_has_its_options():
    """Advice must be right when it is obeyed."""
    every = {kind.value: 10.0 for kind in TimeClass}
    for one in losses({"wall_s": 60.0, "classes": every}):
        words = one["how"].split()
        named = typer.main.get_command(app)
        for word in words[1:]:
            if word in getattr(named, "commands", {}):
                named = named.commands[word]
        options = {o for p in named.params for o in (*p.opts, *p.secondary_opts)}
        assert {w for w in words if w.startswith("--")} <= options, one["how"]


def test_small_losses_and_short_jobs_are_left_alone():
    assert losses({"wall_s": 59.0, "classes": {"detect": 50.0}}) == []
    assert losses({"wall_s": 600.0, "classes": {"detect": 59.0}}) == []
    assert losses({"wall_s": None, "classes": {}}) == losses({}) == []
    one, other = losses({"wall_s": 100.0, "classes": {"detect": 20.0, "idle_division": 32.0}}, 12_000)
    assert (one["class"], other["class"]) == ("idle_division", "detect")
    assert "12000 micro-batches" in one["text"]
    assert one["text"].endswith("…, 1200, 1500, 2000, 2400, 3000, 4000, 6000, 12000.")
    lines = losses_lines([one, other]).plain.splitlines()
    assert lines[0].startswith("to do  idle division takes 32.0% of 100.0 s")
    assert lines[1].endswith("See `holdfast run --detection SECONDS --stall-factor FACTOR`.")
