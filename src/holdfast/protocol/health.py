"""What is said about the health of a node: findings, checks, and what can be done about them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

EVIDENCE_CHARS = 400
"""So much of a line is kept as evidence."""


class Condition(StrEnum):
    """What is known of the thing that a rule or check looks at. Unknown is neither healthy nor faulty."""

    HEALTHY = "healthy"
    FAULTY = "faulty"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    """How bad it is for the job. fatal: what runs on the device or node now is lost, or cannot be trusted."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    FATAL = "fatal"


class Remedy(StrEnum):
    """What a rule asks for, mildest first. The core decides what is done."""

    WATCH = "watch"
    RESTART_WORKER = "restart-worker"
    RESET_DEVICE = "reset-device"
    REBOOT = "reboot"
    REPLACE = "replace"
    ASK = "ask"


_REMEDY_TEXT = {
    Remedy.WATCH: "nothing is done",
    Remedy.RESTART_WORKER: "its workers are restarted",
    Remedy.RESET_DEVICE: "the device is reset",
    Remedy.REBOOT: "it is rebooted",
    Remedy.REPLACE: "it is replaced",
    Remedy.ASK: "a person is asked",
}


def remedy_text(remedy: str) -> str:
    """What a remedy does, in words. One that this version does not know is shown as it is."""
    return _REMEDY_TEXT[Remedy(remedy)] if remedy in _REMEDY_TEXT else remedy


def acts_on_node(remedy: Remedy) -> bool:
    """It takes a node out of the job, if only for a while."""
    return remedy in (Remedy.RESET_DEVICE, Remedy.REBOOT, Remedy.REPLACE)


class Finding(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one rule found on one node.

    source: what it was read from (`kmsg`, `sysfs`, `nvml`, `worker`, `log`, `peers`, `check`, ...). subject: what it is
    about, as people call it (`gpu 0`, `mlx5_0 port 1`, `rank 3`); empty: the node. device: the subject's lasting
    identity (a GPU's UUID, a serial number), if it has one. worker: the worker that it concerns, if it is one.
    count: occurrences within the rule's window. shared: many nodes have this fault at once (a file server, a switch), so
    none of them is to blame. dry_run: the rule is on trial: written down, never acted on. age_s: since it happened.
    firm: a user's rule over logs that says how much is a fault; it need not be seen twice.
    """

    rule: str
    severity: Severity
    remedy: Remedy
    source: str
    condition: Condition = Condition.FAULTY
    subject: str = ""
    device: str = ""
    worker: str = ""
    evidence: str = ""
    count: int = 1
    shared: bool = False
    dry_run: bool = False
    age_s: float = 0.0
    firm: bool = False


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One check of one node. value, floor: in `unit`; value None: not measured. lower: smaller is better, `floor` is a
    ceiling then. with_node: the other end, of a check between two nodes; if that is faulty it is the way between them,
    not this node. model: of what was checked (a processor, a GPU); only values of one model are compared. digest: of
    bits that are the same wherever the model is."""

    name: str
    condition: Condition
    detail: str = ""
    value: float | None = None
    floor: float | None = None
    unit: str = ""
    lower: bool = False
    took_s: float = 0.0
    subject: str = ""
    with_node: str = ""
    model: str = ""
    digest: str = ""


class HealthSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a job is told about health.

    watch: False: nobody looks. rules: TOML files of the user's, beside the catalogue. dry_run: rules on trial (`*`: all).
    history: where nodes' histories are kept: a SQLite file or a PostgreSQL URL; empty: `$HOLDFAST_HOME/health.sqlite`.
    blast_share, blast_window_s: at most this share of the nodes is acted on within this time. reboot_s: a machine that is
    not back so long after its reboot was ordered is given up (bare metal takes some 30 minutes). deep: nodes that come new
    pass the deep checks first. hooks: a folder of scripts, see `docs/health.md`. replace_slow: a worker that computes so
    many times as long as its peers is replaced, once it has cost more time than a replacement does; 0: never.
    replace_suspect: a node whose part of loss or gradient alone is wrong again and again is replaced, not only told of.
    """

    watch: bool = True
    rules: tuple[str, ...] = ()
    dry_run: tuple[str, ...] = ()
    history: str = ""
    blast_share: float = 0.25
    blast_window_s: float = 600.0
    reboot_s: float = 2700.0
    deep: bool = False
    hooks: str = ""
    replace_slow: float = 0.0
    replace_suspect: bool = False
