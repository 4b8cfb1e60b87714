"""The coordinator's liveness signal: one byte after the other into a pipe, by which its launcher knows that its event loop
runs."""

from __future__ import annotations

import asyncio
import os


def beat(pipe: int, every_s: float) -> None:
    """Writes a byte now and every `every_s` seconds, as long as this thread's event loop runs. Never blocks: a launcher that
    does not read leaves the pipe full, or is gone."""
    try:
        # From the loop that decides, not from a thread: a thread would go on while the loop hangs, and the
        # launcher would watch a dead coordinator for ever.
        os.write(pipe, b".")
    except BlockingIOError:
        pass
    except OSError:
        return
    asyncio.get_running_loop().call_later(every_s, beat, pipe, every_s)
