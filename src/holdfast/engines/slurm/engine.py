"""The Slurm engine: agents as steps of the job's allocation, follow-up allocations, and reports to Slurm.

Slurm takes 9 to 30 s to notice a lost node. Holdfast does not wait for that, but reports it to Slurm.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.engines.jobs import home
from holdfast.engines.slurm.commands import SlurmCommands, SlurmError, clean_environment
from holdfast.engines.slurm.parse import WAITING
from holdfast.engines.slurm.script import MODULE, follow_up_name, follow_up_script
from holdfast.protocol.engine_orders import (
    Availability,
    Capacity,
    EngineTraits,
    JobGoing,
    NodeGoing,
    NodeTaken,
    NodeUnavailable,
    ReleaseNode,
)
from holdfast.protocol.job import JobSpec
from holdfast.protocol.machine.processes import python_module
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.stored import decode_file

_log = logging.getLogger(__name__)
POLL_S = 3.0
"""Interval at which Slurm is polled. It does not notify users when an administrator drains a node or when a job has to make room:
its triggers are for administrators and come 7 s late."""

CLOSE_S = 10.0
REACH_S = 1.0
SETTLE_S = 1.0
TOGETHER_S = 5.0
"""Nodes that are lost within this time count as lost together."""
LEAVE_S = 30.0
SLURMD_PORT = 6818
KNOWN = "slurm.json"
TIME_LIMIT = "the time limit of the Slurm job"
"""Reason for the end of a job, for people."""
FAILURES = 2
"""Number of times that an agent is lost on a reachable node until the node is drained."""


class Known(msgspec.Struct):
    """State for a launcher that takes over, stored in the job's folder."""

    follow_ups: dict[str, str | None] = {}
    """Ids of follow-up allocations, each with its node; None: it waits in the queue."""
    bad: dict[str, str] = {}
    """Nodes that this job does not use, each with the reason."""
    told: set[str] = set()
    """Bad nodes that were reported to Slurm, which keeps them out of use until the site returns them to service."""
    going: set[str] = set()
    """Nodes that leave or have left as planned."""


_knowns = msgspec.json.Decoder(Known)


