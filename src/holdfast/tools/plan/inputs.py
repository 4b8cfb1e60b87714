"""Reads and checks the input of `holdfast plan run`: flags, a YAML file, a preset and a report."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast import formulas
from holdfast.errors import UsageError
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.job_view import IncidentView
from holdfast.tools.plan import quantities
from holdfast.tools.plan.options import FIELDS


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of a recovery, in seconds."""

    detect_s: float
    """Until the failure is detected."""
    replace_s: float
    """Until a new node is available."""
    spare_s: float
    """Until a spare has taken the failed node's place."""
    resume_s: float
    """To restart all workers with the state from storage."""
    memory_s: float | None
    """To restart all workers with the state from memory. None: as `resume_s`, less a time computed from sizes and
    speeds."""
    peer_s: float
    """Until the survivors continue, if a new worker gets the state from a peer."""
    source: str
    """The source of these times, for people."""


PRESETS: dict[str, Times] = {
    "self-managed": Times(
        detect_s=600,
        replace_s=14400,
        spare_s=60,
        resume_s=1800,
        memory_s=None,
        peer_s=105,
        source="published: 10 + 240 + 30 min; peers: as of `checkpointless`",
    ),
    "managed-cloud": Times(
        detect_s=90,
        replace_s=900,
        spare_s=60,
        resume_s=1410,
        memory_s=None,
        peer_s=105,
        source="published: 1.5 + 15 + 23.5 min; peers: as of `checkpointless`",
    ),
    "checkpointless": Times(
        detect_s=90,
        replace_s=900,
        spare_s=60,
        resume_s=1410,
        memory_s=None,
        peer_s=105,
        source="published: 1 min 45 s against 15 min",
    ),
}
"""Published times. `holdfast` is not among them, because it takes its times from a job's report."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the planner."""

    nodes: int
    """Nodes that train, without spares."""
    gpus_per_node: int
    """GPUs per node."""
    work_s: float
    """Duration of the run without failures."""
    gpu_hours: float
    """The same work in GPU-hours."""
    rates: dict[str, float]
    """Failures per node-hour that stop the job, by class."""
    times: Times
    """The durations of a recovery."""
    cost_s: float
    """How long a checkpoint to storage stalls training."""
    memory_cost_s: float
    """How long a snapshot to memory stalls training."""
    step_s: float
    """Duration of one step: with peers, the most that a failure loses."""
    checkpoint_bytes: float
    """The size of one checkpoint of the whole job."""
    storage_bytes_per_s: float
    """Bytes per second that each node reads from storage."""
    network_bytes_per_s: float
    """Bytes per second that each node reads from its peers."""
    price: float
    """Price of a GPU-hour, in any currency; 0: none was given."""
    spares: int
    """The most spares to consider."""
    repair_s: float
    """Until a used spare is replenished."""
    preset: str
    """The name of the preset from which `times` started."""

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
        """Mean time between failures of the job."""
        return formulas.mtbf_hours(self.nodes, self.rate) * formulas.HOUR_S


def read(given: Mapping[str, Any], report: JobReport | None = None, as_flags: bool = False) -> Inputs:
    """Checks the given fields.

    Args:
        given: fields by name, from flags and from YAML.
        report: a job's report, for the preset `holdfast`.
        as_flags: there is no file, so messages about missing fields show options as examples.

    Raises:
        UsageError: the message names the field and an example.
    """
    for name in given:
        # Refused with the nearest name: if a misspelt field were ignored, the plan would be for another
        # cluster, without any notice.
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f": did you mean {near[0]!r}?" if near else f"; the fields are {', '.join(FIELDS)}"
            raise UsageError(f"unknown field {name!r}{hint}")

    def value(name: str) -> Any:
        return given.get(name, FIELDS[name].default)

    def time(name: str, zero: bool = True) -> float:
        return quantities.time_s(name, value(name), zero)

    nodes = quantities.count("nodes", _needed(given, "nodes", as_flags))
    per_node = quantities.count("gpus_per_node", value("gpus_per_node"), example="8")
    gpu_hours = _gpu_hours(given, as_flags)
    preset = str(value("preset"))
    times = _times(given, preset, report)
    return Inputs(
        nodes=nodes,
        gpus_per_node=per_node,
        gpu_hours=gpu_hours,
        work_s=gpu_hours / (nodes * per_node) * formulas.HOUR_S,
        rates=_rates(given, nodes, as_flags),
        times=times,
        cost_s=time("checkpoint_cost"),
        memory_cost_s=time("memory_cost"),
        # With peers a step is the interval between saves, and `waterfall` divides by that.
        step_s=time("step", zero=False),
        checkpoint_bytes=quantities.nbytes("checkpoint_size", value("checkpoint_size")),
        storage_bytes_per_s=quantities.nbytes("storage_speed", value("storage_speed")),
        network_bytes_per_s=quantities.nbytes("network_speed", value("network_speed")),
        price=quantities.amount("price", value("price"), "2.5", zero=True),
        spares=quantities.count("spares", value("spares"), least=0, example="4"),
        # A used spare is replenished by a new node, unless a time for the repair of the failed one is given.
        repair_s=quantities.time_s("repair", given.get("repair", times.replace_s), zero=True),
        preset=preset,
    )


