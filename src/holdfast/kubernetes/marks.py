"""Marks on machines that a job's coordinator blames: who has one, who may get one, and how it looks on a Node. Pure.

A mark is an annotation of the Node. It names the job, so that the job can take it back, and it is what a person removes. The
condition and the taint follow it.

Rules:
- Nothing is marked unless the site asks for it (`--mark`): in many clusters another program owns that.
- The brake: never more than a share of the cluster's machines has a mark at once. A wrong rule must not empty a cluster.
- A mark is taken back on evidence, and not because nothing is known: by the coordinator that has the machine in quarantine, when
  it has it there no more, or by a node that has joined from a machine which was only turned away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes.names import NOTE_FAULT, TAINT_UNHEALTHY
from holdfast.kubernetes.times import timestamp
from holdfast.protocol.wire.decoding import decode

Marking = Literal["none", "condition", "taint"]
CONDITION = "HoldfastFault"
WORDS = 400
"""Characters of a reason."""
Object = dict[str, Any]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is not to be used."""

    uid: str
    """Of the job."""
    job: str
    """`namespace/name`, for people."""
    run: int
    term: int
    """Of the coordinator that says so."""
    quarantined: bool
    """It has the machine in quarantine. Else it has turned a node away whose checks failed."""
    reason: str
    at_s: float | None = None
    """When it was marked, in UTC; None: unknown."""
    replacement: str = ""
    """Of whom another machine was asked, or why it could not be; empty: of nobody yet."""


class MachineMarks(msgspec.Struct, frozen=True, kw_only=True):
    """What of a mark is on a Node."""

    mark: Mark | None = None
    condition: bool = False
    """Ours holds."""
    tainted: bool = False
    """It has our taint."""


NONE = MachineMarks()


def brake(machines: Mapping[str, MachineMarks], most_percent: int) -> str | None:
    """Why no further machine may be marked; None: one may."""
    marked = sum(one.mark is not None for one in machines.values())
    # One may always be: a cluster of a few machines has no smaller share.
    most = max(1, len(machines) * most_percent // 100)
    if marked < most:
        return None
    return f"{marked} of {len(machines)} machines are marked, and at most {most_percent}% may be ({most}): it is not marked"


def is_over(
    mark: Mark, machine: str, run: int, term: int, bad: frozenset[str], joined: frozenset[str]
) -> bool:
    """Whether its own job knows that a mark does not hold any more.

    Args:
        run, term: of the job now.
        bad: machines that its coordinator has in quarantine.
        joined: machines from which a node has joined.
    """
    if mark.run != run:
        return False
    if mark.quarantined:
        # A successor that has lost the ledger knows of no quarantine, which proves nothing.
        return mark.term == term and machine not in bad
    return machine in joined and machine not in bad


def renewed(mark: Mark, machine: str, run: int, term: int, bad: frozenset[str]) -> Mark | None:
    """The mark as its coordinator of now stands for it; None: it is so already, or it does not."""
    if mark.run != run or machine not in bad or (mark.term == term and mark.quarantined):
        return None
    return msgspec.structs.replace(mark, term=term, quarantined=True)


# ------------------------------------------------------------ on a Node


def marks_of(node: Mapping[str, Any]) -> MachineMarks:
    """As the Node has them."""
    conditions = node.get("status", {}).get("conditions", ())
    text = node["metadata"].get("annotations", {}).get(NOTE_FAULT)
    return MachineMarks(
        mark=None if text is None else _read(text),
        condition=any(one["type"] == CONDITION and one.get("status") == "True" for one in conditions),
        tainted=any(one.get("key") == TAINT_UNHEALTHY for one in node.get("spec", {}).get("taints", ())),
    )


_marks = msgspec.json.Decoder(Mark)


def _read(text: str) -> Mark:
    try:
        return decode(_marks.decode, text, NOTE_FAULT)
    except Damaged:
        # A person's own words. It is a mark all the same, and no job's, so no job takes it back.
        return Mark(uid="", job="", run=0, term=0, quarantined=True, reason=text[:WORDS])


def note(mark: Mark | None) -> Object:
    """The patch of a Node by which it is marked so; None: not at all."""
    text = None if mark is None else msgspec.json.encode(mark).decode()
    return {"metadata": {"annotations": {NOTE_FAULT: text}}}


def lags(seen: MachineMarks, marking: Marking) -> bool:
    """Whether condition or taint are not yet as the mark says."""
    wanted = seen.mark is not None
    return seen.condition != wanted or seen.tainted != (wanted and marking == "taint")


def patches(node: Mapping[str, Any], marking: Marking, now_s: float) -> Iterator[tuple[str, Object]]:
    """What brings condition and taint there: a subresource (empty: the Node itself) and a patch of it."""
    seen = marks_of(node)
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    wanted = seen.mark is not None and marking == "taint"
    if seen.tainted != wanted:
        others = [one for one in node.get("spec", {}).get("taints", ()) if one.get("key") != TAINT_UNHEALTHY]
        # No value: a reason is longer than one may be. NoSchedule: other jobs' nodes that train there stay.
        ours = [{"key": TAINT_UNHEALTHY, "effect": "NoSchedule"}] if wanted else []
        # The list is one field. With the version, what somebody else has added meanwhile is not lost.
        yield "", {"metadata": version, "spec": {"taints": [*others, *ours]}}
    if seen.condition != (seen.mark is not None):
        yield "/status", shown(seen.mark, now_s)


def shown(mark: Mark | None, now_s: float, changed: bool = True) -> Object:
    """The patch of a Node's status with the condition of a mark. changed: False: it holds already, and has other words."""
    if mark is None:
        status, reason, message = "False", "Cleared", "no job blames this machine"
    else:
        status, reason = "True", "Quarantined" if mark.quarantined else "ChecksFailed"
        message = f"{mark.job}: {mark.reason}" + (f"; {mark.replacement}" if mark.replacement else "")
    at = timestamp(now_s)
    condition = {
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": at,
        # What a strategic patch leaves out stays.
        **({"lastTransitionTime": at} if changed else {}),
    }
    return {"status": {"conditions": [condition]}}
