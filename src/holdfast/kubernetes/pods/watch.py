"""`python -m holdfast.kubernetes.pods.watch`: the program of the watch's pod, one on each machine. It watches the machine as an
agent does, and writes on its Node what makes it sick. Jobs leave that machine, and new nodes keep away from it.

The annotation of the Node is what counts, as with marks. The condition follows it, and operators empty the machine for the
condition.

Rules:
- A finding counts when the rule that made it asks for the machine, and is sure: a fault, severe, on this machine alone, not on trial.
- The first finding stays. What follows from it makes no machine sicker, and each write wakes all who watch Nodes.
- It is over when the machine has booted since, or when a person removes the annotation. That a reading is well again proves
  nothing: a link that comes and goes would send jobs to and fro.

While nothing is found it asks the API server for nothing but its own Node, once at its start: a cluster has thousands of these.
Only the watch of a sick machine follows its Node, to see that a person calls it well.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from holdfast import logs
from holdfast.agent.health import Watcher
from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.health.kmsg import boot_id
from holdfast.health.ruleset import catalogue
from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoAnswer, Object, connect
from holdfast.kubernetes.names import HEALTH_CONDITION, MACHINE_VARIABLE, NOTE_WATCH, STATE_FOLDER
from holdfast.kubernetes.objects.status import timestamp
from holdfast.kubernetes.pods.pod import until_stopped
from holdfast.protocol.health import Condition, Finding, HealthSpec, Severity, acts_on_node
from holdfast.protocol.messages import FindingsReported, NodeReadings
from holdfast.protocol.wire.decoding import decode

WORDS = 400
"""Characters of a message."""


class HealthNote(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is sick."""

    rule: str
    """Which found it; empty: a person wrote the note."""
    reason: str
    """What it found, for people."""
    boot: str
    """The kernel's id of the boot in which it was found; empty: not known, so no boot ends it."""
    at: str
    """When, as Kubernetes writes moments."""


def calls_sick(finding: Finding) -> bool:
    """Whether no job is to run on a machine of which this was found."""
    return (
        finding.condition is Condition.FAULTY
        and finding.severity in (Severity.ERROR, Severity.FATAL)
        and acts_on_node(finding.remedy)
        and not (finding.shared or finding.dry_run)
    )


def note_of(finding: Finding, boot: str, now_s: float) -> HealthNote:
    """What is written of it. boot: the kernel's id of this boot; now_s: UTC."""
    about = f"{finding.subject}: " if finding.subject else ""
    reason = f"{about}{finding.evidence}"[:WORDS]
    return HealthNote(rule=finding.rule, reason=reason, boot=boot, at=timestamp(now_s))


_notes = msgspec.json.Decoder(HealthNote)


def note_on(node: Mapping[str, Any]) -> HealthNote | None:
    """As the Node has it."""
    text = node["metadata"].get("annotations", {}).get(NOTE_WATCH)
    if text is None:
        return None
    try:
        return decode(_notes.decode, text, NOTE_WATCH)
    except Damaged:
        # A person's own words. Who wrote them removes them.
        return HealthNote(rule="", reason=text[:WORDS], boot="", at="")


def is_over(note: HealthNote, boot: str) -> bool:
    """Whether the machine has booted since. boot: of now; empty: not known."""
    return bool(note.boot and boot) and note.boot != boot


def patches(
    node: Mapping[str, Any], found: HealthNote | None, boot: str, now_s: float
) -> Iterator[tuple[str, Object]]:
    """What brings annotation and condition there: a subresource (empty: the Node itself) and a patch of it.

    Args:
        found: what is to be written, if nothing is yet.
        boot: the kernel's id of this boot.
        now_s: UTC.
    """
    there = note_on(node)
    wanted = found if there is None or is_over(there, boot) else there
    # With the uid: a cloud gives a name again, and what was found on one machine says nothing of the next.
    metadata = {key: node["metadata"][key] for key in ("uid",) if key in node["metadata"]}
    if wanted != there:
        text = None if wanted is None else msgspec.json.encode(wanted).decode()
        yield "", {"metadata": {**metadata, "annotations": {NOTE_WATCH: text}}}
    if (said := _condition(node, wanted, now_s)) is not None:
        yield "/status", {"metadata": metadata, "status": {"conditions": [said]}}


