"""Runs a coroutine until Kubernetes or a person ends the process. Separate from `pod`, so that the watch, of which a cluster has
thousands, does not import the modules for job folders."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until it ends or SIGTERM or SIGINT comes, and returns when it is over. Raises what `work` raises."""
    leaves = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leaves.set)
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(leaves.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