def from_report(report: JobReport) -> Times:
    """Phase times as a job measured them: medians over its incidents.

    Raises:
        UsageError: it had no incident after which training continued.
    """
    # An incident that training did not survive has no stall: its times would depend on the person who
    # restarted the job.
    incidents = [i for i in report.incidents if i.stall_s is not None]
    if not incidents:
        raise UsageError(
            "report: there is no incident in it that training survived, so it does not contain recovery times; run a "
            "job with a fault: holdfast run --fault kill-worker:step=20 ..."
        )
    stall = _median(incidents, "stall_s") or 0.0
    detect = _median(incidents, "detect_s") or 0.0
    # An incident that a spare ended has a `replace_s` too, but it measures the spare and not a new node.
    replace = _median([i for i in incidents if i.rung != "spare"], "replace_s")
    source = f"measured: medians of {len(incidents)} incidents of job {report.job}"
    if replace is None:
        replace = PRESETS["managed-cloud"].replace_s
        source += (
            "; no node was replaced without a spare, so the time for a new one is that of `managed-cloud`"
        )
    # The stall runs from the failure to the next committed step, so it includes spare, join and restore: `spare_s` is 0 to
    # count none of it twice, and `peer_s` is what remains of it after detection.
    return Times(
        detect_s=detect,
        replace_s=replace,
        spare_s=0.0,
        resume_s=stall,
        memory_s=None,
        peer_s=max(0.0, stall - detect),
        source=source,
    )


def _needed(given: Mapping[str, Any], name: str, as_flags: bool) -> Any:
    if name not in given:
        example = quantities.as_given(name, FIELDS[name].example, as_flags)
        raise UsageError(f"{name} is missing; for example {example}")
    return given[name]


def _gpu_hours(given: Mapping[str, Any], as_flags: bool) -> float:
    if "gpu_hours" in given:
        if "tokens" in given:
            raise UsageError(
                "gpu_hours and tokens cannot be combined; use one of them, for example gpu_hours: 10M"
            )
        return quantities.amount("gpu_hours", given["gpu_hours"], "10M")
    if "tokens" not in given:
        by_hours, by_tokens, pace = (
            quantities.as_given(name, value, as_flags)
            for name, value in (("gpu_hours", "10M"), ("tokens", "15T"), ("tokens_per_gpu_s", "400"))
        )
        raise UsageError(f"the amount of work is missing; specify {by_hours}, or {by_tokens} and {pace}")
    tokens = quantities.amount("tokens", given["tokens"], "15T")
    speed = quantities.amount("tokens_per_gpu_s", _needed(given, "tokens_per_gpu_s", as_flags), "400")
    return tokens / speed / formulas.HOUR_S


def _rates(given: Mapping[str, Any], nodes: int, as_flags: bool) -> dict[str, float]:
    if "rate" in given and "mtbf" in given:
        raise UsageError("rate and mtbf cannot be combined; use one of them, for example rate: 0.016%")
    if "mtbf" in given:
        hours = quantities.time_s("mtbf", given["mtbf"]) / formulas.HOUR_S
        # An MTBF is that of the whole job, a rate that of one node. So from here on, the same job on more
        # nodes fails more often.
        return {"all": 1 / (hours * nodes)}
    rates = _needed(given, "rate", as_flags)
    if not isinstance(rates, Mapping):
        return {"all": quantities.rate("rate", rates)}
    return {str(name): quantities.rate(f"rate.{name}", value) for name, value in rates.items()}


def _times(given: Mapping[str, Any], preset: str, report: JobReport | None) -> Times:
    if preset == "holdfast":
        if report is None:
            raise UsageError(
                "preset: holdfast uses measured times, so it needs the report of a job that had failures: --report "
                "~/.holdfast/jobs/NAME/report.json"
            )
        times = from_report(report)
    elif preset in PRESETS:
        times = PRESETS[preset]
    else:
        raise UsageError(f"preset must be one of {', '.join([*PRESETS, 'holdfast'])} (got {preset!r})")
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


def _median(incidents: list[IncidentView], name: str) -> float | None:
    values = sorted(float(getattr(i, name)) for i in incidents if getattr(i, name) is not None)
    return values[len(values) // 2] if values else None
