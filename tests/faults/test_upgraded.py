"""Holdfast is installed anew while a job runs: nothing of it is ended by the version that is there now."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from drive import Deed, Driver
from harness import TINY, finish, leftovers, start, wait_for

import holdfast
import preloaded
from holdfast.protocol.network.endpoint import read_endpoint

STEPS = 100


class Installed:
    """Two installations, of which a link says which one is found, as after `pip install --upgrade`."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        package = Path(holdfast.__file__).parent
        for name in ("this", "next"):
            shutil.copytree(package, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            self._set(folder / name / "engines/coordinator_supervisor.py", "STANDBY_S", "1.0")
        self._set(folder / "next/protocol/messages.py", "PROTOCOL_VERSION", "1000")
        self.use("this")

    def _set(self, path: Path, name: str, value: str) -> None:
        text, count = re.subn(rf"(?m)^{name} = .*", f"{name} = {value}", path.read_text())
        assert count == 1
        path.write_text(text)

    def use(self, name: str) -> None:
        work = self.site / ".work"
        work.symlink_to(f"../{name}")
        work.replace(self.site / "holdfast")


@pytest.mark.long
def test_a_job_survives_an_upgrade_beneath_it_and_the_loss_of_its_coordinator(tmp_path, monkeypatch):
    installed = Installed(tmp_path / "installed")
    monkeypatch.setenv("PYTHONPATH", str(installed.site))
    monkeypatch.setattr(preloaded, "launcher", lambda modules: [sys.executable, "-m", "holdfast"])
    home, job_dir = tmp_path / "home", tmp_path / "home/jobs/job"
    home.mkdir()

    def stands_by(status: dict) -> bool:
        return any("--gate=" in command for command in leftovers(home).values())

    async def upgrade_and_lose_the_coordinator(client, status):
        installed.use("next")
        os.kill(read_endpoint(job_dir).pid, signal.SIGKILL)

    async def lose_it_again(client, status):
        os.kill(read_endpoint(job_dir).pid, signal.SIGKILL)

    process = start(home, "--nnodes", 2, TINY, STEPS, "--device-s", 0.02)
    wait_for(process, "generation 1")
    with Driver(
        job_dir, [Deed(upgrade_and_lose_the_coordinator, 5, when=stands_by), Deed(lose_it_again, 10)]
    ):
        # The one that waited has taken over; another that could wait is not to be had.
        wait_for(process, "Workers continue to train")
        installed.use("this")
        ran = finish(process, home)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.steps() == list(range(STEPS))
    assert ran.report["steps"]["lost"] == 0
    assert [i["cause"] for i in ran.report["incidents"]] == ["the coordinator was lost"] * 2
    assert ran.kinds().count("node-refused") == ran.kinds().count("node-lost") == 0
