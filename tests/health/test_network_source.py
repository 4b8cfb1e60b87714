import errno
import os
import struct

import pytest
from machines import Hand, values, write

from holdfast.health.network import Interfaces, parse_links
from holdfast.health.rdma import Rdma
from holdfast.health.sources import MachineRoot


def interface(root, name, carrier="1", flags="0x1003", device=True):
    folder = root / "sys/class/net" / name
    write(
        folder,
        {
            "flags": flags + "\n",
            "carrier": carrier + "\n",
            "ifindex": "2\n",
            "carrier_changes": "4\n",
            "statistics/rx_errors": "5\n",
            "statistics/tx_errors": "0\n",
            "queues/tx-0/tx_timeout": "1\n",
            "queues/tx-1/tx_timeout": "2\n",
        },
    )
    if device and not (folder / "device").is_symlink():
        os.symlink("../../../pci0", folder / "device")


def test_interfaces_with_a_device_that_are_up(tmp_path):
    interface(tmp_path, "lo", device=False)
    interface(tmp_path, "docker0", device=False)
    interface(tmp_path, "eth0")
    interface(tmp_path, "eth1", carrier="", flags="0x1002")  # taken down on purpose
    source = Interfaces(MachineRoot(tmp_path), Hand())
    assert source.fileno() == -1
    assert values(source.read()) == {
        ("net.carrier", "eth0"): 1.0,
        ("net.carrier_changes", "eth0"): 4.0,
        ("net.rx_errors", "eth0"): 5.0,
        ("net.tx_errors", "eth0"): 0.0,
        ("net.tx_timeouts", "eth0"): 3.0,
    }
    interface(tmp_path, "eth0", "0")
    assert values(source.read())["net.carrier", "eth0"] == 0.0


def test_a_counter_that_cannot_be_read_is_unknown(tmp_path, monkeypatch):
    interface(tmp_path, "eth0")
    opened = os.open

    def refuse(path, *flags):
        if str(path).endswith("rx_errors"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *flags)

    monkeypatch.setattr(os, "open", refuse)
    readings = {r.name: r for r in Interfaces(MachineRoot(tmp_path), Hand()).read()}
    assert readings["net.rx_errors"].value is None
    assert "Permission denied" in readings["net.rx_errors"].why
    assert readings["net.tx_errors"].value == 0.0


def test_the_interfaces_in_an_announcement():
    def message(index, payload=b""):
        body = struct.pack("=BxHiII", 0, 1, index, 0x1003, 0) + payload
        return struct.pack("=IHHII", 16 + len(body), 16, 0, 0, 0) + body

    assert parse_links(message(2) + message(7, b"x" * 8)) == {2, 7}
    assert parse_links(b"") == parse_links(b"\0" * 16) == parse_links(message(3)[:18]) == set()


def port(
    root, device="mlx5_0", state="4: ACTIVE", driver="mlx5_core", rate="400 Gb/sec (4X NDR)", **counters
):
    folder = root / "sys/class/infiniband" / device
    write(
        folder,
        {
            "node_guid": "b83f:d203:00aa:0001\n",
            "ports/1/state": state + "\n",
            "ports/1/rate": rate + "\n",
            **{f"ports/1/counters/{name}": f"{value}\n" for name, value in counters.items()},
        },
    )
    drivers = root / "sys/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (folder / "device").mkdir(exist_ok=True)
    if not (folder / "device/driver").exists():
        os.symlink(drivers, folder / "device/driver")
    write(root, {f"sys/class/infiniband_verbs/uverbs{device[-1]}/ibdev": device + "\n"})
    return folder


def test_ports_of_infiniband(tmp_path):
    folder = port(tmp_path, symbol_error=3, link_downed=1, port_rcv_data=10**12)
    write(folder, {"ports/1/hw_counters/rnr_nak_retry_err": "2\n"})
    source = Rdma(MachineRoot(tmp_path))
    readings = list(source.read())
    assert values(readings) == {
        ("rdma.state", "mlx5_0 port 1"): "ACTIVE",
        ("rdma.rate_gbps", "mlx5_0 port 1"): 400.0,
        ("rdma.link_downed", "mlx5_0 port 1"): 1.0,
        ("rdma.symbol_error", "mlx5_0 port 1"): 3.0,
        ("rdma.rnr_nak_retry_err", "mlx5_0 port 1"): 2.0,
        ("rdma.lost", "mlx5_0"): 0.0,
        ("rdma.char_devices_missing", "mlx5_0"): 0.0,
    }
    assert {r.device for r in readings} == {"guid:b83f:d203:00aa:0001"}
    port(tmp_path, state="1: DOWN", rate="2.5 Gb/sec (1X SDR)")
    found = values(source.read())
    assert found["rdma.state", "mlx5_0 port 1"] == "DOWN"
    assert ("rdma.rate_gbps", "mlx5_0 port 1") not in found  # of a link that is down it says nothing
    os.rename(folder, tmp_path / "away")
    assert values(source.read())["rdma.lost", "mlx5_0"] == 1.0


def test_a_missing_character_device(tmp_path):
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1")
    (tmp_path / "sys/class/infiniband_verbs/uverbs1/ibdev").unlink()
    found = values(Rdma(MachineRoot(tmp_path)).read())
    assert found["rdma.char_devices_missing", "mlx5_0"] == 0.0
    assert found["rdma.char_devices_missing", "mlx5_1"] == 1.0


@pytest.mark.parametrize(("operstate", "expected"), [("up", "ACTIVE"), ("down", "DOWN"), (None, None)])
def test_efa_says_active_whatever_happens_so_its_interface_is_asked(tmp_path, operstate, expected):
    folder = port(tmp_path, "rdmap1", driver="efa")
    if operstate:
        write(folder, {"device/net/ens5/operstate": operstate + "\n"})
    assert values(Rdma(MachineRoot(tmp_path)).read()).get(("rdma.state", "rdmap1 port 1")) == expected
