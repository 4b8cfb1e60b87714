"""Whom a site wants asked for another machine in place of one that a job blames, and how often. Pure.

A mark says that a machine is sick; a replacement is what somebody does about it. This package owns no machines, so it asks whoever
does, in the way that the site names (`--replace`).

Rules:
- Only a machine that has been marked for a while is replaced. Until then it may pass its checks, or a person may clear it.
- Nothing is asked twice for one machine: what was asked stands in its mark.
- The brake: at most so many machines in a day, over all jobs. A replaced machine takes its mark with it, so the brake on marks
  would let a wrong rule go through a whole cluster.
- Whoever is asked may take the machine at once. Cluster API and Karpenter evict its pods in order before that; where nobody
  is known to, the operator waits until no node of any job is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.kubernetes.marks import Mark

DAY_S = 86_400.0
AFTER_S, MOST_A_DAY = 600.0, 3
MOST_KEPT = 100
"""Records of replacements. Those of the last day are kept however many there are, and the brake bounds them."""
WORDS = 300
_LABEL = re.compile(r"(?:[a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")

Object = dict[str, Any]


class SetLabel(msgspec.Struct, frozen=True):
    """Label the machine; another program replaces it then."""

    key: str
    value: str


class DeleteMachine(msgspec.Struct, frozen=True):
    """Delete its Machine of Cluster API; the MachineSet makes another."""


class DeleteNodeClaim(msgspec.Struct, frozen=True):
    """Delete its NodeClaim of Karpenter, which makes another when pods need it."""


class RunCommand(msgspec.Struct, frozen=True):
    """Run a program of the site's, with the machine, the job and the reason as its arguments."""

    program: str


Way = SetLabel | DeleteMachine | DeleteNodeClaim | RunCommand
ACCEPTED = "none, cluster-api, karpenter, label:KEY=VALUE or command:PROGRAM"


def read_way(text: str) -> Way | None:
    """Of `--replace`; None: nobody is asked. Raises ValueError."""
    kind, _, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    match kind:
        case "none" if not rest:
            return None
        case "cluster-api" if not rest:
            return DeleteMachine()
        case "karpenter" if not rest:
            return DeleteNodeClaim()
        case "label" if equals and _LABEL.fullmatch(key) and _VALUE.fullmatch(value):
            return SetLabel(key, value)
        case "command" if rest.startswith("/"):
            return RunCommand(rest)
        case "command":
            raise ValueError(
                f"{text!r}: the program must be given with its full path, for example command:/opt/site/replace"
            )
    raise ValueError(f"{text!r}: {ACCEPTED}")


def evicts_in_order(way: Way) -> bool:
    """Whether who is asked evicts the machine's pods first, so that jobs leave it at a step's edge."""
    return isinstance(way, DeleteMachine | DeleteNodeClaim)


# ------------------------------------------------------------ when


class Replacements(msgspec.Struct, frozen=True, kw_only=True):
    """What a site wants of them."""

    way: Way
    after_s: float = AFTER_S
    """How long a machine is marked before it is asked for."""
    most_a_day: int = MOST_A_DAY


def due_s(mark: Mark | None, after_s: float) -> float | None:
    """When another machine is to be asked for, in UTC; None: never, or it was."""
    # A person's own words have no job and no moment; a person also decides what becomes of them.
    if mark is None or mark.replacement or mark.at_s is None:
        return None
    return mark.at_s + after_s


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A machine for which another one was asked, or is about to be."""

    machine: str
    uid: str
    """Of the Node: one that joins under its name later is another machine."""
    job: str
    reason: str
    at_s: float
    """UTC."""


def brake(records: Sequence[Record], most_a_day: int, now_s: float) -> str | None:
    """Why no further machine may be asked for now; None: one may."""
    recent = sum(one.at_s + DAY_S > now_s for one in records)
    if recent < most_a_day:
        return None
    return f"{recent} machines were replaced in the last 24 h, and at most {most_a_day} may be"


def free_again_s(records: Sequence[Record], most_a_day: int) -> float:
    """When the brake lets the next one through, in UTC. Only for records that hold it."""
    return sorted(one.at_s for one in records)[-most_a_day] + DAY_S


def with_record(records: Sequence[Record], new: Record) -> tuple[Record, ...]:
    """And without what is long past."""
    recent = [one for one in records if one.at_s + DAY_S > new.at_s]
    older = [one for one in records if one.at_s + DAY_S <= new.at_s]
    room = max(0, MOST_KEPT - len(recent) - 1)
    return (*(older[-room:] if room else ()), *recent, new)


# ------------------------------------------------------------ what is asked


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The object whose deletion replaces a machine."""

    group: str
    plural: str
    name: str
    namespace: str = ""
    """Empty: it is the cluster's."""
    uid: str = ""
    """Empty: the Node does not have it."""

    def path(self, version: str) -> str:
        """Its path at the API server, in a version of its group."""
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"/apis/{self.group}/{version}{scope}/{self.plural}/{self.name}"


def owner_of(way: DeleteMachine | DeleteNodeClaim, node: Mapping[str, Any]) -> Owner | None:
    """Of a Node; None: it does not name one."""
    metadata = node["metadata"]
    if isinstance(way, DeleteMachine):
        # Cluster API writes both on each Node of its own, and reads them itself.
        notes = metadata.get("annotations", {})
        name, namespace = (notes.get(f"cluster.x-k8s.io/{key}") for key in ("machine", "cluster-namespace"))
        if not name or not namespace:
            return None
        return Owner(group="cluster.x-k8s.io", plural="machines", namespace=namespace, name=name)
    for one in metadata.get("ownerReferences", ()):
        if one.get("kind") == "NodeClaim" and str(one.get("apiVersion", "")).startswith("karpenter.sh/"):
            return Owner(group="karpenter.sh", plural="nodeclaims", name=one["name"], uid=one["uid"])
    return None


def labelled(way: SetLabel) -> Object:
    """The patch of a Node."""
    return {"metadata": {"labels": {way.key: way.value}}}


def label_back(way: Way, node: Mapping[str, Any]) -> Object | None:
    """The patch that takes our label from a Node whose mark is gone; None: it does not have it."""
    if not isinstance(way, SetLabel) or node["metadata"].get("labels", {}).get(way.key) != way.value:
        return None
    return {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"], "labels": {way.key: None}}}
