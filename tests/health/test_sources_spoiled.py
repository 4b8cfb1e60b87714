"""Whatever is in a file: sources raise nothing, and the other readings still come."""

import pytest
from bench.health import rig

from holdfast.health.machine import machine_sources
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

CONTENTS = (b"", b"-1\n", b"9" * 40, b"\xff\xfe\x00 b c\n" * 3, b": :\n( ) D\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    for count in ("GPUS", "PORTS", "DRIVES", "INTERFACES", "OTHER_PCI", "PROCESSES", "CONTROLLERS", "QUEUES"):
        monkeypatch.setattr(rig, count, 1)
    rig.build(tmp_path)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    (tmp_path / "sys/block/sda/device").mkdir(parents=True)
    (tmp_path / "sys/block/sda/device/ioerr_cnt").write_text("0x1\n")
    (tmp_path / "sys/block/md0/md").mkdir(parents=True)
    (tmp_path / "sys/block/md0/md/degraded").write_text("0\n")
    return tmp_path


def read(root):
    names = set()
    for source in machine_sources(MachineRoot(root)):
        for reading in source.read():
            assert isinstance(reading, Reading)
            assert reading.value is not None or reading.why
            names.add((reading.name, reading.subject))
        source.close()
    return names


def test_any_file_may_hold_anything(machine):
    whole = read(machine)
    assert len(whole) > 50
    files = [path for path in machine.rglob("*") if path.is_file()]
    for path in files:
        before = path.read_bytes()
        for content in CONTENTS:
            path.write_bytes(content)
            kept = read(machine) & whole
            assert len(kept) > len(whole) / 2, (path, content)
        path.write_bytes(before)


def test_any_file_may_be_missing(machine):
    whole = read(machine)
    for path in [path for path in machine.rglob("*") if path.is_file()]:
        before = path.read_bytes()
        path.unlink()
        read(machine)
        path.mkdir()  # and cannot be read as a file
        read(machine)
        path.rmdir()
        path.write_bytes(before)
    assert read(machine) == whole
