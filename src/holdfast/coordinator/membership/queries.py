"""What the other parts want to know of nodes and workers. Nothing is changed here."""

from __future__ import annotations

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import Worker, WorkerPhase

COST_SHARE = 0.05
"""So much of the time may go into letting newcomers in that add little: after a change that stalled training for 0.5 s the
next one waits until 10 s have passed."""


GAIN_SHARE = 0.5
"""And so much of what they add, where that is more: to go on with half of the workers for 10 s costs more than the stall."""


def leaves(core: Context, worker: Worker) -> bool:
    """Its node is to leave."""
    node = core.state.nodes.get(worker.node)
    return node is not None and node.leaving is not None


def ready_to_join(core: Context) -> list[Worker]:
    return [w for w in core.workers_in(WorkerPhase.READY) if not leaves(core, w)]


def about_to_join(core: Context) -> list[Worker]:
    starting = core.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    return [w for w in starting if not leaves(core, w)]


def join_after_s(core: Context, staying: int, full: int = 0) -> float:
    """From when on newcomers are let in, at the next commit, which may be the generation's first: all at once if several are
    about to be ready, and not so often that joining costs more than its share of the time.

    Args:
        staying, full: workers that compute without them, and with them.
    """
    s = core.state
    if s.generation is None:
        return float("inf")
    gain = 1 - staying / full if full > staying else 0.0
    after_s = s.grew_at_s + s.join_cost_s / max(COST_SHARE, GAIN_SHARE * gain) if s.grew_at_s else 0.0
    ready = ready_to_join(core)
    if about_to_join(core) and staying + len(ready) < s.target:
        after_s = max(after_s, min(w.ready_at_s for w in ready) + core.timing.gather_s)
    return after_s
