"""The agent: it starts and watches the workers of its node, and passes messages between them and the coordinator."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.agent import simulated_sources
from holdfast.agent.checks import NodeChecks, Repairs
from holdfast.agent.coordinator_link import CoordinatorLink, show_ready
from holdfast.agent.health import HealthWatcher
from holdfast.agent.hooks import HookRun, Hooks
from holdfast.agent.ledger_copy import LedgerCopy
from holdfast.agent.process import Leftovers, WorkerProcess, innermost
from holdfast.agent.snapshots import SnapshotKeeper
from holdfast.agent.warm_pool import WarmPool
from holdfast.agent.worker_logs import LogFollower, LogLimit
from holdfast.agent.zygote import Zygote
from holdfast.errors import ProtocolError, TierError
from holdfast.health.identity import devices, identity
from holdfast.logs import VARIABLE as LOG_VARIABLE
from holdfast.protocol import messages as m
from holdfast.protocol.faults import MACHINE_FAULTS, NODE_FAULTS, ArmedFault, FaultKind
from holdfast.protocol.generation_difference import NOTHING, apply
from holdfast.protocol.health import CheckResult, Condition, Finding, Remedy, Severity
from holdfast.protocol.job import JobSpec
from holdfast.protocol.machine.notice_board import NoticeBoard
from holdfast.protocol.machine.processes import kernel_id
from holdfast.protocol.network.lookup import FolderLookup, Lookup
from holdfast.protocol.network.sockets import listening
from holdfast.protocol.place import NodePlace
from holdfast.protocol.wire.stored import read_stored_word

_log = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36
PORTS_OFFERED = 16
SAME_SIGNAL_S = 1.0
"""A second SIGTERM within this time is the same one. A scheduler signals a step and each of its processes."""
STACKS_WAIT_S = 0.15
REPORT_S = 1.0
"""How long reports of further steps wait to be sent in one frame with those of the node's other workers."""
LEFTOVERS_S = 5.0
"""For what a worker has left behind, from SIGTERM to SIGKILL at the end of the job."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What an agent is started with."""

    spec: JobSpec
    """Of the job. The other fields are the node's own."""
    node: str
    job_dir: Path
    host: str
    """The address that the agent and its workers bind."""
    memory: Path
    """The folder of the node's snapshot memory."""
    place: NodePlace = ()
    """Where the node stands; empty: not known."""
    grace_s: float = 30.0
    """Seconds from SIGTERM until somebody kills this node."""
    shared_machine: bool = False
    """Whether other nodes are on this machine too."""
    ready_port: int | None = None
    """The port at which whoever started this agent may ask whether it has joined, see `protocol.network.endpoint.Hearing`. None:
    nobody asks."""
    coordinator_is_late: bool = False
    """Its first coordinator may take as long to come as a node for which the job waits."""
    lookup: Lookup | None = None
    """How it finds the coordinator; None: by the job's folder."""


