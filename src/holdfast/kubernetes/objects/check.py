"""Checks whether a HoldfastJob is valid. One pure function, so that the command line and the operator accept the same objects:
the former checks before it sends anything, the latter in case an older CRD let something through.

The object is compared with the structural schema as by the API server, but each problem is described in one line. Then follow
rules that a schema cannot express. What only the cluster knows (Pod Security, quotas, webhooks, whether a ConfigMap exists) is
checked by a server-side dry run of the pod that `render` makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.checkpoint.policy import parse_cadence
from holdfast.errors import HoldfastError
from holdfast.health.stragglers import SLOWER
from holdfast.kubernetes.names import LABEL_QUEUE
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.render import SHARED_MEMORY
from holdfast.kubernetes.objects.resource import (
    GPU_RESOURCE,
    WORKER,
    HoldfastJob,
    HoldfastJobSpec,
    ObjectName,
    quantity,
    quantity_of_limit,
    worker_container,
)
from holdfast.kubernetes.objects.schema import by_fields, job_schema, rules_of
from holdfast.protocol.faults import parse_fault
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.units import parse_share

SHOWN_CHARS = 80
"""Number of characters of a value that a message shows."""


OWN_FOLDERS = (SHARED_MEMORY, "/var/lib/holdfast", "/etc/holdfast")
"""Folders at which the operator mounts the agent's volumes."""
OWN_LABELS = "holdfast.dev/"
"""Prefix of the operator's labels and annotations."""
RESERVED_MEMORY_SHARE = 0.8
"""Largest share of the container's memory limit that snapshots may use: tmpfs counts towards it, and the worker needs the
rest."""


class Problem(msgspec.Struct, frozen=True):
    """An invalid field of an object."""

    path: str
    """The field's path, for example `spec.checkpoints[1].url`."""
    value: Any
    """Its value; None: it is missing."""
    accepted: str
    """Description of the values that are accepted."""

    def __str__(self) -> str:
        text = msgspec.json.encode(self.value).decode()
        shown = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
        return f"{self.path}: {'is missing' if self.value is None else shown}; accepted: {self.accepted}"


