"""The input of a simulation: the cluster, its work, the failures and their rates, and all durations. Times in seconds."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.tools.plan import quantities
from holdfast.tools.simulate.options import EXAMPLES, FAILURES

SCOPES = ("worker", "node", "hang", "slow", "rack", "job")
"""The scopes of a failure: one process ends, one machine is lost, one process hangs, one machine becomes slow, a group
of machines is lost at once (a rack, a switch), all processes end at once."""


class FailureClass(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of failure."""

    name: str
    scope: str
    """One of `SCOPES`."""
    rate: float
    """Failures per node-hour. This also holds for `rack` and `job`: a rack of 16 nodes fails 16 times as often as the
    figure."""
    shape: float = 1.0
    """Shape of the Weibull distribution of times between failures of one machine. 1: exponential; below 1: early
    failures and bursts."""
    size: int = 16
    """Number of machines in a rack or under a switch."""
    burst: float = 0.0
    """How many other machines of its rack fail with a machine, on average, within `burst_s`."""
    burst_s: float = 60.0
    lasts_s: float = 3600.0
    """Until a slow machine is fast again, or a rack has power again."""
    factor: float = 1.5
    """Step time of a slow machine, as a multiple of the usual one."""
    found_s: float = 0.0
    """A slow machine is reported to the coordinator after this long; 0: never."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster and one run."""

    nodes: int
    work_s: float
    """Duration of training at full size without failures."""
    classes: tuple[FailureClass, ...] = ()
    spares: int = 0
    min_nodes: int = 0
    """The fewest nodes to continue with; 0: as many as `nodes`, so the job never gets smaller."""
    gpus_per_node: int = 8
    step_s: float = 10.0
    micro_batches: int = 0
    lemons: float = 0.0
    """Share of machines that fail `lemon_factor` times as often."""
    lemon_factor: float = 10.0
    detection_s: float = 2.0
    """The job's `--detection`, from which the coordinator's time-outs follow."""
    start_s: float = 60.0
    """From the start of a process until it is ready."""
    join_s: float = 1.0
    """Until a generation trains if all members have the state."""
    peer_s: float = 10.0
    """The same if a member fetches the state from a peer."""
    memory_s: float = 30.0
    """The same if all members fetch it from snapshots in memory."""
    load_s: float = 300.0
    """The same if all members fetch it from a durable tier."""
    cloud: bool = True
    """True: a failed machine is returned, and a new one comes. False: it is repaired, in `repair_s`."""
    replace_s: float = 900.0
    """Until a requested machine joins, if one is available."""
    repair_s: float = 86400.0
    scarce: float = 0.0
    """Share of the requests for which no machine is available at once."""
    capacity_s: float = 3600.0
    """How long none is available, on average."""
    resubmit_s: float = 600.0
    """Until a person restarts a job that gave up."""
    memory_every_s: float = 60.0
    """Between snapshots; 0: none."""
    durable_every_s: float = 1800.0
    """Between checkpoints; 0: none."""
    store_s: float = 60.0
    """Until a checkpoint is in the durable tier."""
    max_restarts: int = 100

    @property
    def rate(self) -> float:
        """Failures per node-hour of all classes that stop the job."""
        return sum(c.rate for c in self.classes if c.scope != "slow")

    @property
    def least(self) -> int:
        """The fewest nodes to continue with."""
        return self.min_nodes or self.nodes

    @property
    def steps(self) -> int:
        """Number of steps of the work."""
        return max(1, round(self.work_s / self.step_s))


LLAMA = (
    FailureClass(name="gpu", scope="node", rate=0.0161e-2 * 0.66),
    FailureClass(name="software", scope="worker", rate=0.0161e-2 * 0.24),
    FailureClass(name="hang", scope="hang", rate=0.0161e-2 * 0.10),
)
"""Failures as in Llama 3.1: 0.0161% per node-hour. Of its 419 unexpected interruptions 278 are of machines (GPU,
memory, network, host), about a quarter of software and maintenance; the share of hangs is an assumption."""

_TIMES = {
    "step": "step_s",
    "detection": "detection_s",
    "start": "start_s",
    "join": "join_s",
    "peer": "peer_s",
    "resume_memory": "memory_s",
    "resume": "load_s",
    "replace": "replace_s",
    "repair": "repair_s",
    "capacity": "capacity_s",
    "resubmit": "resubmit_s",
    "memory_every": "memory_every_s",
    "durable_every": "durable_every_s",
    "store": "store_s",
}
_COUNTS = {"spares": 0, "min_nodes": 1, "gpus_per_node": 1, "micro_batches": 0, "max_restarts": 0}


