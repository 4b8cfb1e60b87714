"""An event loop in virtual time, one for each simulated process."""

from __future__ import annotations

import asyncio
import enum
from asyncio import events
from collections.abc import Callable
from typing import Any

from simcluster.clock import Clock, Timer

HANDLE_S = 2e-5
"""What a handle costs where nothing is slow. Not zero: whoever plans itself again at once has to come to an end."""


class State(enum.Enum):
    """Of a process."""

    RUNS = enum.auto()
    STOPPED = enum.auto()
    """By SIGSTOP: its kernel goes on to receive for it."""
    DEAD = enum.auto()


class Exited(BaseException):
    """The process has ended itself: its loop is dead already, and what is unwound changes nothing."""


class _Selector:
    """Never waits: the clock brings the loop its turn when there is something to do."""

    def __init__(self) -> None:
        self.arrived: list[asyncio.Handle] = []

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        """What the kernel has received since the last look."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        """Nothing is open."""


class _Transport(asyncio.Transport):
    """Nothing is said on it."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def is_closing(self) -> bool:
        return self._closed


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's own loop, whose turns are events of a simulated clock: it orders messages, timers and tasks as it does on a
    real one. Time stands still within a turn; each handle that ran delays the next turn by its cost."""

    def __init__(self, clock: Clock, name: str, broke: Callable[[str], None]) -> None:
        """broke: is called with what went wrong in a callback, or in a task that nobody waits for."""
        super().__init__()
        self.name, self._world, self._broke = name, clock, broke
        self.state = State.RUNS
        self.handle_s = HANDLE_S
        self.at_end: list[Callable[[], None]] = []
        """What its kernel does when the process is gone."""
        self.on_continue: list[Callable[[], None]] = []
        self.answers: Callable[[str], bool | None] = lambda host: False
        """Whether somebody listens on a machine; None: it does not even refuse."""
        self._selector = _Selector()
        self._clock_resolution = 1e-9
        self._turn: Timer | None = None
        self._turn_s = 0.0
        self._busy_until_s = clock.now
        self._in_turn = False
        self._kept: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._on_exception)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._world.now

    @property
    def alive(self) -> bool:
        """It exists, stopped or not."""
        return self.state is not State.DEAD

    # ------------------------------------------------------------ turns

    def deliver(self, call: Callable[..., object], *args: Any) -> None:
        """The kernel has something for the process, which finds it at the select of its next turn."""
        if self.alive:
            self._selector.arrived.append(asyncio.Handle(call, args, self))
            self._plan()

    def _process_events(self, event_list: list[asyncio.Handle]) -> None:
        self._ready.extend(event_list)

    def _write_to_self(self) -> None:
        """For call_soon_threadsafe: the call is planned already."""

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = super()._call_soon(callback, args, context)
        self._plan()
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        self._plan()
        return timer

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """To a server that waits for a request and gets none."""
        answers = self.answers(host)
        if answers is None:
            await asyncio.Event().wait()
        if not answers:
            raise ConnectionRefusedError(f"nobody listens at {host}")
        protocol, transport = protocol_factory(), _Transport()
        protocol.connection_made(transport)
        return transport, protocol

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """On the loop, a turn later. What may hang or fail has a `SideThread`."""
        future = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(call)
        return future

    def _plan(self) -> None:
        if self._in_turn or self.state is not State.RUNS:
            return
        if self._ready or self._selector.arrived:
            at_s = self._world.now
        elif self._scheduled:
            at_s = self._scheduled[0]._when
        else:
            return
        at_s = max(at_s, self._busy_until_s, self._world.now)
        if self._turn is not None:
            if self._turn_s <= at_s:
                return
            self._turn.cancel()
        self._turn, self._turn_s = self._world.at(at_s, self._take_turn), at_s

    def _take_turn(self) -> None:
        self._turn = None
        if self.state is not State.RUNS:
            return
        self._in_turn = True
        before = len(self._ready) + len(self._selector.arrived)
        events._set_running_loop(self)
        try:
            self._run_once()
        finally:
            events._set_running_loop(None)
            self._in_turn = False
        self._busy_until_s = self._world.now + max(1, before) * self.handle_s
        self._plan()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.state is State.RUNS:
            self._broke(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        # Kept for the whole schedule. Where nobody else holds it, a dead process's task would be collected, and
        # run its `finally`, at a moment that no seed determines.
        task = asyncio.Task(work, loop=loop, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._kept.append(task)
        if len(self._kept) > 500:
            self._kept = [t for t in self._kept if not t.done()]
        return task

    # ------------------------------------------------------------ signals

    def stop_process(self) -> None:
        """SIGSTOP."""
        if self.state is State.RUNS:
            self.state = State.STOPPED
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None

    def continue_process(self) -> None:
        """SIGCONT."""
        if self.state is State.STOPPED:
            self.state = State.RUNS
            waiting, self.on_continue = self.on_continue, []
            for call in waiting:
                call()
            self._plan()

    def kill(self) -> None:
        """SIGKILL: no `finally` runs, nothing is flushed. The kernel closes what was open."""
        if not self.alive:
            return
        self.state = State.DEAD
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for handle in self._ready:  # of this very turn; they are counted, so they stay
            handle.cancel()
        for call in self.at_end:
            call()

    def bury(self) -> None:
        """After the schedule: lets go of everything without a word about tasks that never ended."""
        self.state = State.DEAD
        self._ready.clear()
        self._scheduled.clear()
        events._set_running_loop(self)
        try:
            for task in self._kept:
                if task.done():
                    if not task.cancelled():
                        task.exception()
                    continue
                try:
                    task.get_coro().close()  # type: ignore[union-attr]
                except (Exception, Exited):
                    pass
        finally:
            events._set_running_loop(None)
        self._kept.clear()
        self._ready.clear()
        self._scheduled.clear()
        self.close()
