"""The Slurm engine: agents as steps of the job's allocation, follow-up allocations, and what Slurm is told.

Slurm takes 9 to 30 s to notice a lost node. Holdfast does not wait for that: it tells Slurm.
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
"""Slurm tells nobody that an administrator drains a node or that a job is to make room (its triggers are for
administrators and come 7 s late), so it is asked."""

CLOSE_S = 10.0
REACH_S = 1.0
SETTLE_S = 1.0
TOGETHER_S = 5.0
"""Nodes that are lost within this time were lost together."""
LEAVE_S = 30.0
SLURMD_PORT = 6818
KNOWN = "slurm.json"
TIME_LIMIT = "the time limit of the Slurm job"
"""Why a job ends, in words."""
FAILURES = 2
"""So often an agent may be lost on a node that Slurm can reach before the node is drained."""


class Known(msgspec.Struct):
    """What a launcher that takes over has to know; it is kept in the job's folder."""

    follow_ups: dict[str, str | None] = {}
    """Ids of further allocations, each with its node; None: it waits in the queue."""
    bad: dict[str, str] = {}
    """Nodes that this job does not use, and why."""
    told: set[str] = set()
    """Those of the bad ones that Slurm keeps out, until the site lets them in again."""
    going: set[str] = set()
    """Nodes that left as planned."""


_knowns = msgspec.json.Decoder(Known)


