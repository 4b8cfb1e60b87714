"""What Slurm's commands print, of any version: pure.

Jobs are read from text whose columns we name, which no version has changed. Nodes come as JSON where `scontrol` has it
(23.02 and newer), and its schema differs between versions; older ones print KEY=VALUE.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

JOB_FORMAT = "%i|%T|%r|%B|%L|%N"
STEP_FORMAT = "%i|%j"
GOING = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "MAINT", "POWERING_DOWN", "POWER_DOWN"})
DEAD = frozenset({"DOWN", "NOT_RESPONDING", "ERROR", "POWERED_DOWN", "FUTURE", "UNKNOWN", "REBOOT_ISSUED"})
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
LIVING = WAITING | {"RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
HELD_AGAIN = "launch failed requeued held"
"""Slurm's reason for holding a job that was queued again after its batch script had been killed."""
HOPELESS = frozenset(
    {
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "AccountNotAllowed",
        "QOSNotAllowed",
    }
)
"""Reasons of a job that waits for what will not come by itself."""


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job in Slurm's queue."""

    id: str
    state: str
    """As `squeue` writes it in full, for example `RUNNING`."""
    reason: str
    """Why it waits; `None` where there is no reason."""
    batch_host: str
    """The node that the batch script runs on."""
    left_s: float | None
    """Seconds until its time limit; None: it has no limit."""
    nodes: str
    """As Slurm writes lists (`n[1-3]`)."""


class NodeLine(msgspec.Struct, frozen=True):
    """A node as Slurm sees it."""

    name: str
    address: str
    states: frozenset[str]
    """Its state and its flags."""
    reason: str

    @property
    def usable(self) -> bool:
        """New work may start there."""
        return not self.states & (GOING | DEAD)

    @property
    def going(self) -> bool:
        """It is to leave, and lives."""
        return bool(self.states & GOING) and not self.states & DEAD


def parse_jobs(text: str) -> list[JobLine]:
    """`squeue --noheader --format=JOB_FORMAT`."""
    jobs = []
    for line in filter(None, map(str.strip, text.splitlines())):
        # The last column takes the rest of the line.
        id, state, reason, host, left, nodes = line.split("|", 5)
        jobs.append(
            JobLine(id=id, state=state, reason=reason, batch_host=host, left_s=parse_limit(left), nodes=nodes)
        )
    return jobs


def parse_limit(text: str) -> float | None:
    """`minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours[:minutes[:seconds]]` in seconds; None for no
    limit, or none that is known.

    Raises:
        ValueError: it is none of these.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "INVALID", "NOT_SET", "N/A", ""):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(text)
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    # Two parts mean minutes and seconds, but with days in front hours and minutes: Slurm reads them so.
    if match[1] is not None or match[4] is not None:
        return float(((days * 24 + first) * 60 + second) * 60 + third)
    return float(first * 60 + second)


def parse_nodes(text: str) -> list[NodeLine]:
    """`scontrol show node`, as JSON or `--oneliner`, or `sinfo --json`."""
    text = text.strip()
    if text.startswith("{"):
        return [_from_json(n) for n in json.loads(text).get("nodes", [])]
    return [_from_text(line) for line in text.splitlines() if line.startswith("NodeName=")]


def _from_json(node: dict[str, Any]) -> NodeLine:
    # A string in some versions and a list in others, of which some have the flags apart.
    state = node.get("state", [])
    states = [state] if isinstance(state, str) else list(state)
    states += node.get("state_flags", [])
    address = node.get("address") or node.get("hostname") or node["name"]
    return NodeLine(node["name"], address, frozenset(s.upper() for s in states), node.get("reason") or "")


_ENDS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "%": "POWERING_DOWN", "$": "MAINT", "^": "REBOOT_ISSUED"}


def _from_text(line: str) -> NodeLine:
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    states = set()
    for part in fields.get("State", "UNKNOWN").split("+"):
        # The marks at the end stand for flags, and several may follow each other.
        word = part.rstrip("*~#!%$@^-")
        states |= {word} | {_ENDS[c] for c in part[len(word) :] if c in _ENDS}
    # The reason is free text with blanks, and ends where Slurm adds who gave it and when.
    reason = re.search(r" Reason=(.*?)(?: \[\w+@[^\]]*\]|$| Comment=)", line)
    name = fields["NodeName"]
    return NodeLine(
        name, fields.get("NodeAddr") or name, frozenset(states), reason[1].strip() if reason else ""
    )


def parse_steps(text: str) -> dict[str, str]:
    """`squeue --steps --format=STEP_FORMAT`: step names, each with the newest step of that name."""
    steps: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        id, name = line.split("|", 1)
        # A node that was lost and came back has two steps of its name for a while. Only the newer one may be
        # ended or watched.
        if name not in steps or _number(id) > _number(steps[name]):
            steps[name] = id
    return steps


def _number(step: str) -> int:
    last = step.rpartition(".")[2]
    return int(last) if last.isdigit() else -1


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_version(text: str) -> tuple[int, int]:
    """`slurm 22.05.8` as (22, 5); (0, 0) when it says nothing of the kind."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def plain_error(text: str) -> str:
    """The first thing that a command complained about, without its name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower()] or lines
    return re.sub(r"^\w+: (?:(?:fatal )?error: )?", "", told[0]) if told else "it printed nothing"
