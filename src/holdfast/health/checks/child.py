"""Deep checks in a child process: what crashes or hangs there ends neither the agent nor the command that asked."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable

import msgspec

from holdfast import plugins
from holdfast.errors import Damaged
from holdfast.health.checks.check import CheckProgress, Task, is_of, unknown
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.machine.processes import python_module
from holdfast.protocol.wire.decoding import decode

NICE = 10
"""So that what trains on the same machine has the processor first."""

TURN_S = 900.0
"""How long a node waits for others of the same machine to be checked."""

DAMAGE = (signal.SIGILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE)
"""Signals by which a processor or memory that is broken ends a program that is not."""

LEAVE_S = 5.0
EXIT_S = 60.0
"""How long a child that has said all may take to end. It gives back much memory, at a low priority, beside what trains here."""
_progress = msgspec.json.Decoder(CheckProgress)
_PR_SET_PDEATHSIG = 1


def limit_s(seconds: float) -> float:
    """How long one check may take before it is given up."""
    return 120.0 + 20 * seconds


async def check_in_child(
    task: Task, tell: Callable[[CheckProgress], None] = lambda progress: None
) -> list[CheckResult]:
    """Runs the checks of a task; `tell` hears of each that begins and of every result.

    A check that hangs, and those after it, are unknown. One that crashed by a fault of the machine's is faulty.
    """
    process = await asyncio.create_subprocess_exec(
        *python_module("holdfast.tools.checks"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=_modest,
        # A session of its own: the check may start tools (dcgmi, ib_write_bw), and all of them are ended by
        # one signal to the group.
        start_new_session=True,
    )
    results: list[CheckResult] = []
    try:
        why = await _listen(process, task, results, tell)
    finally:
        await _end(process)
    # What was asked for and gave nothing. After a normal end that means that there was nothing to look at;
    # after any other end nobody knows.
    left = [
        name
        for name in task.only or plugins.names(plugins.CHECKS)
        if not any(is_of(name, r) for r in results)
    ]
    if process.returncode == 0 and not why:
        return results  # a check without a result has nothing to look at here
    for name in left:
        result = _unfinished(name, why if name == left[0] else "", process.returncode, first=name == left[0])
        tell(CheckProgress(result=result))
        results.append(result)
    return results


async def _listen(
    process: asyncio.subprocess.Process,
    task: Task,
    results: list[CheckResult],
    tell: Callable[[CheckProgress], None],
) -> str:
    """Takes what the child says until its end; why it is not waited for any longer, or ''."""
    assert process.stdin is not None
    assert process.stdout is not None
    # By stdin: the task has the job's token, and command lines can be read by every user of the machine.
    process.stdin.write(msgspec.json.encode(task))
    process.stdin.write_eof()
    limit, until_s = limit_s(task.seconds), time.monotonic() + TURN_S
    while True:
        try:
            # The limit is for each check, not for all: a full suite on eight GPUs takes longer than any hang
            # may. Waiting for a turn has a limit of its own.
            async with asyncio.timeout_at(_loop_time(until_s)):
                line = await process.stdout.readline()
        except TimeoutError:
            return f"it did not end within {limit:g} s"
        if not line:
            return ""
        try:
            progress = decode(_progress.decode, line, "its output cannot be read")
        except Damaged as error:
            return str(error)
        if progress.result is not None:
            results.append(progress.result)
        until_s = time.monotonic() + (TURN_S if progress == CheckProgress() else limit)
        tell(progress)


def _loop_time(monotonic_s: float) -> float:
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the child, if it has not ended. One that waits for a broken device in the kernel is left behind."""
    try:
        if process.stdout is not None and process.stdout.at_eof():
            # Without its exit code nobody knows whether it ended in order, and what it found nothing to look at would be
            # unknown.
            async with asyncio.timeout(EXIT_S):
                await process.wait()
            return
        async with asyncio.timeout(LEAVE_S):
            # A process in state D does not end before its call returns. Waiting for it would hold the agent
            # as long as the device hangs.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    except (TimeoutError, ProcessLookupError):
        return


def _unfinished(name: str, why: str, code: int | None, first: bool) -> CheckResult:
    if not first:
        return unknown(name, "not run: the previous check did not end")
    if why:
        return unknown(name, why)
    # SIGKILL is not among them: it is the kernel's answer to a lack of memory, or a person's. SIGABRT is not
    # either, because libraries abort for wrong settings too.
    if code is not None and -code in DAMAGE:
        what = signal.Signals(-code).name
        return CheckResult(
            name=name,
            condition=Condition.FAULTY,
            detail=f"the check was ended by {what}: processor or memory",
        )
    return unknown(name, f"the process that checks ended with exit code {code}")


def _modest() -> None:
    os.nice(NICE)
    # If the agent is killed, the check must not go on loading a machine on which nobody waits for its result.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