def _condition(node: Mapping[str, Any], note: HealthNote | None, now_s: float) -> Object | None:
    """As it is to be; None: it is."""
    conditions = node.get("status", {}).get("conditions", ())
    there: Object = next((one for one in conditions if one["type"] == HEALTH_CONDITION), {})
    # A machine that was never sick has none: of a thousand that are well nothing is written.
    if note is None and there.get("status") in (None, "False"):
        return None
    wanted = (
        {"status": "False", "reason": "Cleared", "message": "nothing calls this machine sick any more"}
        if note is None
        else {"status": "True", "reason": _camel_case(note.rule) or "Noted", "message": note.reason}
    )
    if all(there.get(key) == value for key, value in wanted.items()):
        return None
    at = timestamp(now_s)
    changed = {} if there.get("status") == wanted["status"] else {"lastTransitionTime": at}
    return {"type": HEALTH_CONDITION, **wanted, "lastHeartbeatTime": at, **changed}


def _camel_case(rule: str) -> str:
    """`xid-79` as a reason has to be: `Xid79`."""
    words = "".join(word[0].upper() + word[1:] for word in re.split(r"[-_.]+", rule) if word)
    return f"Rule{words}" if words[:1].isdigit() else words


if __name__ == "__main__":
    # Before the other imports, which take a while: the kernel drops a SIGTERM that the first process of a container has no
    # handler for, and the pod would stay for its whole grace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

_log = logging.getLogger("holdfast.watch-pod")
NODES = "/api/v1/nodes"
REFUSED_S = 300.0
"""The longest time between two tries of a request that is refused: a right may be missing for thousands of these."""


class NodeHealth:
    """Keeps annotation and condition of one Node as its machine is found."""

    def __init__(
        self,
        api: Api,
        machine: str,
        boot: str,
        backoff: Backoff | None = None,
        refusals: Backoff | None = None,
    ) -> None:
        """machine: the Node's name; boot: the kernel's id of this boot. refusals: how long to wait after what would be refused
        again."""
        self._api, self._machine, self._boot = api, machine, boot
        self._backoff = backoff or Backoff()
        self._refusals = refusals or Backoff(first_s=1.0, most_s=REFUSED_S)
        self._found: HealthNote | None = None
        self._news = asyncio.Event()
        self._is_sick = False

    def hear(self, told: FindingsReported | NodeReadings) -> None:
        """What the watcher tells. The first finding that calls the machine sick is written; more of them change nothing."""
        if isinstance(told, NodeReadings) or self._is_sick or self._found is not None:
            return
        for finding in filter(calls_sick, told.findings):
            self._found = note_of(finding, self._boot, self._api.now_s())
            _log.warning("this machine is sick: %s", self._found.reason, extra={"rule": finding.rule})
            self._news.set()
            return

    async def run(self) -> None:
        """Until it is cancelled.

        Raises:
            ApiError: the first look was refused: there is no such Node, or a right is missing.
        """
        looked = False
        while True:
            try:
                node = await self._settle()
                looked = True
                if self._is_sick:
                    await self._until_other(node)
                else:
                    self._backoff.reset()
                    await self._news.wait()
            except (ApiError, NoAnswer) as error:
                if isinstance(error, NoAnswer) or error.may_pass or error.is_gone or error.is_unknown:
                    await self._wait(error, self._backoff)
                elif looked:
                    # What was found stays to be written: somebody may mend the right.
                    await self._wait(error, self._refusals)
                else:
                    raise

    async def _settle(self) -> Object:
        """Looks at the Node and writes what is missing on it; returns it as it is then."""
        self._is_sick = False
        self._news.clear()
        found = self._found
        path = f"{NODES}/{self._machine}"
        node = await self._api.get(path)
        for below, patch in patches(node, found, self._boot, self._api.now_s()):
            write = self._api.strategic if below else self._api.merge
            node = await write(path + below, patch)
            _log.info("writes on its Node: %s", patch, extra={"machine": self._machine})
        self._is_sick = note_on(node) is not None
        # What was found meanwhile is kept, if the machine is not sick already.
        if self._is_sick or self._found is found:
            self._found = None
        return node

    async def _until_other(self, node: Object) -> None:
        """Until something is to be written: a person has removed the annotation, or changed the condition."""
        query = {"fieldSelector": f"metadata.name={self._machine}"}
        version = node["metadata"]["resourceVersion"]
        # Closed at once and not by the garbage collector: it holds a connection.
        async with aclosing(self._api.watch(NODES, query, version)) as events:
            async for event in events:
                self._backoff.reset()
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED" or any(patches(event["object"], None, self._boot, 0.0)):
                    return
        # A server that ends each watch at once must not be asked in a circle.
        raise NoAnswer("the watch of the Node has ended")

    async def _wait(self, error: Exception, backoff: Backoff) -> None:
        _log.info("%s; it is tried again", error, extra={"machine": self._machine})
        await backoff.wait(error)


