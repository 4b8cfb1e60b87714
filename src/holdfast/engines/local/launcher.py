"""The launcher of the local engine: coordinator, agents and the view of them, from start to the last process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.engines.client import Announcement, JobClient
from holdfast.engines.jobs import JobFolder
from holdfast.engines.local.engine import LocalEngine
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job import JobSpec

COORDINATOR_PORT_TAKEN = 3
LEAVE_S = 15.0


class View(Protocol):
    """Who shows the job to a person."""

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""

    def status(self, status: dict[str, Any]) -> None:
        """The job as it is now."""

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""

    def note(self, text: str) -> None:
        """Something about the launcher itself."""


class Launcher:
    """Runs one job on this machine."""

    _engine: LocalEngine

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View, port: int = 0) -> None:
        self._spec, self._folder, self._view, self._port = spec, folder, view, port
        self._coordinator: asyncio.subprocess.Process | None = None
        self._lifeline, self._held = os.pipe()
        self._interrupts = 0
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> dict[str, Any]:
        """Runs the job to its end; returns the report. Ctrl-C once stops it in order, twice at once.

        Raises:
            UsageError: the port is taken.
            HoldfastError: the coordinator cannot be kept running.
        """
        resume = self._folder.prepare(self._spec, self._view.note)
        self._engine = LocalEngine(self._spec, self._folder.path, self._folder.memory, self._view.output)
        if resume.checkpoints:
            newest = resume.checkpoints[0]
            self._view.note(f"the newest checkpoint is of step {newest.step} ({newest.place})")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self._interrupted)
        try:
            await self._start_coordinator()
            for _ in range(self._spec.max_nodes + self._spec.spares):
                await self._engine.provide()
            watching = asyncio.create_task(self._watch())
            await self._keep_coordinator()
            try:
                async with asyncio.timeout(1.0):
                    await watching  # its last announcement may still be on the way
            except TimeoutError:
                watching.cancel()
        finally:
            await self._close()
        return self._report()

    # ------------------------------------------------------------ the coordinator

    async def _start_coordinator(self) -> None:
        self._coordinator = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.coordinator",
            f"--job-dir={self._folder.path}",
            f"--port={self._port}",
            f"--lifeline={self._lifeline}",
            pass_fds=(self._folder.lock, self._lifeline),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _keep_coordinator(self) -> None:
        """Waits for the coordinator's end; one that died is started again and takes the job over."""
        failures = 0
        while True:
            assert self._coordinator is not None
            code = await self._coordinator.wait()
            if code == 0 or self._interrupts > 1:
                return
            if code == COORDINATOR_PORT_TAKEN:
                raise UsageError(f"port {self._port} is in use; choose another --port, or leave it out")
            failures = failures + 1 if code > 0 else 0
            if failures >= 3:
                raise HoldfastError(f"the coordinator ended {failures} times with exit code {code}")
            self._view.note("the coordinator is gone; starting it again")
            await self._start_coordinator()

    async def _watch(self) -> None:
        async with JobClient(self._folder.path) as client:
            async for said in client.watch():
                self._heard(said)
                if said.kind == "provide-node":
                    await self._engine.provide()
                elif said.kind == "release-node":
                    await self._engine.release(said.value["node"])
                elif said.kind == "mark-node":
                    await self._engine.mark(said.value["node"], said.value["reason"])
                elif said.kind == "reboot-node":
                    await self._engine.reboot(said.value["node"], said.value["reason"])

    def _heard(self, said: Announcement) -> None:
        if said.kind == "event":
            self._view.event(said.value)
        elif said.kind == "status":
            self._view.status(said.value)
        elif said.kind == "log":
            self._view.note(said.value["text"])

    # ------------------------------------------------------------ the end

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._view.note("stopping after this step; once more to stop at once")
            task = asyncio.create_task(self._ask_to_stop())
            self._tasks.add(task)
        elif self._coordinator is not None and self._coordinator.returncode is None:
            self._coordinator.kill()

    async def _ask_to_stop(self) -> None:
        async with JobClient(self._folder.path) as client:
            try:
                await client.post("/stop?reason=interrupted")
            except UsageError as error:
                self._view.note(str(error))

    async def _close(self) -> None:
        if self._coordinator is not None and self._coordinator.returncode is None:
            self._coordinator.kill()
            await self._coordinator.wait()
        await self._engine.close()
        os.close(self._held)
        os.close(self._lifeline)

    def _report(self) -> dict[str, Any]:
        path: Path = self._folder.path / "report.json"
        try:
            report: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return {"outcome": "killed", "reason": "stopped at once", "incidents": []}
        return report
