"""Parses the output of Slurm's commands, of any version. Pure.

Jobs are read from text with columns that we request, a format that no version has changed. Nodes are read from JSON if `scontrol`
supports it (23.02 and newer), whose schema differs between versions; older versions print KEY=VALUE.
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
"""Reasons for which a job would wait for ever."""


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job in Slurm's queue."""

    id: str
    state: str
    """Its state in `squeue`'s long form, for example `RUNNING`."""
    reason: str
    """Why it waits; the text `None` if there is no reason."""
    batch_host: str
    """The node that the batch script runs on."""
    left_s: float | None
    """Seconds until its time limit; None: it has no limit."""
    nodes: str
    """Its nodes in Slurm's notation (`n[1-3]`)."""


class NodeLine(msgspec.Struct, frozen=True):
    """A node according to Slurm."""

    name: str
    address: str
    states: frozenset[str]
    """Its state and its flags."""
    reason: str

    @property
    def usable(self) -> bool:
        """Whether new work may start there."""
        return not self.states & (GOING | DEAD)

    @property
    def going(self) -> bool:
        """Whether it is to be taken out of service but still works."""
        return bool(self.states & GOING) and not self.states & DEAD


def parse_jobs(text: str) -> list[JobLine]:
    """Parses the output of `squeue --noheader --format=JOB_FORMAT`."""
    jobs = []
    for line in filter(None, map(str.strip, text.splitlines())):
        # The last column is the rest of the line.
        id, state, reason, host, left, nodes = line.split("|", 5)
        jobs.append(
            JobLine(id=id, state=state, reason=reason, batch_host=host, left_s=parse_limit(left), nodes=nodes)
        )
    return jobs


def parse_limit(text: str) -> float | None:
    """Parses `minutes`, `minutes:seconds`, `hours:minutes:seconds` or `days-hours[:minutes[:seconds]]`; returns seconds.

    None: there is no limit, or it is not known.

    Raises:
        ValueError: it is none of these.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "INVALID", "NOT_SET", "N/A", ""):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(text)
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    # As in Slurm, two parts are minutes and seconds, but after days they are hours and minutes.
    if match[1] is not None or match[4] is not None:
        return float(((days * 24 + first) * 60 + second) * 60 + third)
    return float(first * 60 + second)


def parse_nodes(text: str) -> list[NodeLine]:
    """Parses the output of `scontrol show node`, as JSON or `--oneliner`, or of `sinfo --json`."""
    text = text.strip()
    if text.startswith("{"):
        return [_from_json(n) for n in json.loads(text).get("nodes", [])]
    return [_from_text(line) for line in text.splitlines() if line.startswith("NodeName=")]


def _from_json(node: dict[str, Any]) -> NodeLine:
    # A string in some versions and a list in others, some of which have the flags in another field.
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
        # Characters at the end stand for flags, and there may be several.
        state = part.rstrip("*~#!%$@^-")
        states |= {state} | {_ENDS[c] for c in part[len(state) :] if c in _ENDS}
    # The reason is free text with blanks. It ends where Slurm adds its author and time.
    reason = re.search(r" Reason=(.*?)(?: \[\w+@[^\]]*\]|$| Comment=)", line)
    name = fields["NodeName"]
    return NodeLine(
        name, fields.get("NodeAddr") or name, frozenset(states), reason[1].strip() if reason else ""
    )


def parse_steps(text: str) -> dict[str, str]:
    """Parses the output of `squeue --steps --format=STEP_FORMAT`: step names, each with the id of the newest step of that
    name."""
    steps: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        id, name = line.split("|", 1)
        # For a node that was lost and came back there are two steps of its name for a while, of which only the newer one counts.
        if name not in steps or _number(id) > _number(steps[name]):
            steps[name] = id
    return steps


def _number(step: str) -> int:
    last = step.rpartition(".")[2]
    return int(last) if last.isdigit() else -1


def parse_config(text: str) -> dict[str, str]:
    """Parses the output of `scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_version(text: str) -> tuple[int, int]:
    """Parses a version: `slurm 22.05.8` as (22, 5); (0, 0): there is none in the text."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def plain_error(text: str) -> str:
    """The first error message in a command's output, without the command's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return re.sub(r"^\w+: (?:(?:fatal )?error: )?", "", errors[0]) if errors else "it printed nothing"