class SlurmProvider:
    """The nodes of one job. Every public method may be called while another one runs."""

    traits = EngineTraits(watches_boots=True, keeps_nodes=False, nodes_are_machines=True)

    def __init__(
        self,
        spec: JobSpec,
        job_dir: Path,
        job_id: str,
        note: Callable[[str], None],
        post: Callable[[Availability], None],
    ) -> None:
        """post: tells the coordinator about capacity."""
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
        """Starts an agent on every node; not fresh: they run already, only Slurm is watched, and the step of the node
        `here` is the one that this process is in."""
        self._own_step_of = "" if fresh else here
        job = await self.slurm.job(self._id)
        if job is None:
            raise SlurmError(f"Slurm does not know the job {self._id} any more")
        self.batch_host = job.batch_host
        names = await self.slurm.names(job.nodes)
        # A launcher that took over finds everything running. It must not start a second agent on any node.
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
        # In one step, because the next launcher may read it at any moment. The name has host and pid: two
        # launchers may write for a moment while one takes over.
        work.replace(self._job_dir / KNOWN)

    async def _start_step(self, node: str) -> None:
        """One step for one node: nothing that happens to it ends another. Its exit code means nothing."""
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
            # Slurm would end the whole step when one node fails. That decision is the coordinator's.
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
            start_new_session=True,  # a signal to the batch script is not one to the steps
        )
        self._steps[node] = process
        self._spawn(self._reap(node, process))

    async def _reap(self, node: str, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        # A node that was lost may have a newer step already, which the end of the old one must not remove.
        if self._steps.get(node) is process:
            del self._steps[node]
            if node not in self._joined and self._polling is not None:
                self._note(
                    f"the agent of {node} ended before it joined: see {self._job_dir}/logs/agents/{node}.log"
                )

    async def provide(self) -> bool:
        """Uses a node of the allocation that has no agent, or else asks Slurm for one more."""
        node = await self._idle_node()
        if node is not None:
            self._note(f"starting an agent on {node}, which is in the allocation already")
            await self._start_step(node)
            return True
        # One at a time. Nodes that were asked for twice would both come, and one of them would cost its price
        # for nothing.
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
            told = await self.slurm.nodes(names)
        except SlurmError as error:
            self._note(str(error))
            return None
        since = time.monotonic() - TOGETHER_S
        for name in names:
            if self._lost_at.get(name, 0.0) > since:
                continue  # it is not known yet what became of it
            free = name not in self.alive and name not in self._steps and name not in self._known.bad
            if free and name not in self._known.going and name in told and told[name].usable:
                return name
        return None

    async def _ask_for_one_more(self) -> None:
        job = await self.slurm.job(self._id)
        # The follow-up must not outlive the job.
        minutes = None if job is None or job.left_s is None else max(1, int(job.left_s // 60))
        script = follow_up_script(self._spec, self._job_dir, home(), self._without(), minutes)
        id = await self.slurm.submit(script, self._job_dir)
        # Written down at once. A launcher that takes over would otherwise not know of the node and never give
        # it back.
        self._known.follow_ups[id] = None
        self._keep()
        self._note(f"requested one more node from Slurm: its job {id}")

    def _without(self) -> list[str]:
        """Nodes that a follow-up allocation must not have."""
        return sorted({*self._known.bad, *self._known.going})

    # ------------------------------------------------------------ what Slurm is told

    async def mark(self, node: str, reason: str) -> None:
        """Drains the node, with the reason, and has the site replace it."""
        self._known.bad[node] = reason
        self._keep()
        await self._tell(node, "drain", reason)
        if self._spec.slurm.replace_command:
            await self._run_site_command(node, reason)

    async def release(self, order: ReleaseNode) -> None:
        """Ends the node's step. One that cannot be reached, or fails again and again, is Slurm's to know of."""
        node = order.node
        self.alive.discard(node)
        if order.planned:
            self._known.going.add(node)
        elif node not in self._known.bad:
            # Judged later, in a task. Nothing that trains waits for Slurm.
            self._lost_at[node] = time.monotonic()
            self._spawn(self._lost(node, order.reason))
            return
        self._left(node, order.reason)

    async def _lost(self, node: str, reason: str) -> None:
        """Nothing that trains waits for this. Many at once are a network's doing, this node's perhaps: then nothing is
        said of anybody."""
        await asyncio.sleep(SETTLE_S)
        if node not in self._lost_at:
            return  # it is booted
        since = time.monotonic() - TOGETHER_S
        lost = [n for n, at in self._lost_at.items() if at > since and n not in self.alive]
        # Most nodes cannot fail in the same second, but a switch can, or the cable of this very node.
        # Draining the half of a cluster for that would be worse than anything it could prevent.
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
        """Decides whether a lost node is bad, or only its agent was."""
        # A machine that answers has lost only our agent, so it is drained after the second time. One that
        # does not answer is down.
        reached, state = await self._reachable(node), "down"
        if node in self.alive:
            return  # it is back already
        if reached:
            self._failures[node] = self._failures.get(node, 0) + 1
            state = "drain"
        if not reached or self._failures[node] >= FAILURES:
            self._known.bad[node] = reason
            if node == self.batch_host and not reached:
                # Slurm would send the batch script's end after it, and take that for the job's when it arrives.
                self._note(f"{node} is not reported to Slurm: the job's batch script ran there")
            else:
                await self._tell(node, state, reason)

    async def _end(self, node: str) -> None:
        """Ends everything on the node and returns it to Slurm where that is possible."""
        if node == self._own_step_of:
            self._note(f"the coordinator stays on {node} until the job ends")
            return
        process = self._steps.get(node)
        if process is not None and node in self._known.going:  # its agent ends when its hooks have
            try:
                async with asyncio.timeout(LEAVE_S):
                    await process.wait()
            except TimeoutError:
                pass
        if process is not None:
            _kill(process)  # it only watches; the step is ended now
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
        """Makes the allocation smaller, so that Slurm can have the node repaired or give it to others."""
        try:
            job = await self.slurm.job(self._id)
            names = await self.slurm.names(job.nodes) if job else []
            # Slurm cannot take the batch host out of a job, nor the last node.
            if node not in names or node == self.batch_host or len(names) < 2:
                return
            rest = ",".join(n for n in names if n != node)
            await self.slurm.run(
                "scontrol", "update", f"jobid={self._id}", f"nodelist={rest}", cwd=self._job_dir, within_s=6.0
            )
        except SlurmError as error:  # 22.05 cannot once it has taken a dead node out of the job
            self._note(f"{node} stays in the allocation until the job ends, idle ({error})")

    async def _reachable(self, node: str) -> bool:
        """Whether the node's slurmd listens: the machine is there, and only our agent is not."""
        try:
            # slurmd's port is asked directly, because Slurm itself takes up to 30 s to notice a lost node.
            told = await self.slurm.nodes([node])
            port = int((await self.slurm.config()).get("SlurmdPort", "").partition("-")[0] or SLURMD_PORT)
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(told[node].address, port)
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
            # A user without the right gets one note and not one for every bad node. Any other error may pass,
            # so the next node is tried again.
            self._admin = "invalid user" not in str(error).lower() and "denied" not in str(error).lower()
            self._note(
                f"{node} is not {'drained' if state == 'drain' else 'set down'} in Slurm ({error}); this job does "
                "not use it any more, but other jobs may"
            )

    async def reboot(self, node: str, reason: str) -> None:
        """Has Slurm boot the node when it is free of this job, and asks for one in its place, which it may be itself."""
        self._lost_at.pop(node, None)  # that it does not answer meanwhile is nothing to tell Slurm
        self._known.bad[node] = reason
        self._keep()
        self._spawn(self._boot(node, reason))

    async def _boot(self, node: str, reason: str) -> None:
        text = self._for_slurm(reason)
        self._post(NodeTaken(node, reason))
        # The step has to be over, because `reboot ASAP` waits until the node is idle.
        await self._end(node)
        try:
            await self.slurm.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", f"reason={text}", node)
        except SlurmError as error:
            self._note(f"{node} cannot be rebooted through Slurm ({error})")
            await self._tell(node, "drain", reason)
        else:
            self._note(f"asked Slurm to reboot {node}")
            # Before `provide`: the booted node itself may be the one that is used again.
            del self._known.bad[node]
            self._known.going.discard(node)
            self._keep()
        await self.provide()

    def _for_slurm(self, reason: str) -> str:
        return f"holdfast {self._spec.name}: {reason}".replace("\n", " ")[:200]

    async def _run_site_command(self, node: str, reason: str) -> None:
        # Split here and run without a shell. The reason contains text from kernel logs, which must not be
        # executed, so it goes through the environment.
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

    # ------------------------------------------------------------ what Slurm tells

    def on_event(self, kind: str, fields: dict[str, object]) -> None:
        """An event of the job: who is there, and whether Slurm takes all of it away at once."""
        node = str(fields.get("node", ""))
        if kind == "node-joined":
            self.alive.add(node)
            self._joined.add(node)
            self._terminated.discard(node)
        elif kind in ("node-lost", "node-left", "node-taken"):
            self.alive.discard(node)
        elif kind == "node-leaving" and fields.get("cause") == NoticeCause.PREEMPTION:
            # Slurm sends SIGTERM to every node of an allocation that it takes away, but to each at its own
            # moment. When the last living node has it, the whole job has to stop and not to shrink.
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
                self._note(str(error))  # the job needs no controller: it is asked again
            except Exception as error:  # noqa: BLE001 - of a task that has ended nobody would hear, nor of the time limit
                _log.exception("Slurm's answer cannot be used; the request is repeated")
                self._note(f"Slurm's answer cannot be used, and the request is repeated: {error}")

    async def _look(self) -> None:
        # Slurm's answer is about the moment of the question. While it is on its way another follow-up job may be
        # submitted and its node may join: neither is in the answer, and neither has ended for that.
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
            # It ended, or it was cancelled. A node that it had brought is lost by its own silence.
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
            # Nodes of follow-up jobs are not in this job's own list. Without them every poll would take them
            # for nodes that Slurm has taken away.
            followed = {node for node in self._known.follow_ups.values() if node}
            gone = (alive & self.alive) - set(names) - followed - set(self._known.bad) - self._known.going
            for node in gone:
                self._known.going.add(node)
                self._keep()
                self._post(NodeTaken(node, "Slurm removed the node from the allocation"))
            told = await self.slurm.nodes(sorted(self.alive))
            for name, line in told.items():
                if line.going and name not in self._known.bad and name not in self._known.going:
                    self._known.going.add(name)
                    self._keep()
                    self._post(NodeGoing(name, f"Slurm drains the node: {line.reason or 'without a reason'}"))
            # Posted with every poll. The coordinator acts on the first, and a new coordinator has to learn it
            # as well.
            if ours.left_s is not None and ours.left_s < self._spec.slurm.warn_s:
                self._post(Capacity(0, TIME_LIMIT, ours.left_s, NoticeCause.TIME_LIMIT))
            else:
                self._foretell(ours.left_s)

    def _foretell(self, left_s: float | None) -> None:
        """Lets the scripts know when the job will be stopped, as long before as the stop is before the time limit."""
        warn_s = self._spec.slurm.warn_s
        soon = left_s is not None and left_s < 2 * warn_s
        if left_s is not None and soon:
            self._post(JobGoing(TIME_LIMIT, left_s - warn_s, NoticeCause.TIME_LIMIT))
        elif self._foretold:
            self._post(JobGoing("Slurm gives the job more time", None, NoticeCause.TIME_LIMIT))
        self._foretold = soon

    async def _readmit(self) -> None:
        """Somebody has seen to a node that Slurm was told of, and let it in again. Whether it is well is for the deep
        checks, if it is the same machine."""
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
        # A job that still waits in the queue has its excluded nodes written down by Slurm, so they are
        # changed there.
        for id, where in self._known.follow_ups.items():
            if where is None:
                await self.slurm.run(
                    "scontrol", "update", f"jobid={id}", f"excnodelist={','.join(self._without())}"
                )

    # ------------------------------------------------------------ the end

    async def abandon(self) -> None:
        """Stops at once, and leaves everything as it is."""
        running = [t for t in (*self._tasks, self._polling) if t is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def close(self, gives_back: bool = True) -> None:
        """Gives back what was asked for beyond the allocation, and waits for the agents, which end with the job. Memory is
        given back in any case: the nodes are others' next."""
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
