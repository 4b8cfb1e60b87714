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
    # handler for, and the pod would stay for its whole grace period.
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
"""Longest pause between two tries of a refused request, in seconds: the permission may be missing for thousands of watches."""


class NodeConditionWriter:
    """Keeps the health annotation and condition of one Node up to date."""

    def __init__(
        self,
        api: Api,
        machine: str,
        boot: str,
        backoff: Backoff | None = None,
        refusals: Backoff | None = None,
    ) -> None:
        """Writes nothing yet, see `run`.

        Args:
            machine: the Node's name.
            boot: the kernel's id of this boot.
            backoff: the pauses after errors that may pass.
            refusals: the pauses after other refusals, which are likely to be repeated.
        """
        self._api, self._machine, self._boot = api, machine, boot
        self._backoff = backoff or Backoff()
        self._refusals = refusals or Backoff(first_s=1.0, most_s=REFUSED_S)
        self._found: HealthNote | None = None
        self._news = asyncio.Event()
        self._is_sick = False

    def hear(self, message: FindingsReported | NodeReadings) -> None:
        """Takes a message of the health watcher. The first finding that makes the machine sick is written; further ones are
        ignored."""
        if isinstance(message, NodeReadings) or self._is_sick or self._found is not None:
            return
        for finding in filter(calls_sick, message.findings):
            self._found = health_note_of(finding, self._boot, self._api.now_s())
            _log.warning("this machine is sick: %s", self._found.reason, extra={"rule": finding.rule})
            self._news.set()
            return

    async def run(self) -> None:
        """Keeps the Node up to date until cancelled.

        Raises:
            ApiError: the first request was refused: there is no such Node, or a permission is missing.
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
                    # The finding still has to be written, and somebody may restore the permission.
                    await self._wait(error, self._refusals)
                else:
                    raise

    async def _settle(self) -> Object:
        """Reads the Node and writes what is missing on it; returns the Node after that."""
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
        # A finding that arrived in the meantime is kept, unless the machine is sick already.
        if self._is_sick or self._found is found:
            self._found = None
        return node

    async def _until_other(self, node: Object) -> None:
        """Waits until something has to be written, because a person has removed the annotation or changed the condition."""
        query = {"fieldSelector": f"metadata.name={self._machine}"}
        version = node["metadata"]["resourceVersion"]
        # Closed explicitly instead of by the garbage collector, because it holds a connection.
        async with aclosing(self._api.watch(NODES, query, version)) as events:
            async for event in events:
                self._backoff.reset()
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED" or any(note_patches(event["object"], None, self._boot, 0.0)):
                    return
        # With a pause, in case the server ends each watch at once.
        raise NoApiAnswer("the watch of the Node has ended")

    async def _wait(self, error: Exception, backoff: Backoff) -> None:
        _log.info("%s; it is tried again", error, extra={"machine": self._machine})
        await backoff.wait(error)


def main() -> int | str:
    """Watches until SIGTERM, then returns 0. Returns a message if it cannot, which Kubernetes puts into the pod's status."""
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
        _log_sources(watcher.sources)
        await node.run()
    except ApiError as error:
        raise HoldfastError(
            f"the API server refuses access that the watch of {machine} needs ({error}); "
            "deploy/kubernetes/watch.yaml contains the required permissions"
        ) from error
    finally:
        watcher.close()


def _log_sources(there: frozenset[str]) -> None:
    """Logs which sources are watched here, and which are not although there are rules for them by which a machine is sick."""
    wanted = {rule.source for rule in catalogue() if acts_on_node(rule.remedy)}
    _log.info(
        "watches this machine",
        extra={"sources": ",".join(sorted(there)), "missing": ",".join(sorted(wanted - there)) or "none"},
    )


if __name__ == "__main__":
    sys.exit(main())
