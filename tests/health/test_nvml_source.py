"""The stand-in library (nvml/standin.c) below the real nvidia-ml-py."""

import select

import pytest
from gpus import HEALTHY, forget, stand_in, xid
from machines import Hand, lines, values, write

from holdfast.health.nvml import Nvml, load_nvml, nvml_sources
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import load_rules
from holdfast.health.sources import MachineRoot

SUBJECT = "gpu 0000:5d:00"


@pytest.fixture
def gpus(tmp_path):
    """The folder of the stand-in, with a healthy GPU in it."""
    stand_in(tmp_path / "gpus")
    return tmp_path / "gpus"


@pytest.fixture
def nvml(gpus, tmp_path):
    pynvml = load_nvml(gpus)
    clock = Hand()
    source = Nvml(tmp_path, pynvml, clock)
    source.clock = clock
    yield source
    source.close()
    forget(pynvml)


def again(source):
    source.clock.now += source.every_s
    return values(source.read())


def test_a_healthy_gpu(nvml):
    readings = list(nvml.read())
    assert values(readings) == {
        ("nvml.silent_s", ""): 0.0,
        ("nvml.missing", ""): 0.0,
        ("nvml.lost", SUBJECT): 0.0,
        ("nvml.temperature_c", SUBJECT): 60.0,
        ("nvml.temperature_margin_c", SUBJECT): 27.0,
        ("nvml.clock_reasons", SUBJECT): 4.0,
        ("nvml.ecc.sram_threshold", SUBJECT): 0.0,
        ("nvml.ecc.volatile.corrected", SUBJECT): 7.0,
        ("nvml.ecc.volatile.uncorrected", SUBJECT): 0.0,
        ("nvml.remap.uncorrected_rows", SUBJECT): 1.0,
        ("nvml.remap.pending", SUBJECT): 0.0,
        ("nvml.remap.failure", SUBJECT): 0.0,
        ("nvml.recovery_action", SUBJECT): 0.0,
        ("nvml.nvlink.inactive", SUBJECT): 0.0,
        ("nvml.fabric.completed", SUBJECT): 1.0,
        ("nvml.fabric.status", SUBJECT): 0.0,
        ("nvml.fabric.health_mask", SUBJECT): 2.0,
    }
    assert {r.device for r in readings if r.subject} == {"GPU-aa-0"}
    assert list(nvml.read()) == []  # not due yet


def test_what_goes_wrong(nvml, gpus):
    list(nvml.read())
    write(
        gpus / "0", {"field4": "2", "field145": "1", "field230": "2", "sram_threshold": "1", "margin": "-3"}
    )
    write(gpus / "0", {"reasons": "0x48", "fabric": "3 999 0x1", "nvlink3": "0", "nvlink7": "0"})
    found = again(nvml)
    assert found["nvml.ecc.volatile.uncorrected", SUBJECT] == 2.0
    assert found["nvml.remap.failure", SUBJECT] == 1.0
    assert found["nvml.recovery_action", SUBJECT] == 2.0
    assert found["nvml.ecc.sram_threshold", SUBJECT] == 1.0
    assert found["nvml.temperature_margin_c", SUBJECT] == -3.0
    assert found["nvml.clock_reasons", SUBJECT] == 0x48
    assert found["nvml.fabric.status", SUBJECT] == 999.0
    assert found["nvml.nvlink.inactive", SUBJECT] == 2.0


def test_an_old_card_has_less_and_its_limit_is_its_own(nvml, gpus):
    for name in HEALTHY:
        (gpus / "0" / name).unlink()
    write(
        gpus / "0", {"temperature": "60", "threshold1": "90", "nvlink0": "0", "field30": "2", "field31": "1"}
    )
    assert values(nvml.read()) == {
        ("nvml.silent_s", ""): 0.0,
        ("nvml.missing", ""): 0.0,
        ("nvml.lost", "gpu 0000:10:00"): 0.0,
        ("nvml.temperature_c", "gpu 0000:10:00"): 60.0,
        ("nvml.temperature_margin_c", "gpu 0000:10:00"): 30.0,
        ("nvml.retired.double_bit_pages", "gpu 0000:10:00"): 2.0,
        ("nvml.retired.pending", "gpu 0000:10:00"): 1.0,
    }


def test_a_gpu_is_lost_while_the_other_goes_on(nvml, gpus):
    write(gpus / "1", HEALTHY | {"uuid": "GPU-aa-1", "bus": "0x9b"})
    list(nvml.read())
    write(gpus / "0", {"lost": ""})
    found = again(nvml)
    assert found["nvml.lost", SUBJECT] == 1.0
    assert not [name for name, subject in found if subject == SUBJECT and name != "nvml.lost"]
    assert found["nvml.lost", "gpu 0000:9b:00"] == 0.0
    assert found["nvml.temperature_c", "gpu 0000:9b:00"] == 60.0


