"""Threads that leave the processor to training."""

from __future__ import annotations

import os
import threading


def stand_back(nice: int) -> None:
    """Lowers the priority of this thread. A thread whose priority is lower already keeps it, because only root may
    raise it again."""
    me = threading.get_native_id()
    try:
        if os.getpriority(os.PRIO_PROCESS, me) < nice:
            os.setpriority(os.PRIO_PROCESS, me, nice)
    except OSError:
        return  # a sandbox may forbid it; what the thread does matters more than when
