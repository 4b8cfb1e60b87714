"""The coordinator's pulse: a byte into a pipe, again and again, by which its launcher knows that its loop turns."""

from __future__ import annotations

import asyncio
import os


def beat(pulse: int, every_s: float) -> None:
    """Writes now and from now on, as long as the loop of this thread turns. A launcher that does not read leaves the pipe
    full, or is gone: nobody waits for it."""
    try:
        # From the loop that decides, not from a thread: a thread would go on while the loop hangs, and the
        # launcher would watch a dead coordinator for ever.
        os.write(pulse, b".")
    except BlockingIOError:
        pass
    except OSError:
        return
    asyncio.get_running_loop().call_later(every_s, beat, pulse, every_s)