def test_a_gpu_that_was_lost_before_has_only_its_number(nvml, gpus):
    write(gpus / "0", {"lost": ""})
    assert values(nvml.read())["nvml.lost", "gpu 0"] == 1.0


def test_a_gpu_that_needs_a_reset_or_fails_otherwise(nvml, gpus):
    list(nvml.read())
    write(gpus / "0", {"error": "16"})
    assert again(nvml)["nvml.recovery_action", SUBJECT] == 1.0
    write(gpus / "0", {"error": "999"})
    assert again(nvml)["nvml.lost", SUBJECT] is None


def test_gpus_that_the_driver_knows_and_the_library_does_not(nvml, tmp_path):
    write(
        tmp_path / "proc/driver/nvidia/gpus", {"0000:5d:00.0/information": "", "0000:9b:00.0/information": ""}
    )
    assert values(nvml.read())["nvml.missing", ""] == 1.0


def test_a_driver_that_hangs_is_unknown(nvml, gpus, monkeypatch):
    list(nvml.read())
    monkeypatch.setattr(nvml._caller, "_limit_s", 0.02)
    write(gpus / "0", {"hang": ""})
    found = again(nvml)
    assert found["nvml.silent_s", ""] > 0
    assert found["nvml.devices", ""] is None
    assert again(nvml)["nvml.silent_s", ""] > 0
    (gpus / "0" / "hang").unlink()
    nvml._caller._pending.done.wait()
    monkeypatch.setattr(nvml._caller, "_limit_s", 10.0)
    assert again(nvml)["nvml.lost", SUBJECT] == 0.0


@pytest.mark.parametrize(("card", "known"), [(False, []), (True, ["nvml.devices"])])
def test_a_library_without_a_driver(nvml, gpus, tmp_path, card, known):
    write(gpus, {"init": "9"})
    if card:
        write(tmp_path / "sys/bus/pci/devices/0000:5d:00.0", {"vendor": "0x10de\n", "class": "0x030200\n"})
    readings = list(nvml.read())
    assert [r.name for r in readings] == known
    assert all(r.value is None and r.why == "Driver Not Loaded" for r in readings)


def test_an_xid_wakes_the_reader_and_reads_as_the_kernels_line(nvml, gpus):
    list(nvml.read())
    waiter = select.poll()
    waiter.register(nvml.fileno(), select.POLLIN)
    xid(gpus / "0", 1, 79)
    assert waiter.poll(10_000)
    assert lines(nvml.read()) == ["NVRM: Xid (PCI:0000:5d:00): 79, reported by the driver's library"]
    assert list(nvml.read()) == []


def test_without_the_library_there_is_no_source(tmp_path):
    assert nvml_sources(MachineRoot(tmp_path)) == []
    assert nvml_sources(MachineRoot(tmp_path, tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("files", "rules"),
    [
        ({"lost": ""}, ["gpu-lost"]),
        ({"field4": "1"}, ["gpu-ecc-uncorrected"]),
        ({"sram_threshold": "1"}, ["gpu-sram-threshold"]),
        ({"field144": "1"}, ["gpu-remap-pending"]),
        ({"field145": "1", "field230": "1"}, ["gpu-needs-reset", "gpu-remap-failed"]),
        ({"field230": "2"}, ["gpu-needs-reboot"]),
        ({"field214": "1"}, ["gpu-nvlink-recovery-failed"]),
        ({"field213": "3"}, ["gpu-nvlink-recovered"]),
        ({"field211": "5", "field219": "80"}, ["gpu-nvlink-effective-errors", "gpu-nvlink-integrity"]),
        ({"field207": "4", "field221": "900"}, []),  # corrected, or sent again: for rules of users
        ({"fabric": "3 999 0x2"}, ["gpu-fabric-failed"]),
        ({"fabric": "3 0 0x6"}, ["gpu-fabric-health"]),
        ({"reasons": "0x4", "field3": "900"}, []),  # a power cap, and errors that were corrected
    ],
)
def test_what_the_rules_make_of_it(nvml, gpus, files, rules):
    engine = RuleEngine(load_rules())
    write(gpus / "0", {f"field{field}": "0" for field in range(201, 223)})  # of a GPU with NVLink 5
    for reading in nvml.read():
        assert engine.on_reading(reading, 0.0) == []
    nvml.clock.now += nvml.every_s
    write(gpus / "0", files)
    found = [f for reading in nvml.read() for f in engine.on_reading(reading, nvml.every_s)]
    assert sorted(f.rule for f in found) == rules
    assert {(f.subject, f.device) for f in found} <= {(SUBJECT, "GPU-aa-0")}
