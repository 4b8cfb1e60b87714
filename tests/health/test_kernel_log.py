"""The kernel's log: records as /dev/kmsg gives them, going on where it was left, and what is done when it overruns."""

import asyncio
import errno
import json
import os

import pytest

from holdfast.health import kmsg
from holdfast.health.kmsg import Kmsg, KmsgFile, format_record, open_kernel_log, parse_record

RECORD = rb"3,1234,5140900,-;NVRM: Xid (PCI:0000:05:00): 79, pid=1, name=x, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("data", "sequence", "uptime_s", "text"),
    [
        (
            b"6,339,5140900,-;NET: Registered protocol family 10\n",
            339,
            5.1409,
            "NET: Registered protocol family 10",
        ),
        (
            b"7,160,424069,-;pci_root PNP0A03:00: host bridge\n SUBSYSTEM=acpi\n DEVICE=+acpi:PNP0A03:00\n",
            160,
            0.424069,
            "pci_root PNP0A03:00: host bridge",
        ),
        (b"4,1,2,c,caller=T1;a; b\\x09c\n", 1, 2e-6, "a; b\tc"),
        (b"30,5,7,-;\xff broken\n", 5, 7e-6, "\ufffd broken"),
    ],
)
def test_records(data, sequence, uptime_s, text):
    record = parse_record(data)
    assert (record.sequence, record.text) == (sequence, text)
    assert record.uptime_s == pytest.approx(uptime_s)


@pytest.mark.parametrize("data", [b"", b"hello", b"a,b,c,-;x", b"3,1;x", b" SUBSYSTEM=acpi"])
def test_what_is_no_record(data):
    assert parse_record(data) is None


def test_what_is_written_is_read():
    record = parse_record(format_record(7, "mine"))
    assert (record.sequence, record.text) == (7, "mine")


def test_a_file_that_stands_in_for_it(tmp_path):
    path = tmp_path / "kmsg"
    path.write_bytes(RECORD + b"\n")
    file = KmsgFile(path)
    try:
        assert file.lines() == []  # from before
        with path.open("ab") as log:
            log.write(format_record(1, "one") + format_record(2, "two") + RECORD[:30])
        assert [line.text for line in file.lines()] == ["one", "two"]
        with path.open("ab") as log:
            log.write(RECORD[30:] + b"\n")
        (line,) = file.lines()
        assert line.source == "kmsg"
        assert "79" in line.text
    finally:
        file.close()


class Device(Kmsg):
    """A /dev/kmsg that gives what the test says. None: its buffer was overrun there."""

    def __init__(self, records, left=None, boot="boot-1"):
        self.records = list(records)
        self._left, self._boot, self.overrun = left, boot, 0
        self._after = self._read_left()
        if self._after is None:
            self.records = []  # from the end on

    def _read(self):
        if not self.records:
            raise BlockingIOError
        record = self.records.pop(0)
        if record is None:
            raise BrokenPipeError(errno.EPIPE, "overrun")
        return record


def records(*numbers):
    return [b"6,%d,1000000,-;line %d\n" % (n, n) for n in numbers]


def texts(device):
    return [line.text for line in device.lines()]


def test_it_goes_on_where_it_was_left(tmp_path):
    left = tmp_path / "kmsg.left"
    first = Device(records(1, 2, 3), left)
    assert texts(first) == []  # what was said before the job is for the checks
    first.records = records(4, 5)
    assert texts(first) == ["line 4", "line 5"]
    again = Device(records(1, 2, 3, 4, 5, 6), left)
    assert texts(again) == ["line 6"]


def test_after_a_boot_it_begins_anew(tmp_path):
    left = tmp_path / "kmsg.left"
    first = Device([], left)
    first.records = records(400)
    texts(first)
    assert texts(Device(records(1, 2), left, boot="boot-2")) == []


@pytest.mark.parametrize("content", ["", "boot-1", "boot-1 x", "\0\0", "other 5"])
def test_a_broken_note_of_where_it_was_left(tmp_path, content):
    left = tmp_path / "kmsg.left"
    left.write_text(content)
    assert texts(Device(records(1), left)) == []


def test_an_overrun_is_passed_over():
    device = Device([])
    device.records = [*records(1), None, *records(900, 901)]
    assert texts(device) == ["line 1", "line 900", "line 901"]
    assert device.overrun == 1


def test_a_flood_is_read_in_parts():
    device = Device([])
    device.records = records(*range(kmsg.BATCH + 10))
    assert len(device.lines()) == kmsg.BATCH
    assert len(device.lines()) == 10


def test_no_permission_says_what_would_help(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kmsg, "Kmsg", refuse)
    monkeypatch.setattr(kmsg.shutil, "which", lambda _: None)
    monkeypatch.setattr(kmsg.os, "geteuid", lambda: 0)
    with pytest.raises(OSError, match=r"not permitted.*journalctl was not found.*kernel.dmesg_restrict=0"):
        open_kernel_log(None)


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_real_one(tmp_path):
    """Nothing is written into it: it is opened at its end, and nothing is there or what the kernel says meanwhile."""

    async def read():
        try:
            device = Kmsg(left=tmp_path / "left")
        except PermissionError:
            pytest.skip("kernel.dmesg_restrict")
        asyncio.get_running_loop().add_reader(device.fileno(), lambda: None)
        lines = device.lines()
        asyncio.get_running_loop().remove_reader(device.fileno())
        device.close()
        return lines

    assert all(line.age_s >= 0 for line in asyncio.run(read()))


def test_the_journal_is_asked_when_the_device_may_not_be_read(tmp_path, monkeypatch):
    """A journalctl that the test wrote: its lines come through, and its end is an error."""
    script = tmp_path / "journalctl"
    text = "EXT4-fs (sda1): Remounting filesystem read-only"
    entry = {"_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "MESSAGE": text}
    script.write_text(f"#!/bin/sh\n[ $4 = --output=json ] && echo '{json.dumps(entry)}'\n")
    script.chmod(0o755)

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kmsg, "Kmsg", refuse)
    monkeypatch.setattr(kmsg.shutil, "which", lambda _: str(script))
    monkeypatch.setattr(kmsg, "_may_read_journal", lambda: True)

    async def read():
        journal = open_kernel_log(None)
        ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(journal.fileno(), ready.set)
        lines = []
        try:
            while True:
                await ready.wait()
                ready.clear()
                lines += journal.lines()
        except EOFError:
            return lines
        finally:
            asyncio.get_running_loop().remove_reader(journal.fileno())
            journal.close()

    assert [line.text for line in asyncio.run(read())] == ["EXT4-fs (sda1): Remounting filesystem read-only"]
