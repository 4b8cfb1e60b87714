"""Readings of a node that are figures for people, from the source to the page for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.health import STALE_S, Figures
from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.metrics import Scrape as Page
from holdfast.coordinator.service.tally import Tally
from holdfast.health.disks import Disks
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import MachineRoot
from holdfast.protocol import messages as m
from holdfast.protocol.health import MOST_READINGS
from holdfast.protocol.job import JobSpec


def reading(name: str, subject: str, value: float | str | None) -> Reading:
    return Reading(source="x", name=name, subject=subject, value=value)


class Node:
    """Figures with a hand for a clock; `turn` is the loop."""

    def __init__(self) -> None:
        self.now, self.told = 0.0, list[m.NodeReadings]()
        self._calls: list[Callable[[], None]] = []
        self.figures = Figures(lambda _, call: self._calls.append(call), self.told.append, lambda: self.now)

    def turn(self) -> dict[tuple[str, str], float]:
        (call,), self._calls = self._calls, []
        call()
        return {(name, subject): value for name, subject, value in self.told[-1].readings}


def test_what_several_sources_read_is_one_message() -> None:
    node = Node()
    node.figures.take([reading("nvml.power_watts", "gpu 0", 300.0), LogLine("kmsg", "x")])
    node.figures.take([reading("net.rx_bytes", "eth0", 5.0), reading("net.carrier", "eth0", 1.0)])
    node.figures.take([reading("net.tx_bytes", "eth0", None), reading("disk.state", "sda", "running")])
    assert node.turn() == {("nvml.power_watts", "gpu 0"): 300.0, ("net.rx_bytes", "eth0"): 5.0}
    # Nothing of what is read is for people: nobody is told anything.
    node.figures.take([reading("net.carrier", "eth0", 1.0)])
    assert node._calls == []


def test_a_source_that_is_read_less_often_stays_and_a_device_that_is_gone_does_not() -> None:
    node = Node()
    node.figures.take([reading("disk.read_bytes", "sda", 7.0)])
    node.turn()
    node.now = STALE_S
    node.figures.take([reading("net.rx_bytes", "eth0", 6.0)])
    assert node.turn() == {("disk.read_bytes", "sda"): 7.0, ("net.rx_bytes", "eth0"): 6.0}
    node.now += 1
    node.figures.take([reading("net.rx_bytes", "eth0", 8.0)])
    assert node.turn() == {("net.rx_bytes", "eth0"): 8.0}


def test_a_machine_with_a_thousand_interfaces_has_a_bound() -> None:
    node = Node()
    for turn in range(2):
        node.figures.take(reading("net.rx_bytes", f"{'e' * 80}{n}", float(n + turn)) for n in range(5))
        node.figures.take(reading("net.rx_bytes", f"eth{n}", float(n + turn)) for n in range(1000))
        told = node.turn()
        # Those that were there stay, or their series would come and go.
        assert len(told) == MOST_READINGS
        assert told["net.rx_bytes", "eth7"] == 7.0 + turn
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(node.told[-1]), type=m.NodeReadings) == node.told[-1]
    too_many = m.NodeReadings(node.told[-1].readings * 2)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(too_many), type=m.NodeReadings)


def test_what_a_drive_has_moved(tmp_path: Path) -> None:
    for name, stat in (("sda", "9 8 100 7 6 5 40 3 2 1 0"), ("nvme0n1", "1 2 3"), ("loop0", "1 1 1 1 1 1 1")):
        folder = tmp_path / "sys/block" / name
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"   {stat}\n")
    read = {(r.name, r.subject): r.value for r in Disks(MachineRoot(tmp_path)).read() if "bytes" in r.name}
    assert read == {("disk.read_bytes", "sda"): 51_200.0, ("disk.written_bytes", "sda"): 20_480.0}


def test_series_of_a_node() -> None:
    state = CoreState(spec=JobSpec(name="job", script="train.py"))
    told = (
        ("nvml.utilization_percent", "gpu 0000:5d:00", 87.0),
        ("net.rx_bytes", "eth0", 250.0),
        ("new", "x", 1.0),
    )
    index = PhaseIndex(state.membership, 1)
    text = Page(state, index, Tally(), 1.0, readings={"n0": told}).encode()[0].decode()
    assert 'holdfast_node_gpu_utilization_ratio{gpu="0000:5d:00",node="n0"} 0.87' in text
    assert 'holdfast_node_network_received_bytes_total{interface="eth0",node="n0"} 250.0' in text
