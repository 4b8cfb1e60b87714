"""The agent's watcher over the stand-in for the driver's library: the whole way from a GPU to a finding."""

import asyncio
import importlib

from gpus import forget, stand_in, xid

from holdfast.agent.health import HealthWatcher
from holdfast.agent.simulated_sources import append_kernel_lines
from holdfast.health.sources import MachineRoot
from holdfast.protocol.job_options import HealthSpec

LOCKUP = "watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"


class Findings:
    """What the coordinator is told."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._more = asyncio.Event()

    def send(self, found) -> None:
        self.rules += [f.rule for f in found.findings if f.source in ("kmsg", "nvml") and not f.shared]
        self._more.set()

    async def reach(self, count: int) -> None:
        while len(self.rules) < count:
            self._more.clear()
            await self._more.wait()


async def watch(tmp_path):
    machine = MachineRoot(tmp_path / "machine", tmp_path / "machine" / "nvml")
    stand_in(machine.nvml)
    findings = Findings()
    watcher = HealthWatcher(tmp_path / "node", HealthSpec(), True, findings.send, tmp_path)
    await watcher.start()
    try:
        await watcher.stand_in(machine)
        xid(machine.nvml / "0", 1, 79)
        await findings.reach(1)
        kernel = (
            "NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            LOCKUP,
        )
        append_kernel_lines(tmp_path / "node" / "kmsg", kernel)
        await findings.reach(2)
    finally:
        watcher.close()
        forget(importlib.import_module("pynvml"))
    return findings.rules


def test_an_xid_that_is_heard_of_twice_is_one(tmp_path):
    assert asyncio.run(asyncio.wait_for(watch(tmp_path), 60)) == ["xid-79", "soft-lockup"]
