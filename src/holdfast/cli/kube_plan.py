"""Makes a HoldfastJob of the options of `holdfast run`. Nothing is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.tier import parse_tier
from holdfast.cli.kube_options import KubernetesOptions
from holdfast.cli.spec import parse_nnodes
from holdfast.engines.jobs import default_name
from holdfast.engines.run_options import RunOptions
from holdfast.errors import UsageError
from holdfast.kubernetes.commands.submission import CODE_BYTES, Submission
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.resource import JOB_PARTS, MAX_NAME, NAME_PATTERN, WORKER
from holdfast.kubernetes.objects.schema import in_object
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.options import declared
from holdfast.protocol.units import SIZES, parse_size


def plan_submission(given: RunOptions) -> Submission:
    """The object, and the ConfigMap of the script if it is sent along. What the object's own check refuses is not looked at.

    Raises:
        UsageError: an option that cannot work here.
    """
    _refuse_others(given)
    ours: KubernetesOptions = given.engines.get("kubernetes", KubernetesOptions())
    name = given.job or _name_of(given.script)
    if len(name) > MAX_NAME or not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"--job {name!r}: on Kubernetes a job's name must begin with a letter and have only lower-case letters, "
            f"digits and '-', at most {MAX_NAME} characters"
        )
    low, high = parse_nnodes(given.nodes.nnodes or "1")
    code = None if given.module or ours.in_image else _code(given.script)
    spec: dict[str, Any] = {
        "nodes": high,
        **({"minNodes": low} if low != high else {}),
        "spares": given.nodes.spares,
        "waitForSpare": given.nodes.wait_for_spare,
        "procsPerNode": _number(given.nodes.nproc_per_node),
        "run": _run(given, f"{name}-code" if code else ""),
        "snapshots": in_object(given.save.snapshots) | _memory(given.save.snapshot_memory),
        "checkpoints": [_checkpoint(text) for text in given.save.checkpoints],
        "timing": in_object(given.failures.timing),
        "health": in_object(given.health),
        "runPolicy": {"maxRestarts": given.failures.max_restarts},
        "scheduling": _scheduling(ours),
        "faults": list(given.failures.faults),
        "template": _template(ours, given.log_level),
    }
    return Submission(
        name=name,
        namespace=ours.namespace,
        context=ours.context,
        queue=ours.queue,
        spec={field: value for field, value in spec.items() if value not in ([], {}, False)},
        code=code,
    )


def _name_of(script: str) -> str:
    name = default_name(script).lower()
    return re.sub(r"^[^a-z]+|[^a-z0-9-]", "-", name)[-MAX_NAME:].strip("-")


def _refuse_others(given: RunOptions) -> None:
    """Of this machine, or of what the object does not have. An option that would be ignored is refused."""
    ours: KubernetesOptions = given.engines.get("kubernetes", KubernetesOptions())
    if not ours.image and ours.pod_template is None:
        raise UsageError(
            "--image is missing: specify the container image of the nodes, with Holdfast and PyTorch, for example "
            "registry/train:1"
        )
    for option in _set(given.nodes, "racks", "topology"):
        raise UsageError(
            f"{option} cannot be used with --engine kubernetes, where the labels of the machines give their "
            "location; see spec.topology of the HoldfastJob"
        )
    for option in _set(given.health, *JOB_PARTS[HealthSpec].left_out):
        raise UsageError(f"{option} cannot be used with --engine kubernetes: a HoldfastJob has no such field")
    for option in _set(given.save, "data_cache"):
        raise UsageError(
            f"{option} cannot be used with --engine kubernetes; mount a volume with --pod-template instead"
        )
    for option in _set(given, "track", "notify"):
        raise UsageError(
            f"{option} cannot be used with --engine kubernetes, where the job does not depend on this command; run "
            f"`holdfast {option[2:]}` separately"
        )
    for option in _set(given, "log_limit"):
        raise UsageError(
            f"{option} cannot be used with --engine kubernetes: there the log of each worker is limited to 1 GiB"
        )
    for option in _set(given, "port"):
        raise UsageError(f"{option} cannot be used with --engine kubernetes: the coordinator has its own pod")


def _scheduling(ours: KubernetesOptions) -> dict[str, Any]:
    """The object's check refuses the same, in the words of the object. Who types options is told the options."""
    gang, queue = ours.gang, ours.gang_queue
    if gang is not None and ours.queue:
        raise UsageError(
            f"--gang {gang} cannot be combined with --queue {ours.queue}: a job is admitted either by its gang "
            "scheduler or by Kueue; remove one of the two options"
        )
    if queue and gang not in render.GANGS_WITH_QUEUES:
        other = "Kubernetes' own scheduler has no queues" if gang is not None else "--gang is missing"
        raise UsageError(
            f"--gang-queue {queue}: {other}; it works with --gang {' and --gang '.join(render.GANGS_WITH_QUEUES)}; for "
            "a queue of Kueue use --queue"
        )
    if gang == "KAI" and not queue:
        raise UsageError("--gang KAI needs --gang-queue NAME: KAI does not bind pods that have no queue")
    return {
        **({"gang": gang} if gang is not None else {}),
        **({"queue": queue} if queue else {}),
        **({"queueTopology": _queue_topology(ours)} if ours.queue_topology else {}),
    }


