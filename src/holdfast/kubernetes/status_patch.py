"""How a job's status is written: a JSON patch (RFC 6902) that is refused where what it was decided from has changed. Pure.

A request with the object's version would be refused as well where somebody else has changed a label. A script that does so
fifty times a second would then have nearly every status refused, since the version is old before the request is there.

The API server compares the *bytes* of a tested value with its own encoding of the object (seen on 1.37.2). Go writes `<`, `>`
and `&` as `\\u003c`, `\\u003e` and `\\u0026`, and other letters as they are; Python's encoder does neither. A test of a text
would fail for ever as soon as one of these is in it. So only numbers, names of types and moments are tested.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.kubernetes.api import Object
from holdfast.kubernetes.status import ConditionType, JobStatus

OURS = frozenset(ConditionType)


def status_patch(raw: Object, status: JobStatus) -> list[Object]:
    """Of the object as it was seen: tests, and what changes of the status. Other people's conditions are not touched."""
    after = written(status) | {"revision": (raw.get("status") or {}).get("revision", 0) + 1}
    patch: list[Object] = [
        {"op": "test", "path": path, "value": value} for path, value in decided_from(raw).items()
    ]
    before: Object = raw.get("status") or {}
    if not before:
        return [*patch, {"op": "add", "path": "/status", "value": after}]
    conditions = after.pop("conditions", [])
    patch += [
        {"op": "remove", "path": f"/status/{name}"}
        for name in before
        if name not in after | {"conditions": ()}
    ]
    patch += [
        {"op": "add", "path": f"/status/{name}", "value": value}
        for name, value in after.items()
        if name not in before or before[name] != value
    ]
    return patch + _conditions_patch(before.get("conditions"), conditions)


def _conditions_patch(before: list[Object] | None, after: list[Object]) -> list[Object]:
    """The list has no keys in a JSON patch, so a place in it is tested to be the condition's that it was."""
    if before is None:
        return [{"op": "add", "path": "/status/conditions", "value": after}] if after else []
    wanted = {one["type"]: one for one in after}
    changes: list[Object] = []
    gone: list[Object] = []
    for at, one in enumerate(before):
        if (type_ := one["type"]) not in OURS or wanted.get(type_) == one:
            continue
        place = f"/status/conditions/{at}"
        changes.append({"op": "test", "path": f"{place}/type", "value": type_})
        if type_ in wanted:
            changes.append({"op": "replace", "path": place, "value": wanted[type_]})
        else:
            gone.append({"op": "remove", "path": place})
    known = {one["type"] for one in before}
    changes += [
        {"op": "add", "path": "/status/conditions/-", "value": one}
        for one in after
        if one["type"] not in known
    ]
    # From the back, and after everything else: each removal moves the places behind it.
    return changes + gone[::-1]


def decided_from(raw: Object) -> dict[str, Any]:
    """By its path, what has to be as it was: another job of the same name, a spec that was edited, a deletion, and another operator's
    status, whose numbers must not be given out twice."""
    metadata = raw["metadata"]
    found: dict[str, Any] = {
        f"/metadata/{key}": metadata[key] for key in ("uid", "generation") if key in metadata
    }
    # Each write of an operator's counts on. A status without the number was written by a version before it.
    if "revision" in (raw.get("status") or {}):
        return found | {"/status/revision": raw["status"]["revision"]}
    return found | {"/metadata/resourceVersion": metadata["resourceVersion"]}


def written(status: JobStatus) -> Object:
    """The status as the API server has it, without its revision, and without conditions that somebody else keeps on the object."""
    conditions = tuple(one for one in status.conditions if one.type in OURS)
    status = msgspec.structs.replace(status, conditions=conditions, revision=None)
    # Without parts of which nothing is known. The API server makes an empty part, whose fields were known before, to
    # `null`, and then refuses all of the status (seen on 1.37.2, in a second run).
    return {name: value for name, value in msgspec.to_builtins(status).items() if value != {}}
