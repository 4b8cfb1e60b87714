"""Nodes that are lost together because of what they share: a switch, the power of a rack. One incident, which names it."""

from __future__ import annotations

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.incident_state import Incident
from holdfast.coordinator.kernel.membership_state import Node, Worker
from holdfast.protocol import causes, ledger
from holdfast.protocol.place import NodePlace, common, shown

_LOST_WITH_OTHERS = (causes.ConnectionClosed, causes.NodeSilent)
"""What the loss of a switch or of the power looks like. Whatever else takes a node out is about that node alone."""


def began(context: Context, incident: Incident, node: Node, cause: causes.Cause) -> None:
    """This incident is the loss of a node: others of its place may follow."""
    if node.place and not incident.lost_nodes and _may_be_shared(incident, cause):
        incident.lost_nodes, incident.lost_at_s, incident.place = [node.name], context.now, node.place


def join(context: Context, node: Node, workers: list[Worker], cause: causes.Cause) -> Incident | None:
    """The incident of the nodes that are being lost together with this one, which now is a part of it; None: there is
    none."""
    if not node.place or not isinstance(cause, _LOST_WITH_OTHERS):
        return None
    for incident in reversed(context.state.incidents[-incidents.LOOKED_AT :]):
        if not incident.lost_nodes or not _may_be_shared(incident, incident.cause):
            continue
        # Nodes behind one switch fall silent at the same moment, and the deadlines of their silence differ by the
        # time between two signs of life; one whose connection closes at once comes earlier by all of it.
        if context.reached(incident.lost_at_s + context.timing.detection_s + context.timing.heartbeat_s):
            continue
        place = common([incident.place, node.place])
        if not place or not (place == incident.place or _is_lost(context, place, incident)):
            continue
        first = incident.cause.first if isinstance(incident.cause, causes.PlaceLost) else str(incident.cause)
        names = [w.name for w in workers]
        incidents.lost_together(context.state, context.now, incident, cause, node.name, names)
        context.concerns(incident.id)
        incident.place = place
        count = len(incident.lost_nodes)
        there = count + len(context.index.nodes_at(place))
        incident.cause = causes.PlaceLost(place=shown(place), lost=count, nodes=there, first=first)
        context.record(
            ledger.IncidentJoined(id=incident.id, node=node.name, cause=str(cause), cause_kind=cause.kind)
        )
        return incident
    return None


def _may_be_shared(incident: Incident, cause: causes.Cause) -> bool:
    """It is not known to be about one node: no rule found something there."""
    return not (incident.rule or incident.quiet) and isinstance(cause, (*_LOST_WITH_OTHERS, causes.PlaceLost))


def _is_lost(context: Context, place: NodePlace, incident: Incident) -> bool:
    """Most of this place is gone, or has been silent for so long that it soon counts as gone. Two nodes of a large place
    may be lost by chance at the same time; more than half of it are not."""
    silent_s = context.timing.detection_s / 2
    alive = context.index.nodes_at(place)
    silent = sum(context.reached(n.last_seen_s + silent_s) for n in alive)
    return 2 * (len(incident.lost_nodes) + 1 + silent) > len(incident.lost_nodes) + 1 + len(alive)
