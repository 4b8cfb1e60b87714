"""A core driven by hand: a test says what happens, and looks at what the core says to whom."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import CoreState, Incident, JobPhase, Worker, WorkerPhase
from holdfast.coordinator.machine import Core
from holdfast.coordinator.service.tally import READ, Tally, happened
from holdfast.protocol import messages as m
from holdfast.protocol.job import JobSpec
from holdfast.protocol.machine.progress_record import PageReading, Phase
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Key, Part, Saving, Shard

T = TypeVar("T")

TIER = DurableTier("checkpoint")


def copy_of(step: int, generation: int = 1, rank: int = 0, world: int = 1, bits: str = "a") -> Copy:
    """A shard in snapshot memory; equal `bits` stand for equal bytes."""
    head = Part(f"step-{step}/head-{rank}", 10, f"h{rank}{bits}")
    row = Part(f"step-{step}/row-{rank}", 1000, bits)
    return Copy(Key(step, generation, rank, world), Shard(rank, head, row, 0))


class Desk:
    """One core, its clock, and everything that it asked for."""

    def __init__(self, nodes: int = 3, **spec: Any) -> None:
        defaults = {"name": "job", "script": "train.py", "min_nodes": 1, "max_nodes": nodes}
        spec = defaults | {"saving": Saving(tiers=(TIER,))} | spec
        self.core = Core(JobSpec(**spec))
        self.now = 1000.0
        self.actions: list[e.Action] = []
        self.newest: list[e.Action] = []
        self.do(e.Tick())

    # ------------------------------------------------------------ what happens

    def do(self, event: e.Event, after_s: float = 0.01) -> list[e.Action]:
        """One event, a little later than the last."""
        self.now += after_s
        self.newest = self.core.handle(event, self.now)
        self.actions += self.newest
        due = self.core.next_deadline()
        assert due is None or due > self.now, f"the next deadline {due} is not after {self.now}"
        return self.newest

    def wait(self, seconds: float, alive: tuple[str, ...] | None = None) -> None:
        """Time passes, with ticks as they are due. alive: nodes that send heartbeats (None: all)."""
        until = self.now + seconds
        step = self.core.timing.heartbeat_s
        while self.now < until and self.state.membership.phase is not JobPhase.ENDED:
            for node in self.core.alive_nodes():
                if alive is None or node.name in alive:
                    self.do(e.NodeSays(node.name, m.Heartbeat()), 0.0)
            due = self.core.next_deadline()
            self.do(e.Tick(), min(step, max(0.0, (due or until) - self.now), until - self.now) or 1e-6)

    def node(
        self,
        name: str,
        session: str = "1",
        slots: int = 1,
        workers: tuple[m.WorkerView, ...] = (),
        copies: tuple[Copy, ...] = (),
        place: tuple[str, ...] = (),
        port: int = 7000,
    ) -> None:
        """An agent says hello. port: of its snapshot memory; 0 when it has none."""
        hello = m.Hello(
            version=m.PROTOCOL_VERSION,
            node=name,
            session=f"{name}-{session}",
            host=name,
            slots=slots,
            pid=1,
            ports=(29500, 29501),
            workers=workers,
            snapshot_port=port,
            copies=copies,
            place=place,
        )
        self.do(e.NodeJoined(hello))

    def tally(self, steps: int = 0) -> Tally:
        """What the ledger would have counted. steps: committed ones, of which the core does not tell it."""
        found = Tally(ledger="2026-01-02T03:04:05.000+00:00", commits=steps)
        for action in self.actions:
            if isinstance(action, e.Record):
                found.kinds[action.kind] = found.kinds.get(action.kind, 0) + 1
                if action.kind in READ:
                    happened(found, action.kind, action.fields, self.now)
        return found

    def lose(self, name: str) -> None:
        """An agent's connection closes."""
        self.do(e.NodeLost(name, self.state.membership.nodes[name].session))

    def says(self, worker: str, message: m.WorkerMessage, age_s: float = 0.0) -> list[e.Action]:
        """A worker says something."""
        return self.do(e.WorkersSay(worker.partition(".")[0], (m.FromWorker(worker, message, age_s),)))

    def exits(self, worker: str, code: int, killed: bool = False) -> list[e.Action]:
        """A worker's process ends. killed: by its agent."""
        said = m.Exited(worker=worker, code=code, tail=("last line",), log="log", killed=killed)
        return self.do(e.NodeSays(worker.partition(".")[0], said))

    def started(self, worker: str) -> None:
        """An agent started a worker, and its script called `hf.start`."""
        node = worker.partition(".")[0]
        self.do(e.NodeSays(node, m.Started(worker, 1, f"{worker}.log")))
        self.says(worker, m.Attached())

    def ready(self, worker: str, digest: str = "d0") -> None:
        """A worker starts and gets ready."""
        self.started(worker)
        self.gets_ready(worker, self.state.membership.shape, digest)

    def gets_ready(
        self,
        worker: str,
        shape: tuple[int, int],
        digest: str = "d0",
        shard_index: int | None = None,
        micro_batches: int = 0,
    ) -> None:
        """It has built its model, for the shard that it was told, or another."""
        asked = self.known(worker).shard_index % (shape[0] * shape[1]) if shard_index is None else shard_index
        host = worker.partition(".")[0]
        self.says(
            worker,
            m.Ready(
                digest=digest,
                host=host,
                vote_port=1,
                data_port=2,
                micro_batches=micro_batches,
                shape=shape,
                shard_index=asked,
            ),
        )

    def parks(self, worker: str, committed: int | None, prepared: bool = False) -> None:
        """A member is out of the newest generation."""
        self.says(
            worker, m.Parked(generation=self.state.membership.number, committed=committed, prepared=prepared)
        )

    def commit(self, committed: int) -> None:
        """Every member commits."""
        for worker in self.members():
            self.says(
                worker, m.Progress(generation=self.state.membership.number, committed=committed, median_s=0.1)
            )

    def fails(self, worker: str, step: int, error: str = "ValueError", where: str = "train.py:7") -> None:
        """User code raises in a step."""
        trace = f"Traceback\n{error}: bad"
        self.says(
            worker,
            m.Failed(
                generation=self.state.membership.number,
                step=step,
                phase=int(Phase.FORWARD),
                error=error,
                message="bad",
                traceback=trace,
                where=where,
            ),
        )

    def crash(self, away_s: float = 1.0, handed_over: bool = False) -> None:
        """A new coordinator process takes over from the state as it was written."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=CoreState)
        last_s = self.now
        self.core = Core(state.spec, state)
        self.do(e.Recovered(last_s, handed_over), away_s)

    def back(
        self, *nodes: str, held: dict[str, tuple[Copy, ...]] | None = None, **views: dict[str, Any]
    ) -> None:
        """Agents reconnect and tell the truth: `views` changes what a worker's view says (by its rank's name).

        held: what each has in its memory; None: what the core thinks.
        """
        for name in nodes or tuple(n.name for n in self.core.alive_nodes()):
            ours = [w for w in self.core.alive_workers() if w.node == name]
            session = self.state.membership.nodes[name].session.rpartition("-")[2]
            known = self.state.membership.nodes[name]
            copies = self.held(name) if held is None else held.get(name, ())
            seen = tuple(self.view(w.name, **views.get(w.node, {})) for w in ours)
            self.node(name, session, known.slots, seen, copies, known.place, known.memory.port)

    def view(self, worker: str, **changes: Any) -> m.WorkerView:
        """What an agent would say of a worker that is where the core thinks it is."""
        known = self.state.membership.workers[worker]
        inside = known.phase is WorkerPhase.MEMBER
        page = PageReading(
            generation=self.state.membership.number if inside else 0,
            committed=known.committed or 0,
            phase=int(Phase.FORWARD),
        )
        formed = self.state.membership.number if inside else 0
        view = m.WorkerView(
            worker=worker,
            slot=known.slot,
            pid=1,
            formed=formed,
            page=page,
            process="S",
            idle_s=0.0,
            ready=known.ready,
            attached=known.ready is not None,
        )
        return msgspec.structs.replace(view, **changes)

    # ------------------------------------------------------------ snapshots

    def holds(self, node: str, *copies: Copy) -> list[e.Action]:
        """A node has shards in its memory."""
        for copy in copies:
            self.do(e.NodeSays(node, m.SnapshotStored(copy)))
        return self.newest

    def refuses(self, node: str, copy: Copy, reason: str = "no memory") -> list[e.Action]:
        """A node could not keep a shard."""
        return self.do(e.NodeSays(node, m.SnapshotRejected(copy.key, reason)))

    def shards(self, step: int, *nodes: str) -> None:
        """Workers on these nodes save the shards that they hold."""
        for node in nodes:
            shard_index = self.known(self.worker_on(node)).shard_index
            self.holds(node, self.shard(step, shard_index))

    def shard(self, step: int, shard_index: int) -> Copy:
        """A shard of the running generation, where a replica is several workers."""
        return copy_of(
            step,
            self.state.membership.number,
            shard_index,
            self.state.membership.shard_count,
            f"p{shard_index}",
        )

    def snapshot(self, step: int, *nodes: str, generation: int | None = None, bits: str = "a") -> Copy:
        """The replicas on these nodes save the same."""
        copy = copy_of(step, self.state.membership.number if generation is None else generation, bits=bits)
        for node in nodes:
            self.holds(node, copy)
        return copy

    def stores(self, reason: str | None = None, publishes: bool = True, tier: str = TIER.url) -> None:
        """The nodes do what they were asked for a tier; `reason`: or cannot."""
        for node, order in self.sent(m.StoreShard):
            storing = next((x for x in self.state.storage.storing if x.tier == tier), None)
            if storing is None or order.tier != tier or storing.waiting.get(order.key.rank) != node:
                continue
            if order.key.step != storing.step:
                continue
            bits = "a" if self.state.membership.shard_count == 1 else f"p{order.key.rank}"
            shard = copy_of(order.key.step, rank=order.key.rank, bits=bits).shard
            said = m.Stored(tier=tier, key=order.key, shard=None if reason else shard, reason=reason or "")
            self.do(e.NodeSays(node, said))
        if publishes and (orders := self.sent(m.Publish, newest=True)):
            node, publish = orders[0]
            self.do(e.NodeSays(node, m.Published(tier, publish.step)))

    def held(self, node: str) -> tuple[Copy, ...]:
        """What the core thinks that a node holds."""
        return tuple(h.copy for x in self.state.storage.snapshots for h in x.shards if node in h.nodes)

    def complete_snapshots(self) -> list[int]:
        """Steps of the complete snapshots, oldest first."""
        return [x.step for x in self.state.storage.snapshots if x.complete]

    def holders(self, node: str = "") -> tuple[Holder, ...]:
        """Where the newest JoinGeneration of a node's worker says that the snapshot is."""
        return self.told(self.worker_on(node), m.JoinGeneration)[-1].holders

    # ------------------------------------------------------------ what is there

    @property
    def state(self) -> CoreState:
        """What the core remembers."""
        return self.core.state

    def members(self) -> list[str]:
        """The newest generation in the order of its ranks."""
        return (
            [x.worker for x in self.state.membership.generation.members]
            if self.state.membership.generation
            else []
        )

    def workers(self, *phases: WorkerPhase) -> list[str]:
        """Living workers, or those in some phases."""
        found = self.core.workers_in(*phases) if phases else self.core.alive_workers()
        return [w.name for w in found]

    def worker_on(self, node: str) -> str:
        """The living worker of a node's first slot."""
        return next(w.name for w in self.core.alive_workers() if w.node == node and w.slot == 0)

    def known(self, worker: str) -> Worker:
        """What the core knows of a worker."""
        return self.state.membership.workers[worker]

    def incidents(self) -> list[Incident]:
        """All incidents."""
        return self.state.incidents

    def told(self, worker: str, kind: type[T], newest: bool = False) -> list[T]:
        """Messages of one kind to a worker."""
        return [
            a.message.message
            for a in (self.newest if newest else self.actions)
            if isinstance(a, e.Send)
            and isinstance(a.message, m.Relay)
            and a.message.worker == worker
            and isinstance(a.message.message, kind)
        ]

    def sent(self, kind: type[T], newest: bool = False) -> list[tuple[str, T]]:
        """Messages of one kind to agents."""
        actions = self.newest if newest else self.actions
        return [(a.node, a.message) for a in actions if isinstance(a, e.Send) and isinstance(a.message, kind)]

    def did(self, kind: type[T], newest: bool = False) -> list[T]:
        """Actions of one kind."""
        return [a for a in (self.newest if newest else self.actions) if isinstance(a, kind)]

    def records(self, kind: str) -> list[dict[str, object]]:
        """Entries of the ledger."""
        return [a.fields for a in self.did(e.Record) if a.kind == kind]

    def killed(self) -> set[str]:
        """Workers that were ordered to be killed."""
        return {k.worker for _, k in self.sent(m.KillWorker)}


def running(
    nodes: int = 3,
    spares: int = 0,
    committed: int = 5,
    places: tuple[tuple[str, ...], ...] = (),
    shape: tuple[int, int] = (1, 1),
    **spec: Any,
) -> Desk:
    """A job at level 2 whose first generation has `nodes` members and some steps; spares are ready. shape: of a replica."""
    desk = Desk(nodes, spares=spares, **spec)
    slots = desk.core.spec.nproc
    for i in range(nodes + spares):
        desk.node(f"n{i}", slots=slots, place=places[i] if i < len(places) else ())
    for worker in desk.workers():
        desk.started(worker)
    for worker in desk.workers():
        desk.gets_ready(worker, shape)
    assert desk.state.membership.phase is JobPhase.RUNNING
    for worker in desk.members():
        desk.says(worker, m.Joined(1, 0.01))
    if committed:
        desk.commit(committed)
    return desk
