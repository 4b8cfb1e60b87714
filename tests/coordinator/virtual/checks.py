"""The invariants that only a whole service can break, and those of `simcluster` for batches of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from simcluster.checks import Checks, Violation, _is_heartbeat

from holdfast.agent.coordinator_link import ANSWER_S
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import CoreState, JobPhase, WorkerPhase
from holdfast.coordinator.machine import Core
from holdfast.coordinator.service.queues import AgentQueue
from holdfast.coordinator.service.server import Coordinator
from holdfast.coordinator.service.store import SNAPSHOT, LedgerBatch, Store
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Copy, Key

if TYPE_CHECKING:
    from virtual.cluster import VirtualCluster


class VirtualChecks(Checks):
    """What holds after each event of `simcluster` holds here after each batch."""

    cluster: VirtualCluster

    def __init__(self, cluster: VirtualCluster) -> None:
        super().__init__(cluster)
        self._batch: Sequence[e.Event] = ()
        self._runs = False
        self._just_held: set[tuple[str, Key]] = set()
        self._just_joined: set[str] = set()
        asked = self.saved._check_asked

        def check(node: str, copy: Copy) -> None:
            if (node, copy.key) not in self._just_held and node not in self._just_joined:
                asked(node, copy)

        self.saved._check_asked = check  # type: ignore[method-assign]

    def fail(self, text: str, *args: Any) -> NoReturn:
        try:
            super().fail(text, *args)
        except Violation as violation:
            # It may be raised in a task of the service, where somebody would catch it.
            self.cluster.violation = self.cluster.violation or violation
            raise

    def restarted(self, core: Core) -> None:
        super().restarted(core)
        # The one before may have formed a generation and died before that was written.
        if core.state.membership.number != self._number:
            self._number = core.state.membership.number
            self._places.clear()
        self._runs = False

    def handled_all(self, events: Sequence[e.Event], actions: list[e.Action], core: Core) -> None:
        """After a batch."""
        self._core = core
        told_s, before, heard_s = self._heard_s, self._heard, self._heard_s
        for event in events:
            # Steps that were made while the order to break waited for the disk are of the stall.
            if isinstance(event, e.WorkersSay) and self._runs:
                ages = [r.age_s + event.waited_s for r in event.reports if isinstance(r.message, m.Progress)]
                told_s = max([told_s, *(self.cluster.clock.now - age_s for age_s in ages)])
        # What an event has the core order may be out of date by a later event of its batch.
        self._batch = events
        self._just_joined = {event.hello.node for event in events if isinstance(event, e.NodeJoined)}
        self._just_held = {
            (event.node, event.message.copy.key)
            for event in events
            if isinstance(event, e.NodeSays) and isinstance(event.message, m.SnapshotStored)
        }
        cleared = [event for event in events if isinstance(event, e.MachineCleared)]
        last = (cleared or events)[-1]
        for event in events:
            if event is not last:
                self._heard_of(event, core)
        self.handled(last, actions, core)
        self._runs = core.state.membership.phase is JobPhase.RUNNING
        # What waited in an agent, or for the disk, has the time at which it was said.
        self._heard_s = told_s if self._heard != before else heard_s
        self.cluster.invariants.decided(events, actions, core)

    def _check_action(self, action: e.Action, state: CoreState) -> None:
        match action:
            case e.Send(_, m.Relay(name, m.JoinGeneration())) if len(self._batch) > 1:
                known = state.membership.workers.get(name)
                if known is None or known.phase is WorkerPhase.GONE:
                    return
            case _:
                pass
        super()._check_action(action, state)

    def _heard_of(self, event: e.Event, core: Core) -> None:
        if not isinstance(event, e.Tick) and not _is_heartbeat(event):
            self.cluster.log("core <- %s", event)
        self._provided -= isinstance(event, e.NodeUnavailable)
        self.saved._hear(event, core.state)


class Invariants:
    """Knows what was written, and who is well."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self._orders: dict[int, m.ToAgent] = {}
        self._decided = b""
        self._newest: Coordinator | None = None
        self._written = b""
        self._stands: dict[bytes, tuple[int, int]] = {}
        self._seq = 0
        self._committed = (0, 0)
        self._suffered: dict[str, float] = {}
        self._ailed: dict[str, float] = {}
        self._terms: dict[str, int] = {}
        self._cut_off: dict[str, float] = {}
        self._only_disk = True
        self.lost: dict[str, int] = {}

    # ------------------------------------------------------------ the ledger

    def began(self, coordinator: Coordinator) -> None:
        """A process has read the ledger, and is about to decide."""
        require, state = self.cluster.checks.require, coordinator._core.state
        require(coordinator._loop.seq >= self._seq, "entry %d was written and is lost", self._seq)
        there = (state.membership.number, state.membership.committed)
        require(there >= self._committed, "%s stood written, and %s is left", self._committed, there)
        self._orders.clear()
        self._stands.clear()
        store: Any = coordinator._ledger.store
        self._newest = coordinator
        self._watch(coordinator, store)
        opens = coordinator._ledger._open

        def reopened() -> Store:
            opened = opens()
            self._watch(coordinator, opened)
            return opened

        coordinator._ledger._open = reopened

    def superseded(self) -> None:
        """The ledger was copied for another one: what is written into the old file from now on is lost on purpose."""
        self._newest = None

    def _watch(self, coordinator: Coordinator, store: Any) -> None:
        write = store.write

        def wrote(batch: LedgerBatch) -> None:
            write(batch)
            if coordinator is not self._newest:
                return  # another one goes on from a copy
            self._written = batch.kept.get(SNAPSHOT, self._written)
            if SNAPSHOT in batch.kept:
                # Of a state that ordered nothing it is not known: a first start may have been taken back.
                self._committed = self._stands.get(self._written, (0, 0))
            self._seq = max([self._seq, *(entry.seq for entry in batch.entries)])

        store.write = wrote

    def decided(self, events: Sequence[e.Event], actions: list[e.Action], core: Core) -> None:
        """A batch was decided. None of its orders may leave before its page is written."""
        self._orders = {id(a.message): a.message for a in actions if isinstance(a, e.Send)}
        if self._orders:
            self._decided = msgspec.msgpack.encode(core.state)
            self._stands[self._decided] = (core.state.membership.number, core.state.membership.committed)
        for action in actions:
            if isinstance(action, e.Record) and action.kind == "node-lost":
                self._lost_node(str(action.fields["node"]), str(action.fields["cause"]))
            if isinstance(action, e.Record) and action.kind == "stall-judged":
                for name in action.fields["workers"]:
                    self._named(name)

    def sending(self, coordinator: Coordinator, node: str, message: m.ToAgent) -> None:
        """An order goes into the queue of a connection."""
        if id(message) in self._orders and not coordinator._loop.unwritten:
            self.cluster.checks.require(
                self._written == self._decided, "%s leaves for %s before its page is written", message, node
            )

    # ------------------------------------------------------------ who is well

    def struck(self, kind: str) -> None:
        """Something of the service's surroundings."""
        self._only_disk = self._only_disk and kind.startswith("disk")

    def obeyed(self, node: str, term: int) -> None:
        """An agent carries out an order of a coordinator of this term."""
        before = self._terms.get(node, 0)
        self.cluster.checks.require(term >= before, "%s obeys term %d after term %d", node, term, before)
        self._terms[node] = term

    def suffers(self, machine: str, ails: bool = False) -> None:
        """Something happens to a machine: its loss within a while is no fault of the service. ails: nor is that of a worker."""
        self._suffered[machine] = self.cluster.clock.now
        if ails:
            self._ailed[machine] = self.cluster.clock.now

    def heard(self, event: e.Event) -> None:
        """An event is queued for the core, which may hear of it only when the disk has answered."""
        if isinstance(event, e.NodeLost):
            self._cut_off[event.node] = self.cluster.clock.now

    def speaks(self, coordinator: Coordinator, line: AgentQueue) -> None:
        """A message of a connection is taken in."""
        ours = coordinator._lines.by_node.get(line.node) is line
        self.cluster.checks.require(ours, "a connection of %s speaks that was replaced", line.node)

    def _lost_node(self, name: str, cause: str) -> None:
        self.lost[cause] = self.lost.get(cause, 0) + 1
        agent, cluster = self.cluster.agents.get(name), self.cluster
        if agent is None or not agent.alive or agent.silent or agent.leaving is not None:
            return
        if not cause.startswith("silent for") and "connection closed" not in cause:
            return
        # A connection that breaks before it is answered is given up after `ANSWER_S`.
        patience_s = ANSWER_S + 3 * cluster.plan.spec.timing.detection_s
        since_s = self._cut_off.get(name, cluster.clock.now) if "closed" in cause else cluster.clock.now
        well = since_s - self._suffered.get(name, float("-inf")) > patience_s
        cluster.checks.require(not well, "%s is well, and lost: %s", name, cause)

    def _named(self, name: str) -> None:
        """A worker is to have kept the others waiting."""
        cluster, worker = self.cluster, self.cluster.workers.get(name)
        if cluster.plan.faults or cluster.plan.triggers or worker is None or not worker.running:
            return
        patience_s = 3 * cluster.plan.spec.timing.detection_s
        machine = worker.agent.name
        well = cluster.clock.now - self._ailed.get(machine, float("-inf")) > patience_s
        cluster.checks.require(not well or worker.agent.silent, "%s is well, and named for a stall", name)

    def final(self) -> None:
        """The job has ended."""
        plan, luck = self.cluster.plan, self.cluster.luck
        state = self.cluster.checks.last_state()
        disturbed = plan.faults or plan.triggers or plan.changes or plan.findings or plan.bug
        if not disturbed and self._only_disk and not plan.torn_end and not luck.power_fails:
            self.cluster.checks.require(
                not state.membership.lost_steps and not state.membership.restarts_used,
                "only the disk was broken: %d steps are lost, %d restarts used",
                state.membership.lost_steps,
                state.membership.restarts_used,
            )
            for agent in self.cluster.agents.values():
                self.cluster.checks.require(
                    not agent.connections_lost, "only the disk was broken: %s was cut off", agent.name
                )
