"""What findings about a node's health mean for the job, and what is done about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.coordinator import nodes
from holdfast.coordinator.events import MarkNode
from holdfast.coordinator.state import Node
from holdfast.protocol.health import Condition, Finding, Remedy, Severity

if TYPE_CHECKING:
    from holdfast.coordinator.core import Core


def found(core: Core, node: Node, findings: tuple[Finding, ...]) -> None:
    """Rules matched on a node."""
    for finding in findings:
        core.record("finding", node=node.name, **msgspec.structs.asdict(finding))
        if finding.dry_run or finding.condition is not Condition.FAULTY or not node.alive:
            continue
        if finding.severity is Severity.FATAL and finding.remedy is Remedy.REPLACE:
            cause = f"{finding.rule}: {finding.evidence}"
            core.act(MarkNode(node.name, cause))
            nodes.give_up(core, node, cause)
