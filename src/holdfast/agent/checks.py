"""The node's checks and repairs: basic checks during its start, deep ones in a child process when the coordinator asks; GPUs are reset
with the driver's own tool, once per order."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from holdfast.health.checks.basic import Needs, run_basic
from holdfast.health.checks.check import SECONDS, Task
from holdfast.health.checks.child import check_in_child
from holdfast.protocol import messages as m
from holdfast.protocol.health import CheckResult, Condition, Remedy
from holdfast.protocol.wire.stored import read_stored_word

_log = logging.getLogger(__name__)


class NodeChecks:
    """Runs checks of one node, one request after the other: two at the same time would measure each other's load."""

    def __init__(
        self,
        node: str,
        host: str,
        slots: int,
        folder: Path,
        memory: Path,
        send: Callable[[m.AgentMessage], None],
    ) -> None:
        """folder: the job's, whose disk is checked. memory: the folder of the node's snapshots."""
        self._node, self._host, self._folder = node, host, folder
        self._needs = Needs(host, slots, folder, memory)
        self._send = send
        self._busy = asyncio.Lock()
        self._under_way: set[int] = set()

    async def before_joining(self) -> tuple[CheckResult, ...]:
        """Runs the basic checks. The core orders the deep ones, and does not use the node before they are done."""
        return await asyncio.to_thread(run_basic, self._needs)

    async def answer(self, order: m.RunChecks) -> None:
        """Runs the checks and reports their results. A request that is repeated in the meantime is ignored.

        Cancelling this ends the child process.
        """
        # A restarted coordinator repeats the requests that it knows as open. A deep check loads the node
        # fully, and two at a time would find each other's load.
        if order.request in self._under_way:
            return
        self._under_way.add(order.request)
        try:
            async with self._busy:
                results = await self._results(order)
        finally:
            self._under_way.discard(order.request)
        _log.info(
            "checked this node",
            extra={
                "checks": len(results),
                "faulty": [r.name for r in results if r.condition is Condition.FAULTY],
            },
        )
        self._send(m.Checked(order.request, results))

    async def _results(self, order: m.RunChecks) -> tuple[CheckResult, ...]:
        # Basic checks take part of a second and run on a thread. Deep ones run in a child process: they may
        # hang in a driver, and a process that hangs there can at least be left behind.
        alone = () if order.only else await asyncio.to_thread(run_basic, self._needs)
        if order.deep or order.only:
            return (*alone, *await check_in_child(self._task(order)))
        return alone

    def _task(self, order: m.RunChecks) -> Task:
        # Read for each check and given through the child's input. A command line is visible to every user of
        # the machine.
        token = read_stored_word(self._folder / "token")
        return Task(
            node=self._node,
            host=self._host,
            folder=str(self._folder),
            seconds=order.seconds or SECONDS,
            only=order.only,
            peers=order.peers,
            port=order.port,
            token=token,
        )


RESET_S = 120.0
TOOL = "nvidia-smi"
TOLD_CHARS = 200


class Repairs:
    """The repairs of one node. shared: other nodes use this machine's devices, so none is reset."""

    def __init__(self, shared: bool, send: Callable[[m.Repaired], None], tool: str = TOOL) -> None:
        self._shared, self._send, self._tool = shared, send, tool
        # Kept for the life of the agent. A reset ends whatever runs on the device, so a request that is
        # repeated after its answer was lost must not reset the device again.
        self._answers: dict[int, m.Repaired | None] = {}

    async def answer(self, order: m.Repair) -> None:
        """Carries out an order and reports the outcome. A repeated order gets the same answer."""
        if order.request in self._answers:
            known = self._answers[order.request]
            # None: it is still being carried out, and its answer will go to whichever coordinator is there
            # then.
            if known is not None:
                self._send(known)
            return
        self._answers[order.request] = None
        _log.info("a repair was ordered", extra={"remedy": order.remedy.value, "device": order.device})
        answer = m.Repaired(order.request, await self._repair(order))
        _log.info("the repair ended: %s", answer.error or "done", extra={"remedy": order.remedy.value})
        self._answers[order.request] = answer
        self._send(answer)

    async def _repair(self, order: m.Repair) -> str | None:
        """What went wrong; None: nothing."""
        if order.remedy is not Remedy.RESET_DEVICE:
            return f"an agent cannot carry out {order.remedy.value}"
        # The other nodes of this machine train on the same devices.
        if self._shared:
            return "the node shares its machine with others, and has no device of its own to reset"
        path = shutil.which(self._tool)
        if path is None:
            return f"{self._tool} was not found on this node"
        which = ("-i", order.device) if order.device else ()
        process = await asyncio.create_subprocess_exec(
            path,
            "--gpu-reset",
            *which,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(RESET_S):
                output, _ = await process.communicate()
        except (TimeoutError, asyncio.CancelledError) as error:
            # Also where the agent ends: a reset that runs on would hit the job that gets the node next.
            process.kill()
            await process.wait()
            if isinstance(error, asyncio.CancelledError):
                raise
            return f"{self._tool} --gpu-reset did not end within {RESET_S:g} s"
        if process.returncode == 0:
            return None
        told = " ".join(output.decode(errors="replace").split())[-TOLD_CHARS:]
        return f"{self._tool} --gpu-reset ended with exit code {process.returncode}: {told}"
