"""What GPU checks compute and conclude, on CPU tensors; nothing here needs a GPU."""

import msgspec
import pytest
import torch

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.health.checks.fleet import against_fleet
from holdfast.protocol.health import Condition
from holdfast.tools.checks import dcgm, gpu

CPU = gpu.Device(3, torch.device("cpu"), "NVIDIA Test", 64 << 20)


def test_one_device(monkeypatch):
    monkeypatch.setattr(gpu, "HOST_BYTES", 1 << 20)
    results = {r.name: r for r in gpu.check_device(CPU, 0.02, 64)}
    assert set(results) == {
        "gpu-memory-copy",
        "gpu-to-device",
        "gpu-to-host",
        "gpu-memory-patterns",
        "gpu-bits",
        "gpu-matrix",
    }
    assert {r.condition for r in results.values()} == {Condition.HEALTHY}
    assert {(r.subject, r.model) for r in results.values()} == {("gpu 3", "NVIDIA Test")}
    assert all(r.value > 0 for r in results.values() if r.name != "gpu-bits")


def test_a_product_that_differs_once_in_a_while():
    def damage(number, product):
        if number == 2:
            product[7, 9] += 1

    bits, _ = gpu.burn(CPU, 0.05, 32, damage)
    assert bits.condition is Condition.FAULTY
    assert bits.detail.startswith("1 of ")


def test_a_device_that_is_always_wrong_is_found_by_the_others():
    right, _ = gpu.burn(CPU, 0.01, 32)
    wrong = msgspec.structs.replace(right, digest="0")
    judged = against_fleet({"a": [right, right], "b": [right, wrong]})
    assert [r.condition for r in judged["b"]] == [Condition.HEALTHY, Condition.FAULTY]


def test_copies_between_devices():
    other = gpu.Device(4, torch.device("cpu"), "NVIDIA Test", 1 << 20)
    result = gpu.between(CPU, other, 1 << 16)
    assert (result.condition, result.detail) == (Condition.HEALTHY, "to gpu 4")


def test_without_a_gpu_there_is_nothing_to_say():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert list(gpu.check_gpus(Task())) == []


@pytest.mark.parametrize(
    ("model", "states", "condition"),
    [
        ("NVIDIA H100 80GB HBM3", (True,) * 18, Condition.HEALTHY),
        ("NVIDIA H100 80GB HBM3", (True,) * 17 + (False,), Condition.FAULTY),
        ("NVIDIA H100 PCIe", (True,) * 6 + (False,) * 6, Condition.UNKNOWN),
    ],
)
def test_links(model, states, condition):
    (result,) = gpu.judge_links(
        [
            gpu.Links(0, model, states),
            gpu.Links(1, "L4", ()),
            gpu.Links(2, "A100-PCIE", (False,) * 12),
        ]
    )
    assert (result.condition, result.value, result.floor) == (condition, sum(states), len(states))


# ---------------------------------------------------------------- dcgmi diag -j

DIAG_3 = """
{"DCGM Diagnostic": {"test_categories": [
  {"category": "Deployment", "tests": [
    {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "Pass"}]},
    {"name": "Persistence Mode", "results": [{"gpu_ids": "0", "status": "Warn",
      "warnings": "Persistence mode for GPU 0 is disabled."}]}]},
  {"category": "Hardware", "tests": [
    {"name": "GPU Memory", "results": [
      {"gpu_ids": "0", "status": "Pass", "info": ["Allocated 79 GB"]},
      {"gpu_ids": "1", "status": "Fail", "warnings": ["Memory check failed at 0x3f00."], "info": ["GPU 1"]}]},
    {"name": "Pulse Test", "results": [{"gpu_ids": "0", "status": "Skip"}]}]}],
  "version": "3.3.5"}}
"""
DIAG_4 = """Some library's greeting
{"DCGM Diagnostic": {"test_categories": [{"category": "Integration", "tests": [{"name": "pcie", "results": [
  {"entity_group": "GPU", "entity_id": 2, "status": "Fail",
   "warnings": [{"warning": "PCIe replays", "error_id": 31}]}]}]}]}}
"""


def test_a_diagnostic_of_version_3():
    found = {(r.name, r.subject): r for r in dcgm.parse_diag(DIAG_3)}
    assert len(found) == 4
    assert found["dcgm-denylist", "gpu 0,1"].condition is Condition.HEALTHY
    warned = found["dcgm-persistence-mode", "gpu 0"]
    assert (warned.condition, warned.detail) == (
        Condition.HEALTHY,
        "Persistence mode for GPU 0 is disabled.",
    )
    assert found["dcgm-gpu-memory", "gpu 0"].detail == ""
    bad = found["dcgm-gpu-memory", "gpu 1"]
    assert (bad.condition, bad.detail) == (Condition.FAULTY, "Memory check failed at 0x3f00.; GPU 1")


def test_a_diagnostic_of_version_4():
    (bad,) = dcgm.parse_diag(DIAG_4)
    assert (bad.name, bad.subject, bad.condition) == ("dcgm-pcie", "gpu 2", Condition.FAULTY)
    assert bad.detail == "PCIe replays"


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        ("", "Error: unable to establish a connection to the specified host", "unable to establish"),
        ('{"DCGM GPU Diagnostic Error": "no GPUs"}', "", "no GPUs"),
        ('{"DCGM Diagnostic": {"runtime_error": "another diagnostic runs"}}', "", "another diagnostic runs"),
        ('{"DCGM Diagnostic": {"test_categories": []}}', "", "ran no test"),
        ('{"DCGM Diagnostic": {"test_', "", "DCGM"),
        ("", "", "it printed nothing"),
    ],
)
def test_a_diagnostic_that_could_not_run(text, error, why):
    with pytest.raises(CannotCheck, match=why):
        dcgm.parse_diag(text, error)


def test_the_level_fits_the_time():
    assert [dcgm.level_for(s) for s in (0.1, 2, 20, 200)] == [1, 1, 2, 3]
