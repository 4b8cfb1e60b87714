"""Results judged by floors, and by other nodes."""

import random

import pytest

from holdfast.errors import UsageError
from holdfast.health.checks.fleet import against_fleet
from holdfast.protocol.health import CheckResult, Condition
from holdfast.tools.checks.suite import against_floor, read_floors


def result(value: float | None, name="memory-copy", **more) -> CheckResult:
    return CheckResult(name=name, condition=Condition.HEALTHY, value=value, unit="GB/s", **more)


def bad_nodes(by_node: dict[str, CheckResult]) -> set[str]:
    judged = against_fleet({n: [r] for n, r in by_node.items()})
    return {n for n, (r,) in judged.items() if r.condition is Condition.FAULTY}


def test_every_floor_has_a_reference_and_a_known_model_wins():
    floors = read_floors()
    assert all(f.reference for f in floors)
    slow = against_floor(result(2000.0, "gpu-memory-copy", model="NVIDIA H200"), floors)
    assert (slow.condition, slow.floor) == (Condition.FAULTY, 2212.5)
    assert "DCGM" in slow.detail
    fine = against_floor(result(2000.0, "gpu-memory-copy", model="NVIDIA H100 80GB HBM3"), floors)
    assert (fine.condition, fine.floor) == (Condition.HEALTHY, 1905.0)
    assert against_floor(result(1.0, "gpu-memory-copy", model="Quadro"), floors).floor is None


def test_unknown_stays_unknown():
    unknown = CheckResult(name="memory-copy", condition=Condition.UNKNOWN, detail="no torch")
    assert against_floor(unknown, read_floors()) == unknown
    assert against_fleet({"a": [unknown], "b": [result(1.0)]})["a"] == [unknown]


def test_a_file_of_floors_that_is_wrong(tmp_path):
    path = tmp_path / "floors.toml"
    path.write_text("[[floor]]\ncheck = 'disk-read'\nvalue = 'fast'\nreference = 'x'\n")
    with pytest.raises(UsageError, match=r"floors.toml cannot be read.*float"):
        read_floors(path)


def test_one_that_is_far_behind():
    values = {f"n{i}": result(20.0 + 0.1 * i) for i in range(8)}
    assert bad_nodes(values) == set()
    assert bad_nodes(values | {"n3": result(14.0)}) == {"n3"}
    assert bad_nodes(values | {"n3": result(19.0)}) == set()


def test_a_wide_spread_accuses_nobody():
    assert bad_nodes({f"n{i}": result(v) for i, v in enumerate((10, 15, 20, 25, 30, 35))}) == set()


def test_three_have_no_median():
    assert bad_nodes({"a": result(20.0), "b": result(20.0), "c": result(2.0)}) == set()


def test_other_models_are_not_compared():
    values = {f"n{i}": result(20.0, model="new") for i in range(4)} | {"old": result(8.0, model="old")}
    assert bad_nodes(values) == set()


def test_smaller_is_better():
    values = {f"n{i}": result(1.0 + 0.01 * i, "pair-latency", lower=True) for i in range(6)}
    assert bad_nodes(values | {"n0": result(9.0, "pair-latency", lower=True)}) == {"n0"}


def test_free_space_is_not_compared():
    assert bad_nodes({f"n{i}": result(v, "shm") for i, v in enumerate((100, 100, 100, 100, 1))}) == set()


def test_other_bits_than_the_majority():
    bits = {f"n{i}": result(None, "cpu-bits", digest="aa") for i in range(3)}
    assert bad_nodes(bits) == set()
    assert bad_nodes(bits | {"x": result(None, "cpu-bits", digest="ab")}) == {"x"}


def test_two_that_differ_are_unknown():
    judged = against_fleet({n: [result(None, "cpu-bits", digest=n)] for n in ("a", "b")})
    assert [r.condition for rs in judged.values() for r in rs] == [Condition.UNKNOWN] * 2


def test_noise_accuses_few():
    """Gaussian noise of 3%: fewer than one value in 10,000."""
    chance = random.Random(11)
    accused = 0
    for _ in range(200):
        accused += len(bad_nodes({f"n{i}": result(chance.gauss(20.0, 0.6)) for i in range(64)}))
    assert accused <= 1
