"""Lifecycle hooks: the user's scripts that run on a node when it joins and leaves."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import time
from pathlib import Path

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.machine.ownership import refuse_open_to_others

_log = logging.getLogger(__name__)
HOOKS = ("on-create", "before-join", "on-drain", "after-job")
"""on-create: the node's agent begins. before-join: just before the coordinator hears of it; a failure keeps the node
out. on-drain: it is told to leave. after-job: the job, or the node's part in it, is over."""

TIMEOUT_VARIABLE = "HOLDFAST_HOOK_TIMEOUT_S"
TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


class HookRun(msgspec.Struct, frozen=True):
    """How a hook ended."""

    hook: str
    error: str = ""
    """What went wrong; empty: nothing did."""
    took_s: float = 0.0
    log: str = ""
    """Path of its output; empty: it has none."""

    def told(self, node: str) -> str:
        """Which hook, where, how it ended, and where its output is."""
        return f"hook {self.hook} failed on {node}: {self.error}; its output is in {self.log}"


def timeout_s() -> float:
    """How long a hook may take.

    Raises:
        UsageError: the environment says something that is no time.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else TIMEOUT_S
    except ValueError:
        seconds = -1.0
    # NaN fails this comparison too.
    if not 0 < seconds < 86400:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r}: must be a number of seconds, for example 60")
    return seconds


def check_hooks(folder: Path) -> tuple[str, ...]:
    """The hooks that a folder has.

    Raises:
        UsageError: there is no such folder, it has none, or one cannot be executed.
    """
    if not folder.is_dir():
        raise UsageError(f"--hooks {folder}: this folder does not exist")
    timeout_s()
    refuse_open_to_others(folder, "--hooks", owner=False)
    there = tuple(hook for hook in HOOKS if (folder / hook).exists())
    if not there:
        raise UsageError(f"--hooks {folder}: the folder does not contain any of {', '.join(HOOKS)}")
    for hook in there:
        path = folder / hook
        if not path.is_file() or not os.access(path, os.X_OK):
            raise UsageError(f"--hooks {folder}: {hook} is not executable; run `chmod +x {path}`")
        refuse_open_to_others(path, "--hooks", owner=False)
        with path.open("rb") as script:
            # An empty file is executable and ends with an error that names neither the hook nor the reason.
            if not script.read(1):
                raise UsageError(
                    f"--hooks {folder}: {hook} is empty; write a script that begins for example with #!/bin/sh"
                )
    return there


class Hooks:
    """The hooks of one node. Their output is kept in the node's log folder."""

    def __init__(self, folder: str, job: str, node: str, logs: Path) -> None:
        """folder: empty when the job has none."""
        self._folder = Path(folder) if folder else None
        self._job, self._node, self._logs = job, node, logs

    async def run(self, hook: str, reason: str) -> HookRun | None:
        """Runs a hook to its end, or to its time-out; None when there is none of this name."""
        if self._folder is None or not (self._folder / hook).exists():
            return None
        # Appended: an agent that starts again on this node keeps the output of the one before.
        log = self._logs / f"hook-{hook}.log"
        try:
            # On this machine, and now: what was looked at before the job's start may have been another folder.
            for path in (self._folder, self._folder / hook):
                refuse_open_to_others(path, "--hooks", owner=False)
        except (OSError, UsageError) as error:
            return HookRun(hook, f"it is not run: {error}", 0.0, str(log))
        began_s, limit_s = time.monotonic(), timeout_s()
        _log.info("running a hook", extra={"hook": hook, "reason": reason, "limit_s": limit_s})
        with log.open("ab") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    self._folder / hook,
                    env=self._environment(hook, reason),
                    cwd=self._folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=asyncio.subprocess.STDOUT,
                    # A hook may start children. In a session of its own all of them form one group, which a
                    # time-out can kill as a whole.
                    start_new_session=True,
                    # An agent that is killed must not leave a hook behind that unmounts what the next agent
                    # uses.
                    preexec_fn=_die_with_agent,
                )
            except OSError as error:
                return HookRun(hook, f"it cannot be started: {error.strerror}", 0.0, str(log))
        trouble = await _ended(process, limit_s)
        return HookRun(hook, trouble, round(time.monotonic() - began_s, 3), str(log))

    def _environment(self, hook: str, reason: str) -> dict[str, str]:
        """The agent's environment, without any token."""
        # A hook is the site's program and may print its environment into a log.
        kept = {k: v for k, v in os.environ.items() if not (k.startswith("HOLDFAST_") and "TOKEN" in k)}
        ours = {"JOB": self._job, "NODE": self._node, "REASON": reason, "HOOK": hook}
        return kept | {f"HOLDFAST_{name}": value for name, value in ours.items()}


async def _ended(process: asyncio.subprocess.Process, limit_s: float) -> str:
    """Waits; kills it, with all that it started, when its time is over. What went wrong, or ''."""
    try:
        async with asyncio.timeout(limit_s):
            code = await process.wait()
    except TimeoutError:
        _kill(process.pid)
        await process.wait()
        return f"it did not end within {limit_s:g} s"
    except asyncio.CancelledError:
        _kill(process.pid)
        await process.wait()
        raise
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _die_with_agent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
