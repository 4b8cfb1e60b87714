"""Faults that can be injected: `KIND[:key=value,...]`, parsed and checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.phases import Phase
from holdfast.protocol.units import parse_seconds


class FaultKind(StrEnum):
    """What can be done to a running job."""

    KILL_WORKER = "kill-worker"
    KILL_NODE = "kill-node"
    STOP_WORKER = "stop-worker"
    STOP_NODE = "stop-node"
    RAISE = "raise"
    SEGFAULT = "segfault"
    EXIT = "exit"
    DEADLOCK = "deadlock"
    HOLD_GIL = "hold-gil"
    DROP_NODE = "drop-node"
    PREEMPT_NODE = "preempt-node"
    KILL_COORDINATOR = "kill-coordinator"
    NAN = "nan"
    XID = "xid"
    ECC = "ecc"
    LINK_DOWN = "link-down"
    READONLY_FS = "readonly-fs"
    SLOW = "slow"
    FLIP_BIT = "flip-bit"


MACHINE_FAULTS = frozenset({FaultKind.XID, FaultKind.ECC, FaultKind.LINK_DOWN, FaultKind.READONLY_FS})
"""Faults of the machine: its agent writes them where the sources of `health` read; they do nothing else."""

NODE_FAULTS = MACHINE_FAULTS | {
    FaultKind.KILL_NODE,
    FaultKind.STOP_NODE,
    FaultKind.DROP_NODE,
    FaultKind.PREEMPT_NODE,
}
"""Faults of a whole node: its agent does them. `preempt-node` is what a SIGTERM to the agent is."""

VALUES = {FaultKind.XID: "code", FaultKind.SLOW: "factor"}
"""Faults that can be written `KIND=VALUE`, and which key the value is for."""
LARGEST_XID = 999

PHASES = {p.name.lower(): p for p in (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.VOTE, Phase.UPDATE)}
PHASES |= {"commit": Phase.COMMIT, "transfer": Phase.TRANSFER, "snapshot": Phase.SNAPSHOT}
_KEYS = ("rank", "node", "step", "after", "every", "phase", "times", "seed", "code", "factor")
_SLOW_EXAMPLE = "for example slow=1.5x,rank=2 (slow=1x ends it)"
_EXAMPLE = "for example --fault kill-node:node=2,step=40 or --fault kill-worker:every=8s,times=4"


# A bare number is one of the local engine's nodes, for short command lines. Everywhere else a node has the
# name that its machine has.
def node_name(given: int | str) -> str:
    """A node as people call it: by its name, or by the number of one of the local engine's."""
    return f"node{given}" if isinstance(given, int) or given.isdecimal() else given


class FaultSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One `--fault`."""

    kind: FaultKind
    rank: int | None = None
    """Whom it strikes; None: drawn at random when it is due, unless `node` is given."""
    node: int | str | None = None
    """A node's name, or the number of one of the local engine's; None: drawn at random when it is due."""
    step: int | None = None
    """It fires in the step after so many committed ones, in the phase `snapshot` at the first copy from then on; None: by
    time, or at once."""
    after_s: float | None = None
    """Due so long after the first generation was formed, or after it was asked for while the job runs."""
    every_s: float | None = None
    """Due again and again, so far apart; None: once."""
    phase: str | None = None
    """Name of the phase in which it fires; None: the backward pass of `step`, or where the worker is."""
    times: int = 1
    """How often it strikes."""
    seed: int = 0
    """Of the draws."""
    code: int | None = None
    """Of `xid`: the driver's error number."""
    factor: float | None = None
    """Of `slow`: how many times as long the worker computes from then on; 1: as fast as before."""

    def __str__(self) -> str:
        parts = [
            f"{k}={getattr(self, k)}"
            for k in ("code", "factor", "rank", "node", "step", "phase")
            if getattr(self, k) is not None
        ]
        parts += [
            f"{k}={getattr(self, k + '_s'):g}s"
            for k in ("after", "every")
            if getattr(self, k + "_s") is not None
        ]
        return f"{self.kind}{':' if parts else ''}{','.join(parts)}"


class ArmedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault on its way to one worker."""

    id: str
    kind: FaultKind
    step: int | None = None
    """As in FaultSpec; None: the next step."""
    phase: int | None = None
    """It fires as the worker enters this `Phase`; None: the backward pass."""
    code: int | None = None
    """As in FaultSpec."""
    factor: float | None = None
    """As in FaultSpec."""


def join_words(words: Sequence[str]) -> str:
    """A fault given as several words, `xid=79 node=2`, as one: `xid=79,node=2`."""
    return ",".join(words)


def parse_fault(text: str) -> FaultSpec:
    """Reads `KIND[:key=value,...]`, or `KIND=VALUE[,key=value,...]` of a fault that has a value.

    Raises:
        UsageError: unknown kind, key or phase, a value that is no number, or an impossible combination.
    """
    kind_text, rest = _split(text)
    try:
        kind = FaultKind(kind_text)
    except ValueError:
        raise UsageError(
            f"--fault {text!r}: {kind_text!r} is not a kind of fault; choose one of {', '.join(FaultKind)}; {_EXAMPLE}"
        ) from None
    fields: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS:
            raise UsageError(
                f"--fault {text!r}: {part!r} must be KEY=VALUE with one of the keys {', '.join(_KEYS)}; {_EXAMPLE}"
            )
        if key in fields:
            raise UsageError(f"--fault {text!r}: {key} is given twice")
        fields[key] = value
    spec = FaultSpec(
        kind=kind,
        rank=_whole(text, fields, "rank"),
        node=_node(text, fields),
        step=_whole(text, fields, "step"),
        after_s=_seconds(text, fields, "after"),
        every_s=_seconds(text, fields, "every"),
        phase=_phase(text, fields),
        times=_times(text, fields),
        seed=_whole(text, fields, "seed") or 0,
        code=_whole(text, fields, "code"),
        factor=_factor(text, kind, fields.get("factor")),
    )
    _check(text, spec)
    return spec


def check_watched(spec: FaultSpec, watch: bool) -> None:
    """Raises UsageError for a fault of a machine if health is not watched: nobody would notice the fault."""
    if spec.kind in MACHINE_FAULTS and not watch:
        raise UsageError(
            f"--fault {str(spec)!r}: faults of a machine are found by the health rules, which --no-health turns off; "
            "remove --no-health"
        )


def _split(text: str) -> tuple[str, str]:
    """The kind, and the keys with their values."""
    head, _, rest = re.sub(r"^([\w-]+),", r"\1:", text).partition(":")
    kind, equals, value = head.partition("=")
    key = VALUES.get(FaultKind(kind)) if equals and kind in set(FaultKind) else None
    if not equals or key is None:
        return head, rest
    value, _, more = value.partition(",")
    return kind, ",".join(filter(None, (f"{key}={value}", more, rest)))


def _check(text: str, spec: FaultSpec) -> None:
    when = [name for name in ("step", "after_s", "every_s") if getattr(spec, name) is not None]
    # One trigger for each fault: with two, a test that passed would not say which of them it was about.
    if len(when) > 1:
        raise UsageError(
            f"--fault {text!r}: only one of step=, after= and every= can be used, not {len(when)}"
        )
    if spec.rank is not None and spec.node is not None:
        raise UsageError(f"--fault {text!r}: rank= and node= cannot be combined; use one of them")
    if spec.kind is FaultKind.KILL_COORDINATOR and (spec.rank is not None or spec.node is not None):
        raise UsageError(
            f"--fault {text!r}: the coordinator does not have a rank or node; remove rank= and node="
        )
    if spec.kind is FaultKind.XID and spec.code is None:
        raise UsageError(
            f"--fault {text!r}: specify the number of the Xid, for example --fault xid=79,node=2"
        )
    if spec.kind is not FaultKind.XID and spec.code is not None:
        raise UsageError(f"--fault {text!r}: only a fault xid takes a code")
    if spec.code is not None and not 1 <= spec.code <= LARGEST_XID:
        raise UsageError(f"--fault {text!r}: an Xid must be a number from 1 to {LARGEST_XID}, for example 79")
    if spec.kind in MACHINE_FAULTS and spec.phase is not None:
        raise UsageError(
            f"--fault {text!r}: faults of a machine do not depend on the phase of a step; remove phase="
        )
    if spec.every_s is not None and spec.every_s <= 0:
        raise UsageError(f"--fault {text!r}: every= must be longer than 0 s")


def _whole(text: str, fields: dict[str, str], key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if not re.fullmatch(r"\d+", value):
        raise UsageError(f"--fault {text!r}: {key}={value!r} is not a whole number from 0 upward; {_EXAMPLE}")
    return int(value)


def _node(text: str, fields: dict[str, str]) -> int | str | None:
    value = fields.get("node")
    if value is None or re.fullmatch(r"\d+", value):
        return _whole(text, fields, "node")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", value):
        raise UsageError(
            f"--fault {text!r}: node={value!r} is neither a number nor a node's name; {_EXAMPLE}"
        )
    return value


def _times(text: str, fields: dict[str, str]) -> int:
    times = _whole(text, fields, "times")
    if times == 0:
        raise UsageError(f"--fault {text!r}: with times=0 the fault would never happen; remove the fault")
    if times is None:
        # A fault that repeats has no end unless one is given; any other strikes once. A number and not
        # infinity: the count travels in a message.
        return 1 if "every" not in fields else 1_000_000
    return times


def _seconds(text: str, fields: dict[str, str], key: str) -> float | None:
    value = fields.get(key)
    return None if value is None else parse_seconds(f"--fault {text!r}: {key}", value)


def _factor(text: str, kind: FaultKind, value: str | None) -> float | None:
    if (value is None) == (kind is FaultKind.SLOW):
        raise UsageError(
            f"--fault {text!r}: slow needs a factor, and no other fault takes one; {_SLOW_EXAMPLE}"
        )
    if value is None:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?x?", value) or not 1.0 <= float(value.rstrip("x")) <= 100.0:
        raise UsageError(f"--fault {text!r}: factor={value!r} is not a number from 1 to 100; {_SLOW_EXAMPLE}")
    return float(value.rstrip("x"))


def _phase(text: str, fields: dict[str, str]) -> str | None:
    value = fields.get("phase")
    if value is not None and value not in PHASES:
        raise UsageError(f"--fault {text!r}: phase={value!r} is not one of {', '.join(PHASES)}")
    return value