def main() -> int | str:
    """Watches until SIGTERM: 0. A text says why it cannot: Kubernetes puts it into the pod's status."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.kubernetes.pods.watch", description=__doc__)
    parser.add_argument(
        "--machine",
        default=os.environ.get(MACHINE_VARIABLE, ""),
        help=f"name of its Node; by default the value of {MACHINE_VARIABLE}",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(STATE_FOLDER),
        help="folder in which it keeps its state, by default %(default)s",
    )
    parser.add_argument(
        "--health-rules",
        action="append",
        default=[],
        metavar="FILE",
        help="rules (TOML) that add to or change the built-in ones; can be repeated",
    )
    parser.add_argument(
        "--health-dry-run",
        action="append",
        default=[],
        metavar="RULE",
        help="a rule whose findings are only logged; * means all rules; can be repeated",
    )
    parser.add_argument("--log", default="", metavar="LEVEL[,json]")
    given = parser.parse_args()
    try:
        close_log = logs.configure(given.log, {})
    except HoldfastError as error:
        return f"[holdfast] {error}"
    try:
        if not given.machine:
            raise UsageError(
                f"{MACHINE_VARIABLE} is not set: this program runs only in the pods of deploy/kubernetes/watch.yaml"
            )
        spec = HealthSpec(rules=tuple(given.health_rules), dry_run=tuple(given.health_dry_run))
        asyncio.run(until_stopped(_serve(given.machine, given.folder, spec)))
    except HoldfastError as error:
        return f"[holdfast] {error}"
    finally:
        close_log()
    return 0


async def _serve(machine: str, folder: Path, spec: HealthSpec) -> None:
    async with connect() as api:
        await watch(api, machine, folder, spec)


async def watch(api: Api, machine: str, folder: Path, spec: HealthSpec) -> None:
    """Watches the machine of this pod until it is cancelled.

    Raises:
        HoldfastError: the API server refuses what it needs.
    """
    node = NodeHealth(api, machine, boot_id())
    watcher = Watcher(folder=folder, spec=spec, shared=False, send=node.hear, job_dir=folder)
    try:
        await watcher.start()
        _say_sources(watcher.sources)
        await node.run()
    except ApiError as error:
        raise HoldfastError(
            f"the API server refuses access that the watch of {machine} needs ({error}); "
            "deploy/kubernetes/watch.yaml contains the required permissions"
        ) from error
    finally:
        watcher.close()


def _say_sources(there: frozenset[str]) -> None:
    """Once: what of a machine is not watched here, although rules that call one sick are about it."""
    wanted = {rule.source for rule in catalogue() if acts_on_node(rule.remedy)}
    _log.info(
        "watches this machine",
        extra={"sources": ",".join(sorted(there)), "missing": ",".join(sorted(wanted - there)) or "none"},
    )


if __name__ == "__main__":
    sys.exit(main())
