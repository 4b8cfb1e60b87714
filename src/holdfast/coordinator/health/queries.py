"""What other parts may read about checks and remedies. Nothing here changes the state."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import Node
from holdfast.protocol import messages as m
from holdfast.protocol.health import CheckResult, Condition


def refusal(hello: m.Hello) -> str | None:
    """Why a node is not admitted at all, because its basic checks found a fault; None: they found none."""
    bad = [c for c in hello.checks if c.condition is Condition.FAULTY]
    return described(bad) if bad else None


def described(results: Sequence[CheckResult]) -> str:
    told = [
        f"{r.name}{f' of {r.subject}' if r.subject else ''}: {r.detail or r.condition.value}"
        for r in results[:3]
    ]
    return "; ".join(told) + (f" (and {len(results) - 3} more)" if len(results) > 3 else "")


def decides_now(context: Context) -> bool:
    """Whether a decision on a finding is due at this moment."""
    undecided = (incidents.numbered(context.state, number).due_s for number in context.state.health.undecided)
    return any(due_s is not None and context.reached(due_s) for due_s in undecided)


def any_ordered(context: Context) -> bool:
    """Whether an agent that is connected has, or is about to get, an order that it has not answered."""
    alive = context.index.alive_nodes
    return any(a.request and not a.done and a.node in alive for a in context.state.health.acts)


def ordered(context: Context, node: Node) -> bool:
    """Whether the node's agent has, or is about to get, an order that it has not answered."""
    return any(a.node == node.name and a.request and not a.done for a in context.state.health.acts)
