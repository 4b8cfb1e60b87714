"""Child processes that end with the benchmark, whatever they start themselves.

Launchers put their workers into sessions of their own, and some peers double-fork helpers, so process
groups are not enough. The benchmark makes itself the subreaper of its descendants: whoever loses its
parent becomes our child, and stays visible until we end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """In a child, before exec: SIGTERM when the benchmark itself is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Children:
    """Everything this benchmark starts. Leaving the `with` block ends every descendant that was not there before."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._before: set[int] = set()

    def __enter__(self) -> Children:
        self._before = set(descendants(os.getpid(), ended=True))
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self._groups:
            group.end()
        self._end_orphans()
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    @contextlib.contextmanager
    def group(self) -> Iterator[Group]:
        """A group of processes that is ended on leaving the block, with all that they have started.

        Orphans cannot be told apart by group: they are ended together with the last group that is open.
        """
        group = Group()
        self._groups.append(group)
        try:
            yield group
        finally:
            group.end()
            self._groups.remove(group)
            if not self._groups:
                self._end_orphans()

    def _end_orphans(self) -> None:
        """With no group left, every descendant is an orphan. Collected, its CPU time counts as ours."""
        _end_all(lambda: set(descendants(os.getpid())) - self._before)
        for pid in set(descendants(os.getpid(), ended=True)) - self._before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


class Group:
    """Processes that were started for one purpose."""

    GRACE_S = 3.0
    """Between SIGTERM and SIGKILL."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def spawn(self, argv: Sequence[str | Path], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start `argv` in a session of its own, its output appended to `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(word) for word in argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._started.append(process)
        return process

    def first_exit(self, killed: Collection[int] = ()) -> subprocess.Popen[bytes] | None:
        """A started process that has ended and whose pid is not among those `killed`, if any."""
        return next((p for p in self._started if p.poll() is not None and p.pid not in killed), None)

    def end(self) -> None:
        """SIGTERM to what was started; SIGKILL to all that is left of it after the grace time."""
        running = [process for process in self._started if process.poll() is None]
        family = [pid for process in running for pid in (process.pid, *descendants(process.pid))]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self.GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        mine = set(family).intersection
        _end_all(lambda: mine(descendants(os.getpid())))
        self._started.clear()


def _end_all(alive: Callable[[], Iterable[int]], limit_s: float = 10.0) -> None:
    """SIGKILL what `alive` lists until it lists nothing: a parent may have restarted a child meanwhile."""
    deadline = time.monotonic() + limit_s
    while pids := list(alive()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} do not end")
        time.sleep(0.02)


def descendants(root: int, ended: bool = False) -> Iterator[int]:
    """The living descendants of `root`, parents before their children. ended: also those that nobody has waited for."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if ended or fields[0] != b"Z":
                    children.setdefault(int(fields[1]), []).append(int(folder.name))
    waiting = [root]
    while waiting:
        found = children.get(waiting.pop(0), [])
        yield from found
        waiting += found


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt, so that every `with` block ends its children.

    Further ones are ignored: the clean-up is short, and interrupting it would leave processes behind.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
