"""The coordinator's process: the real service on a virtual loop, its launcher, and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.machine import Core
from holdfast.coordinator.service.queues import AgentQueue
from holdfast.coordinator.service.server import Coordinator
from holdfast.coordinator.service.store import succeed
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import EngineOrder
from holdfast.protocol.job import Durable, Resume
from holdfast.protocol.leadership import EXIT_SUPERSEDED, GRACE_S, claim_term, newest_term
from holdfast.protocol.network.endpoint import Endpoint
from virtual.disk import DiskThread
from virtual.loop import HANDLE_S, Exited, State, VirtualLoop
from virtual.network import Door, Socket

if TYPE_CHECKING:
    from virtual.cluster import VirtualCluster

HEAD, SECOND = "head", "second"
"""The machine of the coordinator, and another one that may take its place."""


class Process:
    """One run of the coordinator."""

    def __init__(self, service: VirtualService, number: int, machine: str, term: int) -> None:
        self.service, self.cluster, self.number = service, service.cluster, number
        self.machine, self.term = machine, term
        self.superseded = False
        """Another one goes on from its ledger: nothing that this one decides from now on counts."""
        self.loop = VirtualLoop(self.cluster.clock, f"coordinator {number}", self.cluster.broke)
        self.loop.handle_s = self.cluster.luck.coordinator_handle_s
        self.cluster.loops.append(self.loop)
        self.loop.at_end.append(self._on_end)
        self.loop.answers = self._listens
        self.coordinator: Coordinator | None = None
        self.where = Endpoint(host=machine, port=1, pid=number, instance=f"c{number}", term=term)
        self._serving: list[asyncio.Task[None]] = []
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._main = self.loop.create_task(self._serve())
        self._main.add_done_callback(self._on_main_ended)

    async def _serve(self) -> None:
        cluster = self.cluster
        self.coordinator = coordinator = Coordinator(
            cluster.job_dir,
            cluster.plan.spec,
            Resume(self.service.checkpoints),
            self.term,
            steady=self.loop.time,
            thread=lambda name: DiskThread(cluster.disk, self.loop, name),  # type: ignore[arg-type, return-value]
            exit_now=self._exit_now,
        )
        self._hook(coordinator)
        if not self.superseded:
            self.service.began(coordinator)
        coordinator.begin(self.where)
        self.service.doors[self.machine].open(self.loop, self._accept)
        for order in coordinator._loop.open_orders() if not self.superseded else ():
            self.service.ordered(order)
        await coordinator.run(self)  # type: ignore[arg-type]
        await coordinator.farewell()
        self.close()
        await coordinator.close()

    def _exit_now(self, code: int) -> NoReturn:
        self.service.exited(self, code)
        self.loop.kill()
        raise Exited

    def _on_main_ended(self, main: asyncio.Task[None]) -> None:
        if main.cancelled() or (error := main.exception()) is None:
            self.service.exited(self, 0)
            self.loop.kill()
        elif not isinstance(error, Exited):
            self.cluster.broke(f"the coordinator broke: {error!r}", error)

    def _on_end(self) -> None:
        if self.service.doors[self.machine].loop is self.loop:
            self.close()
        self.cluster.network.ended(self.loop)
        if self.coordinator is not None and (store := self.coordinator._ledger._store) is not None:
            store.close()

    def _listens(self, machine: str) -> bool | None:
        """For those that fetch snapshots."""
        network = self.cluster.network
        if not network.passes(self.machine, machine) or not network.passes(machine, self.machine):
            return None
        return self.cluster.agents[machine].loop.alive

    # ------------------------------------------------------------ its entrance

    def close(self) -> None:
        """Who connects from now on waits for the next process."""
        self.service.doors[self.machine].close()

    async def settled(self) -> None:
        """Nobody is between the door and the service."""

    def _accept(self, socket: Socket) -> None:
        self._serving.append(self.loop.create_task(self._talk(socket)))

    async def _talk(self, socket: Socket) -> None:
        assert self.coordinator is not None
        try:
            await socket.send_bytes(self.where.instance.encode())
            await self.coordinator._agents.talk(socket, socket)  # type: ignore[arg-type]
        except ConnectionError:
            pass
        finally:
            socket.shut()

    # ------------------------------------------------------------ what is looked at

    def _hook(self, coordinator: Coordinator) -> None:
        """Looks on where the service calls the core, and where it carries out what was decided."""
        core, loop, lines = coordinator._core, coordinator._loop, coordinator._lines
        handle_all, do, send, take_in = core.handle_all, loop.do, lines.send, loop._take_in
        agents, invariants = coordinator._agents, self.cluster.invariants
        on_message = agents._on_message
        ailments = self.cluster.ailments

        async def past(machine: str, devices: Sequence[str]) -> Any:
            self.cluster.strike_at("joining", next(iter(self.cluster.joining(machine)), ""))
            await asyncio.sleep(self.cluster.luck.history_s * self.cluster.draw("a history"))
            return ailments.past(machine)

        coordinator._memory.past = past  # type: ignore[method-assign]
        coordinator._memory.remember = lambda record: None  # type: ignore[method-assign]

        def handled(events: Sequence[e.Event], now: float) -> list[e.Action]:
            if self.superseded:
                return handle_all(events, now)
            self.service.batch_begins()
            actions = handle_all(events, now)
            self.cluster.checks.handled_all(events, actions, core)
            return actions

        def done(action: e.Action) -> None:
            do(action)
            if not self.superseded:
                self.service.performed(action)

        def sent(node: str, message: m.ToAgent) -> None:
            if not self.superseded:
                invariants.sending(coordinator, node, message)
            send(node, message)

        def taken_in(event: e.Event, line: AgentQueue | None = None) -> Any:
            if not self.superseded:
                invariants.heard(event)
            return take_in(event, line)

        async def heard(line: AgentQueue, message: m.AgentMessage) -> None:
            invariants.speaks(coordinator, line)
            await on_message(line, message)

        core.handle_all = handled  # type: ignore[method-assign]
        loop.do = done  # type: ignore[method-assign]
        lines.send = sent  # type: ignore[method-assign]
        loop._take_in = taken_in  # type: ignore[method-assign]
        agents._on_message = heard  # type: ignore[method-assign]


class VirtualService:
    """What the rest of `simcluster` sees of the coordinator. A launcher starts it again when it dies."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.doors = {machine: Door(cluster.network, machine) for machine in cluster.heads}
        self.machine, self.term = HEAD, int(cluster.luck.shared)
        """Where the newest coordinator is to be started, and in which term."""
        if self.term:
            claim_term(cluster.job_dir, self.term, HEAD)
        self.ended: str | None = None
        self.over = False
        """The process of a coordinator whose job has ended is gone, too."""
        self.crashes = 0
        self.starts = 0
        self.checkpoints: tuple[Durable, ...] = ()
        self._dies_at = 0
        self._done: set[int] = set()
        self.process: Process | None = None
        self.processes: list[Process] = []

    def start(self) -> None:
        """One more process."""
        if self.over or self.process is not None or self.machine in self.cluster.network.dark:
            return
        self.starts += 1
        self.process = Process(self, self.starts, self.machine, self.term)
        self.processes.append(self.process)

    @property
    def up(self) -> bool:
        """The process lives, and has read its ledger."""
        return self.core is not None

    @property
    def core(self) -> Core | None:
        """That decides now."""
        process = self.process
        return None if process is None or process.coordinator is None else process.coordinator._core

    def handle(self, event: e.Event) -> None:
        """Something from outside, such as a person's request."""
        process = self.process
        if process is not None and process.coordinator is not None:
            process.loop.call_soon(process.coordinator._loop.handle, event)

    def began(self, coordinator: Coordinator) -> None:
        """A process has read its ledger."""
        self.cluster.log("coordinator %s begins", self.starts)
        if self.starts > 1:
            self.cluster.checks.restarted(coordinator._core)
        self.cluster.invariants.began(coordinator)

    # ------------------------------------------------------------ what was decided

    def performed(self, action: e.Action) -> None:
        """The service has carried it out."""
        match action:
            case e.Record():
                self.cluster.checks.recorded(action)
            case e.End(outcome):
                self.ended = outcome
                self.cluster.ended(outcome)
            case e.Send() | e.Remember():
                pass
            case _:
                self.ordered(action)

    def ordered(self, order: EngineOrder) -> None:
        """The engine hears of it, once more after a restart."""
        if order.order_id not in self._done:
            self._done.add(order.order_id)
            self.cluster.clock.after(self.cluster.latency_s(), self._carry_out, order)
        self.cluster.clock.after(2 * self.cluster.latency_s(), self.handle, e.OrderDone(order.order_id))

    def _carry_out(self, order: EngineOrder) -> None:
        match order:
            case e.ProvideNode():
                self.cluster.provide()
            case e.ReleaseNode(node=node):
                self.cluster.release(node)
            case e.MarkNode() | e.RebootNode():
                self.cluster.ailments.acted(order)

    # ------------------------------------------------------------ death

    def crash_soon(self) -> None:
        """The process dies in one of its next batches: before it is written, meanwhile, or when some orders have left."""
        if self.up and not self._dies_at:
            self._dies_at = 1 + int(3 * self.cluster.draw("batches before a crash"))

    def batch_begins(self) -> None:
        """The core decides on one now."""
        if not self._dies_at:
            return
        self._dies_at -= 1
        if not self._dies_at:
            delay_s = self.cluster.draw("into the batch") * 4 * self.cluster.disk.write_s
            self.cluster.clock.after(delay_s, self.crash)

    def calm(self) -> None:
        """A crash that has not happened yet does not happen."""
        self._dies_at = 0

    def crash(self) -> None:
        """SIGKILL. The launcher starts another one in a while."""
        process = self.process
        if process is None or self.over or not process.loop.alive:
            return
        self.cluster.log("the coordinator dies")
        self.crashes += 1
        self.process, self._dies_at = None, 0
        process.loop.kill()
        self._again()

    def _again(self) -> None:
        draw = self.cluster.draw
        delay_s = (0.1, 0.5, 1.0, 3.0, 8.0)[int(5 * draw("a restart"))] * (0.5 + draw("its delay"))
        self.cluster.clock.after(delay_s, self.start)

    def exited(self, process: Process, code: int) -> None:
        """It ended itself."""
        self.cluster.log("coordinator %s ends with %d", process.number, code)
        if process is not self.process or code == EXIT_SUPERSEDED:
            self.process = None if process is self.process else self.process
            self._shut(self.doors[process.machine])
            return
        self.process = None
        if code == 0:
            self.over = True
        else:
            self.crashes += 1
            self._again()

    def supersede(self) -> None:
        """The other machine claims the next term; when its predecessor must have seen that, it goes on from the ledger."""
        term = newest_term(self.cluster.job_dir) + 1
        machine = SECOND if self.machine == HEAD else HEAD
        if self.over or machine in self.cluster.network.dark or term != self.term + 1:
            return
        claim_term(self.cluster.job_dir, term, machine)
        delay_s = GRACE_S + self.cluster.draw("a successor begins")
        self.cluster.clock.after(delay_s, self._succeed, machine, term)

    def _succeed(self, machine: str, term: int) -> None:
        if self.over:
            return
        job_dir, before = self.cluster.job_dir, self.process
        self.cluster.log("%s goes on in term %d", machine, term)
        store = None
        if before is not None and before.coordinator is not None:
            store = before.coordinator._ledger._store
        if store is None:
            succeed(job_dir, term)
        else:
            # Its process lives, and has its file locked. Nobody writes meanwhile: here the copy takes no time.
            (job_dir / f"job-{term}.sqlite").write_bytes(store.copy())
        self.cluster.invariants.superseded()
        old, self.process, self.machine, self.term = self.doors[self.machine], None, machine, term
        self._dies_at = 0
        for process in self.processes:
            process.superseded = True
        for agent in self.cluster.agents.values():
            self.cluster.invariants.suffers(agent.name, ails=True)
        if before is None:
            # Its launcher starts another one, which sees the later term and ends; then the launcher ends, too.
            self.cluster.clock.after(2 * self.cluster.draw("a launcher ends"), self._shut, old)
        elif before.loop.state is not State.RUNS or before.loop.handle_s > HANDLE_S:
            # One that goes on later would decide and send before it looks at the term. Generations do not have terms yet,
            # so nothing would tell its orders from those of its successor.
            before.loop.kill()
            self._shut(old)
        self.crashes += 1
        self.start()

    def _shut(self, door: Door) -> None:
        if door.machine != self.machine:
            door.shut()

    def terminate(self) -> None:
        """SIGTERM: it hands over to the next process."""
        process = self.process
        if process is not None and process.coordinator is not None:
            process.loop.call_soon(process.coordinator._on_sigterm)

    def stop(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        if self.process is not None:
            self.process.loop.stop_process()
            self.cluster.clock.after(for_s, self.process.loop.continue_process)
