"""The oldest part of a worker's log is given back to the disk, and nobody who has the file open notices."""

import errno
import logging
import os

import pytest

from holdfast.agent import worker_logs
from holdfast.agent.worker_logs import ALIGN_BYTES, LogLimit

LIMIT = 8 << 20


@pytest.fixture
def log(tmp_path):
    """A log of more than the limit, open as its worker has it."""
    path = tmp_path / "worker.log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield path, lambda nbytes, byte=b"x": os.write(file, byte * nbytes)
    os.close(file)


def on_disk(path):
    return path.stat().st_blocks * 512


def test_the_oldest_part_is_given_back_and_offsets_stay(log):
    path, write = log
    limit = LogLimit(LIMIT)
    limit.add(path)
    size = 0
    for _ in range(10):
        size += write(3 << 20)
        limit.look()
        assert on_disk(path) <= LIMIT
        assert path.stat().st_size == size
    size += write(5, b"y")
    with path.open("rb") as file:
        file.seek(size - 6)
        assert file.read() == b"xyyyyy"  # where the worker's descriptor was, so it is
        start = os.lseek(file.fileno(), 0, os.SEEK_DATA)
    assert start % ALIGN_BYTES == 0
    assert size - start <= LIMIT


def test_a_log_within_its_limit_is_left_alone(log):
    path, write = log
    write(LIMIT)
    limit = LogLimit(LIMIT)
    limit.add(path)
    limit.look()
    assert on_disk(path) >= LIMIT


def test_a_log_that_its_script_empties_begins_anew(log):
    path, write = log
    limit = LogLimit(LIMIT)
    limit.add(path)
    write(2 * LIMIT)
    limit.look()
    os.truncate(path, 0)
    limit.look()
    for _ in range(3):
        write(LIMIT)
        limit.look()
    assert on_disk(path) <= LIMIT


def test_nobody_looks_for_a_log_that_is_not_there_or_of_a_worker_that_is_gone(log, tmp_path, caplog):
    path, write = log
    write(2 * LIMIT)
    limit = LogLimit(LIMIT)
    limit.add(tmp_path / "nobody.log")
    limit.add(path)
    limit.remove(path)
    limit.look()
    assert on_disk(path) == 2 * LIMIT
    assert not caplog.records


def test_a_file_system_without_holes_is_named_once(log, tmp_path, monkeypatch, caplog):
    path, write = log
    write(2 * LIMIT)
    other = tmp_path / "other.log"
    other.write_bytes(b"x" * (2 * LIMIT))

    class NoHoles:
        @staticmethod
        def fallocate(*args):
            worker_logs.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(worker_logs, "_libc", NoHoles)
    limit = LogLimit(LIMIT)
    limit.add(path)
    limit.add(other)
    with caplog.at_level(logging.WARNING):
        limit.look()
        limit.look()
    (record,) = caplog.records
    assert "worker.log is larger than --log-limit" in record.getMessage()
    assert "its file system cannot punch holes" in record.getMessage()
    assert path.stat().st_size == on_disk(path) == 2 * LIMIT