def read(given: Mapping[str, Any], as_flags: bool = False) -> Scenario:
    """Checks the given fields. as_flags: there is no file, so messages about missing fields show options as examples.

    Raises:
        UsageError: the message names the field and an example.
    """
    _known("field", given, EXAMPLES)
    for name in ("nodes", "days"):
        if name not in given:
            example = quantities.as_given(name, EXAMPLES[name], as_flags)
            raise UsageError(f"{name} is missing; for example {example}")
    nodes = quantities.count("nodes", given["nodes"])
    days = quantities.amount("days", given["days"], "54")
    fields: dict[str, Any] = {
        f: quantities.time_s(n, given[n], zero=n != "step") for n, f in _TIMES.items() if n in given
    }
    for name, least in _COUNTS.items():
        if name in given:
            fields[name] = quantities.count(name, given[name], least, EXAMPLES[name])
    for name in ("lemons", "scarce"):
        if name in given:
            fields[name] = _share(name, given[name])
    if "lemon_factor" in given:
        fields["lemon_factor"] = quantities.amount("lemon_factor", given["lemon_factor"], "10")
    if "cloud" in given:
        fields["cloud"] = _flag(given["cloud"])
    scenario = Scenario(nodes=nodes, work_s=days * 86400.0, classes=_classes(given, as_flags), **fields)
    check(scenario)
    return scenario


def check(s: Scenario) -> None:
    """Refuses impossible values; the message names the field."""
    if s.least > s.nodes:
        raise UsageError(
            f"min_nodes: {s.min_nodes} is more than nodes: {s.nodes}; for example {max(1, s.nodes - 8)}"
        )
    if s.step_s > s.work_s:
        raise UsageError(
            f"step: {s.step_s:g} s is longer than the whole run of {s.work_s:g} s; for example 10s"
        )
    # As in `Timing.start_s`. The simulated core would end every worker before it is ready, and the result
    # would depend on this limit and not on the cluster.
    if s.start_s >= 150 * s.detection_s:
        raise UsageError(
            f"start: the coordinator ends workers that are not ready within 150 x detection = {150 * s.detection_s:g} s, "
            f"and these need {s.start_s:g} s; for example detection: {s.start_s / 100:.0f}s"
        )
    if s.rate and s.nodes * s.rate * (s.peer_s + s.detection_s) >= 3600:
        mtbf_s = 3600 / (s.nodes * s.rate)
        raise UsageError(
            f"the run does not finish: {s.nodes} nodes fail every {mtbf_s:.0f} s, and recovery takes "
            f"{s.peer_s + s.detection_s:.0f} s (detection + peer); for example rate: 0.0161%"
        )


def _classes(given: Mapping[str, Any], as_flags: bool) -> tuple[FailureClass, ...]:
    if FAILURES not in given:
        if "rate" not in given:
            shown = quantities.as_given("rate", "0.0161%", as_flags)
            raise UsageError(f"rate is missing; for example {shown} (failures per node-hour)")
        rate = quantities.rate("rate", given["rate"])
        # Shares of the published mix, scaled to the given rate: a person knows the rate of a job's failures
        # far better than their causes.
        whole = sum(c.rate for c in LLAMA)
        return tuple(msgspec.structs.replace(c, rate=rate * c.rate / whole) for c in LLAMA) if rate else ()
    if "rate" in given:
        raise UsageError("rate and failures: give one of them; each of the failures has a rate of its own")
    classes = given[FAILURES]
    if not isinstance(classes, list) or not all(isinstance(x, Mapping) for x in classes):
        raise UsageError(f"failures: a list of classes; for example {EXAMPLES[FAILURES]}")
    return tuple(_class(i, x) for i, x in enumerate(classes))


def _class(index: int, given: Mapping[str, Any]) -> FailureClass:
    at = f"failures[{index}]"
    # Derived from the class itself, so that a field that is added there is accepted at once, and one that is
    # removed is refused.
    names = {f.removesuffix("_s") for f in FailureClass.__struct_fields__} | {"burst_within"}
    _known(f"field in {at}", given, names)
    scope = given.get("scope", "node")
    if scope not in SCOPES:
        raise UsageError(f"{at}.scope: {scope!r} is none of {', '.join(SCOPES)}")
    if "rate" not in given:
        raise UsageError(f"{at}.rate is missing; for example rate: 0.01% (per node-hour)")
    fields: dict[str, Any] = {}
    for name in ("shape", "factor"):
        if name in given:
            fields[name] = quantities.amount(f"{at}.{name}", given[name], "0.7" if name == "shape" else "1.5")
    if "burst" in given:
        fields["burst"] = quantities.amount(f"{at}.burst", given["burst"], "2", zero=True)
    for name in ("burst", "lasts", "found"):
        key = "burst_within" if name == "burst" else name
        if key in given:
            fields[f"{name}_s"] = quantities.time_s(f"{at}.{key}", given[key], zero=True)
    if "size" in given:
        fields["size"] = quantities.count(f"{at}.size", given["size"], example="16")
    return FailureClass(
        name=str(given.get("name", scope)),
        scope=scope,
        rate=quantities.rate(f"{at}.rate", given["rate"]),
        **fields,
    )


def _known(what: str, given: Mapping[str, Any], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            hint = f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"
            raise UsageError(f"unknown {what} {name!r}{hint}")


def _share(name: str, given: Any) -> float:
    if isinstance(given, str) and given.endswith("%"):
        found = quantities.amount(name, given[:-1], "2%", zero=True) / 100
    else:
        found = quantities.amount(name, given, "2%", zero=True)
    if found > 1:
        raise UsageError(f"{name}: {given!r} is more than all; for example 2%")
    return found


def _flag(given: Any) -> bool:
    if str(given).lower() not in ("true", "false", "yes", "no"):
        raise UsageError(f"cloud: {given!r} is neither true nor false")
    return str(given).lower() in ("true", "yes")
