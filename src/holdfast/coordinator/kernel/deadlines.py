"""When the core has to look at something even if nothing happens."""

from __future__ import annotations

import msgspec


class Deadlines(msgspec.Struct):
    """Times on the core's clock; None: not set. Written by `membership`."""

    break_deadline_s: float | None = None
    """Members that have not left the broken generation by then are taken out."""
    stop_deadline_s: float | None = None
    """The job, which was asked to stop, has ended by then."""
    inspect_deadline_s: float | None = None
    """A hang is judged by what was answered by then."""
    wait_deadline_s: float | None = None
    """A job with too few workers gives up then."""
    form_deadline_s: float | None = None
    """A smaller generation than was asked for is formed then."""
    form_after_s: float | None = None
    """No generation is formed before, after several that committed nothing."""
    start_after_s: float | None = None
    """No worker is started again before, after several that did not get ready."""
    ask_after_s: float | None = None
    """The engine is asked for no node before."""