def _queue_topology(ours: KubernetesOptions) -> dict[str, str]:
    kind, _, label = ours.queue_topology.partition("=")
    if kind not in ("required", "preferred") or not label:
        raise UsageError(
            f"--queue-topology must be required=LABEL or preferred=LABEL (got {ours.queue_topology}), where LABEL is "
            "a label of machines that is a level of Kueue's Topology"
        )
    if not ours.queue:
        raise UsageError(f"--queue-topology {ours.queue_topology} needs --queue, the LocalQueue of Kueue")
    return {kind: label}


def _set(options: Any, *fields: str) -> Iterator[str]:
    """The flags of those that were given."""
    kind: Any = type(options)
    for one in declared(kind):
        if one.name in fields and getattr(options, one.name) != one.default:
            yield one.flag


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _run(given: RunOptions, config_map: str) -> dict[str, Any]:
    what = (
        {"module": given.script}
        if given.module
        else {"script": Path(given.script).name if config_map else given.script}
    )
    preload = [part for part in (part.strip() for part in given.preload.split(",")) if part]
    return {
        **what,
        **({"args": list(given.args)} if given.args else {}),
        "preload": preload,
        **({"code": {"configMap": config_map}} if config_map else {}),
    }


def _code(script: str) -> dict[str, str]:
    """The script's text by its name."""
    path = Path(script)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise UsageError(
            f"{script}: {why}; specify a script on this machine, which is sent along, or a path in the image "
            "together with --in-image"
        ) from None
    if len(text.encode()) > CODE_BYTES:
        raise UsageError(
            f"{script}: larger than {CODE_BYTES} bytes, the most that fit into a ConfigMap; put the script into the "
            "image, and pass --in-image"
        )
    return {path.name: text}


def _memory(text: str) -> dict[str, str]:
    """In Kubernetes' notation, in which the same letters are powers of 1000."""
    if not text:
        return {}
    nbytes = parse_size("--snapshot-memory", text)
    unit = next(unit for unit in reversed(SIZES) if nbytes % SIZES[unit] == 0)
    return {"memory": f"{nbytes // SIZES[unit]}{unit and unit + 'i'}"}


def _checkpoint(text: str) -> dict[str, Any]:
    try:
        tier = parse_tier(text)
    except UsageError as error:
        raise UsageError(f"--checkpoint {error}") from error
    if "://" not in text and not text.startswith("/"):
        raise UsageError(
            f"--checkpoint {text}: with --engine kubernetes this must be a URL, or an absolute path on a volume that "
            "all nodes mount (--pod-template)"
        )
    made: dict[str, Any] = in_object(tier)
    return made


def _template(ours: KubernetesOptions, log: str) -> dict[str, Any]:
    template = (
        _read_template(ours.pod_template) if ours.pod_template is not None else {"spec": {"containers": []}}
    )
    containers = template["spec"].setdefault("containers", [])
    worker = next((one for one in containers if one.get("name") == WORKER), None)
    if worker is None:
        worker = {"name": WORKER}
        containers.append(worker)
    if ours.image:
        worker["image"] = ours.image
    resources = worker.setdefault("resources", {})
    limits = {
        **({"memory": ours.node_memory} if ours.node_memory else {}),
        **({"cpu": ours.node_cpus} if ours.node_cpus else {}),
        **({"nvidia.com/gpu": str(ours.node_gpus)} if ours.node_gpus else {}),
    }
    if limits:
        # Kubernetes takes a limit for the request as well where none is given.
        resources["limits"] = {**resources.get("limits", {}), **limits}
    if not resources:
        del worker["resources"]
    if log:
        worker.setdefault("env", []).append({"name": "HOLDFAST_LOG", "value": log})
    return template


def _read_template(path: Path) -> dict[str, Any]:
    from holdfast.cli.yaml_file import read_yaml

    read = read_yaml("--pod-template", path)
    # A whole Pod is one too: people have these.
    template: dict[str, Any] = {key: read[key] for key in ("metadata", "spec") if key in read}
    metadata = template.get("metadata") or {}
    # A Pod's name, namespace and owner are its own: as a template's they would be the same for every node.
    template["metadata"] = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    if not template["metadata"]:
        del template["metadata"]
    spec = template.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("containers", []), list):
        raise UsageError(f"--pod-template {path}: not a pod template: `spec.containers` is missing")
    if not all(isinstance(one, Mapping) for one in spec.get("containers", [])):
        raise UsageError(f"--pod-template {path}: each entry of `spec.containers` must have a `name`")
    return template
