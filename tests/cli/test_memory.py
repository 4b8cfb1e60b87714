"""Is there memory enough to start?"""

import pytest

from holdfast.engines.local import NODE_BYTES, WORKER_BYTES, check_memory
from holdfast.errors import UsageError
from holdfast.protocol.machine.processes import available_bytes, kills, limit_bytes, rooms

NEEDED = 5 * (NODE_BYTES + 2 * WORKER_BYTES)


def test_enough_passes_and_so_does_unknown():
    check_memory(5, 2, NEEDED)
    check_memory(5, 2, None)


def test_too_little_is_refused_with_both_figures():
    with pytest.raises(
        UsageError, match=rf"about {NEEDED >> 20} MiB .* {(NEEDED - (1 << 20)) >> 20} MiB are free"
    ):
        check_memory(5, 2, NEEDED - (1 << 20))


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable:    1048576 kB\n")
    return tmp_path


def group(folder, limit, used, inactive):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_of_the_machine(machine):
    assert available_bytes(machine, machine) == 1 << 30


def test_of_the_container_when_it_has_less(machine):
    group(machine, 700 << 20, 600 << 20, 200 << 20)
    assert available_bytes(machine, machine) == 300 << 20


def test_a_container_without_a_limit(machine):
    group(machine, "max", 600 << 20, 0)
    assert available_bytes(machine, machine) == 1 << 30


def test_nowhere_to_look(tmp_path):
    assert available_bytes(tmp_path, tmp_path) is None


V2, V1 = (
    ("memory.max", "memory.current", "inactive_file"),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def groups(machine, names, root, path, *limits):
    """A process in a group, and its parents' limits in MiB, from the root on; each has used 100 and can give up 10."""
    folder = machine / root
    for part, limit in zip(("", *path), limits, strict=True):
        folder = folder / part
        folder.mkdir(exist_ok=True, parents=True)
        (folder / names[0]).write_text(f"{limit if isinstance(limit, str) else limit << 20}\n")
        (folder / names[1]).write_text(f"{100 << 20}\n")
        (folder / "memory.stat").write_text(f"cache 7\n{names[2]} {10 << 20}\n")


def in_group(machine, *lines):
    (machine / "self").mkdir()
    (machine / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))


def mebibytes(machine):
    return sorted(room.free >> 20 for room in rooms(machine, machine))


def test_the_limits_of_all_parents_hold(machine):
    in_group(machine, "0::/kubepods/pod7/main")
    groups(machine, V2, "", ["kubepods", "pod7", "main"], "max", 900, 400, "max")
    assert mebibytes(machine) == [310, 810, 1024]
    assert available_bytes(machine, machine) == 310 << 20


def test_version_1_beside_version_2(machine):
    in_group(machine, "9:name=systemd:/x", "4:cpu,memory:/docker/a", "0::/")
    unlimited = str((1 << 63) - 4096)
    groups(machine, V1, "memory", ["docker", "a"], unlimited, unlimited, 500)
    assert mebibytes(machine) == [410, 1024]


@pytest.mark.parametrize("line", ["4:memory:/docker/of-the-host", "4:memory:/../../outside", "0::/elsewhere"])
def test_a_path_that_is_not_mounted_leaves_the_container_s_own_group(machine, line):
    in_group(machine, line)
    groups(machine, V1, "memory", [], 500)
    assert mebibytes(machine) == [410, 1024]


def test_what_cannot_be_read_is_no_limit(machine):
    in_group(machine, "no colons here", "0::/a")
    groups(machine, V2, "", ["a"], "max", "many")
    assert mebibytes(machine) == [1024]
    groups(machine, V2, "", ["a"], 200, 300)
    (machine / "a" / "memory.stat").unlink()
    assert mebibytes(machine) == [110, 1024]


def test_what_the_kernel_has_killed_is_counted_in_the_innermost_group(machine):
    assert kills(machine, machine) is None
    in_group(machine, "0::/kubepods/pod7")
    groups(machine, V2, "", ["kubepods", "pod7"], "max", 900, 400)
    (machine / "kubepods" / "memory.events").write_text("oom 9\noom_kill 9\n")
    (machine / "kubepods" / "pod7" / "memory.events").write_text(
        "low 0\noom 1\noom_kill 2\noom_group_kill 0\n"
    )
    assert kills(machine, machine) == 2
    assert limit_bytes(machine, machine) == 400 << 20


def test_version_1_counts_too(machine):
    in_group(machine, "4:memory:/docker/of-the-host")
    groups(machine, V1, "memory", [], 500)
    assert kills(machine, machine) is None, "kernels before 4.13 do not count"
    (machine / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert kills(machine, machine) == 3
    assert limit_bytes(machine, machine) == 500 << 20


def test_the_machine_s_own_memory_is_no_limit(machine):
    assert limit_bytes(machine, machine) is None
