"""Does things to a running job when it has come to certain steps."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import leftovers

from holdfast.engines.client import JobClient, NoAnswer
from holdfast.protocol.job_view import JobView

Act = Callable[[JobClient, dict[str, Any]], Any]
"""What is done, with the job's client and its status."""


@dataclass(frozen=True)
class Deed:
    """Something to do when the job trains with `world` workers (None: any number), has committed `after` steps
    more than at the deed before, and its status is such that `when`."""

    do: Act
    after: int = 20
    world: int | None = None
    when: Callable[[JobView], bool] = lambda status: True


def resize(nodes: int) -> Act:
    return lambda client, status: client.post(f"/resize?nodes={nodes}&reason=test")


def drain(rank: int) -> Act:
    """The node of a rank is to leave."""

    def deed(client: JobClient, status: JobView) -> Any:
        node = next(w.node for w in status.workers if w.rank == rank % status.world)
        return client.post("/drain", f'{{"type": "node-going", "node": "{node}", "reason": "test"}}')

    return deed


def engine(body: str) -> Act:
    """Something that the engine says."""
    return lambda client, status: client.post("/engine", body)


def fault(spec: str) -> Act:
    return lambda client, status: client.post("/fault", spec)


def kill_everything(home: Path) -> Act:
    """Every process of the job gets SIGKILL, and none sees another one's end."""

    async def act(client: JobClient, status: JobView) -> None:
        handles: dict[int, int] = {}
        while new := set(leftovers(home)) - set(handles):
            for pid in new:
                with suppress(ProcessLookupError):
                    handles[pid] = os.pidfd_open(pid)
                    os.kill(pid, signal.SIGSTOP)
        for handle in handles.values():
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in handles.values():
            assert select.select([handle], [], [], 20)[0], "a process does not end"
            os.close(handle)

    return act


class Gate:
    """Where a script's workers wait, between two steps, until they may go on."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR)  # both ends: it stays open, and so does what is written

    def open(self) -> Act:
        async def act(client: JobClient, status: JobView) -> None:
            os.write(self._file, b"." * 100)  # a byte for everybody who comes

        return act

    def close(self) -> None:
        os.close(self._file)


def newcomer(status: JobView) -> bool:
    """Somebody is ready to be let in."""
    return any(w.state == "ready" for w in status.workers)


def stop() -> Act:
    return lambda client, status: client.post("/stop?reason=test")


class Driver:
    """Follows a job in a thread, and does one deed after the other."""

    def __init__(self, job_dir: Path, deeds: list[Deed]) -> None:
        self.left = list(deeds)
        self.error: BaseException | None = None
        self._job_dir = job_dir
        self._step = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None and exception[0] is None:
            raise self.error

    def _run(self) -> None:
        try:
            asyncio.run(self._drive())
        except BaseException as error:  # for the test's thread
            self.error = error

    async def _drive(self) -> None:
        async with JobClient(self._job_dir) as client:
            async for said in client.watch():
                if said.kind == "status":
                    await self._see(client, said.value)

    async def _see(self, client: JobClient, status: JobView) -> None:
        if not self.left or status.phase != "running":
            return
        deed = self.left[0]
        if deed.world not in (None, status.world) or status.step < self._step + deed.after:
            return
        if not deed.when(status):
            return
        self.left.pop(0)
        self._step = status.step
        try:
            await deed.do(client, status)
        except NoAnswer:
            return  # the deed was the coordinator's end
