import os
import shutil

import pytest
from machines import values, write

from holdfast.health.pcie import Pcie
from holdfast.health.sources import MachineRoot

GPU = "0000:5d:00.0"
SUBJECT = "gpu 0000:5d:00"
AER = "RxErr 1\nBadTLP 2\nTOTAL_ERR_COR 3\n"


@pytest.fixture
def machine(tmp_path):
    bridge = tmp_path / "sys/devices/pci0000:5c/0000:5c:01.0"
    write(
        bridge,
        {
            "max_link_width": "16\n",
            "max_link_speed": "32.0 GT/s PCIe\n",
            f"{GPU}/class": "0x030200\n",
            f"{GPU}/max_link_width": "16\n",
            f"{GPU}/max_link_speed": "64.0 GT/s PCIe\n",
            f"{GPU}/current_link_width": "16\n",
            f"{GPU}/current_link_speed": "32.0 GT/s PCIe\n",
            f"{GPU}/aer_dev_correctable": AER,
            f"{GPU}/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0\n",
            f"{GPU}/config": "\x10\x20\x30\x40",
        },
    )
    write(tmp_path, {f"proc/driver/nvidia/gpus/{GPU}/information": "Model: H100\nGPU UUID: \t GPU-1-2\n"})
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    os.symlink(bridge / GPU, bus / GPU)
    write(tmp_path, {"sys/bus/pci/devices/0000:00:1f.0/class": "0x060100\n"})
    return tmp_path, bridge / GPU


def test_errors_and_the_link(machine):
    root, _ = machine
    readings = list(Pcie(MachineRoot(root)).read())
    assert values(readings) == {
        ("pcie.lost", SUBJECT): 0.0,
        ("pcie.aer_fatal", SUBJECT): 0.0,
        ("pcie.aer_correctable", SUBJECT): 3.0,
        ("pcie.link_width_share", SUBJECT): 1.0,
        ("pcie.link_speed_share", SUBJECT): 1.0,
    }
    assert {r.device for r in readings} == {"GPU-1-2"}


def test_a_narrow_link_but_not_a_narrow_slot(machine):
    root, gpu = machine
    source = Pcie(MachineRoot(root))
    write(gpu, {"current_link_width": "8\n"})
    assert values(source.read())["pcie.link_width_share", SUBJECT] == 0.5
    write(gpu.parent, {"max_link_width": "8\n"})
    assert values(Pcie(MachineRoot(root)).read())["pcie.link_width_share", SUBJECT] == 1.0


def test_a_device_that_does_not_answer_or_went_away_is_lost(machine):
    root, gpu = machine
    source = Pcie(MachineRoot(root))
    list(source.read())
    (gpu / "config").write_bytes(b"\xff" * 64)
    assert values(source.read()) == {("pcie.lost", SUBJECT): 1.0}
    shutil.rmtree(gpu)
    (root / "sys/bus/pci/devices" / GPU).unlink()
    assert values(source.read()) == {("pcie.lost", SUBJECT): 1.0}


def test_a_device_that_sleeps_is_left_alone_and_virtual_functions_have_no_link(machine):
    root, gpu = machine
    write(gpu, {"power/runtime_status": "suspended\n"})
    assert values(Pcie(MachineRoot(root)).read()) == {}
    write(gpu, {"power/runtime_status": "active\n"})
    os.symlink("../physical", gpu / "physfn")
    assert values(Pcie(MachineRoot(root)).read()) == {}


def test_an_unknown_speed_is_no_reading(machine):
    root, gpu = machine
    write(gpu, {"current_link_speed": "Unknown\n", "current_link_width": "255\n"})
    found = values(Pcie(MachineRoot(root)).read())
    assert not {name for name, _ in found if "link" in name}
