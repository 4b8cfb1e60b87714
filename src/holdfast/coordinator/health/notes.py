"""Records about a machine for later jobs, and requests to a person."""

from __future__ import annotations

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.events import Remember
from holdfast.coordinator.kernel.history import RecordKind
from holdfast.coordinator.kernel.state import KEPT_ASKS, TEXT_CHARS, Incident, Node
from holdfast.protocol import ledger
from holdfast.protocol.health import Ask


def remember(context: Context, node: Node, kind: RecordKind, incident: Incident, remedy: str = "") -> None:
    """Writes a record for later jobs, about machines that can be identified."""
    # Only machines that can be told again. A name is given to another machine tomorrow, and would carry this
    # one's record.
    if node.lasting:
        text = str(incident.cause)[:TEXT_CHARS]
        context.act(
            Remember(
                machine=node.lasting,
                kind=kind,
                node=node.name,
                rule=incident.rule,
                device=incident.device,
                text=text,
                remedy=remedy,
                incident=incident.id,
            )
        )


def ask(context: Context, node: Node, rule: str, text: str, incident: Incident | None = None) -> None:
    """Asks a person to look at something."""
    asks = context.state.health.asks
    number = incident.id if incident else 0
    # Newest last, one per node and rule: a person's list must not fill with repetitions.
    asks[:] = [a for a in asks if (a.node, a.rule) != (node.name, rule)]
    asks.append(Ask(at_s=context.now, node=node.name, rule=rule, text=text[:TEXT_CHARS], incident=number))
    del asks[:-KEPT_ASKS]
    context.record(ledger.Asked(node=node.name, rule=rule, text=text, incident=number or None))
