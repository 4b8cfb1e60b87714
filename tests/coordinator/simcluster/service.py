"""The coordinator's process around the real core: persists, sends, crashes, comes back; and the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.machine import Core
from holdfast.coordinator.service.decision_loop import routine
from holdfast.protocol import messages as m
from simcluster.agent import Connection
from simcluster.clock import Timer

if TYPE_CHECKING:
    from simcluster.cluster import Cluster


class Service:
    """Drives the core as the real service does: the state is on disk before any action is taken."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.core: Core | None = Core(cluster.plan.spec)
        self.connections: dict[str, Connection] = {}
        self.sockets: set[Connection] = set()
        self.ended: str | None = None
        self.crashes = 0
        self._dies_between = False
        self._disk = b""
        self._last_s = cluster.clock.now
        self._tick: Timer | None = None
        self._tick_s: float | None = None

    @property
    def up(self) -> bool:
        """The process lives."""
        return self.core is not None

    # ------------------------------------------------------------ in

    def receive(self, connection: Connection, message: m.AgentMessage) -> None:
        """A message arrived on a connection."""
        if not self.up or not connection.open:
            return
        if isinstance(message, m.Hello):
            connection.session = message.session
            before = self.connections.get(message.node)
            self.connections[message.node] = connection
            if before is not None and before is not connection:
                self._drop(before)
            self.handle(e.NodeJoined(message, self.cluster.ailments.past(message.identity)))
        elif self.connections.get(connection.agent.name) is connection:
            node = connection.agent.name
            report = isinstance(message, m.FromWorker)
            self.handle(e.WorkersSay(node, (message,)) if report else e.NodeSays(node, message))

    def peer_closed(self, connection: Connection) -> None:
        """An agent's end of a connection closed: what is still on its way may be lost or not."""
        if self.cluster.rng.random() < 0.5:
            connection.up.close()
        delay = self.cluster.latency_s() + self.cluster.rng.uniform(0.0, 0.02)
        self.cluster.clock.after(delay, self._closed, connection)

    def _closed(self, connection: Connection) -> None:
        if not connection.open:
            return
        if connection.agent.silent:
            return  # a dead machine closes nothing
        connection.open = False
        self.sockets.discard(connection)
        if self.connections.get(connection.agent.name) is connection:
            del self.connections[connection.agent.name]
            if self.up:
                self.handle(e.NodeLost(connection.agent.name, connection.session))

    def handle(self, event: e.Event) -> None:
        """One event through the core, and what it asks for."""
        core, now = self.core, self.cluster.clock.now
        if core is None:
            return
        if self._dies_between and self.cluster.rng.random() < 0.2:
            self.crash()  # before the event was on disk: it is as if it never came
            return
        actions = core.handle(event, now)
        self.cluster.checks.handled(event, actions, core)
        if self.cluster.plan.coordinator_dies and (actions or not routine(event)):
            self._last_s, self._disk = now, msgspec.msgpack.encode(core.state)
        if self._dies_between:
            self._send_some(actions)
            self.crash()
            return
        for action in actions:
            self._perform(action)
        if self.core is core:
            self._wind(core)

    def _wind(self, core: Core) -> None:
        due = core.next_deadline()
        self.cluster.checks.deadline(due)
        if due == self._tick_s and self._tick is not None:
            return
        if self._tick is not None:
            self._tick.cancel()
        self._tick_s = due
        self._tick = None if due is None else self.cluster.clock.at(due, self._tick_due)

    def _tick_due(self) -> None:
        self._tick = self._tick_s = None
        self.handle(e.Tick())

    # ------------------------------------------------------------ out

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Send(node, message):
                connection = self.connections.get(node)
                if connection is not None and connection.open:
                    # No draw for what decides nothing: the schedules of all seeds stay what they were.
                    connection.down.send(message, draws=not isinstance(message, m.Notify))
            case e.Record():
                self.cluster.checks.recorded(action)
            case e.ProvideNode():
                self.cluster.provide()
            case e.ReleaseNode(node=node):
                if self.cluster.plan.closes_released and (connection := self.connections.pop(node, None)):
                    self._drop(connection)
                self.cluster.release(node)
            case e.MarkNode() | e.RebootNode() | e.Remember():
                self.cluster.ailments.acted(action)
            case e.End(outcome):
                self.ended = outcome
                self.cluster.ended(outcome)

    def _send_some(self, actions: list[e.Action]) -> None:
        """The crash comes while the actions are on their way: each node got only the first of its messages."""
        rng = self.cluster.rng
        left: dict[Any, int] = {}
        for action in actions:
            if isinstance(action, e.Send) and isinstance(action.message, m.Notify):
                continue  # it is lost: a hello brings it again
            key = action.node if isinstance(action, e.Send) else id(action)
            left.setdefault(key, rng.choice((0, 0, 1, 2, 99)))
            if left[key] > 0:
                left[key] -= 1
                self._perform(action)

    def _drop(self, connection: Connection) -> None:
        """Closes a connection from this side."""
        connection.open = False
        self.sockets.discard(connection)
        connection.up.close()
        self.cluster.clock.after(self.cluster.latency_s(), self._dropped, connection)

    def _dropped(self, connection: Connection) -> None:
        if connection.agent.silent:  # nobody hears it until the network is back
            self.cluster.clock.after(0.5, self._dropped, connection)
            return
        connection.down.close()
        connection.agent.disconnected(connection)

    # ------------------------------------------------------------ crash

    def crash_soon(self) -> None:
        """The process dies at its next event: before that is on disk, or before all messages are out."""
        if self.up:
            self._dies_between = True

    def calm(self) -> None:
        """A crash that has not happened yet does not happen."""
        self._dies_between = False

    def crash(self) -> None:
        """The process dies now and a new one starts in a while."""
        if self.core is None:
            return
        self.cluster.log("the coordinator dies")
        self.core, self._dies_between = None, False
        self.crashes += 1
        if self._tick is not None:
            self._tick.cancel()
            self._tick = self._tick_s = None
        for connection in sorted(self.sockets, key=lambda c: c.session):
            self._drop(connection)
        self.connections, self.sockets = {}, set()
        rng = self.cluster.rng
        self.cluster.clock.after(rng.choice((0.1, 0.5, 1.0, 3.0, 8.0)) * rng.uniform(0.5, 1.5), self._restart)

    def _restart(self) -> None:
        state = msgspec.msgpack.decode(self._disk, type=CoreState)
        self.core = Core(self.cluster.plan.spec, state)
        self.cluster.log("the coordinator is back")
        self.cluster.checks.restarted(self.core)
        self.handle(e.Recovered(self._last_s))
