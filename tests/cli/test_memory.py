"""Is there memory enough to start?"""

import pytest

from holdfast.cli.memory import NODE_BYTES, WORKER_BYTES, check_memory
from holdfast.errors import UsageError
from holdfast.health.capacity import available_bytes

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
