"""Findings for a core that is driven by hand, and what it made of them."""

from __future__ import annotations

from desk import Desk

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.kernel.state import WorkerPhase
from holdfast.protocol import messages as m
from holdfast.protocol.health import Finding, Remedy, Severity
from holdfast.protocol.job_options import HealthSpec

FATAL, ERROR, WARNING = Severity.FATAL, Severity.ERROR, Severity.WARNING
WIDE = HealthSpec(blast_radius="100%")


def finding(
    rule: str = "xid-79", severity: Severity = FATAL, remedy: Remedy = Remedy.REPLACE, **more: object
) -> Finding:
    fields = {"source": "kmsg", "evidence": f"{rule} was seen", "device": "GPU-1"} | more
    return Finding(rule=rule, severity=severity, remedy=remedy, **fields)  # type: ignore[arg-type]


def finds(desk: Desk, node: str, *args: object, **more: object) -> list[e.Action]:
    return desk.do(e.NodeSays(node, m.FindingsReported((finding(*args, **more),))))  # type: ignore[arg-type]


def park_all(desk: Desk) -> None:
    for worker in desk.members():
        if desk.known(worker).phase is WorkerPhase.MEMBER:
            desk.parks(worker, desk.state.membership.committed)


def train_on(desk: Desk) -> None:
    """Whatever ends now ends, and what comes next commits a step."""
    park_all(desk)
    desk.commit(desk.state.membership.committed + 1)


def verdicts(desk: Desk) -> list[tuple[object, object]]:
    return [(v["does"], v["against"]) for v in desk.records("verdict")]


def marked(desk: Desk) -> list[str]:
    return [a.node for a in desk.did(e.MarkNode)]


def come_back(
    desk: Desk, name: str, *past: Remembered, identity: str = "M1", session: str = "x", **more: object
) -> None:
    hello = m.Hello(
        version=m.PROTOCOL_VERSION,
        node=name,
        session=f"{name}-{session}",
        host=name,
        slots=1,
        pid=1,
        identity=identity,
        **more,
    )  # type: ignore[arg-type]
    desk.do(e.NodeJoined(hello, past))


def log_says(desk: Desk, worker: str, rule: str = "ours", severity: Severity = ERROR, **more: object) -> None:
    """A rule of the user's matches in a worker's log."""
    fields = {"source": "log", "worker": worker, "firm": True, "device": "", "subject": worker} | more
    finds(
        desk, worker.partition(".")[0], rule, severity, fields.pop("remedy", Remedy.RESTART_WORKER), **fields
    )
