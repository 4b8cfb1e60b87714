"""What is said about the health of a node: findings, checks, and what can be done about them; and which readings of a machine
are figures for people, which a dashboard shows beside a job and no rule needs to judge."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

EVIDENCE_CHARS = 400
"""So much of a line is kept as evidence."""


# Three values, because a sensor that cannot be read is the usual case on some machines. As "healthy" it would
# hide faults, as "faulty" it would empty the cluster.
class Condition(StrEnum):
    """What is known of the thing that a rule or check examines. Unknown is neither healthy nor faulty."""

    HEALTHY = "healthy"
    FAULTY = "faulty"
    UNKNOWN = "unknown"


CLUSTER_NAME = "k8s:"
"""Identities that begin so are names of a cluster's nodes. A cloud gives such a name to another machine later: it tells
machines apart within a job, and nothing is kept under it for other jobs."""


class Severity(StrEnum):
    """How bad a finding is for the job. fatal: what runs on the device or node now is lost, or cannot be trusted."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    FATAL = "fatal"


_SEVERITY_TEXT = {
    Severity.INFO: "worth knowing, no harm",
    Severity.WARNING: "may become a fault",
    Severity.ERROR: "a fault, which may disturb training",
    Severity.FATAL: "what runs on the device or node is lost, or cannot be trusted",
}


def severity_text(severity: str) -> str:
    """What a severity means, in words; empty: this version does not know it."""
    return _SEVERITY_TEXT[Severity(severity)] if severity in _SEVERITY_TEXT else ""


# The order is the ladder: `stronger` compares by position, so a new remedy has to be put at its place.
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
    Remedy.ASK: "a person is asked to act",
}


def remedy_text(remedy: str) -> str:
    """What a remedy does, in words. One that this version does not know is shown as it is."""
    # A ledger may hold a remedy of a later version. It is shown as it was written.
    return _REMEDY_TEXT[Remedy(remedy)] if remedy in _REMEDY_TEXT else remedy


def acts_on_node(remedy: Remedy) -> bool:
    """Whether a remedy takes a node out of the job, at least for a while."""
    # Restarting a worker does not take the node away, so neither the limits on nodes nor the budget of
    # repairs count it.
    return remedy in (Remedy.RESET_DEVICE, Remedy.REBOOT, Remedy.REPLACE)


# Evidence and no verdict: the rule that made it saw one node, and whether that node is at fault can only be
# told by comparing it with others.
class Finding(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one rule found on one node."""

    rule: str
    """The rule's name."""
    severity: Severity
    remedy: Remedy
    source: str
    """What it was read from: `kmsg`, `sysfs`, `nvml`, `worker`, `log`, `peers`, `check`, ..."""
    condition: Condition = Condition.FAULTY
    subject: str = ""
    """What it is about, as people call it (`gpu 0`, `mlx5_0 port 1`, `rank 3`); empty: the node."""
    device: str = ""
    """The subject's lasting identity (a GPU's UUID, a serial number), if it has one."""
    worker: str = ""
    """The worker that it concerns, if it is one."""
    evidence: str = ""
    """The line or reading, at most EVIDENCE_CHARS of it."""
    count: int = 1
    """Occurrences within the rule's window."""
    shared: bool = False
    """Many nodes have this fault at once (a file server, a switch), so none of them is to blame."""
    dry_run: bool = False
    """The rule is on trial: its findings are recorded and never acted on."""
    age_s: float = 0.0
    """Seconds since it happened."""
    firm: bool = False
    """A user's rule over logs that defines how much is a fault; it need not be seen twice."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a person is to look at."""

    at_s: float
    """On the core's clock."""
    node: str
    rule: str
    text: str
    incident: int = 0
    """Its number; 0: it is about none."""


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One check of one node."""

    name: str
    condition: Condition
    detail: str = ""
    value: float | None = None
    """In `unit`; None: not measured."""
    floor: float | None = None
    """What the value must reach, in `unit`; a ceiling where `lower` is set."""
    unit: str = ""
    lower: bool = False
    """Smaller is better."""
    took_s: float = 0.0
    """Seconds that the check took."""
    subject: str = ""
    """What was checked, as people call it."""
    with_node: str = ""
    """The other end of a check between two nodes. If that is faulty, it is the way between them, not this
    node."""
    model: str = ""
    """Of what was checked (a processor, a GPU); only values of one model are compared."""
    digest: str = ""
    """Of bits that are the same wherever the model is."""


MOST_READINGS = 128
"""Of one node. Each is a time series for whoever scrapes `/metrics`, and a job may have thousands of nodes."""
SUBJECT_CHARS = 64


class NodeFigure(NamedTuple):
    """One reading as a series."""

    metric: str
    text: str
    label: str
    """What its subject is called."""
    is_counter: bool = False
    scale: float = 1.0
    """From the reading to the base unit."""


NODE_FIGURES: dict[str, NodeFigure] = {
    "nvml.utilization_percent": NodeFigure(
        "holdfast_node_gpu_utilization_ratio",
        "Share of time in which the GPU ran a kernel.",
        "gpu",
        scale=0.01,
    ),
    "nvml.memory_used_bytes": NodeFigure(
        "holdfast_node_gpu_memory_used_bytes", "Memory of the GPU that is in use.", "gpu"
    ),
    "nvml.temperature_c": NodeFigure(
        "holdfast_node_gpu_temperature_celsius", "Temperature of the GPU.", "gpu"
    ),
    "nvml.power_watts": NodeFigure("holdfast_node_gpu_power_watts", "Power that the GPU draws.", "gpu"),
    "net.rx_bytes": NodeFigure(
        "holdfast_node_network_received_bytes", "Received by the interface.", "interface", True
    ),
    "net.tx_bytes": NodeFigure(
        "holdfast_node_network_sent_bytes", "Sent by the interface.", "interface", True
    ),
    "disk.read_bytes": NodeFigure("holdfast_node_disk_read_bytes", "Read from the drive.", "disk", True),
    "disk.written_bytes": NodeFigure(
        "holdfast_node_disk_written_bytes", "Written to the drive.", "disk", True
    ),
}
"""By the reading's name."""


class PairFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What two nodes measured between them."""

    nodes: tuple[str, str]
    bytes_per_s: float | None = None
    """The slower direction. 0: they did not reach each other. None: it could not be tried."""
    latency_s: float = 0.0
    """There and back; 0: not measured."""
    why: str = ""
    """What went wrong."""
    damaged: bool = False
    """Bytes came back changed."""


class CheckNews(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run of checks."""

    id: int
    version: int
    """Grows with every change."""
    doing: str
    """What runs now, in words."""
    waiting: tuple[str, ...]
    """Nodes that have not answered."""
    over: bool
    """The results are final."""
    results: dict[str, tuple[CheckResult, ...]] = {}
    pairs: tuple[PairFigures, ...] = ()
    """Of every pair of nodes, if that was asked for, when it is over."""
