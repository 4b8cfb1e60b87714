"""`python -m holdfast.kubernetes.pods.watch`: the program of the watch's pod, one on each machine. It watches the machine as an
agent does, and writes on its Node what makes it sick. Jobs leave that machine, and new nodes keep away from it.

While nothing is found it asks the API server for nothing but its own Node, once at its start: a cluster has thousands of these.
Only the watch of a sick machine follows its Node, to see that a person calls it well.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Before the other imports, which take a while: the kernel drops a SIGTERM that the first process of a container has no
    # handler for, and the pod would stay for its whole grace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

import argparse
import asyncio
import logging
import os
from contextlib import aclosing
from pathlib import Path

from holdfast import logs
from holdfast.agent.health import HealthWatcher
from holdfast.errors import HoldfastError, UsageError
from holdfast.health.kmsg import boot_id
from holdfast.health.ruleset import catalogue
from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoApiAnswer, Object, connect
from holdfast.kubernetes.names import MACHINE_VARIABLE, STATE_FOLDER
from holdfast.kubernetes.objects.machine import (
    HealthNote,
    calls_sick,
    health_note_of,
    health_note_on,
    note_patches,
)
from holdfast.kubernetes.pods.until_stopped import until_stopped
from holdfast.protocol.health import acts_on_node
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.messages import FindingsReported, NodeReadings

_log = logging.getLogger("holdfast.watch-pod")
NODES = "/api/v1/nodes"
REFUSED_S = 300.0
"""The longest time between two tries of a request that is refused: a right may be missing for thousands of these."""


class NodeConditionWriter:
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
            self._found = health_note_of(finding, self._boot, self._api.now_s())
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
            except (ApiError, NoApiAnswer) as error:
                if isinstance(error, NoApiAnswer) or error.may_pass or error.is_gone or error.is_unknown:
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
        for below, patch in note_patches(node, found, self._boot, self._api.now_s()):
            write = self._api.strategic if below else self._api.merge
            node = await write(path + below, patch)
            _log.info("writes on its Node: %s", patch, extra={"machine": self._machine})
        self._is_sick = health_note_on(node) is not None
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
                if event["type"] == "DELETED" or any(note_patches(event["object"], None, self._boot, 0.0)):
                    return
        # A server that ends each watch at once must not be asked in a circle.
        raise NoApiAnswer("the watch of the Node has ended")

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
    node = NodeConditionWriter(api, machine, boot_id())
    watcher = HealthWatcher(folder=folder, spec=spec, shared=False, send=node.hear, job_dir=folder)
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
