"""Drives and arrays."""

import struct

from machines import values, write

from holdfast.health.disks import _COMMAND, Disks, Smart, parse_smart
from holdfast.health.sources import MachineRoot


def test_drives_and_arrays(tmp_path):
    write(
        tmp_path,
        {
            "sys/block/sda/device/ioerr_cnt": "0x1f\n",
            "sys/block/sda/device/state": "running\n",
            "sys/block/md0/md/degraded": "1\n",
            "sys/block/nvme0n1/size": "100\n",
            "sys/class/nvme/nvme0/state": "live\n",
            "sys/class/nvme/nvme0/serial": "S123  \n",
            "sys/class/nvme/nvme0/hwmon3/temp1_alarm": "0\n",
            "sys/fs/ext4/sda1/errors_count": "2\n",
            "sys/fs/ext4/features/lazy_itable_init": "supported\n",
        },
    )
    readings = list(Disks(MachineRoot(tmp_path)).read())
    assert values(readings) == {
        ("disk.io_errors", "sda"): 31.0,
        ("disk.state", "sda"): "running",
        ("md.degraded", "md0"): 1.0,
        ("nvme.state", "nvme0"): "live",
        ("nvme.temperature_alarm", "nvme0"): 0.0,
        ("fs.errors", "sda1"): 2.0,
    }
    assert {r.device for r in readings if r.subject == "nvme0"} == {"nvme:S123"}


def test_what_drives_say_of_themselves(tmp_path):
    write(tmp_path, {f"sys/class/nvme/{name}/state": "live\n" for name in ("nvme0", "nvme1", "nvme2")})

    def smart(path):
        if path == "/dev/nvme1":
            raise PermissionError(13, "Permission denied", path)
        if path == "/dev/nvme2":
            raise FileNotFoundError(2, "No such file or directory", path)
        return Smart(4, 101, 12)

    source = Disks(MachineRoot(tmp_path), smart)
    found = values(source.read())
    source.close()
    assert {key: value for key, value in found.items() if key[0] != "nvme.state"} == {
        ("nvme.critical_warning", "nvme0"): 4.0,
        ("nvme.media_errors", "nvme0"): 12.0,
        ("nvme.used_percent", "nvme0"): 101.0,
        ("nvme.critical_warning", "nvme1"): None,
    }


def test_the_log_of_a_drive():
    log = bytearray(512)
    log[0], log[5] = 0x08, 3
    struct.pack_into("<QQ", log, 160, 7, 0)
    assert parse_smart(bytes(log)) == Smart(8, 3, 7)
    assert _COMMAND.size == 72
