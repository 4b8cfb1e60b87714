"""`python -m holdfast.kubernetes.pods.coordinator`: the program of a coordinator's pod. It keeps the coordinator of one term
running, and leaves a termination message about the job's end in the pod's status."""

from __future__ import annotations

import signal
import sys

from holdfast.errors import Damaged
from holdfast.protocol.job_report import JobReport

if __name__ == "__main__":
    # Before the other imports, which take a while: the kernel drops a SIGTERM that the first process of a container has no
    # handler for, and the pod would stay for its whole grace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

import argparse
import asyncio
import logging
import os
from pathlib import Path

import msgspec

from holdfast import logs
from holdfast.engines import jobs
from holdfast.engines.client import JobClient
from holdfast.engines.coordinator_supervisor import (
    CoordinatorConfig,
    CoordinatorSupervisor,
    LauncherSuperseded,
    listen,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.kubernetes.names import CONFIG_FOLDER, COORDINATOR_PORT, TERMINATION_FILE
from holdfast.kubernetes.objects.pod import TerminationMessage
from holdfast.kubernetes.pods.pod import PodPlace, read_pod
from holdfast.protocol.engine_orders import EngineTraits
from holdfast.protocol.leadership import EXIT_HANDED_OVER

_log = logging.getLogger("holdfast.coordinator-pod")
TRAITS = EngineTraits(keeps_nodes=False, nodes_are_machines=True)
"""A pod's memory ends with the pod."""
COPIES = 2
"""Number of copies of the ledger at agents: its file ends with the pod, and another machine may be lost together with this
one."""
REASON_CHARS = 1000
"""Longest reason in a termination message, of which Kubernetes accepts 4096 bytes."""


class CoordinatorPod:
    """The coordinator of one term."""

    def __init__(self, pod: PodPlace, term: int, termination_message: Path) -> None:
        """termination_message: the file of the termination message."""
        self._pod, self._term, self._termination_message = pod, term, termination_message
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Runs the coordinator until the job is over or another term has begun (returns 0), or until this pod has to go (75).

        Raises:
            HoldfastError: the coordinator cannot be kept running.
        """
        # First, so that connections made during the search for checkpoints wait in the kernel.
        listener = listen(self._pod.host, COORDINATOR_PORT)
        loop = asyncio.get_running_loop()
        leaves = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, leaves.set)
        loop.add_signal_handler(signal.SIGINT, leaves.set)
        # While it is held, `holdfast status` within this pod finds the job running.
        lock = jobs.JobFolder(self._pod.spec.name).lock
        await asyncio.to_thread(self._prepare)
        config = CoordinatorConfig(
            job_dir=self._pod.folder,
            timing=self._pod.spec.timing,
            host=self._pod.host,
            listener=listener,
            term=self._term,
            inherited=(lock,),
            copies=COPIES,
        )
        supervisor = CoordinatorSupervisor(config, self._note, self._on_coordinator)
        keeping = asyncio.create_task(self._keep(supervisor))
        leaving = asyncio.create_task(leaves.wait())
        try:
            await asyncio.wait({keeping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not keeping.done():
                # The job continues: the operator starts the next term elsewhere.
                supervisor.hand_over()
            try:
                await keeping
            except LauncherSuperseded as error:
                self._note(str(error))
                return 0
        finally:
            leaving.cancel()
            for task in self._tasks:
                task.cancel()
            await supervisor.close()
        return await asyncio.to_thread(self._write_termination_message)

    async def _keep(self, supervisor: CoordinatorSupervisor) -> None:
        await supervisor.start()
        await supervisor.keep()

    def _prepare(self) -> None:
        """Prepares the job's folder, and finds the checkpoints to resume from. A container that is restarted in its pod has
        both."""
        self._pod.prepare()
        path = self._pod.folder / "resume.json"
        # Checkpoints are searched once in a pod's life. A restarted container continues with its ledger, which has newer
        # checkpoints.
        if path.exists():
            return
        resume = jobs.find_checkpoints(self._pod.spec, self._note)
        if resume.checkpoints:
            self._note(f"the newest checkpoint has step {resume.checkpoints[0].step}")
        # Written to a temporary file and renamed: if half of this file were read after a kill, the job would start from an older
        # checkpoint or from none.
        work = path.with_suffix(".tmp")
        work.write_bytes(msgspec.json.encode(resume))
        work.replace(path)

    def _on_coordinator(self) -> None:
        task = asyncio.create_task(self._tell_traits())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_traits(self) -> None:
        async with JobClient(self._pod.folder) as client:
            try:
                await client.post("/engine", msgspec.json.encode(TRAITS).decode(), repeat=True)
            except UsageError as error:
                self._note(str(error))

    def _write_termination_message(self) -> int:
        """Writes the termination message, if the job is over. Returns the exit code: 0, with which Kubernetes does not restart
        the container, or 75 if the job is not over."""
        try:
            report = jobs.read_report(self._pod.folder / "report.json")
        except (OSError, Damaged):
            return EXIT_HANDED_OVER
        message = termination_message(report)
        self._termination_message.write_bytes(msgspec.json.encode(message))
        self._note(f"the job is over: {message.outcome}{': ' if message.reason else ''}{message.reason}")
        return 0

    def _note(self, text: str, **fields: object) -> None:
        _log.info("%s", text, extra=fields)


def termination_message(report: JobReport) -> TerminationMessage:
    """The termination message for a report.

    The reason of a failed job includes the first failing rank, its node and the cause, which `kubectl` shows nowhere else. The
    last step and checkpoint are included because the operator's last report may be some seconds older than the end.
    """
    outcome, reason = str(report.outcome), report.reason or ""
    root_cause = report.blame if outcome == "failed" else None
    if root_cause is not None and root_cause.cause not in reason:
        rank = "" if root_cause.rank is None else f"rank {root_cause.rank}"
        node = f"on {root_cause.node}" if root_cause.node else ""
        where = " ".join(filter(None, (rank, node)))
        reason = ": ".join(filter(None, (reason, where, root_cause.cause)))
    return TerminationMessage(
        outcome=outcome,
        reason=reason[:REASON_CHARS],
        cause=report.cause or "",
        step=report.steps.committed if report.steps is not None else None,
        checkpoint=None if report.saved is None else report.saved.where,
    )


def main() -> int | str:
    """Returns the exit code, see `CoordinatorPod.run`, or an error message, which Kubernetes puts into the pod's status."""
    parser = argparse.ArgumentParser(prog="holdfast.kubernetes.pods.coordinator")
    parser.add_argument("--term", type=int, required=True)
    parser.add_argument(
        "--config", type=Path, default=Path(CONFIG_FOLDER), help="has the token and spec.json"
    )
    parser.add_argument("--termination-message", type=Path, default=Path(TERMINATION_FILE))
    given = parser.parse_args()
    os.umask(0o077)
    try:
        pod = read_pod(config=given.config)
        close_log = logs.configure(
            pod.spec.log, {"job": pod.spec.name, "term": str(given.term)}, secrets=(pod.token,)
        )
    except HoldfastError as error:
        return f"[holdfast] {error}"
    try:
        return asyncio.run(CoordinatorPod(pod, given.term, given.termination_message).run())
    except HoldfastError as error:
        return f"[holdfast] {error}"
    finally:
        close_log()


if __name__ == "__main__":
    sys.exit(main())
