"""A simulated agent with the real link to the coordinator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from simcluster.agent import SimAgent
from simcluster.worker import SIGKILL

from holdfast.agent.coordinator_link import CoordinatorLink, Outbox
from holdfast.errors import ProtocolError
from holdfast.protocol import generation_difference
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING
from holdfast.protocol.network.lookup import FolderLookup
from virtual.loop import State, VirtualLoop
from virtual.network import Dialler

if TYPE_CHECKING:
    from virtual.cluster import VirtualCluster


class VirtualAgent(SimAgent):
    """The process of one node's agent: its orders and its workers as in `simcluster`, its connection as it is."""

    cluster: VirtualCluster

    # ------------------------------------------------------------ the process

    def _connect(self) -> None:
        cluster = self.cluster
        self.generation = NOTHING
        self.connections_lost = 0
        self.loop = VirtualLoop(cluster.clock, self.name, cluster.broke)
        self.loop.handle_s = cluster.luck.handle_s
        self.loop.at_end.append(lambda: cluster.network.ended(self.loop))
        cluster.loops.append(self.loop)
        timing = cluster.plan.spec.timing
        self.link = CoordinatorLink(
            lookup=FolderLookup(cluster.job_dir),
            token="token",
            hello=self._hello,
            take=self._take,
            orphan_s=timing.orphan_s,
            orphaned=self._orphaned,
            heartbeat_s=timing.heartbeat_s,
            lost=self._on_connection_lost,
            connect=Dialler(cluster.network, self.loop, self.name).connected,
            clock=self.loop.time,
        )
        if cluster.luck.kept_messages:
            self.link._outbox = Outbox(cluster.luck.kept_messages)
        self.running: asyncio.Task[None] | None = None
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self.running = self.loop.create_task(self.link.run())
        self.running.add_done_callback(self._on_link_ended)

    def _on_link_ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self.cluster.broke(f"the link of {self.name} broke: {error!r}")
        self.loop.kill()

    def _orphaned(self) -> None:
        self.cluster.log("%s is orphaned", self.name)
        self._leave()

    def _on_connection_lost(self) -> None:
        self.connections_lost += self.cluster.service.ended is None
        if self.leaving is not None and not self.link.left_to_another:
            self._leave()

    def _leave(self) -> None:
        """The agent ends in order: its workers first, its connection last."""
        self.alive = False
        for worker in self.living():
            worker.die(SIGKILL)
        if self.running is not None:
            self.running.cancel()

    def end(self) -> None:
        """The machine, or all that runs on it, is gone."""
        if not self.alive:
            return
        self.alive = False
        if self.cluster.luck.power_fails and self.cluster.draw(f"{self.name} has no power") < 0.5:
            self.cluster.network.darken(self.name)
        for worker in self.living():
            worker.die(SIGKILL)
        self.loop.kill()

    # ------------------------------------------------------------ the connection

    def silence(self, silent: bool, cut: bool) -> None:
        network = self.cluster.network
        self.silent, self.cut = silent, cut
        for machine in self.cluster.heads:
            if silent:
                network.block(self.name, machine)
                network.block(machine, self.name)
            else:
                network.unblock(self.name, machine)
                network.unblock(machine, self.name)
        if not silent:
            self.cluster.recheck_planes()

    def send(self, message: m.AgentMessage) -> None:
        if self.alive:
            self.loop.call_soon(self.link.send, message)

    def _hello(self) -> m.Hello:
        hello = super()._hello()
        return msgspec.structs.replace(
            hello, term=self.link.term, generation=(self.generation.number, self.generation.digest)
        )

    def _beat(self) -> None:
        if not self.alive:
            return
        if self.loop.state is State.RUNS:
            for worker in self.living():
                self._watch(worker)
        self.cluster.clock.after(self.cluster.plan.spec.timing.heartbeat_s, self._beat)

    # ------------------------------------------------------------ orders

    def _take(self, order: m.ToAgent) -> None:
        if not self.alive:
            return
        self.cluster.log("%s <- %s", self.name, order)
        self.cluster.invariants.obeyed(self.name, self.link.term)
        match order:
            case m.Form():
                self._form(order)
            case m.Shutdown():
                self._leave()
            case m.Preload() | m.RunFault():
                pass
            case _:
                self._obey(order)

    def _form(self, order: m.Form) -> None:
        """As `Agent._form` does."""
        try:
            base = self.generation if order.change.base else NOTHING
            self.generation = generation_difference.apply(base, order.change)
        except ProtocolError:
            self.cluster.asked_for_whole += 1
            self.generation = NOTHING
            self.link.say_hello()
            return
        for name, join in order.orders:
            self._obey(m.Relay(name, msgspec.structs.replace(join, generation=self.generation)))
