"""Processes that decode samples for a worker.

They belong to a process pool, not to a DataLoader. A DataLoader hands batches out in the order in which it asked for
them, so after a resize those of the old share come first; and it reports the death of a process by an exception from a
signal handler, which may interrupt an optimizer step. A pool gives a future for every micro-batch.

They are spawned, not forked: a worker has threads, whose locks a fork would copy. They end with the worker from their
first instruction on, even while they still import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from concurrent.futures import Future, InvalidStateError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from holdfast.data.collate import Ids, Maker, describe, packed
from holdfast.errors import DataError, UsageError

_END_WITH_PARENT = "import ctypes, os; ctypes.CDLL(None).prctl({option}, {signal}); os.getppid() == {parent} or os._exit(1); "
_PR_SET_PDEATHSIG = 1

_maker: list[Maker] = []
"""In a decoding process: the maker of micro-batches, sent once when the process starts."""


class Decoders:
    """A pool of `workers` decoding processes."""

    def __init__(self, maker: Maker, workers: int) -> None:
        """Raises UsageError if the dataset cannot be pickled for another process."""
        self._workers = workers
        self._up = False
        try:
            # Pickled once and here, for two reasons: a dataset that cannot be pickled is refused before
            # training starts, and a restart sends the same bytes even if the script has changed the dataset
            # since.
            self._sent = pickle.dumps(maker)
        except Exception as error:
            raise UsageError(
                f"holdfast.data.shuffled({describe(maker.dataset)}): the dataset cannot be sent to a decoding "
                f"process ({error}); define the dataset, its transforms and `collate` at the top level of a module, "
                "or use workers=0"
            ) from error
        self._start()

    @property
    def up(self) -> bool:
        """Whether the first process is ready to decode; until then the worker does better to decode by itself."""
        # A process that has answered once can decode. If it dies later, the future of its micro-batch shows
        # it.
        self._up = self._up or any(f.done() for f in self._greetings)
        return self._up

    def make(self, step: int, micro: int, ids: Ids) -> Future[bytes]:
        """Submits a micro-batch to be made."""
        try:
            future = self._pool.submit(_make, step, micro, ids)
            future.__class__ = _Cancellable
            return future
        except BrokenProcessPool as error:
            failed: Future[bytes] = Future()
            failed.set_exception(error)
            return failed

    def restart(self) -> None:
        """Starts new processes in place of those that died."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._start()

    def close(self) -> None:
        """Ends the processes. Waits for the samples under way, but not for processes that are still starting: they
        would import torch for seconds, to no purpose."""
        if not all(f.done() for f in self._greetings):
            for process in list(self._pool._processes.values()):  # Python 3.14 has kill_workers() for this
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> None:
        self._pool = ProcessPoolExecutor(
            self._workers,
            mp_context=_Context(),
            initializer=_begin,
            initargs=(self._sent,),
        )
        # A pool starts a process only if it gets work and no process is idle. One greeting per process makes
        # the pool start all of them now. Otherwise they would start one after the other with the first steps,
        # each with seconds of imports.
        self._greetings = [self._pool.submit(_greet) for _ in range(self._workers)]


class _Cancellable(Future[bytes]):
    """A future that may be cancelled before its pool breaks. In Python 3.11 the pool's thread raises at such a future:
    it prints a traceback, and no future after it ever completes, so a worker would wait for its micro-batch for ever."""

    def set_exception(self, exception: BaseException | None) -> None:
        with suppress(InvalidStateError):
            super().set_exception(exception)


class _Popen(popen_spawn_posix.Popen):
    """Starts a process that runs code of ours before it imports the script, for which multiprocessing has no hook."""

    def _launch(self, process_obj: Any) -> None:
        plain = spawn.get_command_line

        def command_line(**given: Any) -> list[str]:
            line = plain(**given)
            first = _END_WITH_PARENT.format(
                option=_PR_SET_PDEATHSIG, signal=int(signal.SIGKILL), parent=os.getpid()
            )
            at = line.index("-c") + 1
            # -P: it must not import modules of the current folder before it has the parent's sys.path
            return [line[0], "-P", *line[1:at], first + line[at], *line[at + 1 :]]

        # Replaced for the duration of one start only, so that processes that the script starts are started as
        # usual.
        spawn.get_command_line = command_line
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        finally:
            spawn.get_command_line = plain


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


def is_decoder() -> bool:
    """Whether this process is a decoding process that is starting, and imports the script only for its definitions."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _begin(sent: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends its processes
    import torch

    # With torch's default each of these processes would start as many threads as the machine has cores.
    torch.set_num_threads(1)
    _maker.append(pickle.loads(sent))


def _greet() -> None:
    return


def _make(step: int, micro: int, ids: Ids) -> bytes:
    """(sample numbers, batch), pickled."""
    try:
        return packed((ids, _maker[0].make(step, micro, ids)))
    except DataError as error:
        # The exception is pickled on its way to the worker. A cause of a class that the worker cannot import
        # would break the pool, and the user would see that instead of the error in the dataset.
        raised = DataError(str(error))
        raised.add_note("In a decoding process:\n" + "".join(traceback.format_exception(error)))
        raise raised from None
    except Exception as error:  # noqa: BLE001 - whatever a batch's own class raises when it is pickled
        raise DataError(
            f"the micro-batch {micro} of step {step} of {describe(_maker[0].dataset)} cannot be sent to the worker: "
            f"{type(error).__name__}: {error}"
        ) from None
