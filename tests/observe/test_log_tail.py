"""Logs as they grow."""

import asyncio
import io

import pytest

from holdfast.agent.worker_logs import LogLimit
from holdfast.observe.log_tail import (
    LAST_BYTES,
    NOTHING,
    Tail,
    WholeLines,
    first_data,
    last_lines,
    last_said,
)


def joined(file, lines):
    return b"".join(last_lines(file, lines))


def test_last_lines_of_a_long_file():
    text = b"".join(b"line %d\n" % i for i in range(50_000))
    assert joined(io.BytesIO(text), 2) == b"line 49998\nline 49999\n"
    assert joined(io.BytesIO(text), 0) == text
    assert joined(io.BytesIO(text + b"half"), 1) == b"half"
    assert joined(io.BytesIO(b""), 5) == b""


def test_the_file_is_left_where_it_was_read_to():
    file = io.BytesIO(b"a\nb\nc\n")
    joined(file, 1)
    assert file.read() == b""


def test_tail_of_what_comes_only(tmp_path):
    async def follow():
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        tail = Tail(lambda label, lines: heard.put_nowait((label, lines)))
        old = tmp_path / "old.log"
        old.write_bytes(b"long ago\n")
        tail.add(old, "1", NOTHING)
        with old.open("ab") as log:
            log.write(b"now\n")
        assert await heard.get() == ("1", b"now\n")
        tail.close()

    asyncio.run(asyncio.wait_for(follow(), 10))


def test_tail_follows_files_that_grow_and_files_that_come(tmp_path):
    async def follow():
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        tail = Tail(lambda label, lines: heard.put_nowait((label, lines)))
        first, second = tmp_path / "first.log", tmp_path / "second.log"
        first.write_bytes(b"old\nlast\nbegun")
        tail.add(first, "1", 2)
        tail.add(second, "2", 0)
        assert await heard.get() == ("1", b"last\n")
        with first.open("ab") as log:
            log.write(b" and ended\n")
        assert await heard.get() == ("1", b"begun and ended\n")
        second.write_bytes(b"new\nunfinished")
        assert await heard.get() == ("2", b"new\n")
        tail.close()
        assert await heard.get() == ("2", b"unfinished\n")
        assert heard.empty()

    asyncio.run(asyncio.wait_for(follow(), 10))


MB = 1 << 20


def with_a_hole(path, lines, limit_bytes):
    """A log of so many lines, whose oldest part an agent gave back."""
    path.write_bytes(b"".join(b"line %07d\n" % i for i in range(lines)))
    limit = LogLimit(limit_bytes)
    limit.add(path)
    limit.look()
    return path


def test_what_was_given_back_is_skipped_and_nothing_else(tmp_path):
    path = with_a_hole(tmp_path / "log", 500_000, 4 * MB)
    with path.open("rb") as file:
        assert 0 < first_data(file, 0) < path.stat().st_size
        read = joined(file, 0)
        assert file.tell() == path.stat().st_size
        assert read == path.read_bytes()[-len(read) :]
        assert b"\0" not in read
        assert 2 * MB < len(read) <= 4 * MB
        assert joined(file, 2) == b"line 0499998\nline 0499999\n"


def test_last_lines_are_bounded_in_a_log_without_lines(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (LAST_BYTES + 1000))
    with path.open("rb") as file:
        assert len(joined(file, 3)) == LAST_BYTES
        assert max(map(len, last_lines(file, 0))) < MB


def test_who_follows_a_log_and_falls_behind_passes_over_the_hole(tmp_path):
    async def follow():
        heard: list[bytes] = []
        tail = Tail(lambda label, lines: heard.append(lines))
        path = tmp_path / "log"
        path.write_bytes(b"first\n")
        tail.add(path, "1", 0)
        with_a_hole(path, 500_000, 4 * MB)
        tail.look()
        tail.close()
        return heard

    first, *rest = asyncio.run(follow())
    assert first == b"first\n"
    assert b"".join(rest).endswith(b"line 0499999\n")
    assert b"\0" not in b"".join(rest)
    assert all(lines.endswith(b"\n") for lines in rest)


def test_a_line_that_never_ends_is_not_kept_in_memory():
    cut = WholeLines()
    taken = [cut.take(b"x" * MB) for _ in range(LAST_BYTES // MB + 1)]
    assert b"".join(taken) == b"x" * (LAST_BYTES + MB)
    assert cut.rest == b""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"epoch 1\n", b"epoch 1\n"),
        (b"\r 10%|# |\r 20%|##|", b" 20%|##|"),
        (b"\r 99%|##|\r100%|##|\r\n", b"100%|##|\n"),
        (b"\n", b"\n"),
        (b"", b""),
    ],
)
def test_a_progress_bar_shows_what_it_said_last(line, shown):
    assert last_said(line) == shown
