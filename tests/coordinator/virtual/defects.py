"""Defects that are planted on purpose: a simulation that does not find them proves nothing."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.coordinator.membership import nodes
from holdfast.coordinator.service import agents, decision_loop, queues
from holdfast.protocol import generation_difference

Change = tuple[Any, str, str, str]
"""Where a function is, its name, a text in its source, and what stands there instead."""


@dataclass(frozen=True)
class Defect:
    """One change of the code, or several that belong together."""

    name: str
    changes: tuple[Change, ...]
    told: str
    """What the invariant that finds it says."""
    seed: int
    """A schedule in which it is found."""


DAMAGED: tuple[Change, ...] = (
    (
        queues.AgentLines,
        "_form",
        "difference(line.base, generation)",
        "damaged(difference(line.base, generation))",
    ),
)
"""Differences that their agents refuse."""

DEFECTS = (
    Defect(
        "a failed write closes the connections",
        (
            (
                decision_loop.DecisionLoop,
                "on_ledger_trouble",
                "now_s = asyncio.get_running_loop().time()",
                "now_s = asyncio.get_running_loop().time()\n"
                "    for line in self._lines.by_node.values():\n"
                "        line.put_nowait(None)",
            ),
        ),
        "only the disk was broken",
        35,
    ),
    Defect(
        "an order leaves before its page is written",
        ((decision_loop.DecisionLoop, "_decide", "await self._written(batch)", "self._ledger.write(batch)"),),
        "before its page is written",
        0,
    ),
    Defect(
        "a deadline is looked at before messages that have come",
        (
            (decision_loop.DecisionLoop, "_tick_due", "if turns:", "if False:"),
            (
                decision_loop.DecisionLoop,
                "_excuses",
                "if late_s > self.core.timing.heartbeat_s / 2:",
                "if False:",
            ),
        ),
        "is well, and lost: silent",
        10,
    ),
    Defect(
        "a connection that was replaced still speaks",
        (
            (
                agents.AgentConnections,
                "talk",
                "frame.type is WSMsgType.BINARY and self._speaks(line)",
                "frame.type is WSMsgType.BINARY",
            ),
            (agents.AgentConnections, "_on_frame", "if not self._speaks(line):", "if False:"),
            (agents.AgentConnections, "_on_reports", "if reports and self._speaks(line):", "if reports:"),
        ),
        "speaks that was replaced",
        12,
    ),
    Defect(
        "a damaged difference is applied without its digest check",
        (*DAMAGED, (generation_difference, "apply", "if made.digest != change.digest:", "if False:")),
        "was told the rank of",
        0,
    ),
    Defect(
        "an order to join that was lost is not repeated",
        ((nodes, "_repeat", "if view.formed < number:", "if False:"),),
        "no step was committed",
        39,
    ),
)


def damaged(change: Any) -> Any:
    """A difference of which one run is another one: as if a side had another generation than it believes."""
    import msgspec

    runs = list(change.members)
    if change.base and len(runs) > 1:
        runs[0], runs[1] = runs[1], runs[0]
    return msgspec.structs.replace(change, members=tuple(runs))


def changed(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function with another text in its source."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (function, old)
    names = dict(function.__globals__, damaged=damaged)
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), "planted", "exec"), names)
    made: Callable[..., Any] = names[function.__name__]
    return made


@contextmanager
def planted(changes: tuple[Change, ...]) -> Iterator[None]:
    """The code has these defects meanwhile."""
    before = []
    try:
        for where, name, old, new in changes:
            before.append((where, name, getattr(where, name)))
            setattr(where, name, changed(getattr(where, name), old, new))
        yield
    finally:
        for where, name, function in reversed(before):
            setattr(where, name, function)
