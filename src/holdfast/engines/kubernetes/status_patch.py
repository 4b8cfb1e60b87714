"""How a job's status is written: a JSON patch (RFC 6902) that is refused where what it was decided from has changed. Pure.

A request with the object's version would be refused as well where somebody else has changed a label. A script that does so
fifty times a second would then have nearly every status refused, since the version is old before the request is there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.engines.kubernetes.api import Object
from holdfast.engines.kubernetes.status import ConditionType, JobStatus

OURS = frozenset(ConditionType)


def status_patch(raw: Object, status: JobStatus) -> list[Object]:
    """Of the object as it was seen: tests, and the status."""
    after = written(status)
    others = [one for one in raw.get("status", {}).get("conditions", ()) if one["type"] not in OURS]
    if others:
        after["conditions"] = [*after.get("conditions", ()), *others]
    tests = [{"op": "test", "path": path, "value": value} for path, value in decided_from(raw).items()]
    return [*tests, {"op": "add", "path": "/status", "value": after}]


def decided_from(raw: Object) -> dict[str, Any]:
    """By its path, what has to be as it was: another job of the same name, a spec that was edited, a deletion, and another operator's
    status, whose numbers must not be given out twice."""
    metadata = raw["metadata"]
    found: dict[str, Any] = {
        f"/metadata/{key}": metadata[key] for key in ("uid", "generation") if key in metadata
    }
    # A status that is not there cannot be tested.
    if "status" in raw:
        return found | {"/status": raw["status"]}
    return found | {"/metadata/resourceVersion": metadata["resourceVersion"]}


def written(status: JobStatus) -> Object:
    """The status as the API server has it, without conditions that somebody else keeps on the object: those stay as they are."""
    conditions = tuple(one for one in status.conditions if one.type in OURS)
    status = msgspec.structs.replace(status, conditions=conditions)
    # Without parts of which nothing is known. The API server makes an empty part, whose fields were known before, to
    # `null`, and then refuses all of the status (seen on 1.37.2, in a second run).
    return {name: value for name, value in msgspec.to_builtins(status).items() if value != {}}
