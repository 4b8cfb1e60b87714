"""Runs deep checks in a child process, so that a crash or a hang in one ends neither the agent nor the command that
asked for it."""

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
"""Niceness of the child, so that jobs that train on the same machine have priority."""

TURN_S = 900.0
"""How long a node waits for its turn while other nodes of the same machine are checked."""

DAMAGE = (signal.SIGILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE)
"""Signals by which a broken processor or broken memory ends a correct program."""

LEAVE_S = 5.0
EXIT_S = 60.0
"""How long a child that has sent all results may take to exit. It frees much memory, at a low priority, while others
train on this machine."""
_progress = msgspec.json.Decoder(CheckProgress)
_PR_SET_PDEATHSIG = 1


def limit_s(seconds: float) -> float:
    """How long one check may take before it is abandoned."""
    return 120.0 + 20 * seconds


async def check_in_child(
    task: Task, tell: Callable[[CheckProgress], None] = lambda progress: None
) -> list[CheckResult]:
    """Runs the checks of a task; `tell` is called for each check that begins and for every result.

    The result of a check that hangs, and of those after it, is unknown. A check that crashed through a fault of the
    machine is faulty.
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
    # Checks that were asked for and gave no result. After a normal exit this means that there was nothing to
    # check; after any other exit the result is unknown.
    left = [
        name
        for name in task.only or plugins.names(plugins.CHECKS)
        if not any(is_of(name, r) for r in results)
    ]
    if process.returncode == 0 and not why:
        return results  # no result: there is nothing to check on this machine
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
    """Reads what the child reports until it exits. Returns why it is not waited for any longer, or ''."""
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
    """Ends the child if it has not exited. One that waits in the kernel for a broken device is left behind."""
    try:
        if process.stdout is not None and process.stdout.at_eof():
            # Without its exit code it is unknown whether the child ended normally, and checks for which there
            # was nothing to look at would be reported as unknown.
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