class SlurmProvider:
    """Provides the nodes of one job. Its public methods may run concurrently."""

    traits = EngineTraits(watches_boots=True, keeps_nodes=False, nodes_are_machines=True)

    def __init__(
        self,
        spec: JobSpec,
        job_dir: Path,
        job_id: str,
        note: Callable[[str], None],
        post: Callable[[Availability], None],
    ) -> None:
        """job_id: the Slurm job's. note: shows a message to the user. post: tells the coordinator about available nodes."""
        self._spec, self._job_dir, self._id = spec, job_dir, job_id
        self._note, self._post = note, post
        self.slurm = SlurmCommands()
        self.batch_host = ""
        self.alive: set[str] = set()
        self._joined: set[str] = set()
        self._foretold = False
        self._steps: dict[str, asyncio.subprocess.Process] = {}
        self._known = Known()
        self._terminated: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._admin = True
        self._own_step_of = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ nodes

    async def start(self, fresh: bool, here: str) -> None:
        """Starts an agent on every node of the allocation, and polls Slurm from then on.

        Args:
            fresh: False: a takeover, with the agents running already, so that Slurm is only polled.
            here: the node whose step this process is in, for a takeover.
        """
        self._own_step_of = "" if fresh else here
        job = await self.slurm.job(self._id)
        if job is None:
            raise SlurmError(f"Slurm does not know the job {self._id} any more")
        self.batch_host = job.batch_host
        names = await self.slurm.names(job.nodes)
        # After a takeover everything is running already, and no node must get a second agent.
        if not fresh:
            self._recall()
            for id, other in (await self.slurm.named(follow_up_name(self._spec))).items():
                self._known.follow_ups.setdefault(id, other.nodes or None)
        for name in names if fresh else ():
            await self._start_step(name)
        self._polling = asyncio.create_task(self._poll())

    def _recall(self) -> None:
        try:
            self._known = decode_file(_knowns.decode, self._job_dir / KNOWN)
        except FileNotFoundError:
            return

    def _keep(self) -> None:
        work = self._job_dir / f".{KNOWN}.{os.uname().nodename}.{os.getpid()}"
        work.write_bytes(msgspec.json.encode(self._known))
        # Renamed atomically, because the next launcher may read it at any moment. The temporary name has host and pid, because
        # two launchers may write at the same time during a takeover.
        work.replace(self._job_dir / KNOWN)

    async def _start_step(self, node: str) -> None:
        """Starts the step of one node. Each node has its own, so that a failure of one does not end another. Its exit code is
        ignored."""
        logs = self._job_dir / "logs" / "agents"
        logs.mkdir(parents=True, exist_ok=True)
        gpus = self._spec.slurm.gpus_per_node
        process = await asyncio.create_subprocess_exec(
            "srun",
            f"--jobid={self._id}",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node}",
            f"--job-name=agent-{node}",
            # The step shares the node with the batch script and with the other steps of this job.
            "--overlap",
            "--mem=0",
            # Otherwise Slurm would end the whole step when its node fails. That decision is the coordinator's.
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--input=none",
            "--open-mode=append",
            f"--output={logs}/%N.log",
            f"--chdir={self._spec.cwd}",
            *([f"--gpus-per-node={gpus}"] if gpus else []),
            *python_module(f"{MODULE}.node", f"--job-dir={self._job_dir}"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=clean_environment(),
            start_new_session=True,  # signals to the batch script must not reach the steps
        )
        self._steps[node] = process
        self._spawn(self._reap(node, process))

    async def _reap(self, node: str, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        # A node that was lost may already have a newer step, which must not be removed when the old one ends.
        if self._steps.get(node) is process:
            del self._steps[node]
            if node not in self._joined and self._polling is not None:
                self._note(
                    f"the agent of {node} ended before it joined: see {self._job_dir}/logs/agents/{node}.log"
                )

    async def provide(self) -> bool:
        """Starts an agent on a node of the allocation that has none, or else requests one more node from Slurm."""
        node = await self._idle_node()
        if node is not None:
            self._note(f"starting an agent on {node}, which is in the allocation already")
            await self._start_step(node)
            return True
        # Only one request at a time: if a node were requested twice both would come, and one of them would be paid for nothing.
        if any(where is None for where in self._known.follow_ups.values()):
            self._post(NodeUnavailable("a node was requested from Slurm and has not joined yet"))
            return False
        try:
            await self._ask_for_one_more()
        except SlurmError as error:
            self._post(NodeUnavailable(str(error)))
            return False
        return True

    async def _idle_node(self) -> str | None:
        try:
            job = await self.slurm.job(self._id)
            if job is None:
                return None
            names = await self.slurm.names(job.nodes)
            nodes = await self.slurm.nodes(names)
        except SlurmError as error:
            self._note(str(error))
            return None
        since = time.monotonic() - TOGETHER_S
        for name in names:
            if self._lost_at.get(name, 0.0) > since:
                continue  # its state is not known yet
            free = name not in self.alive and name not in self._steps and name not in self._known.bad
            if free and name not in self._known.going and name in nodes and nodes[name].usable:
                return name
        return None

    async def _ask_for_one_more(self) -> None:
        job = await self.slurm.job(self._id)
        # The follow-up must not outlive the job.
        minutes = None if job is None or job.left_s is None else max(1, int(job.left_s // 60))
        script = follow_up_script(self._spec, self._job_dir, home(), self._without(), minutes)
        id = await self.slurm.submit(script, self._job_dir)
        # Stored at once. Otherwise a launcher that takes over would not know of the node and would never give it back.
        self._known.follow_ups[id] = None
        self._keep()
        self._note(f"requested one more node from Slurm: its job {id}")

    def _without(self) -> list[str]:
        """Nodes to exclude from follow-up allocations."""
        return sorted({*self._known.bad, *self._known.going})

    # ------------------------------------------------------------ reports to Slurm

    async def mark(self, node: str, reason: str) -> None:
        """Drains the node in Slurm, and runs the site's command to replace it, if there is one."""
        self._known.bad[node] = reason
        self._keep()
        await self._tell(node, "drain", reason)
        if self._spec.slurm.replace_command:
            await self._run_site_command(node, reason)

    async def release(self, order: ReleaseNode) -> None:
        """Ends the node's step. A node that cannot be reached, or that fails repeatedly, is reported to Slurm."""
        node = order.node
        self.alive.discard(node)
        if order.planned:
            self._known.going.add(node)
        elif node not in self._known.bad:
            # In the background, so that the job does not wait for Slurm.
            self._lost_at[node] = time.monotonic()
            self._spawn(self._lost(node, order.reason))
            return
        self._left(node, order.reason)

    async def _lost(self, node: str, reason: str) -> None:
        """Handles a lost node, in the background. If many nodes are lost at the same time the cause is the network, perhaps of
        this very node, and none of them is reported."""
        await asyncio.sleep(SETTLE_S)
        if node not in self._lost_at:
            return  # it is being rebooted
        since = time.monotonic() - TOGETHER_S
        lost = [n for n, at in self._lost_at.items() if at > since and n not in self.alive]
        # It is unlikely that most nodes fail in the same second, but a switch can fail, or the network of this node. Draining
        # half of a cluster for that would do more harm than good.
        if len(lost) > 1 and len(lost) > len(self.alive):
            self._note(
                f"{len(lost)} nodes were lost at the same time, {node} among them: they are not reported to Slurm"
            )
            return
        await self._judge(node, reason)
        self._left(node, reason)

    def _left(self, node: str, reason: str) -> None:
        self._keep()
        if node in self._known.bad or node in self._known.going:
            self._post(NodeTaken(node, reason))
        if node not in self.alive:
            self._spawn(self._end(node))

    async def _judge(self, node: str, reason: str) -> None:
        """Decides whether a lost node is bad, or only its agent has failed, and reports a bad one to Slurm."""
        # A machine that answers has lost only its agent, so it is drained only after the second time. One that does not answer is
        # down.
        reached, state = await self._reachable(node), "down"
        if node in self.alive:
            return  # it is back already
        if reached:
            self._failures[node] = self._failures.get(node, 0) + 1
            state = "drain"
        if not reached or self._failures[node] >= FAILURES:
            self._known.bad[node] = reason
            if node == self.batch_host and not reached:
                # Otherwise Slurm would end the batch script there too, and take its end for the job's once the node answers
                # again.
                self._note(f"{node} is not reported to Slurm: the job's batch script ran there")
            else:
                await self._tell(node, state, reason)

    async def _end(self, node: str) -> None:
        """Ends everything of the job on the node, and gives the node back to Slurm if possible."""
        if node == self._own_step_of:
            self._note(f"the coordinator stays on {node} until the job ends")
            return
        process = self._steps.get(node)
        if process is not None and node in self._known.going:  # its agent ends after its hooks
            try:
                async with asyncio.timeout(LEAVE_S):
                    await process.wait()
            except TimeoutError:
                pass
        if process is not None:
            _kill(process)  # this is only srun; the step itself is ended below
        follow_up = next((id for id, where in self._known.follow_ups.items() if where == node), None)
        try:
            if follow_up is not None:
                del self._known.follow_ups[follow_up]
                self._keep()
                await self.slurm.cancel(follow_up)
                return
            step = (await self.slurm.steps(self._id)).get(f"agent-{node}")
            if step is not None:
                await self.slurm.cancel("--signal=KILL", step, within_s=5.0)
        except SlurmError as error:
            self._note(str(error))
        if node in self._known.bad or node in self._known.going:
            await self._give_back(node)

    async def _give_back(self, node: str) -> None:
        """Removes a node from the allocation, so that Slurm can have it repaired or give it to other jobs."""
        try:
            job = await self.slurm.job(self._id)
            names = await self.slurm.names(job.nodes) if job else []
            # Slurm can remove neither the batch host nor the last node from a job.
            if node not in names or node == self.batch_host or len(names) < 2:
                return
            rest = ",".join(n for n in names if n != node)
            await self.slurm.run(
                "scontrol", "update", f"jobid={self._id}", f"nodelist={rest}", cwd=self._job_dir, within_s=6.0
            )
        except SlurmError as error:  # Slurm 22.05 fails here once it has removed a dead node from the job
            self._note(f"{node} stays in the allocation until the job ends, idle ({error})")

    async def _reachable(self, node: str) -> bool:
        """Whether the node's slurmd listens, so that the machine works and only the agent has failed."""
        try:
            # By a connection to slurmd's port, because Slurm itself takes up to 30 s to notice a lost node.
            nodes = await self.slurm.nodes([node])
            port = int((await self.slurm.config()).get("SlurmdPort", "").partition("-")[0] or SLURMD_PORT)
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(nodes[node].address, port)
            writer.close()
        except (OSError, TimeoutError, SlurmError, KeyError, ValueError):
            return False
        return True

    async def _tell(self, node: str, state: str, reason: str) -> None:
        if not self._admin:
            return
        text = self._for_slurm(reason)
        try:
            await self.slurm.run(
                "scontrol", "update", f"nodename={node}", f"state={state}", f"reason={text}", within_s=6.0
            )
            self._note(f"reported to Slurm: {node} is {state}: {reason}")
            self._known.told.add(node)
            self._keep()
        except SlurmError as error:
            # Without the permission the user gets one message, and not one for every bad node. Any other error may be temporary,
            # so the next node is reported again.
            self._admin = "invalid user" not in str(error).lower() and "denied" not in str(error).lower()
            self._note(
                f"{node} is not {'drained' if state == 'drain' else 'set down'} in Slurm ({error}); this job does "
                "not use it any more, but other jobs may"
            )

    async def reboot(self, node: str, reason: str) -> None:
        """Has Slurm reboot the node once it is free of this job, and requests another one, which may be the same node."""
        self._lost_at.pop(node, None)  # that it does not answer during the reboot must not be reported
        self._known.bad[node] = reason
        self._keep()
        self._spawn(self._boot(node, reason))

    async def _boot(self, node: str, reason: str) -> None:
        text = self._for_slurm(reason)
        self._post(NodeTaken(node, reason))
        # The step has to end first, because `reboot ASAP` waits until the node is idle.
        await self._end(node)
        try:
            await self.slurm.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", f"reason={text}", node)
        except SlurmError as error:
            self._note(f"{node} cannot be rebooted through Slurm ({error})")
            await self._tell(node, "drain", reason)
        else:
            self._note(f"asked Slurm to reboot {node}")
            # Before `provide`, because the rebooted node itself may be used again.
            del self._known.bad[node]
            self._known.going.discard(node)
            self._keep()
        await self.provide()

    def _for_slurm(self, reason: str) -> str:
        return f"holdfast {self._spec.name}: {reason}".replace("\n", " ")[:200]

    async def _run_site_command(self, node: str, reason: str) -> None:
        # Split here and run without a shell. The reason contains text from kernel logs, which must not be executed, so it is
        # passed in the environment.
        command = [*shlex.split(self._spec.slurm.replace_command), node]
        env = {**os.environ, "HOLDFAST_NODE": node, "HOLDFAST_REASON": reason}
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=env, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._note(f"--replace-command {command[0]!r}: {error.strerror}")
            return
        self._note(f"replacing {node}: {shlex.join(command)}")
        self._spawn(self._follow_command(command[0], process))

    async def _follow_command(self, name: str, process: asyncio.subprocess.Process) -> None:
        if code := await process.wait():
            self._note(f"--replace-command {name!r} ended with exit code {code}")

    # ------------------------------------------------------------ changes in Slurm

    def on_event(self, kind: str, fields: dict[str, object]) -> None:
        """Takes an event of the job: it tracks which nodes are there, and detects that Slurm ends the whole allocation."""
        node = str(fields.get("node", ""))
        if kind == "node-joined":
            self.alive.add(node)
            self._joined.add(node)
            self._terminated.discard(node)
        elif kind in ("node-lost", "node-left", "node-taken"):
            self.alive.discard(node)
        elif kind == "node-leaving" and fields.get("cause") == NoticeCause.PREEMPTION:
            # Slurm sends SIGTERM to every node of an allocation that it takes away, but not to all at the same moment. When all
            # living nodes have received it, the whole job has to stop instead of shrinking.
            self._terminated.add(node)
            within_s = fields.get("within_s")
            if self.alive and self.alive <= self._terminated and isinstance(within_s, int | float):
                self._post(Capacity(0, "Slurm ends the whole allocation", float(within_s)))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
            except SlurmError as error:
                self._note(str(error))  # the job does not need the controller, so it is simply polled again
            except Exception as error:  # noqa: BLE001 - if this task ended, the time limit, for example, would not be noticed
                _log.exception("Slurm's answer cannot be used; the request is repeated")
                self._note(f"Slurm's answer cannot be used, and the request is repeated: {error}")

    async def _look(self) -> None:
        # Slurm's answer describes the moment of the request. Another follow-up job that is submitted in the meantime, or its
        # node, is missing in the answer, but has not ended.
        asked, alive = dict(self._known.follow_ups), set(self.alive)
        lines = await self.slurm.jobs(self._id, *asked)
        for id, where in asked.items():
            if id not in self._known.follow_ups:
                continue
            job = lines.get(id)
            if job is not None and job.state == "RUNNING" and where is None:
                self._known.follow_ups[id] = job.nodes
                self._keep()
                self._note(f"Slurm started the follow-up job {id} on {job.nodes}")
            # It has ended or was cancelled. The coordinator notices by itself that the node is lost, if it had one.
            elif job is None or job.state not in WAITING | {"RUNNING"}:
                del self._known.follow_ups[id]
                self._keep()
                if where is None:
                    self._post(NodeUnavailable(f"Slurm's job {id} ended before it started"))
        if self._known.told:
            await self._readmit()
        ours = lines.get(self._id)
        if ours is not None and ours.state == "RUNNING":
            names = await self.slurm.names(ours.nodes)
            # Nodes of follow-up jobs are not in this job's own list. They are added here, or each poll would take them for nodes
            # that Slurm has removed.
            followed = {node for node in self._known.follow_ups.values() if node}
            gone = (alive & self.alive) - set(names) - followed - set(self._known.bad) - self._known.going
            for node in gone:
                self._known.going.add(node)
                self._keep()
                self._post(NodeTaken(node, "Slurm removed the node from the allocation"))
            nodes = await self.slurm.nodes(sorted(self.alive))
            for name, line in nodes.items():
                if line.going and name not in self._known.bad and name not in self._known.going:
                    self._known.going.add(name)
                    self._keep()
                    self._post(NodeGoing(name, f"Slurm drains the node: {line.reason or 'without a reason'}"))
            # Posted at every poll: the coordinator acts on the first one, but a new coordinator has to be told as well.
            if ours.left_s is not None and ours.left_s < self._spec.slurm.warn_s:
                self._post(Capacity(0, TIME_LIMIT, ours.left_s, NoticeCause.TIME_LIMIT))
            else:
                self._foretell(ours.left_s)

    def _foretell(self, left_s: float | None) -> None:
        """Tells the job's scripts when the job will be stopped. They are told `warn_s` before the stop, which comes `warn_s`
        before the time limit."""
        warn_s = self._spec.slurm.warn_s
        soon = left_s is not None and left_s < 2 * warn_s
        if left_s is not None and soon:
            self._post(JobGoing(TIME_LIMIT, left_s - warn_s, NoticeCause.TIME_LIMIT))
        elif self._foretold:
            self._post(JobGoing("Slurm gives the job more time", None, NoticeCause.TIME_LIMIT))
        self._foretold = soon

    async def _readmit(self) -> None:
        """Lets the job use nodes again that were reported to Slurm and that the site has returned to service. The deep checks
        decide whether such a node, if it is the same machine, is healthy."""
        lines = await self.slurm.nodes(sorted(self._known.told))
        back = {name for name, line in lines.items() if line.usable}
        if not back:
            return
        self._known.told -= back
        for name in back:
            self._known.bad.pop(name, None)
            self._failures.pop(name, None)
            self._note(f"Slurm has {name} in service again, so this job may use it")
        self._keep()
        # Slurm has stored the excluded nodes of follow-up jobs that still wait in the queue, so these are updated.
        for id, where in self._known.follow_ups.items():
            if where is None:
                await self.slurm.run(
                    "scontrol", "update", f"jobid={id}", f"excnodelist={','.join(self._without())}"
                )

    # ------------------------------------------------------------ the end

    async def abandon(self) -> None:
        """Stops acting at once, and leaves everything as it is."""
        running = [t for t in (*self._tasks, self._polling) if t is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def close(self, gives_back: bool = True) -> None:
        """Cancels follow-up allocations, and waits for the agents, which end with the job. Memory is freed in any case, because
        the nodes are given to other jobs."""
        if self._polling is not None:
            self._polling.cancel()
        if self._known.follow_ups:
            try:
                await self.slurm.cancel(*self._known.follow_ups)
            except SlurmError as error:
                self._note(str(error))
        steps = list(self._steps.values())
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(p.wait() for p in steps))
        except TimeoutError:
            for process in steps:
                _kill(process)
        for task in list(self._tasks):
            await task

    def _spawn(self, coroutine: object) -> None:
        assert asyncio.iscoroutine(coroutine)
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