def check(job: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Everything that is wrong with an object as a user wrote it; empty: it is valid."""
    found = [
        *problems(job.get("metadata", {}).get("name", ""), _NAME, "metadata.name"),
        *problems(job.get("spec"), _SPEC, "spec"),
    ]
    # The other checks need the fields to have the right types.
    if found:
        return tuple(found)
    made = convert(job)
    return (*_of_spec(made.spec), *_of_gang(made), *_of_queue(made))


def convert(job: Mapping[str, Any]) -> HoldfastJob:
    """The typed form of an object that has passed `check`."""
    metadata = job["metadata"]
    id_ = ObjectName(
        namespace=metadata.get("namespace", ""), name=metadata["name"], uid=metadata.get("uid", "")
    )
    queue = str((metadata.get("labels") or {}).get(LABEL_QUEUE, ""))
    spec = msgspec.convert(by_fields(job["spec"], _TYPE), HoldfastJobSpec)
    return HoldfastJob(id=id_, spec=spec, queue=queue)


_NAME = job_schema()["properties"]["metadata"]["properties"]["name"]
_SPEC = job_schema()["properties"]["spec"]
_TYPE = msgspec.inspect.type_info(HoldfastJobSpec)


def _of_spec(spec: HoldfastJobSpec) -> Iterator[Problem]:
    yield from _of_rules(spec, "spec")
    if spec.procs_per_node == "gpu" and not quantity_of_limit(spec, GPU_RESOURCE):
        yield Problem(
            "spec.procsPerNode",
            "gpu",
            f"a number, or a limit of {GPU_RESOURCE} in the template's container {WORKER!r}",
        )
    yield from _cadences(spec)
    yield from _health(spec.health)
    yield from _faults(spec)
    yield from _of_template(spec)


def _of_rules(part: msgspec.Struct, at: str) -> Iterator[Problem]:
    """Violations of the rules that the API server checks as well, see `schema.rules_of`."""
    for one in rules_of(type(part)):
        if not one.holds(part):
            yield Problem(f"{at}.{one.field}".rstrip("."), one.value(part), one.accepted)
    # Not `msgspec.structs.fields`, which parses all annotations each time, while the operator checks a job at each look.
    for name, shown in zip(part.__struct_fields__, part.__struct_encode_fields__, strict=True):
        if isinstance(below := getattr(part, name), msgspec.Struct):
            yield from _of_rules(below, f"{at}.{shown}")


def _cadences(spec: HoldfastJobSpec) -> Iterator[Problem]:
    given = [("spec.snapshots.every", spec.snapshots.every)]
    given += [(f"spec.checkpoints[{n}].every", tier.every) for n, tier in enumerate(spec.checkpoints)]
    for path, text in given:
        try:
            parse_cadence(text)
        except HoldfastError as error:
            yield Problem(path, text, str(error))


def _health(health: HealthSpec) -> Iterator[Problem]:
    try:
        parse_share("--blast-radius", health.blast_radius)
    except HoldfastError:
        accepted = "a share of the nodes above 0 and up to 100%, for example 25% or 0.25"
        yield Problem("spec.health.blastRadius", health.blast_radius, accepted)
    if 0 < health.replace_slow < SLOWER:
        accepted = (
            f"0 (only report), or at least {SLOWER:g}, below which a slow rank cannot be told from noise"
        )
        yield Problem("spec.health.replaceSlow", health.replace_slow, accepted)


def _faults(spec: HoldfastJobSpec) -> Iterator[Problem]:
    for position, text in enumerate(spec.faults):
        try:
            parse_fault(text)
        except HoldfastError as error:
            yield Problem(f"spec.faults[{position}]", text, str(error))


def _of_gang(job: HoldfastJob) -> Iterator[Problem]:
    spec, gang = job.spec, job.spec.scheduling.gang
    if gang is not None and job.queue:
        yield Problem(
            "spec.scheduling.gang", gang, f"none in a queue of Kueue's (the label {LABEL_QUEUE}: {job.queue})"
        )
    # Refused instead of silently overwritten: the user who wrote such a field believes that it has an effect.
    ours, given = render.ties_to_group(spec, job.id.name), spec.template
    for at, there, set_ in (
        ("spec.template.metadata.labels", given.metadata.labels, ours.labels),
        ("spec.template.metadata.annotations", given.metadata.annotations, ours.annotations),
        ("spec.template.spec", given.spec, ours.spec),
    ):
        for name in set_:
            if name in there and name not in _NOT_IN_POD:
                yield Problem(f"{at}.{name}", there[name], f"none: spec.scheduling.gang {gang} sets it")


def _of_queue(job: HoldfastJob) -> Iterator[Problem]:
    asked, at = job.spec.scheduling.queue_topology, "spec.scheduling.queueTopology"
    if asked is None:
        return
    given = msgspec.to_builtins(asked)
    if not job.queue:
        yield Problem(at, given, f"none without a queue of Kueue's (the label {LABEL_QUEUE})")


def _of_template(spec: HoldfastJobSpec) -> Iterator[Problem]:
    pod, at = spec.template.spec, "spec.template.spec"
    for at_, given in (
        ("spec.template.metadata.labels", spec.template.metadata.labels),
        ("spec.template.metadata.annotations", spec.template.metadata.annotations),
        ("spec.coordinator.labels", spec.coordinator.labels or {}),
        ("spec.coordinator.annotations", spec.coordinator.annotations or {}),
    ):
        for name in given:
            if name.startswith(OWN_LABELS):
                yield Problem(f"{at_}.{name}", given[name], f"none that begins with {OWN_LABELS}")
    for name, why in _NOT_IN_POD.items():
        if name in pod:
            yield Problem(f"{at}.{name}", pod[name], why)
    names = [one["name"] for one in pod["containers"]]
    if names.count(WORKER) != 1:  # a rule reports this
        return
    yield from _of_worker(spec, f"{at}.containers[{names.index(WORKER)}]")
    for position, volume in enumerate(pod.get("volumes") or ()):
        if isinstance(volume, Mapping) and str(volume.get("name", "")).startswith("holdfast-"):
            yield Problem(f"{at}.volumes[{position}].name", volume["name"], "none that begins with holdfast-")


def _of_worker(spec: HoldfastJobSpec, at: str) -> Iterator[Problem]:
    container = worker_container(spec)
    assert container is not None
    for name, why in _NOT_IN_WORKER.items():
        if name in container:
            yield Problem(f"{at}.{name}", container[name], why)
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        where = str(mount.get("mountPath", "")) if isinstance(mount, Mapping) else ""
        if where.rstrip("/") in OWN_FOLDERS:
            yield Problem(
                f"{at}.volumeMounts[{position}].mountPath", where, f"none of {', '.join(OWN_FOLDERS)}"
            )
    for position, variable in enumerate(container.get("env") or ()):
        name = str(variable.get("name", "")) if isinstance(variable, Mapping) else ""
        if name.startswith("HOLDFAST_") and name not in _ENVIRONMENT_OF_USERS:
            yield Problem(
                f"{at}.env[{position}].name", name, "none that begins with HOLDFAST_, but HOLDFAST_LOG"
            )
    # Checked here because it would otherwise show hours later: snapshots fill tmpfs, which counts as the container's memory, and
    # the kernel kills the node at its first large snapshot.
    limit = quantity_of_limit(spec, "memory")
    given = quantity(spec.snapshots.memory) if spec.snapshots.memory is not None else None
    if given is not None and limit is not None and given > RESERVED_MEMORY_SHARE * limit:
        yield Problem(
            "spec.snapshots.memory",
            spec.snapshots.memory,
            f"at most {RESERVED_MEMORY_SHARE:.0%} of the container's memory limit ({limit:.0f} bytes): "
            "what lies in memory counts against it",
        )


_NOT_IN_POD = {
    # Fields that the operator sets are refused instead of silently overwritten: a user who wrote one would believe that it has
    # an effect.
    "restartPolicy": "no such field: the operator sets OnFailure, so an agent that crashed returns in its place",
    "terminationGracePeriodSeconds": "no such field; say it as spec.disruption.graceSeconds",
    "hostname": "no such field: the operator names each pod",
    "subdomain": "no such field: the operator names each pod",
    "hostNetwork": "no such field: two jobs on one machine would want the same port",
    "nodeName": "no such field: the scheduler places pods; use nodeSelector or affinity",
    "ephemeralContainers": "no such field",
    "schedulingGroup": "no such field; say it as spec.scheduling.gang",
}
_NOT_IN_WORKER = {
    "command": "no such field: the operator starts the agent; say what runs as spec.run",
    "args": "no such field: the script's arguments are spec.run.args",
    "livenessProbe": "no such field: the coordinator judges whether a node lives",
    "readinessProbe": "no such field: the operator sets it",
    "startupProbe": "no such field: the operator sets it",
    "lifecycle": "no such field: the agent leaves in order by itself",
}
_ENVIRONMENT_OF_USERS = frozenset({"HOLDFAST_LOG"})


# ------------------------------------------------------------ comparison with the schema

Schema = Mapping[str, Any]


def problems(value: Any, schema: Schema, path: str) -> Iterator[Problem]:
    """Every place at which a value does not match its schema, in the order of the schema."""
    if not _has_type(value, schema):
        yield Problem(path, value, accepted(schema))
    elif isinstance(value, Mapping):
        yield from _of_object(value, schema, path)
    elif isinstance(value, list | tuple):
        yield from _of_list(value, schema, path)
    elif not _within(value, schema):
        yield Problem(path, value, accepted(schema))


def _of_object(value: Mapping[str, Any], schema: Schema, path: str) -> Iterator[Problem]:
    fields: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield Problem(f"{path}.{name}", None, accepted(fields[name]))
    # The only form of `oneOf` that our schema uses. A schema with another form needs an extension here, or only the server would
    # check it.
    choices = [branch["required"][0] for branch in schema.get("oneOf", ())]
    if choices and sum(name in value for name in choices) != 1:
        yield Problem(path, dict(value) or None, f"exactly one of {' and '.join(choices)}")
    for name, one in value.items():
        if name in fields:
            yield from problems(one, fields[name], f"{path}.{name}")
        elif "additionalProperties" in schema:
            yield from problems(one, schema["additionalProperties"], f"{path}.{name}")
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            known = ", ".join(sorted(fields)) or "nothing"
            yield Problem(f"{path}.{name}", one, f"no such field; {path} has {known}")


def _of_list(value: Sequence[Any], schema: Schema, path: str) -> Iterator[Problem]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield Problem(path, list(value), accepted(schema))
        return
    for position, one in enumerate(value):
        yield from problems(one, schema["items"], f"{path}[{position}]")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    seen: set[tuple[Any, ...]] = set()
    for position, one in enumerate(value):
        # The server merges lists of this type by key: two entries with one key would become one, and a tier would silently be
        # lost.
        key = tuple(one.get(name) for name in keys) if keys and isinstance(one, Mapping) else None
        if key is not None and key in seen:
            yield Problem(
                f"{path}[{position}].{keys[0]}", key[0], f"each {keys[0]} once; an earlier entry has this one"
            )
        elif key is not None:
            seen.add(key)


def _has_type(value: Any, schema: Schema) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    match schema.get("type"):
        case "object":
            return isinstance(value, Mapping)
        case "array":
            return isinstance(value, list | tuple)
        case "boolean":
            return isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":  # bool is a subclass of int in Python, but not in JSON
            return isinstance(value, int) and not isinstance(value, bool)
        case _:
            return isinstance(value, str)


def _within(value: Any, schema: Schema) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str):
        pattern = schema.get("pattern")
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and (pattern is None or re.search(pattern, value) is not None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def accepted(schema: Schema) -> str:
    """Describes the values that a schema accepts."""
    text = _accepted(schema)
    return f"{text} ({schema['description'].rstrip('.')})" if "description" in schema else text


def _accepted(schema: Schema) -> str:
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema.get("x-kubernetes-int-or-string"):
        return f"a number or a word that matches {schema['pattern']}"
    match schema.get("type"):
        case "object":
            return "an object"
        case "array":
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            return f"a list of {least} to {most} entries" if most else f"a list of {least} or more entries"
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            text = "a whole number" if kind == "integer" else "a number"
            low, high = schema.get("minimum"), schema.get("maximum")
            if low is not None and high is not None:
                return f"{text} from {low} to {high}"
            return text if low is None else f"{text} of {low} or more"
        case _:
            if "pattern" in schema:
                return f"text that matches {schema['pattern']}" + (
                    f", at most {schema['maxLength']} characters" if "maxLength" in schema else ""
                )
            low, high = schema.get("minLength", 0), schema.get("maxLength")
            return f"text of {low} to {high} characters" if high else "text"
