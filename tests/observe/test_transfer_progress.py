"""Progress in bytes: silent at first, then now and then."""

import io

import pytest

from holdfast.observe import transfer_progress
from holdfast.observe.transfer_progress import ByteCount, HowFar


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(transfer_progress.time, "monotonic", lambda: now[0])
    return now


def test_nothing_is_said_in_the_first_two_seconds_and_then_ever_more_rarely(clock):
    said = []
    count = ByteCount(said.append, "loading step 5", 200_000_000)
    times = []
    for second in range(100):
        clock[0] = 100.0 + second
        before = len(said)
        count.add(1_000_000)
        times += [second] if len(said) > before else []
    assert times == [2, 6, 14, 30, 60, 90]
    assert said[0] == "loading step 5: 3.00 MB of 200 MB, 1.50 MB/s, 2 min 11 s left"


def test_a_stream_that_is_no_terminal_gets_lines(clock):
    stream = io.StringIO()
    with ByteCount(stream, "step 5") as count:
        clock[0] += 2.5
        count.add(5_000_000)
    assert stream.getvalue() == "step 5: 5.00 MB, 2.00 MB/s\n"


def test_what_is_left_is_never_less_than_nothing(clock):
    said = []
    count = ByteCount(said.append, "reading", 1_000_000)
    clock[0] += 2.5
    count.add(5_000_000)
    assert said == ["reading: 5.00 MB of 1.00 MB, 2.00 MB/s, 0 ms left"]


def test_a_terminal_gets_one_line_that_is_cleared_in_the_end(clock):
    stream = io.StringIO()
    stream.isatty = lambda: True
    with ByteCount(stream, "step 5") as count:
        for _ in range(3):
            clock[0] += 2.0
            count.add(1_000_000)
    assert stream.getvalue().count("step 5: ") == 3
    assert stream.getvalue().endswith("\r\033[K")
    assert "\n" not in stream.getvalue()


def test_who_was_told_how_far_it_is_hears_of_its_end(clock):
    said = []
    short = HowFar(lambda *far: said.append(far))
    short.add(5, 100)
    short.over(100)
    assert said == []
    long = HowFar(lambda *far: said.append(far))
    clock[0] += 2.5
    long.add(5, 100)
    long.over(100)
    assert said == [(5, 100), (100, 100)]
