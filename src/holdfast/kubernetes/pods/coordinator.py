"""`python -m holdfast.kubernetes.pods.coordinator`: the program of a coordinator's pod. It keeps the coordinator of one term
running, and leaves how the job ended in the pod's status."""

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
"""Memory of a pod ends with it."""
COPIES = 2
"""Of the ledger. Its file ends with the pod, and a machine may be lost together with this one."""
REASON_CHARS = 1000
"""Kubernetes takes 4096 bytes of a termination message."""


class CoordinatorPod:
    """The coordinator of one term."""

    def __init__(self, pod: PodPlace, term: int, termination_message: Path) -> None:
        """termination_message: the file of the termination message."""
        self._pod, self._term, self._termination_message = pod, term, termination_message
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until the job is over (0), another term has begun (0), or this pod is to go (75).

        Raises:
            HoldfastError: the coordinator cannot be kept running.
        """
        # First: who connects while the checkpoints are looked through waits in the kernel.
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
                # The job goes on: the operator starts the next term elsewhere.
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
        """The folder, and what there is to go on from. A container that is started again in its pod finds both."""
        self._pod.prepare()
        path = self._pod.folder / "resume.json"
        # Checkpoints are looked for once in a pod's life. A container that starts again in it continues with
        # its ledger, and newer checkpoints are known there.
        if path.exists():
            return
        resume = jobs.find_checkpoints(self._pod.spec, self._note)
        if resume.checkpoints:
            self._note(f"the newest checkpoint has step {resume.checkpoints[0].step}")
        # Written beside and renamed: a half of this file, read after a kill, would start the job from an
        # older checkpoint or from none.
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
        """0 where the job is over: Kubernetes does not start the container again. Else 75."""
        try:
            report = jobs.read_report(self._pod.folder / "report.json")
        except (OSError, Damaged):
            return EXIT_HANDED_OVER
        word = termination_message(report)
        self._termination_message.write_bytes(msgspec.json.encode(word))
        self._note(f"the job is over: {word.outcome}{': ' if word.reason else ''}{word.reason}")
        return 0

    def _note(self, text: str, **fields: object) -> None:
        _log.info("%s", text, extra=fields)


def termination_message(report: JobReport) -> TerminationMessage:
    """Of a job that failed with the first failing rank, its node and the cause: `kubectl` shows them nowhere else. With the last
    step and what is saved, since the operator has heard of these some seconds before the end."""
    outcome, reason = str(report.outcome), report.reason or ""
    blame = report.blame if outcome == "failed" else None
    if blame is not None and blame.cause not in reason:
        rank = "" if blame.rank is None else f"rank {blame.rank}"
        node = f"on {blame.node}" if blame.node else ""
        where = " ".join(filter(None, (rank, node)))
        reason = ": ".join(filter(None, (reason, where, blame.cause)))
    return TerminationMessage(
        outcome=outcome,
        reason=reason[:REASON_CHARS],
        cause=report.cause or "",
        step=report.steps.committed if report.steps is not None else None,
        checkpoint=None if report.saved is None else report.saved.where,
    )


def main() -> int | str:
    """See `CoordinatorPod.run`. A text says why it cannot be: Kubernetes puts it into the pod's status."""
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