class Agent:
    """One node's agent. `run` returns when the job is over, or when the agent has been without a coordinator for too long."""

    def __init__(self, config: AgentConfig, zygote: Zygote | None = None) -> None:
        self._config = config
        self._session = uuid.uuid4().hex
        self._generation = NOTHING
        """The newest generation that this node was sent."""
        self._token = read_stored_word(config.job_dir / "token")
        self._logs = config.job_dir / "logs" / config.node
        self._logs.mkdir(parents=True, exist_ok=True)
        self._spec = spec = config.spec
        self._pool = WarmPool(spec.nproc, spec.preload, zygote, config.shared_machine)
        self._workers: dict[str, WorkerProcess] = {}
        self._leftovers = Leftovers()
        self._unwanted: set[str] = set()
        self._starting: dict[str, list[m.ToWorker]] = {}
        self._armed: dict[str, ArmedFault] = {}
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports = _free_ports(config.host, PORTS_OFFERED)
        self._follower = LogFollower(self._on_files_changed)
        self._log_limit = LogLimit(spec.log_limit)
        self._keeper: SnapshotKeeper | None = None
        self._ledger_copy = LedgerCopy(config.job_dir / "nodes" / config.node)
        self._sending_ledger: asyncio.Task[None] | None = None
        self._leaving: m.Leaving | None = None
        self._notices = NoticeBoard()
        self._terminated_at = 0.0
        self._health = spec.health
        # A node that shares its machine with others has a part of its identity, and none of its devices for itself.
        root = Path("/")
        self._identity = identity(root, config.node if config.shared_machine else "", environ=os.environ)
        self._devices = () if config.shared_machine else devices(root)
        self._watcher = HealthWatcher(
            folder=config.job_dir / "nodes" / config.node,
            spec=self._health,
            shared=config.shared_machine,
            send=self._report,
            job_dir=config.job_dir,
            inotify=self._follower.inotify,
        )
        self._hooks = Hooks(self._health.hooks, config.job_dir.name, config.node, self._logs)
        self._checks_before: tuple[CheckResult, ...] = ()
        self._reason = "the agent was ended"
        self._code = 0
        self._gives_back = False
        self._launcher_lost = False
        self._draining: asyncio.Task[HookRun | None] | None = None
        self._link = CoordinatorLink(
            lookup=config.lookup or FolderLookup(config.job_dir),
            token=self._token,
            hello=self._hello,
            take=self._on_order,
            orphan_s=spec.timing.orphan_s,
            orphaned=self._on_orphaned,
            heartbeat_s=spec.timing.heartbeat_s,
            lost=self._on_connection_lost,
            join_s=spec.timing.wait_s if config.coordinator_is_late else None,
        )
        self._repairs = Repairs(config.shared_machine, self._link.send)
        self._checks = NodeChecks(
            node=config.node,
            host=config.host,
            slots=spec.nproc,
            folder=config.job_dir,
            memory=config.memory,
            send=self._link.send,
        )

    async def run(self, lifeline: int | None) -> int:
        """Serves until the job is over. Returns the exit code: 1 when the agent could not continue.

        lifeline: a pipe that reaches its end when the launcher is gone.
        """
        loop = asyncio.get_running_loop()
        # Workers are forked twice by the zygote, so that they outlive it. As subreaper the agent becomes
        # their parent: only a parent gets SIGCHLD for them and may read their exit status.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child_changed)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        # Ctrl-C goes to the whole foreground group. The launcher answers it, and ends the job in order; an
        # agent that ended by itself would look like a lost node.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        # Who started this process may have blocked it until now. Before any other process is started, which would
        # inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if lifeline is not None:
            loop.add_reader(lifeline, self._on_launcher_gone, lifeline)
        # The four take seconds each (a first look at the memory, the checks, the import of torch, the first
        # reading of sensors) and do not need each other. The agent says hello only when all are over: the
        # hello has their results, and the core may send StartWorker right after it.
        self._keeper, self._checks_before, _, _ = await asyncio.gather(
            asyncio.to_thread(self._open_memory),
            self._unless_over(self._before_joining()),
            self._pool.start(),
            self._watcher.start(),
        )
        _log.info(
            "ready to join", extra={"slots": self._spec.nproc, "snapshot_port": self._port_of_snapshots}
        )
        conversation = asyncio.create_task(self._link.run())
        conversation.add_done_callback(self._on_link_ended)
        self._spawn(self._ledger_copy.run())
        self._log_limit.start()
        if self._config.ready_port is not None:
            self._spawn(self._show_ready(self._config.ready_port))
        if self._keeper is not None:
            self._spawn(self._keeper.watch())
        # Everything below runs in this order. Workers end first, because the hook after-job may clean up what
        # they use; the link stays up until the hook has ended, because a failure of the hook is reported by
        # it.
        await self._over.wait()
        _log.info("ending: %s", self._reason, extra={"workers": len(self._workers)})
        await self._end_workers()
        await self._leftovers.end(LEFTOVERS_S)
        # The hook on-drain was promised its time-out. It would be killed with this process.
        if self._draining is not None:
            await self._draining
        await self._hook("after-job", self._reason)
        conversation.cancel()
        if self._keeper is not None:
            # Only the coordinator knows that no state is lost with the memory: without its word it is left.
            await self._keeper.close(self._gives_back)
        await self._pool.close()
        self._follower.close()
        self._log_limit.close()
        self._watcher.close()
        return self._code

    async def _show_ready(self, port: int) -> None:
        config, link = self._config, self._link
        await show_ready(config.node, config.host, port, self._token, link.joined, link.hearing, link.told)

    def _open_memory(self) -> SnapshotKeeper | None:
        config = self._config
        try:
            return SnapshotKeeper(
                config.memory, self._spec.saving.budget_bytes, config.host, self._token, self._link.send
            )
        except TierError as error:
            _log.warning("this node keeps no snapshots: %s", error, extra={"folder": config.memory})
            return None

    async def _before_joining(self) -> tuple[CheckResult, ...]:
        """Runs the checks and hooks of a node that starts, in parallel with the start of its first process."""
        # In this order: on-create may mount or load what the checks look at, and before-join may use what
        # they have found.
        await self._hook("on-create", "the agent starts")
        results = await self._checks.before_joining()
        run = await self._hook("before-join", "the node is about to join")
        if run is not None:
            condition = Condition.FAULTY if run.error else Condition.HEALTHY
            detail = run.told(self._config.node) if run.error else ""
            results += (
                CheckResult(name="hook-before-join", condition=condition, detail=detail, took_s=run.took_s),
            )
        return results

    async def _unless_over(
        self, work: Coroutine[Any, Any, tuple[CheckResult, ...]]
    ) -> tuple[CheckResult, ...]:
        """Returns what the work returns, or nothing if the node ends first, because a hook may take a while."""
        working, ending = asyncio.create_task(work), asyncio.create_task(self._over.wait())
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
            return ()
        return working.result()

    async def _hook(self, hook: str, reason: str) -> HookRun | None:
        """Runs a hook, if there is one, and reports its failure."""
        run = await self._hooks.run(hook, reason)
        if run is not None and run.error:
            told = run.told(self._config.node)
            _log.warning("%s", told, extra={"hook": hook})
            finding = Finding(
                rule=f"hook-{hook}",
                severity=Severity.WARNING,
                remedy=Remedy.WATCH,
                source="hook",
                evidence=told,
            )
            self._link.send(m.FindingsReported((finding,)))
        return run

    # ------------------------------------------------------------ the coordinator's wishes

    @property
    def _port_of_snapshots(self) -> int:
        return self._keeper.port if self._keeper else 0

    def _hello(self) -> m.Hello:
        config = self._config
        views = tuple(w.view() for w in self._workers.values() if not w.gone)
        return m.Hello(
            version=m.PROTOCOL_VERSION,
            node=config.node,
            session=self._session,
            host=config.host,
            slots=self._spec.nproc,
            pid=os.getpid(),
            ports=self._ports,
            workers=views,
            snapshot_port=self._port_of_snapshots,
            copies=self._keeper.copies() if self._keeper else (),
            place=config.place,
            leaving=self._leaving,
            identity=self._identity,
            devices=self._devices,
            checks=self._checks_before,
            snapshot_server=self._keeper.server if self._keeper else "",
            summing=self._keeper.summing() if self._keeper else (),
            kernel=kernel_id(),
            term=self._link.term,
            ledger=self._ledger_copy.mark if self._ledger_copy.mark.batch else None,
            generation=(self._generation.number, self._generation.digest),
        )

    def _on_order(self, order: m.ToAgent) -> None:
        match order:
            case m.StartWorker():
                # A start takes until a warm process is free. The coordinator does not wait for that, so what
                # it sends to the worker in between is kept here in its order. An armed fault, for example,
                # would otherwise never reach it.
                self._starting[order.worker] = []
                self._spawn(self._start(order), order)
            case m.KillWorker(name, grace_s):
                # With a grace the worker may be copying its state to this node's memory. That copy is worth
                # more than the milliseconds.
                if (worker := self._workers.get(name)) and grace_s > 0 and self._keeper is not None:
                    self._spawn(self._kill_after_copy(worker, self._keeper, grace_s), order)
                elif worker:
                    self._save_stacks_then_kill(worker, grace_s)
                else:
                    # The kill overtook the start. Without this note the worker would be started afterwards,
                    # and nobody would end it.
                    self._unwanted.add(name)
            case m.Preload():
                spec = self._spec
                self._pool.learn(
                    msgspec.structs.replace(order, script=spec.script, args=spec.args, cwd=spec.cwd)
                )
            case m.Relay(name, message):
                self._relay(name, message)
            case m.Form():
                self._form(order)
            case m.Inspect(request):
                self._spawn(self._inspect(request), order)
            case m.RunFault(fault, name):
                self._spawn(self._run_fault(fault, name), order)
            # A node without snapshot memory says so in its hello (port 0), so the coordinator sends it none
            # of these.
            case m.Replicate() if self._keeper:
                self._spawn(self._keeper.replicate(order), order)
            case m.StoreShard() if self._keeper:
                self._spawn(self._keeper.store(order), order)
            case m.Publish() if self._keeper:
                self._spawn(self._keeper.publish(order), order)
            case m.SnapshotComplete(step, kept) if self._keeper:
                self._keeper.complete(step, kept)
            case m.ForgetSnapshots(step, until) if self._keeper:
                self._keeper.forget(step, until)
            case m.Fence(reason):
                _log.warning("fenced, ending all workers: %s", reason, extra={"workers": len(self._workers)})
                self._fence()
            case m.RunChecks():
                self._spawn(self._checks.answer(order), order)
            case m.Repair():
                self._spawn(self._repairs.answer(order), order)
            case m.KeepLedger():
                self._ledger_copy.keep(order)
            case m.SendLedger():
                self._sending_ledger = self._spawn(self._send_ledger(), order)
            case m.Drain(reason):
                self._drain(reason)
            case m.Notify(notices):
                self._notices.put(notices)
                for worker in self._workers.values():
                    worker.tell(order)
            case m.Shutdown(reason, keeps):
                # Only the coordinator knows whether a durable tier has what this node's memory holds. An
                # agent that ends without a Shutdown therefore leaves its memory behind for the job's next
                # start.
                self._reason, self._gives_back = reason, not keeps
                self._over.set()

    async def _send_ledger(self) -> None:
        parts = self._ledger_copy.parts()
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            self._link.send(part)
            await self._link.flushed()  # a long ledger is never in memory as a whole

    def _relay(self, name: str, message: m.ToWorker) -> None:
        if worker := self._workers.get(name):
            self._tell(worker, message)
        elif name in self._starting:
            self._starting[name].append(message)

    def _form(self, order: m.Form) -> None:
        try:
            base = self._generation if order.change.base else NOTHING
            self._generation = apply(base, order.change)
        except ProtocolError as error:
            # Its workers must not be in another generation than all others: a hello that names none is answered with the whole.
            _log.warning("asking for the whole generation: %s", error)
            self._generation = NOTHING
            self._link.say_hello()
            return
        for name, join in order.orders:
            self._relay(name, msgspec.structs.replace(join, generation=self._generation))

    def _tell(self, worker: WorkerProcess, message: m.ToWorker) -> None:
        if isinstance(message, m.Arm):
            self._armed |= {f.id: f for f in message.faults}
        worker.tell(message)  # before what may fail: nothing that only looks on may keep it from the worker
        if isinstance(message, m.JoinGeneration):
            self._watcher.trains(worker.name, message.rank, worker.log)
            # At its start a worker was given a rank as a guess. Two agents may have followed the same one.
            if message.rank == 0:
                self._follower.follow(worker.log)
            else:
                self._follower.leave(worker.log)

    async def _start(self, order: m.StartWorker) -> None:
        """A worker that cannot be started is ended, and the core gets a report of its end."""
        try:
            await self._begin(order)
        except Exception:
            self._starting.pop(order.worker, None)
            if (worker := self._workers.get(order.worker)) is not None:
                worker.kill()
            raise

    async def _begin(self, order: m.StartWorker) -> None:
        warm = await self._pool.take()
        config = self._config
        early = self._starting.pop(order.worker)
        if order.worker in self._unwanted:
            # The process was taken from the pool already and nothing else refers to it. The core waits for
            # the Exited, whether the worker ever ran or not.
            os.kill(warm.pid, signal.SIGKILL)
            self._link.send(m.Exited(worker=order.worker, code=-signal.SIGKILL, killed=True))
            return
        worker = WorkerProcess(
            name=order.worker,
            slot=order.slot,
            warm=warm,
            folder=self._logs,
            timing=self._spec.timing,
            on_message=self._on_message,
            stalled=self._on_stall,
            exited=self._on_exit,
            reaped=self._leftovers.ended,
        )
        self._leftovers.began(warm.pid)
        self._workers[order.worker] = worker
        self._log_limit.add(worker.log)
        env = dict(order.env)
        env["HOLDFAST_JOB_DIR"] = str(config.job_dir)
        env["HOLDFAST_WORKER"] = order.worker
        env["HOLDFAST_NODE"] = config.node
        # torchrun's, one for each start: `torch.distributed.elastic`'s @record writes the error into it.
        env["TORCHELASTIC_ERROR_FILE"] = str(worker.log.with_suffix(".error.json"))
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if self._spec.log:
            env[LOG_VARIABLE] = self._spec.log
        worker.tell(
            m.Start(
                worker=order.worker,
                script=order.script,
                args=order.args,
                module=order.module,
                env=env,
                cwd=order.cwd,
                log=str(worker.log),
                page=worker.record.path,
                stacks=str(worker.stacks),
                token=self._token,
                host=config.host,
            )
        )
        # After Start, which must be the first message of a worker, and before Started: the core then finds
        # the worker in the state that its messages have put it into.
        for message in early:
            self._tell(worker, message)
        if self._notices.numbers:
            worker.tell(m.Notify(self._notices.standing()))
        _log.info("started a worker", extra={"worker": order.worker, "pid": warm.pid, "slot": order.slot})
        self._link.send(m.Started(order.worker, warm.pid, str(worker.log)))
        if (rank := env.get("RANK")) is not None:  # level 0: it trains from its start
            self._watcher.trains(worker.name, int(rank), worker.log)
            if rank == "0":
                self._follower.follow(worker.log)

    def _fence(self) -> None:
        """The job continued without this node. All of its workers end, and it joins again as a new node."""
        for worker in self._workers.values():
            worker.kill()
        # Their ends are still reported. But the hello that follows lists the workers of the new session, and
        # these are not among them.
        self._workers.clear()
        self._notices.put(())  # those of a new node are sent to it
        self._session = uuid.uuid4().hex
        self._link.send(self._hello())

    # ------------------------------------------------------------ what workers do

    def _on_message(self, worker: WorkerProcess, message: m.WorkerMessage) -> None:
        try:
            self._handle(worker, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the words after it are to be heard
            self._link.complain(f"handling {type(message).__name__} of {worker.name} failed", error)

    def _handle(self, worker: WorkerProcess, message: m.WorkerMessage) -> None:
        if isinstance(message, m.SlotWanted):
            # Slots are a matter between the worker and this node. The coordinator hears only how the copy
            # ended.
            self._spawn(self._give_slot(worker, message))
            return
        if isinstance(message, m.SnapshotExpected):
            if self._keeper is not None:
                self._keeper.expect(message)
            return
        if isinstance(message, m.SlotFilled):
            if self._keeper is not None:
                self._spawn(self._keeper.slot_filled(worker.name, message))
            return
        if isinstance(message, m.Imported):
            self._pool.import_ahead()
            if not message.modules:
                return
        within_s = REPORT_S if _may_wait(worker, message) else 0.0
        self._link.send(m.FromWorker(worker.name, message), within_s)  # before what may fail
        if isinstance(message, m.FaultFired):
            # After the message was queued. The fault may end this process, and the core must know that it was
            # injected before it sees the damage.
            self._spawn(self._let_happen(worker, message))
        # Without this, rules of the kind "no step for 60 s" would match on a worker that waits for the
        # others, and its node would be suspected.
        if isinstance(message, m.Parked | m.Done):
            self._watcher.pauses(worker.name)
        if isinstance(message, m.Failed):
            self._follower.append_quietly(worker.log, message.traceback)

    async def _give_slot(self, worker: WorkerProcess, message: m.SlotWanted) -> None:
        if self._keeper is None:
            reason = "this node has no snapshot memory"
            self._link.send(m.SnapshotRejected(message.key, reason))
            worker.tell(m.SlotGiven(message.key, None, reason))
            return
        try:
            answer = await self._keeper.slot_wanted(worker.name, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker waits for an answer
            reason = self._link.complain(f"no memory slot for the snapshot of {worker.name}", error)
            self._link.send(m.SnapshotRejected(message.key, reason))
            # The worker's step waits for an answer, so there is one for every error: without a slot it skips
            # this snapshot and trains on.
            answer = m.SlotGiven(message.key, None, reason)
        worker.tell(answer)

    def _on_stall(self, worker: WorkerProcess, view: m.WorkerView) -> None:
        _log.info(
            "a worker makes no progress",
            extra={
                "worker": worker.name,
                "step": view.page.committed,
                "idle_s": view.idle_s,
                "state": view.process,
            },
        )
        self._link.send(m.Stalled(worker.name, view))

    def _on_exit(self, worker: WorkerProcess, message: m.Exited) -> None:
        _log.info(
            "a worker ended",
            extra={"worker": worker.name, "pid": worker.pid, "code": message.code, "killed": message.killed},
        )
        # By identity: after a fence, a process that ends late is one of the old session, and a worker of that
        # name may be a new one.
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        self._log_limit.remove(worker.log)
        try:
            if self._keeper is not None:
                self._keeper.gone(worker.name)
                # A shard that was copied completely is still being checksummed here. The core must wait for
                # its SnapshotStored instead of counting it as lost with its worker.
                message = msgspec.structs.replace(message, summing=self._keeper.summing(worker.name))
            self._watcher.gone(worker.name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the core must hear of the end
            self._link.complain(f"handling the exit of {worker.name} failed", error)
        self._link.send(message)

    def _on_child_changed(self) -> None:
        self._leftovers.look()
        for worker in self._workers.values():
            worker.check_stopped()

    async def _inspect(self, request: int) -> None:
        """Saves the stacks of all workers and reports where each worker is."""
        # The stacks come first and the views second, so that a view is never older than the stack beside it:
        # the core compares the two to find who hangs.
        workers = [w for w in self._workers.values() if not w.gone]
        stacks = await self._save_stacks(workers)
        # Only nodes with members are inspected. At level 2 these are attached, and say on their pages where they are;
        # a spare that starts beside them must not hold up the answer.
        scripts = not any(w.attached for w in workers)
        groups = await asyncio.gather(*(w.ask_where() for w in workers)) if scripts else [None] * len(workers)
        views = tuple(w.view(g) for w, g in zip(workers, groups, strict=True))
        self._link.send(m.InspectReply(request, views, stacks))

    async def _save_stacks(self, workers: list[WorkerProcess]) -> dict[str, str]:
        sizes = {w.name: _size(w.stacks) for w in workers}
        for worker in workers:
            worker.tell(m.WriteStacks())
        await asyncio.sleep(STACKS_WAIT_S)
        if silent := [w for w in workers if _size(w.stacks) == sizes[w.name]]:
            for worker in silent:
                worker.signal_for_stacks()
            # A signal handler's output has no event; a stopped process has none.
            await asyncio.sleep(STACKS_WAIT_S)
        return {w.name: innermost(w.stacks, sizes[w.name]) for w in workers}

    async def _kill_after_copy(self, worker: WorkerProcess, keeper: SnapshotKeeper, grace_s: float) -> None:
        """Waits for a state that is being copied in parallel with the next step: it counts, whatever ends that step."""
        try:
            async with asyncio.timeout(grace_s):
                await keeper.copied(worker.name)
        except TimeoutError:
            pass
        self._save_stacks_then_kill(worker, grace_s)

    def _save_stacks_then_kill(self, worker: WorkerProcess, grace_s: float) -> None:
        """Wakes a stopped process so that it writes its stack. It was fenced before, so it can do no harm."""
        view = worker.view()
        if view.process in "Tt" and worker.attached:
            worker.signal_for_stacks()
            # In this order: the pending stack signal is delivered before the process runs its own code again.
            worker.signal(signal.SIGCONT)
            asyncio.get_running_loop().call_later(STACKS_WAIT_S, worker.kill)
        else:
            worker.kill(grace_s)

    # ------------------------------------------------------------ injected faults

    async def _let_happen(self, worker: WorkerProcess, message: m.FaultFired) -> None:
        """Acknowledges an injected fault, for which the worker waits. By then the coordinator's kernel has the report."""
        await self._link.flushed()
        fault = self._armed.get(message.fault)
        worker.tell(m.Ack(message.fault))
        if fault is not None and fault.kind in NODE_FAULTS:
            await self._node_fault(fault)

    async def _run_fault(self, fault: ArmedFault, name: str | None) -> None:
        worker = self._workers.get(name) if name else None
        signals = {
            FaultKind.KILL_WORKER: signal.SIGKILL,
            FaultKind.STOP_WORKER: signal.SIGSTOP,
            FaultKind.SEGFAULT: signal.SIGSEGV,
        }
        if fault.kind in NODE_FAULTS:
            self._link.send(m.FaultFired(fault.id))
            await self._link.flushed()
            await self._node_fault(fault)
        elif worker is not None and fault.kind in signals:
            self._link.send(m.FaultFired(fault.id))
            await self._link.flushed()
            worker.signal(signals[fault.kind])
        elif worker is not None or name is None:
            self._armed[fault.id] = fault
            for each in [worker] if worker is not None else list(self._workers.values()):
                each.tell(m.Arm((fault,)))

    async def _node_fault(self, fault: ArmedFault) -> None:
        kind = fault.kind
        _log.info("an injected fault strikes this node", extra={"fault": kind.value})
        if kind in MACHINE_FAULTS:
            await simulated_sources.strike(self._watcher, fault)
            return
        if kind is FaultKind.PREEMPT_NODE:
            self._on_sigterm()
            return
        if kind is FaultKind.DROP_NODE:
            for worker in self._workers.values():
                worker.tell(m.DropTraffic())
            # Nothing is closed, as with a pulled cable. A closed connection would be news to the coordinator,
            # and its detection by silence would not be tried.
            self._link.go_silent()
            return
        for worker in self._workers.values():
            worker.signal(signal.SIGKILL if kind is FaultKind.KILL_NODE else signal.SIGSTOP)
        # Workers first: this process cannot signal anybody after it has stopped itself.
        os.kill(os.getpid(), signal.SIGKILL if kind is FaultKind.KILL_NODE else signal.SIGSTOP)

    def _on_files_changed(self) -> None:
        self._watcher.files_changed()

    def _report(self, found: m.FindingsReported | m.NodeReadings) -> None:
        self._link.send(found)

    # ------------------------------------------------------------ the end

    def _on_sigterm(self) -> None:
        """SIGTERM: this machine will be taken away (Slurm, Kubernetes and spot markets send it).

        The job continues without it after the current step. A second SIGTERM, or one without a coordinator, ends the
        node at once.
        """
        now = asyncio.get_running_loop().time()
        if self._leaving is not None and now < self._terminated_at + SAME_SIGNAL_S:
            return
        # A scheduler signals all of the job at once, the coordinator too, which then hands over. The next one is told.
        expected = self._link.connected or self._link.left_to_another
        if self._leaving is not None or not expected:
            self._over.set()
            return
        _log.info("SIGTERM: leaving within the grace", extra={"grace_s": self._config.grace_s})
        self._terminated_at = now
        self._reason = "SIGTERM"
        self._leaving = m.Leaving(self._reason, self._config.grace_s)
        self._link.send(self._leaving)
        self._drain(self._reason)
        # The scheduler kills the node at the end of the grace, whatever the coordinator does. Ending before
        # it lets the hooks run.
        asyncio.get_running_loop().call_later(self._config.grace_s, self._over.set)

    def _drain(self, reason: str) -> None:
        """Runs on-drain, because the node is to leave. The coordinator repeats the order after a reconnection."""
        # Once: a hook such as "copy the files away" that ran again after each reconnection would meet its own
        # first run.
        if self._draining is None:
            _log.info("this node is to leave: %s", reason)
            self._draining = asyncio.create_task(self._hook("on-drain", reason))

    def _on_connection_lost(self) -> None:
        """Ends a node that is leaving: it waits for another coordinator only where one is on its way. Without a launcher
        there is none."""
        if self._sending_ledger is not None:
            self._sending_ledger.cancel()  # whoever asked for it is gone, and the next one asks anew
        if self._launcher_lost or (self._leaving is not None and not self._link.left_to_another):
            self._over.set()

    def _on_orphaned(self) -> None:
        _log.warning("no coordinator for %g s; ending the workers and this agent", self._link.patience_s)
        self._over.set()

    def _on_launcher_gone(self, lifeline: int) -> None:
        """Waits for the coordinator, which also knows and stops the job in order. This is for when it is gone too."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(lifeline)
        # Twice the time that a stop in order takes. An agent that ended sooner would take its workers from a
        # job that is still saving its last state.
        loop.call_later(2 * self._spec.timing.stop_s, self._left_alone)

    def _left_alone(self) -> None:
        self._launcher_lost = True
        _log.info("the launcher has ended", extra={"connected": self._link.connected})
        # A coordinator that lives has lost its launcher as well, and ends the job in order. Only without one
        # does nobody else end these workers.
        if not self._link.connected:
            self._over.set()

    async def _end_workers(self) -> None:
        left = list(self._workers.values())
        for worker in left:
            worker.kill()
        for worker in left:
            await worker.finished()

    def _on_link_ended(self, conversation: asyncio.Task[None]) -> None:
        """Ends the agent. Without its link it would get no more orders, and nobody could fence its workers."""
        if conversation.cancelled() or (error := conversation.exception()) is None:
            return
        self._code = 1
        self._reason = f"the agent's link to the coordinator broke: {error!r}"
        _log.error("%s; ending the workers", self._reason, exc_info=error)
        self._over.set()

    def _spawn(self, work: Coroutine[Any, Any, None], order: m.ToAgent | None = None) -> asyncio.Task[None]:
        """Runs the work in parallel. order: the one that it carries out; its failure is reported to the core."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._on_task_ended(ended, order))
        return task

    def _on_task_ended(self, task: asyncio.Task[None], order: m.ToAgent | None) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if order is not None:
            self._link.failed(order, error)
        else:
            self._link.complain(f"{task.get_coro().__qualname__} ended", error)  # type: ignore[union-attr]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _may_wait(worker: WorkerProcess, message: m.WorkerMessage) -> bool:
    """Whether the coordinator need not receive a report at once. That holds for further steps of a generation on other ranks
    than 0, because rank 0 reports the same steps."""
    if not isinstance(message, m.Progress) or worker.rank is None:
        return False
    first, worker.reported = worker.reported != message.generation, message.generation
    return worker.rank > 0 and not first


def _free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that were free just now, for level 0's MASTER_PORT: a new one for every start."""
    # All are open at once, else the kernel could give the same port twice. Another program may take one
    # before rank 0 does; then that start fails, and the next one uses the next port.
    sockets = [listening(host) for _ in range(count)]
    ports = tuple(s.getsockname()[1] for s in sockets)
    for s in sockets:
        s.close()
    return ports
