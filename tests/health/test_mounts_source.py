import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import Hand, values, write

from holdfast.health.bounded_call import BoundedCaller, NoAnswerError
from holdfast.health.mounts import Mounts, parse_mounts
from holdfast.health.sources import MachineRoot

ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"
DATA = r"30 22 8:17 / /data\040one rw,relatime - xfs /dev/sdb1 rw,attr2" + "\n"
OTHER = """23 22 0:21 / /proc rw - proc proc rw
24 22 7:0 / /snap/core rw - squashfs /dev/loop0 ro
25 22 8:1 /etc/hosts /etc/hosts ro - ext4 /dev/sda1 rw
26 22 0:40 / /run rw - tmpfs tmpfs rw
"""
NFS = "40 22 0:50 / /home rw - nfs4 server:/home rw,vers=4.2\n"


def space(share=0.5, **changes):
    blocks = 1000
    fields = {
        "f_blocks": blocks,
        "f_bfree": int(blocks * share),
        "f_bavail": int(blocks * share),
        "f_frsize": 4096,
        "f_files": 100,
        "f_ffree": 25,
    }
    return SimpleNamespace(**fields | changes)


def machine(tmp_path, mountinfo, statvfs=lambda path: space(), clock=None):
    write(tmp_path, {"proc/self/mountinfo": mountinfo})
    return Mounts(MachineRoot(tmp_path), statvfs, clock or itertools.count(0, 60).__next__)


def test_only_disks_and_file_servers_are_watched_each_once():
    mounts = parse_mounts(ROOT + OTHER + DATA + NFS)
    assert [mount.path for mount in mounts] == ["/", "/data one", "/home"]
    with pytest.raises(ValueError, match="mountinfo"):
        parse_mounts("nonsense\n")


def test_what_the_job_writes_into_is_watched_whatever_it_is():
    more = "50 22 0:60 / / rw - overlay overlay rw\n51 22 0:61 / /jobs rw - tmpfs tmpfs rw\n"
    places = [
        m.path for m in parse_mounts(OTHER + more, (Path("/jobs/one"), Path("/jobs/two"), Path("/scratch")))
    ]
    assert sorted(places) == ["/", "/etc/hosts", "/jobs"]


def test_space_is_counted_as_df_does(tmp_path):
    source = machine(tmp_path, ROOT, lambda path: space(f_bfree=300, f_bavail=250))
    found = values(source.read())
    source.close()
    assert found == {
        ("mount.read_only", "/"): 0.0,
        ("disk.free_share", "/"): 250 / 950,
        ("disk.free_bytes", "/"): 250 * 4096.0,
        ("disk.inodes_free_share", "/"): 0.25,
    }


@pytest.mark.parametrize(
    ("after", "read_only"),
    [
        (ROOT.replace("- ext4 /dev/sda1 rw,", "- ext4 /dev/sda1 ro,"), 1.0),
        (ROOT.replace("errors=", "emergency_ro,errors="), 1.0),
        (ROOT.replace("rw,relatime", "ro,relatime").replace("sda1 rw", "sda1 ro"), 0.0),
        (ROOT, 0.0),
    ],
    ids=["remounted by the kernel", "since 6.15", "mounted so on purpose", "writable"],
)
def test_what_the_kernel_made_read_only_is_seen_at_the_first_look(tmp_path, after, read_only):
    source = machine(tmp_path, after)
    assert values(source.read())["mount.read_only", "/"] == read_only
    source.close()


def test_what_was_writable_and_is_not_any_more_is_read_only_whoever_did_it(tmp_path):
    source = machine(tmp_path, ROOT)
    assert values(source.read())["mount.read_only", "/"] == 0.0
    write(tmp_path, {"proc/self/mountinfo": ROOT.replace("rw", "ro")})
    assert values(source.read())["mount.read_only", "/"] == 1.0
    source.close()


def test_a_file_server_that_does_not_answer_is_unknown_and_holds_up_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.health.mounts.ANSWER_S", 0.02)
    answer = threading.Event()
    asked = []

    def statvfs(path):
        asked.append(path)
        if path.endswith("/home"):
            answer.wait()
        return space()

    source = machine(tmp_path, NFS + ROOT, statvfs)
    for _ in range(2):
        readings = list(source.read())
        found = values(readings)
        assert found["mount.silent_s", "/home"] > 0
        assert found["disk.free_share", "/home"] is None
        assert found["disk.free_share", "/"] == 0.5
    assert [path for path in asked if path.endswith("/home")] == [f"{tmp_path}/home"]
    answer.set()
    source.close()


def test_an_error_of_the_file_system_is_unknown(tmp_path):
    def statvfs(path):
        raise OSError(5, "Input/output error", path)

    source = machine(tmp_path, ROOT, statvfs)
    (reading,) = [r for r in source.read() if r.name == "disk.free_share"]
    assert reading.value is None
    assert "Input/output error" in reading.why
    source.close()


def test_mounts_that_change_all_the_time_are_not_read_all_the_time(tmp_path):
    clock = Hand()
    source = machine(tmp_path, ROOT, clock=clock)
    assert ("disk.free_share", "/") in values(source.read())
    clock.now += 1
    assert values(source.read()) == {}
    clock.now += 5
    assert values(source.read()) == {("mount.read_only", "/"): 0.0}
    clock.now += 54
    assert ("disk.free_share", "/") in values(source.read())
    source.close()


def test_the_kernel_announces_changed_mounts():
    source = Mounts(MachineRoot())
    assert source.fileno() >= 0
    assert ("mount.read_only", "/") in values(source.read()) or not os.path.exists("/dev/vda")
    source.close()
    source.close()


def test_a_bounded_call_gives_up_and_recovers():
    caller = BoundedCaller("the driver", 0.02)
    assert caller.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 // 0)
    go, gone = threading.Event(), threading.Event()

    def hang():
        go.wait()
        gone.set()

    with pytest.raises(NoAnswerError, match="the driver has not answered"):
        caller.call(hang)
    with pytest.raises(NoAnswerError):
        caller.call(lambda: pytest.fail("the thread hangs"))
    go.set()
    gone.wait()
    caller._pending.done.wait()
    assert caller.call(lambda: 4) == 4
    caller.close()
