"""`python -m holdfast.engines.slurm.node`: the program on each node of the job. It starts the node's agent, and stands by: when
the coordinator's own node is lost, one of these processes starts a new coordinator from the job's folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

from holdfast.agent.coordinator_link import give_up_when_gone
from holdfast.checkpoint.memory import remove_memory
from holdfast.coordinator.service.store import succeed
from holdfast.engines import jobs
from holdfast.engines.agents import agent_arguments
from holdfast.engines.coordinator_supervisor import LauncherSuperseded
from holdfast.engines.slurm.commands import SlurmCommands, SlurmError
from holdfast.engines.slurm.entry import ThisNode, enter, find_this_node
from holdfast.engines.slurm.launcher import SlurmLauncher, read_roster
from holdfast.engines.topology import place_of_variables
from holdfast.errors import UsageError
from holdfast.observe.live import PlainView
from holdfast.protocol.job import JobSpec
from holdfast.protocol.leadership import GRACE_S, claim_term, newest_term
from holdfast.protocol.machine.processes import python_module
from holdfast.protocol.network.endpoint import read_endpoint
from holdfast.protocol.network.http_client import proving
from holdfast.protocol.place import PLACE_VARIABLE, NodePlace
from holdfast.protocol.wire.stored import read_stored_word

_log = logging.getLogger("holdfast.engines.slurm.node")
RETRY_S = 0.3
TURN_S = 0.5
"""Seconds between the attempts of two nodes to claim a term, in the order of their names."""


async def _run(spec: JobSpec, job_dir: Path) -> int:
    """Serves until the agent ends, and until the end of the job if this process has taken over."""
    slurm = SlurmCommands()
    here = await find_this_node(slurm)
    grace_s = await _grace_s(slurm)
    memory = jobs.memory_of(job_dir)
    await asyncio.to_thread(jobs.sweep_memory)
    agent = await asyncio.create_subprocess_exec(
        *python_module("holdfast.agent"),
        *agent_arguments(job_dir, here.node, here.host, memory / here.node, _place(spec, here)),
        f"--grace={grace_s:g}",
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    loop = asyncio.get_running_loop()
    # Every node stands by, since a single one could be lost together with the coordinator's node.
    stand_by = StandBy(spec, job_dir, here, slurm)
    loop.add_signal_handler(signal.SIGTERM, _on_sigterm, agent, stand_by)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    standing_by = asyncio.create_task(stand_by.run())
    code = await agent.wait()
    _log.info("the agent ended", extra={"code": code, "leads": stand_by.leads})
    if code == 0:  # ended in order; after a kill it may be started again and adopt the memory
        await asyncio.to_thread(remove_memory, memory / here.node)
    if not stand_by.leads:  # the process with the coordinator stays until the job is over
        standing_by.cancel()
    await asyncio.wait([standing_by])
    return 0


def _place(spec: JobSpec, here: ThisNode) -> NodePlace:
    """The node's place according to Slurm, unless the job's topology file or the agent's environment has it."""
    if here.node in spec.places or PLACE_VARIABLE in os.environ:
        return ()
    return place_of_variables(os.environ)


async def _grace_s(slurm: SlurmCommands) -> float:
    """Seconds that a node has from SIGTERM on, from Slurm's KillWait."""
    try:
        kill_wait = (await slurm.config()).get("KillWait", "")
        # Two seconds before Slurm's SIGKILL, so that the agent can end by itself.
        return max(2.0, float(kill_wait.split()[0]) - 2.0)
    except (SlurmError, ValueError, IndexError):
        return 28.0


def _on_sigterm(agent: asyncio.subprocess.Process, stand_by: StandBy) -> None:
    """Slurm ends this node's step, and the coordinator with it if that is here."""
    if agent.returncode is None:
        os.kill(agent.pid, signal.SIGTERM)
    if stand_by.launcher is not None:
        stand_by.launcher.on_sigterm()


