"""What `holdfast plan run` is told: from flags, from a YAML file, from presets and from a report; checked here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.plan import formulas, quantities


class Times(msgspec.Struct, frozen=True):
    """What a failure takes, in seconds.

    detect_s: until somebody knows. replace_s: until a new node is there. spare_s: until a spare takes the place.
    resume_s: start all again, state from storage. memory_s: the same, state from memory; None: as long, less what the
    sizes say. peer_s: survivors go on, the newcomer's state from a peer.
    """

    detect_s: float
    replace_s: float
    spare_s: float
    resume_s: float
    memory_s: float | None
    peer_s: float
    source: str


PRESETS: dict[str, Times] = {
    "self-managed": Times(
        600, 14400, 60, 1800, None, 105, "published: 10 + 240 + 30 min; peers: as of `checkpointless`"
    ),
    "managed-cloud": Times(
        90, 900, 60, 1410, None, 105, "published: 1.5 + 15 + 23.5 min; peers: as of `checkpointless`"
    ),
    "checkpointless": Times(90, 900, 60, 1410, None, 105, "published: 1 min 45 s against 15 min"),
}
"""Published times. `holdfast` is measured: it takes its times from a job's report."""


class Inputs(msgspec.Struct, frozen=True):
    """One question. rates: failures per node-hour that stop the job, by class. repair_s: until a spare that was used is
    made up for; without other word as long as a new node takes."""

    nodes: int
    gpus_per_node: int
    work_s: float
    gpu_hours: float
    rates: dict[str, float]
    times: Times
    cost_s: float
    memory_cost_s: float
    step_s: float
    checkpoint_bytes: float
    storage_bytes_per_s: float
    network_bytes_per_s: float
    price: float
    spares: int
    repair_s: float
    preset: str

    @property
    def rate(self) -> float:
        """Failures per node-hour of all classes."""
        return sum(self.rates.values())

    @property
    def gpus(self) -> int:
        """GPUs that train."""
        return self.nodes * self.gpus_per_node

    @property
    def mtbf_s(self) -> float:
        """Of the job."""
        return formulas.mtbf_hours(self.nodes, self.rate) * formulas.HOUR_S


FIELDS: dict[str, str] = {
    "nodes": "256",
    "gpus_per_node": "8",
    "gpu_hours": "10M",
    "tokens": "15T",
    "tokens_per_gpu_s": "400",
    "rate": "0.016% (failures per node-hour), or a mapping of classes: {gpu: 0.01%, network: 0.002%}",
    "mtbf": "3h (of the whole job)",
    "preset": "managed-cloud",
    "detect": "90s",
    "replace": "15m",
    "spare": "1m",
    "resume": "24m",
    "resume_memory": "5m",
    "peer": "2m",
    "checkpoint_cost": "30s",
    "memory_cost": "1s",
    "step": "10s",
    "checkpoint_size": "840GB",
    "storage_speed": "5GB (per node and second)",
    "network_speed": "12.5GB (per node and second)",
    "price": "2.5 (per GPU-hour)",
    "spares": "4 (at most)",
    "repair": "24h",
}
"""Every field and an example of it."""


