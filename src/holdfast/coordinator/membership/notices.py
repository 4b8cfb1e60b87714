"""Which notices scripts get before their node or the job goes away. This part decides nothing.

Each notice goes to a node's agent as part of the complete list that is in force. The agent passes the list to every worker of
the node, also to those that start later, so a change costs one message per node.
"""

from __future__ import annotations

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import Node, StandingNotice
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import JobGoing
from holdfast.protocol.notices import Going, Notice, NoticeCause

MOVED_S = 5.0
"""A deadline that moves by less is the same: a scheduler reports whole seconds, and is asked every few seconds."""


def standing(context: Context, node: Node) -> tuple[Notice, ...]:
    """The notices that the workers of a node should know now."""
    told = ((Going.NODE, node.notice), (Going.JOB, context.state.membership.notice))
    return tuple(_as_told(context, going, notice) for going, notice in told if notice is not None)


def _as_told(context: Context, going: Going, notice: StandingNotice) -> Notice:
    left_s = None if notice.until_s is None else max(0.0, notice.until_s - context.now)
    return Notice(
        number=notice.number, going=going, cause=notice.cause, reason=notice.reason, deadline_s=left_s
    )


def tell(context: Context, node: Node) -> None:
    """Sends a node's agent the notices in force. They replace those that it had."""
    # The complete list and not what changed: an agent that missed a message, or a worker that started since,
    # is right again after the next one, and nobody keeps track of who has heard what.
    context.send(node.name, m.Notify(standing(context, node)))


# ---------------------------------------------------------------- of a node


def node_goes(context: Context, node: Node, reason: str, cause: NoticeCause) -> None:
    """Gives notice that a node will leave, or that it has less time than was announced."""
    # The end of the job says more than that its nodes are given back then, and when.
    stops = context.state.membership.stop_reason is not None and node.leaves_until_s is None
    if not stops and _is_news(node.notice, node.leaves_until_s):
        node.notice = _new(context, cause, reason, node.leaves_until_s)
        tell(context, node)


def node_stays(context: Context, node: Node) -> None:
    """Withdraws the notice of a node that stays after all."""
    if node.notice is not None:
        node.notice = None
        tell(context, node)


# ---------------------------------------------------------------- of the job


def job_ends(context: Context, reason: str, cause: NoticeCause, within_s: float) -> None:
    """Gives notice that the job stops: its workers have at most the remaining time."""
    membership = context.state.membership
    until_s = context.now + within_s
    if _is_news(membership.notice, until_s):
        membership.notice = _new(context, cause, reason, until_s)
        _tell_all(context)


def foretold(context: Context, event: JobGoing) -> None:
    """Handles the engine's announcement of when it will end the job, or that it will not. Ignored while the job stops anyway."""
    membership = context.state.membership
    if membership.stop_reason is not None:
        return
    if event.within_s is None:
        if membership.notice is not None:
            membership.notice = None
            context.record(ledger.JobStays(reason=event.reason))
            _tell_all(context)
    elif _is_news(membership.notice, context.now + event.within_s):
        context.record(ledger.JobGoing(reason=event.reason, within_s=event.within_s))
        job_ends(context, event.reason, event.cause, event.within_s)


def _tell_all(context: Context) -> None:
    for node in context.alive_nodes():
        tell(context, node)


# ---------------------------------------------------------------- both


def _is_news(known: StandingNotice | None, until_s: float | None) -> bool:
    """Whether a deadline differs from what the scripts know. One that is not known any more is none."""
    if known is None:
        return True
    return until_s is not None and (known.until_s is None or abs(until_s - known.until_s) > MOVED_S)


def _new(context: Context, cause: NoticeCause, reason: str, until_s: float | None) -> StandingNotice:
    # A number is given once in a job, and the count is in the state. A script that keeps the numbers it has
    # handled would otherwise ignore the first notice of a coordinator that took over.
    context.state.membership.notices += 1
    return StandingNotice(context.state.membership.notices, cause, reason, until_s)
