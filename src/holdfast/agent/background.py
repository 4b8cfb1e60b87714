"""Threads that leave the processor to training."""

from __future__ import annotations

import os
import threading


def stand_back(nice: int) -> None:
    """This thread takes what others leave over. One that stands further back already, as in an agent that was started
    under `nice`, stays there: who is not root may not come forward again, and need not."""
    me = threading.get_native_id()
    try:
        if os.getpriority(os.PRIO_PROCESS, me) < nice:
            os.setpriority(os.PRIO_PROCESS, me, nice)
    except OSError:
        return  # a sandbox may forbid it; what the thread does matters more than when