class StandBy:
    """Watches the coordinator, and replaces it when most of the job has lost it.

    A single node that has lost its network must not take over. So each node that misses the coordinator reports that in the job's
    folder, and more than half of the nodes other than the coordinator's must have done so.

    Attributes:
        leads: whether this process has the coordinator.
        launcher: keeps the coordinator running; None before and after.
    """

    def __init__(self, spec: JobSpec, job_dir: Path, here: ThisNode, slurm: SlurmCommands) -> None:
        self._spec, self._job_dir, self._here, self._slurm = spec, job_dir, here, slurm
        self._missing, self._token = job_dir / "missing", ""
        self.leads = False
        self.launcher: SlurmLauncher | None = None

    async def run(self) -> None:
        """Watches until a job that this process has taken over has ended, or until cancelled."""
        lost_at, known = time.monotonic(), 0
        while True:
            # A new holder of the term needs time to start. Without this its start would count as absence, and the next node would
            # take over from it.
            if (newest := newest_term(self._job_dir)) != known:
                lost_at, known = time.monotonic() + self._spec.timing.adopt_s, newest
            if await self._present():
                lost_at = time.monotonic()
                (self._missing / self._here.node).unlink(missing_ok=True)
            # The launcher restarts a coordinator that died on its own node, which is quicker and needs no new term. It gets this
            # time before other nodes report that they miss the coordinator.
            elif time.monotonic() - lost_at > self._spec.timing.adopt_s / 2 and newest_term(self._job_dir):
                self._report_missing()
                term = newest_term(self._job_dir) + 1
                if await self._may_claim(term - 1) and claim_term(self._job_dir, term, self._here.node):
                    await self._take_over(term)
                    return
            await asyncio.sleep(RETRY_S)  # there is no event for another machine's coordinator

    async def _present(self) -> bool:
        """Waits as long as the coordinator lives, then returns True; False: it could not be reached."""
        where = read_endpoint(self._job_dir)
        if where is None:
            return False
        # The token stays the same as long as the job runs here, even if its file is lost.
        with suppress(OSError, UsageError):
            self._token = read_stored_word(self._job_dir / "token")
        if not self._token:
            return False
        limit_s = self._spec.timing.detection_s
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=limit_s / 2)  # for opening the connection
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, middlewares=[proving(self._token, where)]) as session,
                session.ws_connect(f"{where.url}/presence") as socket,
            ):
                (self._missing / self._here.node).unlink(missing_ok=True)
                give_up_when_gone(socket, limit_s)
                # Nothing is sent. The end of the connection is the signal; for a machine without power the kernel's keep-alive
                # detects it.
                async for _ in socket:
                    pass
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return True

    def _report_missing(self) -> None:
        if not self._misses(self._here.node, newest_term(self._job_dir)):
            _log.warning("this node cannot reach the coordinator", extra={"term": newest_term(self._job_dir)})
        self._missing.mkdir(exist_ok=True)
        (self._missing / self._here.node).write_text(str(newest_term(self._job_dir)))

    async def _may_claim(self, term: int) -> bool:
        holder = self._holder(term)
        # A coordinator that is cut off removes the others from its roster, so nodes that have reported count as well.
        reports = {p.name for p in self._missing.iterdir()}
        # More than half of the others must miss the coordinator, so that the two parts of a divided network can never both have
        # one.
        others = {*read_roster(self._job_dir), *(n for n in reports if self._misses(n, term))} - {holder}
        missing = sorted(n for n in others if self._misses(n, term))
        if self._here.node not in missing or 2 * len(missing) <= len(others):
            return False
        # With one or two others a majority proves little, so Slurm's controller is asked as well: a node that is cut off does not
        # reach that either.
        if len(others) < 3 and not await self._slurm_answers():
            return False  # it may be this node that is cut off
        # Each waits for its turn and checks again, so that usually one claims and the others see that. The claim itself would be
        # safe without it.
        await asyncio.sleep(TURN_S * missing.index(self._here.node))
        return newest_term(self._job_dir) == term

    def _misses(self, node: str, term: int) -> bool:
        try:
            return (self._missing / node).read_text() == str(term)
        except OSError:
            return False

    def _holder(self, term: int) -> str:
        try:
            return (self._job_dir / "claims" / str(term)).read_text()
        except OSError:
            return ""

    async def _slurm_answers(self) -> bool:
        try:
            job = await self._slurm.job(self._here.allocation)
        except SlurmError:
            return False
        return job is not None and job.state == "RUNNING"

    async def _take_over(self, term: int) -> None:
        self.leads = True
        _log.warning("taking over as coordinator", extra={"term": term})
        await asyncio.sleep(GRACE_S)  # if the former coordinator still lives, it has stopped after this time
        await asyncio.to_thread(succeed, self._job_dir, term)
        with PlainView(self._spec, self._job_dir) as view:
            view.note(f"the coordinator's node is lost; {self._here.node} takes over")
            self.launcher = launcher = SlurmLauncher(self._spec, self._job_dir, view, self._here, term)
            try:
                report = await launcher.run()
            except LauncherSuperseded:
                return
            finally:
                self.launcher = None
        view.ended(report)
        await launcher.conclude(report)


if __name__ == "__main__":
    sys.exit(enter("holdfast.engines.slurm.node", _run))
