"""What the watch of a machine says of it: which findings call it sick, how that looks on its Node, and when it is over. Pure.

The annotation of the Node is what counts, as with marks. The condition follows it, and operators empty the machine for the
condition.

Rules:
- A finding counts when the rule that made it asks for the machine, and is sure: a fault, severe, on this machine alone, not on trial.
- The first finding stays. What follows from it makes no machine sicker, and each write wakes all who watch Nodes.
- It is over when the machine has booted since, or when a person removes the annotation. That a reading is well again proves
  nothing: a link that comes and goes would send jobs to and fro.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes.names import NOTE_WATCH
from holdfast.kubernetes.times import timestamp
from holdfast.protocol.health import Condition, Finding, Severity, acts_on_node
from holdfast.protocol.wire.decoding import decode

CONDITION = "HoldfastHealth"
"""True: the machine is sick."""
WORDS = 400
"""Characters of a message."""
Object = dict[str, Any]


class HealthNote(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is sick."""

    rule: str
    """Which found it; empty: a person wrote the note."""
    reason: str
    """What it found, for people."""
    boot: str
    """The kernel's id of the boot in which it was found; empty: not known, so no boot ends it."""
    at: str
    """When, as Kubernetes writes moments."""


def calls_sick(finding: Finding) -> bool:
    """Whether no job is to run on a machine of which this was found."""
    return (
        finding.condition is Condition.FAULTY
        and finding.severity in (Severity.ERROR, Severity.FATAL)
        and acts_on_node(finding.remedy)
        and not (finding.shared or finding.dry_run)
    )


def note_of(finding: Finding, boot: str, now_s: float) -> HealthNote:
    """What is written of it. boot: the kernel's id of this boot; now_s: UTC."""
    about = f"{finding.subject}: " if finding.subject else ""
    reason = f"{about}{finding.evidence}"[:WORDS]
    return HealthNote(rule=finding.rule, reason=reason, boot=boot, at=timestamp(now_s))


_notes = msgspec.json.Decoder(HealthNote)


def note_on(node: Mapping[str, Any]) -> HealthNote | None:
    """As the Node has it."""
    text = node["metadata"].get("annotations", {}).get(NOTE_WATCH)
    if text is None:
        return None
    try:
        return decode(_notes.decode, text, NOTE_WATCH)
    except Damaged:
        # A person's own words. Who wrote them removes them.
        return HealthNote(rule="", reason=text[:WORDS], boot="", at="")


def is_over(note: HealthNote, boot: str) -> bool:
    """Whether the machine has booted since. boot: of now; empty: not known."""
    return bool(note.boot and boot) and note.boot != boot


def patches(
    node: Mapping[str, Any], found: HealthNote | None, boot: str, now_s: float
) -> Iterator[tuple[str, Object]]:
    """What brings annotation and condition there: a subresource (empty: the Node itself) and a patch of it.

    Args:
        found: what is to be written, if nothing is yet.
        boot: the kernel's id of this boot.
        now_s: UTC.
    """
    there = note_on(node)
    wanted = found if there is None or is_over(there, boot) else there
    # With the uid: a cloud gives a name again, and what was found on one machine says nothing of the next.
    metadata = {key: node["metadata"][key] for key in ("uid",) if key in node["metadata"]}
    if wanted != there:
        text = None if wanted is None else msgspec.json.encode(wanted).decode()
        yield "", {"metadata": {**metadata, "annotations": {NOTE_WATCH: text}}}
    if (said := _condition(node, wanted, now_s)) is not None:
        yield "/status", {"metadata": metadata, "status": {"conditions": [said]}}


def _condition(node: Mapping[str, Any], note: HealthNote | None, now_s: float) -> Object | None:
    """As it is to be; None: it is."""
    conditions = node.get("status", {}).get("conditions", ())
    there: Object = next((one for one in conditions if one["type"] == CONDITION), {})
    # A machine that was never sick has none: of a thousand that are well nothing is written.
    if note is None and there.get("status") in (None, "False"):
        return None
    wanted = (
        {"status": "False", "reason": "Cleared", "message": "nothing calls this machine sick any more"}
        if note is None
        else {"status": "True", "reason": _camel_case(note.rule) or "Noted", "message": note.reason}
    )
    if all(there.get(key) == value for key, value in wanted.items()):
        return None
    at = timestamp(now_s)
    changed = {} if there.get("status") == wanted["status"] else {"lastTransitionTime": at}
    return {"type": CONDITION, **wanted, "lastHeartbeatTime": at, **changed}


def _camel_case(rule: str) -> str:
    """`xid-79` as a reason has to be: `Xid79`."""
    words = "".join(word[0].upper() + word[1:] for word in re.split(r"[-_.]+", rule) if word)
    return f"Rule{words}" if words[:1].isdigit() else words
