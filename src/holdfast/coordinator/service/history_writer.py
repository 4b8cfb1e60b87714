"""The history of machines beside a running job: read as nodes join, written as decided, on a thread of its own.

A database that is slow or away costs a joining node two seconds once, and is then left alone for a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.coordinator.kernel.events import Remember
from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.service.history_store import Entry, History, HistoryError, now_s, shown

PAST_S = 2.0
PAUSE_S = 60.0


class Memory:
    """One job's way to the histories. `trouble` is told, once, why they cannot be had."""

    def __init__(self, where: str, job: str, trouble: Callable[[str], None]) -> None:
        self._where, self._job, self._trouble = where, job, trouble
        self._thread = ThreadPoolExecutor(1, "history")
        self._history: History | None = None
        self._paused_until_s = 0.0
        self._reported = False

    async def past(self, machine: str, devices: Sequence[str]) -> tuple[Remembered, ...]:
        """What is known of a machine; nothing when it cannot be had in time."""
        if not machine or time.monotonic() < self._paused_until_s:
            return ()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._thread, self._read, machine, devices)
        try:
            return await asyncio.wait_for(reading, PAST_S)
        except HistoryError as error:
            self._failed(str(error))
        except TimeoutError:
            self._failed(f"the history of machines {shown(self._where)} did not answer within {PAST_S:g} s")
        return ()

    def remember(self, record: Remember) -> None:
        """Keeps a record."""
        entry = Entry(
            utc_s=now_s(),
            machine=record.machine,
            node=record.node,
            job=self._job,
            kind=record.kind,
            rule=record.rule,
            device=record.device,
            text=record.text,
            remedy=record.remedy,
        )
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._write, entry)
        writing.add_done_callback(self._written)

    async def close(self) -> None:
        """Returns when all is written, or that takes too long."""
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        await asyncio.wait([closing], timeout=PAST_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _written(self, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self._failed(str(error))

    def _failed(self, why: str) -> None:
        # A database that does not answer costs one join its waiting time, not every join. After the pause it
        # is tried again.
        self._paused_until_s = time.monotonic() + PAUSE_S
        if not self._reported:
            self._reported = True
            self._trouble(why)

    # ------------------------------------------------------------ on the thread

    def _read(self, machine: str, devices: Sequence[str]) -> tuple[Remembered, ...]:
        if self._history is None:
            history = History(self._where, must_exist=True)
            # Opened for each reading and not kept: the file appears when some job writes the first record,
            # and an open handle to nothing would never see it.
            if "://" not in self._where:
                try:
                    return tuple(e.remembered(now_s()) for e in history.past(machine, devices))
                finally:
                    history.close()
            self._history = history
        return tuple(e.remembered(now_s()) for e in self._history.past(machine, devices))

    def _write(self, entry: Entry) -> None:
        if self._history is None:
            self._history = History(self._where)
        self._history.add(entry)

    def _close(self) -> None:
        if self._history is not None:
            self._history.close()
