"""A machine made of files that has as much to read as a server with eight GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

GPUS = PORTS = DRIVES = 8
INTERFACES = 10
OTHER_PCI = 100
PROCESSES = 2000
CONTROLLERS = 16
QUEUES = 16
PORT_COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "excessive_buffer_overrun_errors",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "port_xmit_discards",
)
HW_COUNTERS = (
    "local_ack_timeout_err",
    "out_of_sequence",
    "packet_seq_err",
    "req_transport_retries_exceeded",
    "rnr_nak_retry_err",
    "roce_slow_restart",
)
_AER = "\n".join(f"Error{i} 0" for i in range(8))
_NVML = Path(__file__).parents[2] / "tests/health/nvml/standin.c"


def build(root: Path) -> None:
    """Writes all of it below `root`."""
    files: dict[str, str] = {}
    for i in range(GPUS):
        files |= _pci(f"0000:{0x10 + i:02x}:00.0", "0x030200")
    for i in range(PORTS):
        files |= _pci(f"0000:{0x30 + i:02x}:00.0", "0x020700") | _port(f"mlx5_{i}", i)
    for i in range(DRIVES):
        files |= _pci(f"0000:{0x50 + i:02x}:00.0", "0x010802") | _drive(f"nvme{i}")
    for i in range(OTHER_PCI):
        files[f"sys/bus/pci/devices/0001:{i:02x}:00.0/class"] = "0x060400\n"
    for i in range(INTERFACES):
        files |= _interface(f"eth{i}", i)
    for i in range(PROCESSES):
        fields = " ".join(["0"] * 48)
        files[f"proc/{1000 + i}/stat"] = f"{1000 + i} (process) S {fields}\n"
    for i in range(CONTROLLERS):
        folder = f"sys/devices/system/edac/mc/mc{i}"
        files |= {f"{folder}/ce_count": "0\n", f"{folder}/ue_count": "0\n"}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for name in ("meminfo", "vmstat", "loadavg", "uptime", "pressure/cpu", "pressure/memory", "pressure/io"):
        (root / "proc" / name).parent.mkdir(exist_ok=True)
        shutil.copy(Path("/proc") / name, root / "proc" / name)


def build_gpus(folder: Path) -> bool:
    """The stand-in for the driver's library with eight GPUs; False without a C compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return False
    numbers = {f"field{n}": "0" for n in (3, 4, 5, 6, 38, 45, 52, 59, 94, 143, 144, 145, 230)}
    values = {"temperature": "60", "margin": "30", "reasons": "4", "sram_threshold": "0", "fabric": "3 0 0"}
    links = {f"nvlink{i}": "1" for i in range(18)}
    for gpu in range(GPUS):
        (folder / str(gpu)).mkdir(parents=True)
        for name, content in (numbers | values | links | {"bus": str(0x10 + gpu)}).items():
            (folder / str(gpu) / name).write_text(content)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _NVML], check=True)
    return True


def _pci(address: str, kind: str) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{address}"
    totals = {"fatal": "FATAL", "nonfatal": "NONFATAL", "correctable": "COR"}
    return {
        f"{folder}/class": kind + "\n",
        f"{folder}/config": "\x10\x20\x30\x40" * 16,
        f"{folder}/power/runtime_status": "active\n",
        **{f"{folder}/{which}_link_width": "16\n" for which in ("current", "max")},
        **{f"{folder}/{which}_link_speed": "32.0 GT/s PCIe\n" for which in ("current", "max")},
        **{f"{folder}/aer_dev_{name}": f"{_AER}\nTOTAL_ERR_{end} 0\n" for name, end in totals.items()},
    }


def _port(name: str, number: int) -> dict[str, str]:
    folder = f"sys/class/infiniband/{name}"
    port = f"{folder}/ports/1"
    return {
        f"{folder}/node_guid": f"b83f:d203:00aa:{number:04x}\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        f"sys/class/infiniband_verbs/uverbs{number}/ibdev": name + "\n",
        **{f"{port}/counters/{counter}": "0\n" for counter in PORT_COUNTERS},
        **{f"{port}/hw_counters/{counter}": "0\n" for counter in HW_COUNTERS},
    }


def _drive(name: str) -> dict[str, str]:
    folder = f"sys/class/nvme/{name}"
    return {
        f"{folder}/state": "live\n",
        f"{folder}/serial": f"S{name}\n",
        f"{folder}/hwmon1/temp1_alarm": "0\n",
    }


def _interface(name: str, number: int) -> dict[str, str]:
    folder = f"sys/class/net/{name}"
    return {
        f"{folder}/flags": "0x1003\n",
        f"{folder}/ifindex": f"{number}\n",
        f"{folder}/carrier": "1\n",
        f"{folder}/carrier_changes": "1\n",
        f"{folder}/device/vendor": "0x15b3\n",
        f"{folder}/statistics/rx_errors": "0\n",
        f"{folder}/statistics/tx_errors": "0\n",
        **{f"{folder}/queues/tx-{queue}/tx_timeout": "0\n" for queue in range(QUEUES)},
    }
