"""What scripts log with `run.log`: the newest value of each name in the state, every value in the ledger.

They are rank 0's: a value is the same on all replicas, or each rank has another one and nobody could say which is meant.
"""

from __future__ import annotations

from holdfast.coordinator.kernel.state import CoreState
from holdfast.protocol import messages as m


def heard(state: CoreState, told: m.Progress) -> None:
    """A worker told figures. Names beyond the bounds that `run.log` keeps are not taken: nothing here may grow for ever."""
    current = (
        state.membership.generation is not None and told.generation == state.membership.generation.number
    )
    for step, values in told.figures:
        for name, value in values.items():
            known = state.membership.figures.get(name)
            if known is None and (
                len(state.membership.figures) >= m.MOST_FIGURES or len(name) > m.FIGURE_NAME
            ):
                continue
            # A job that went back to a snapshot logs steps again; a word of the generation before may come late.
            if known is None or current or step >= known[0]:
                state.membership.figures[name] = step, value


def rows(state: CoreState, told: m.Progress) -> list[tuple[str, int, float]]:
    """For the ledger: (name, step, value) of each figure that was taken."""
    return [
        (n, step, v)
        for step, values in told.figures
        for n, v in values.items()
        if n in state.membership.figures
    ]
