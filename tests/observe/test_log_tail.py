"""Logs as they grow."""

import asyncio
import io

from holdfast.observe.log_tail import NOTHING, Tail, last_lines


def test_last_lines_of_a_long_file():
    text = b"".join(b"line %d\n" % i for i in range(50_000))
    assert last_lines(io.BytesIO(text), 2) == b"line 49998\nline 49999\n"
    assert last_lines(io.BytesIO(text), 0) == text
    assert last_lines(io.BytesIO(text + b"half"), 1) == b"half"
    assert last_lines(io.BytesIO(b""), 5) == b""


def test_the_file_is_left_where_it_was_read_to():
    file = io.BytesIO(b"a\nb\nc\n")
    last_lines(file, 1)
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
