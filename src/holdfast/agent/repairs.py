"""Repairs by an agent: it resets a GPU with the driver's own tool, once per order."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable

from holdfast.protocol import messages as m
from holdfast.protocol.health import Remedy

_log = logging.getLogger(__name__)
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