def read(given: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> Inputs:
    """Checks what was given. report: a job's report, for the preset `holdfast`.

    Raises:
        UsageError: names the field and an example.
    """
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            raise UsageError(
                f"unknown field {name!r}"
                + (f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(FIELDS)}")
            )
    nodes = quantities.count("nodes", _needed(given, "nodes"))
    per_node = quantities.count("gpus_per_node", given.get("gpus_per_node", 8), example="8")
    gpu_hours = _gpu_hours(given)
    preset = str(given.get("preset", "managed-cloud"))
    found = _times(given, preset, report)
    spares = quantities.count("spares", given.get("spares", 4), least=0, example="4")

    def size(name: str, default: str) -> float:
        return quantities.nbytes(name, given.get(name, default))

    def time(name: str, default: str, zero: bool = False) -> float:
        return quantities.time_s(name, given.get(name, default), zero)

    return Inputs(
        nodes=nodes,
        gpus_per_node=per_node,
        gpu_hours=gpu_hours,
        work_s=gpu_hours / (nodes * per_node) * formulas.HOUR_S,
        rates=_rates(given, nodes),
        times=found,
        cost_s=time("checkpoint_cost", "30s", zero=True),
        memory_cost_s=time("memory_cost", "1s", zero=True),
        step_s=time("step", "10s"),
        checkpoint_bytes=size("checkpoint_size", "840GB"),
        storage_bytes_per_s=size("storage_speed", "5GB"),
        network_bytes_per_s=size("network_speed", "12.5GB"),
        price=quantities.amount("price", given.get("price", 0), "2.5", zero=True),
        spares=spares,
        repair_s=quantities.time_s("repair", given.get("repair", found.replace_s), zero=True),
        preset=preset,
    )


def from_report(report: Mapping[str, Any]) -> Times:
    """Phase times as a job of one's own measured them: medians over its incidents.

    Raises:
        UsageError: it had no incident in which training went on.
    """
    incidents = [i for i in report.get("incidents", []) if i.get("stall_s") is not None]
    if not incidents:
        raise UsageError(
            "report: no incident in it was survived, so it says nothing about recovery; run one with a fault: "
            "holdfast run --fault kill-worker@step=20 ..."
        )
    stall = _median(incidents, "stall_s") or 0.0
    detect = _median(incidents, "detect_s") or 0.0
    replace = _median([i for i in incidents if i.get("rung") != "spare"], "replace_s")
    source = f"measured: medians of {len(incidents)} incidents of job {report.get('job', '?')}"
    if replace is None:
        replace = PRESETS["managed-cloud"].replace_s
        source += "; it replaced no node without a spare: a new one as of `managed-cloud`"
    return Times(
        detect_s=detect,
        replace_s=replace,
        spare_s=0.0,
        resume_s=stall,
        memory_s=None,
        peer_s=max(0.0, stall - detect),
        source=source,
    )


def _needed(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise UsageError(f"{name} is missing; for example {name}: {FIELDS[name]}")
    return given[name]


def _gpu_hours(given: Mapping[str, Any]) -> float:
    if "gpu_hours" in given:
        if "tokens" in given:
            raise UsageError("gpu_hours and tokens: give one of them; for example gpu_hours: 10M")
        return quantities.amount("gpu_hours", given["gpu_hours"], "10M")
    if "tokens" not in given:
        raise UsageError("how much work is it? give gpu_hours: 10M, or tokens: 15T and tokens_per_gpu_s: 400")
    tokens = quantities.amount("tokens", given["tokens"], "15T")
    speed = quantities.amount("tokens_per_gpu_s", _needed(given, "tokens_per_gpu_s"), "400")
    return tokens / speed / formulas.HOUR_S


def _rates(given: Mapping[str, Any], nodes: int) -> dict[str, float]:
    if "rate" in given and "mtbf" in given:
        raise UsageError("rate and mtbf: give one of them; for example rate: 0.016%")
    if "mtbf" in given:
        hours = quantities.time_s("mtbf", given["mtbf"]) / formulas.HOUR_S
        return {"all": 1 / (hours * nodes)}
    said = _needed(given, "rate")
    if not isinstance(said, Mapping):
        return {"all": quantities.rate("rate", said)}
    return {str(name): quantities.rate(f"rate.{name}", value) for name, value in said.items()}


def _times(given: Mapping[str, Any], preset: str, report: Mapping[str, Any] | None) -> Times:
    if preset == "holdfast":
        if report is None:
            raise UsageError(
                "preset: holdfast is measured, so it needs the report of a job that had failures: "
                "--report ~/.holdfast/jobs/NAME/report.json"
            )
        times = from_report(report)
    elif preset in PRESETS:
        times = PRESETS[preset]
    else:
        raise UsageError(f"preset: {preset!r} is none of {', '.join([*PRESETS, 'holdfast'])}")
    names = {
        "detect": "detect_s",
        "replace": "replace_s",
        "spare": "spare_s",
        "resume": "resume_s",
        "resume_memory": "memory_s",
        "peer": "peer_s",
    }
    own = {f: quantities.time_s(n, given[n], zero=True) for n, f in names.items() if n in given}
    if own:
        source = f"{times.source}; given: {', '.join(n for n in names if n in given)}"
        times = msgspec.structs.replace(times, **own, source=source)
    return times


def _median(incidents: list[Any], name: str) -> float | None:
    values = sorted(float(i[name]) for i in incidents if i.get(name) is not None)
    return values[len(values) // 2] if values else None
