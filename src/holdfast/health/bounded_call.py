"""Calls that may never return (into a driver, to a file server): made in a thread of their own and abandoned after a
time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NoAnswerError(Exception):
    """The call has not returned. waited_s: the time since it was made."""

    def __init__(self, what: str, waited_s: float) -> None:
        super().__init__(f"{what} has not answered for {waited_s:.0f} s")
        self.waited_s = waited_s


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.since = time.monotonic()
        self.done = threading.Event()
        self.result: T
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.result = self.work()
        # BaseException too: an error that ended this thread would leave the caller waiting until its limit,
        # and every later caller as well.
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        self.done.set()


class BoundedCaller:
    """One thread for the calls into one driver or server. While a call hangs, no other call is made: at most one thread
    hangs, and only the first caller waits for the limit."""

    def __init__(self, what: str, limit_s: float) -> None:
        self._what, self._limit_s = what, limit_s
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._pending: _Call[Any] | None = None
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T]) -> T:
        """Returns or raises what `work` does.

        Raises:
            NoAnswerError: it did not return within the limit, or an earlier call has not returned yet.
        """
        # No second call while one hangs. A call into a driver that waits in the kernel cannot be cancelled
        # (state D ignores even SIGKILL), so each further one would leave one more thread for good.
        if self._pending is not None:
            if not self._pending.done.is_set():
                # At once, without waiting the limit again: the watcher's other sources share its period.
                raise NoAnswerError(self._what, time.monotonic() - self._pending.since)
            self._pending = None
        if self._thread is None:
            # A daemon: a thread that hangs in the kernel must not keep the agent from ending.
            self._thread = threading.Thread(target=self._run, name=f"bounded-call-{self._what}", daemon=True)
            self._thread.start()
        # A new object for each call, never a slot that is used again: a call that was given up writes its
        # late result into its own object, where nobody reads it.
        call = _Call(work)
        self._calls.put(call)
        if not call.done.wait(self._limit_s):
            self._pending = call
            raise NoAnswerError(self._what, time.monotonic() - call.since)
        if call.error is not None:
            raise call.error
        return call.result

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()

    def close(self) -> None:
        """Lets the thread end when its call comes back. Does not wait for it."""
        if self._thread is not None:
            # The thread ends when it is free, which may be never. Joining it would make the agent's end
            # depend on the device that hangs.
            self._calls.put(None)
            self._thread = None
