"""The two views that `holdfast run` writes to."""

import io
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from holdfast.observe.live import LiveView, PlainView, terminal
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_view import JobView


def view(status):
    return msgspec.convert(status, JobView)


SPEC = JobSpec(name="demo", script="train.py", max_nodes=2)
JOINED_FIELDS = {"node": "node1", "host": "127.0.0.1", "slots": 1}
JOINED = {"seq": 1, "t_s": 1.5, "utc": "", "kind": "node-joined", "fields": JOINED_FIELDS}
DROPPED = {"seq": 2, "t_s": 1.6, "utc": "", "kind": "worker-started", "fields": {"worker": "node1.0#1"}}
ENDED = {"seq": 3, "t_s": 9.0, "utc": "", "kind": "ended", "fields": {"outcome": "finished", "step": 9}}


class Clock:
    """Time that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(clock):
    return PlainView(SPEC, Path("/jobs/demo"), clock)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_plain_writes_a_line_per_event(plain, capsys):
    plain.event(JOINED)
    plain.event(DROPPED)
    assert lines(capsys) == ["[holdfast]     1.50 s  node1 joined with 1 slot"]


def test_plain_says_how_far_it_is_after_two_silent_seconds(plain, clock, capsys):
    clock.now += 1.9
    plain.tick()
    assert lines(capsys) == []
    clock.now += 0.2
    plain.tick()
    assert lines(capsys) == ["[holdfast] nodes warming up: importing torch (0 of 2 are here)"]


def test_plain_speaks_ever_more_rarely_and_is_awake_after_an_event(plain, clock, status, capsys):
    plain.status(view(status))
    said = []
    for _ in range(100):
        clock.now += 1
        plain.tick()
        said += [clock.now - 100] if lines(capsys) else []
    assert said[:4] == [2, 6, 14, 30]
    assert all(b - a <= 30 for a, b in pairwise(said))
    plain.event(JOINED)
    lines(capsys)
    clock.now += 2
    plain.tick()
    assert "step 1,234, loss" in lines(capsys)[0]


def test_plain_says_how_far_the_fetching_of_the_state_is(plain, clock, status, capsys):
    for worker, restored in zip(status["workers"], ([3_000_000_000, 12_000_000_000], None), strict=False):
        worker |= {"state": "restoring", "restored": restored}
    clock.now += 2.5
    plain.status(view(status))
    said = lines(capsys)[0]
    assert said.endswith("2 of 2 workers fetch the state of step 1,234: 3.00 GB of 12.0 GB")


def test_plain_knows_the_time_of_the_job(plain, clock, status, capsys):
    plain.status(view(status))
    clock.now += 2.5
    plain.tick()
    assert lines(capsys)[0].startswith("[holdfast]    63.50 s  step 1,234, ")


def test_plain_says_what_it_waits_for_at_the_end(plain, clock, status, capsys):
    plain.status(view(status))
    plain.event(ENDED)
    lines(capsys)
    clock.now += 2
    plain.tick()
    assert "waiting for the last processes to end" in lines(capsys)[0]


def test_plain_passes_output_on_untouched(plain, capfdbinary):
    plain.output(b"half a line\r\xff")
    assert capfdbinary.readouterr().out == b"half a line\r\xff"


LOST = JOINED | {"kind": "node-lost", "fields": {"node": "node1", "cause": "word " * 60 + "end"}}


def test_plain_lines_on_a_terminal_fit_100_columns(plain, status, clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    plain.status(view(status | {"step": 123_456_789_012, "world": 16384, "target": 16384}))
    clock.now += 2
    plain.tick()
    plain.event(LOST)
    assert max(map(len, lines(capsys))) <= 100


def test_plain_lines_in_a_file_are_whole(plain, capsys):
    plain.event(LOST)
    assert lines(capsys)[0].endswith("word word end")


@pytest.fixture
def live():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)
    return LiveView(SPEC, Path("/jobs/demo"), console)


def text(view):
    return view._console.file.getvalue()


def test_live_shows_the_startup_then_the_board(live, status):
    with live:
        live.tick()
        assert "nodes warming up: importing torch" in text(live)
        live.event(JOINED)
        live.status(view(status))
    assert "1.50 s  node1 joined with 1 slot" in text(live)
    assert "node0.0#1" in text(live)
    assert "kill-node:rank=1" in text(live)


def test_live_keeps_a_path_in_one_piece(live):
    log = "/a-long-home/of-someone/" + "who-likes-folders/" * 6 + "node1.0-1.log"
    gone = {"worker": "node1.0#1", "node": "node1", "code": 3, "log": log}
    with live:
        live.event(JOINED | {"kind": "worker-exited", "fields": gone})
    assert f"ended with exit code 3; log {log}\n" in text(live)


def test_live_shows_the_outcome_while_the_last_processes_end(live, status):
    with live:
        live.status(view(status))
        live.event(ENDED)
        live.tick()
    assert "demo  finished  step 1,234" in text(live)


def test_live_prints_whole_lines_above(live, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with live:
        live.output(b"step 1 lo")
        assert "step 1" not in text(live)
        live.output(b"ss 2.5\nprogress 10%\rprogress 90%\r\nthe rest")
    assert "step 1 loss 2.5\n" in text(live)
    assert "progress 90%\n" in text(live)
    assert "10%" not in text(live)
    assert "the rest\n" in text(live)


def test_live_sends_output_where_stdout_goes(live, capfdbinary):
    with live:
        live.output(b"bytes\n")
    assert capfdbinary.readouterr().out == b"bytes\n"


def test_a_file_is_no_terminal():
    assert terminal(io.StringIO()) is None
