"""An index of nodes and workers by phase, and the invariants of the state.

A handler that needs the few nodes that leave need not examine the thousands that train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from holdfast.coordinator.kernel.state import (
    CoreState,
    JobPhase,
    MembershipState,
    Node,
    NodePhase,
    Worker,
    WorkerPhase,
)
from holdfast.protocol.place import NodePlace

T = TypeVar("T", Node, Worker)


_GROUP = {
    WorkerPhase.MEMBER: "trains",
    WorkerPhase.PARKED: "trains",
    WorkerPhase.STARTING: "on its way",
    WorkerPhase.ATTACHED: "on its way",
    WorkerPhase.READY: "waits",
}
"""Phases between which a worker may go without a change of who is there."""


class _InOrder(Generic[T]):
    """Nodes or workers by name, listed in the order in which they came into the job.

    They enter a phase in another order. Decisions need the first one, so that the same events give the same actions in
    the process that takes over from this one.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, T]] = {}
        self._last, self._sorted = 0, True

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, number: int, one: T) -> None:
        """number: of its coming."""
        if one.name in self._entries:
            return
        self._entries[one.name] = (number, one)
        # Nearly always the newest. So a list is sorted once after many changes, and not at all after most.
        self._sorted = self._sorted and number > self._last
        self._last = max(self._last, number)

    def drop(self, name: str) -> None:
        """Nothing if it is not here."""
        self._entries.pop(name, None)

    def entries(self) -> list[tuple[int, T]]:
        """Numbers, and who has them."""
        self._sort()
        return list(self._entries.values())

    def names(self) -> list[str]:
        """Of all that are in here."""
        self._sort()
        return list(self._entries)

    def _sort(self) -> None:
        if not self._sorted:
            self._entries = {x[1].name: x for x in sorted(self._entries.values(), key=lambda x: x[0])}
            self._sorted = True


def _listed(*groups: _InOrder[T]) -> list[T]:
    # Each group is in order by itself, and one group is the usual case. Several are merged by number and not
    # joined: joined, a node that came early would stand behind one that came late, only because it is in
    # another phase.
    found = [group.entries() for group in groups if len(group)]
    if len(found) == 1:
        return [one for _, one in found[0]]
    return [one for _, one in sorted((x for entries in found for x in entries), key=lambda x: x[0])]


class PhaseIndex:
    """Nodes and workers by phase, kept up to date by `transitions` alone.

    It is not part of the state: each process builds it from the state with which it starts. `differences` compares the two,
    after every event of the random schedules.

    Attributes:
        alive_nodes, alive_workers: those that are not gone, by name, in the order in which they came.
        ready: how many workers wait to join, by the shard that they were built for.
        changes: how often it changed which nodes there are, or which workers train, wait or are on their way. Whoever has looked
            at all of them once need not look again while this number is the same.
    """

    def __init__(self, membership: MembershipState, nproc: int) -> None:
        self._membership, self._nproc = membership, nproc
        self.alive_nodes: dict[str, Node] = {}
        self.alive_workers: dict[str, Worker] = {}
        self._nodes: dict[NodePhase, _InOrder[Node]] = {phase: _InOrder() for phase in NodePhase}
        self._workers: dict[WorkerPhase, _InOrder[Worker]] = {phase: _InOrder() for phase in WorkerPhase}
        self._workers_of: dict[str, dict[str, Worker]] = {}
        self._with_room: _InOrder[Node] = _InOrder()
        self._lemons: _InOrder[Node] = _InOrder()
        self._at: dict[NodePlace, dict[str, Node]] = {}
        self._numbers: dict[str, int] = {}
        self._came = self.changes = 0
        self.ready: Counter[int] = Counter()
        self._left: dict[str, Worker] = {}
        self._started: dict[str, Worker] = {}
        self._positions: dict[str, int] | None = None
        for node in membership.nodes.values():
            self._enter_node(node)
        for worker in membership.workers.values():
            self._enter_worker(worker)
            if membership.halting and worker.phase is not WorkerPhase.MEMBER:
                self._left[worker.name] = worker
        # After all workers are in: room depends on how many a node has.
        for node in membership.nodes.values():
            self.renew(node)

    # ------------------------------------------------------------ asked

    def nodes_in(self, *phases: NodePhase) -> list[Node]:
        """Nodes in any of these phases, in the order in which they came."""
        return _listed(*(self._nodes[phase] for phase in phases))

    def count_nodes(self, phase: NodePhase) -> int:
        """How many nodes are in a phase."""
        return len(self._nodes[phase])

    def workers_in(self, *phases: WorkerPhase) -> list[Worker]:
        """Workers in any of these phases, oldest first."""
        return _listed(*(self._workers[phase] for phase in phases))

    def count_workers(self, phase: WorkerPhase) -> int:
        """How many workers are in a phase."""
        return len(self._workers[phase])

    def workers_of(self, node: str) -> list[Worker]:
        """A node's workers that are not gone, oldest first."""
        return list(self._workers_of.get(node, {}).values())

    def nodes_with_room(self) -> list[Node]:
        """Nodes in service with fewer workers than slots, in the order in which they came."""
        return _listed(self._with_room)

    def lemons(self) -> list[Node]:
        """Nodes that are not gone and whose machine has a bad history, in the order in which they came."""
        return _listed(self._lemons)

    @property
    def any_place(self) -> bool:
        """Whether the place of any node that is alive is known."""
        return bool(self._at)

    def nodes_at(self, place: NodePlace) -> list[Node]:
        """Nodes that are not gone and stand in this place, of whatever level; none where the place is empty."""
        return list(self._at.get(place, {}).values())

    # ------------------------------------------------------------ kept

    def add_node(self, node: Node) -> None:
        """A node came, or a new one in the place of one of its name."""
        self._enter_node(node)
        self.renew(node)

    def take_left(self) -> list[Worker]:
        """Workers that left the step while replicas halt, since the last call."""
        left, self._left = self._left, {}
        return list(left.values())

    def take_started(self) -> list[Worker]:
        """Workers that were started since the last call, also those that are gone."""
        started, self._started = self._started, {}
        return list(started.values())

    def position(self, node: Node) -> int:
        """The node's position among those that are not gone, in the order in which they came."""
        if self._positions is None:
            self._positions = {name: at for at, name in enumerate(self.alive_nodes)}
        return self._positions[node.name]

    def _enter_node(self, node: Node) -> None:
        self.changes += 1
        # One counter for nodes and workers, and it only rises. A node that joins again gets a new number, so
        # it counts as the newest. In the state it does too, because it was taken out and put in again.
        self._came += 1
        self._numbers[node.name] = self._came
        self._nodes[node.phase].put(self._came, node)
        if node.alive:
            if self._positions is not None and node.name not in self._positions:
                self._positions[node.name] = len(self._positions)
            self.alive_nodes[node.name] = node
            for place in _within(node.place):
                self._at.setdefault(place, {})[node.name] = node

    def move_node(self, node: Node, was: NodePhase) -> None:
        """A node changed its phase."""
        self.changes += 1
        self._nodes[was].drop(node.name)
        self._nodes[node.phase].put(self._numbers[node.name], node)
        if not node.alive:
            self._remove(node)
        self.renew(node)

    def drop_node(self, node: Node) -> None:
        """A node is forgotten."""
        self.changes += 1
        for group in (*self._nodes.values(), self._with_room, self._lemons):
            group.drop(node.name)
        self._remove(node)
        del self._numbers[node.name]

    def _remove(self, node: Node) -> None:
        self._positions = None
        self.alive_nodes.pop(node.name, None)
        for place in _within(node.place):
            there = self._at.get(place, {})
            # By identity and not by name: another node that joined under this name, at this place, has the
            # entry now, and the end of the one before must not take it away.
            if there.get(node.name) is node:
                del there[node.name]
            if not there:
                self._at.pop(place, None)

    def add_worker(self, worker: Worker) -> None:
        """A worker was started."""
        self._enter_worker(worker)
        self._room_of(worker)

    def _enter_worker(self, worker: Worker) -> None:
        self.changes += 1
        self._came += 1
        self._numbers[worker.name] = self._came
        self._workers[worker.phase].put(self._came, worker)
        self.ready[worker.shard_index] += worker.phase is WorkerPhase.READY
        self._started[worker.name] = worker
        if worker.phase is not WorkerPhase.GONE:
            self.alive_workers[worker.name] = worker
            self._workers_of.setdefault(worker.node, {})[worker.name] = worker

    def move_worker(self, worker: Worker, was: WorkerPhase) -> None:
        """A worker changed its phase."""
        self.changes += _GROUP.get(was) != _GROUP.get(worker.phase)
        if self._membership.halting and was in (WorkerPhase.MEMBER, WorkerPhase.PARKED):
            self._left[worker.name] = worker
        self._workers[was].drop(worker.name)
        self._workers[worker.phase].put(self._numbers[worker.name], worker)
        self.ready[worker.shard_index] += (worker.phase is WorkerPhase.READY) - (was is WorkerPhase.READY)
        # GONE may follow GONE, because agents report an end twice. Only the first one gives the slot back:
        # after it, another worker may have it.
        if worker.phase is WorkerPhase.GONE and self.alive_workers.pop(worker.name, None) is not None:
            ours = self._workers_of[worker.node]
            del ours[worker.name]
            if not ours:
                del self._workers_of[worker.node]
            self._room_of(worker)

    def drop_worker(self, worker: Worker) -> None:
        """A worker that is gone is forgotten."""
        self._workers[worker.phase].drop(worker.name)
        self._started.pop(worker.name, None)
        del self._numbers[worker.name]

    def renew(self, node: Node) -> None:
        """Updates what depends on more than the node's phase: whether it has room, and whether it is a lemon."""
        # Computed from what is known now, at each change, and never counted up and down. A count that was
        # wrong once would stay wrong, and a node with a free slot would not be staffed again.
        slots = min(node.slots, self._nproc)
        room = node.phase is NodePhase.IN_SERVICE and len(self._workers_of.get(node.name, {})) < slots
        for kept, belongs in ((self._with_room, room), (self._lemons, node.alive and bool(node.lemon))):
            if belongs:
                kept.put(self._numbers[node.name], node)
            else:
                kept.drop(node.name)

    def _room_of(self, worker: Worker) -> None:
        if (node := self._membership.nodes.get(worker.node)) is not None:
            self.renew(node)

    # ------------------------------------------------------------ compared

    def differences(self) -> Iterator[str]:
        """Where the index differs from one that is built from the whole state."""
        fresh = PhaseIndex(self._membership, self._nproc)
        for name, kept, seen in zip(_KINDS, self._contents(), fresh._contents(), strict=True):
            if kept != seen:
                yield f"the index has other {name} than the state: {kept}, not {seen}"

    def _contents(self) -> Iterator[object]:
        """By name, in the order of `_KINDS`."""
        yield list(self.alive_nodes)
        yield list(self.alive_workers)
        yield {place: set(there) for place, there in self._at.items()}
        yield {node: list(ours) for node, ours in self._workers_of.items()}
        for nodes in (self._with_room, self._lemons, *self._nodes.values()):
            yield nodes.names()
        for workers in self._workers.values():
            yield workers.names()
        yield +self.ready


_KINDS = (
    *("alive nodes", "alive workers", "places", "workers of nodes", "nodes with room", "lemons"),
    *(phase.value for phase in (*NodePhase, *WorkerPhase)),
    "shards of workers that are ready",
)


def _within(place: NodePlace) -> Iterator[NodePlace]:
    """The place, and those that it is in."""
    return (place[:level] for level in range(1, len(place) + 1))


_USED = (WorkerPhase.MEMBER, WorkerPhase.PARKED)


# ---------------------------------------------------------------- validate
# What must always be true of the state, after every event.
#
# The random schedules check it after each of theirs, and a coordinator that is started with HOLDFAST_VALIDATE=1 does so
# too.


def validate(state: CoreState) -> list[str]:
    """What is wrong with a state, in words; empty: nothing."""
    return [
        *_job(state),
        *_workers(state),
        *_nodes(state),
        *_incidents(state),
        *_snapshots(state),
        *_tiers(state),
    ]


def _job(s: CoreState) -> Iterator[str]:
    # Every message of a worker is matched by the generation's number. With a number that is ahead of the
    # generation, all their reports would be dropped as old ones, and the job would look hung.
    if s.membership.phase is JobPhase.RUNNING and (
        s.membership.generation is None or s.membership.generation.number != s.membership.number
    ):
        yield f"the job runs without its generation {s.membership.number}"
    # Launchers and operators act on the outcome: it says whether the job is run again.
    if s.membership.phase is JobPhase.ENDED and s.membership.outcome is None:
        yield "the job has ended without an outcome"
    if s.membership.stop_reason is not None and s.membership.outcome is None:
        yield "the job is to stop without an outcome"
    counts = {
        "restarts_used": s.membership.restarts_used,
        "replacing": s.membership.replacing,
        "committed": s.membership.committed,
        "lost_steps": s.membership.lost_steps,
        "fruitless": s.membership.fruitless,
        "bad_starts": s.membership.bad_starts,
    }
    yield from (f"the count {name} is negative: {count}" for name, count in counts.items() if count < 0)
    # `happened` compares a shard's step with each of these. Falling starts would make a state count as having
    # happened that an earlier rewind had undone.
    starts = [r.start for r in s.storage.rewinds]
    if starts != sorted(set(starts)):
        yield f"the starts of rewinds do not rise: {starts}"


def _workers(s: CoreState) -> Iterator[str]:
    # A worker that trains and is in no generation would keep a stale copy of the state, and could become a
    # donor of it later.
    members = {x.worker for x in s.membership.generation.members} if s.membership.generation else set()
    slots: Counter[tuple[str, int]] = Counter()
    for name, worker in s.membership.workers.items():
        if worker.name != name:
            yield f"worker {worker.name} is known as {name}"
        if worker.phase is WorkerPhase.GONE:
            continue
        # Two workers in one slot would share its GPU: both run out of memory, and both are blamed.
        slots[worker.node, worker.slot] += 1
        node = s.membership.nodes.get(worker.node)
        if node is None or not node.alive:
            yield f"{name} is {worker.phase.value} on a lost node"
        if worker.phase in _USED and name not in members:
            yield f"{name} is {worker.phase.value} and not in generation {s.membership.number}"
        if worker.phase is WorkerPhase.READY and worker.ready is None:
            yield f"{name} is ready without a Ready report"
    yield from (
        f"{count} workers have slot {slot} of {node}" for (node, slot), count in slots.items() if count > 1
    )
    if s.membership.level == 2 and s.membership.phase is JobPhase.RUNNING:
        yield from (
            f"{name} is a member without an assignment" for name in members - set(s.membership.assignments)
        )
    # Who was told to leave is waited for. One that does not exist never leaves, and the job would end by its
    # time-out alone.
    unknown = set(s.membership.stops) - set(s.membership.workers)
    if unknown:
        yield f"workers were told to leave that are not known: {sorted(unknown)}"


def _nodes(s: CoreState) -> Iterator[str]:
    for name, node in s.membership.nodes.items():
        if node.name != name:
            yield f"node {node.name} is known as {name}"
        # `held` is what keeps workers away from a node. A node that is checked and not held would be measured
        # under the load of training, and fail.
        if node.health.checking is not None and node.held is None:
            yield f"{name} runs deep checks and is not held"
        # `Context.held_or_leaving` gives these alone to whoever waits for a check or a remedy.
        aside = node.phase in (NodePhase.HELD, NodePhase.LEAVING)
        if (node.health.checking is not None or node.health.then is not None) and not aside:
            yield f"{name} is {node.phase.value}, and a remedy is planned for it"
        why = {
            NodePhase.IN_SERVICE: node.held is None and node.leaving is None,
            NodePhase.HELD: node.held is not None and node.leaving is None,
            NodePhase.LEAVING: node.leaving is not None,
            NodePhase.LOST: True,
        }
        if not why[node.phase]:
            yield f"{name} is {node.phase.value}: held is {node.held!r}, leaving is {node.leaving!r}"
        # A refused node is kept away by being lost. One that is not would get workers again, with the fault
        # for which it was refused.
        if node.refused is not None and node.alive:
            yield f"{name} is refused and still in the job"
        # A script that believes it would save and wait for an end that does not come.
        if node.notice is not None and node.leaving is None:
            yield f"{name} stays, but its scripts were told that it leaves"
    # Both are removed together when a person clears a machine. A rule that stayed behind would be a
    # quarantine that no longer keeps anybody away, and looks as if it did.
    stray = set(s.health.quarantine_rules) - set(s.health.quarantine)
    if stray:
        yield f"quarantine_rules names machines that are not in quarantine: {sorted(stray)}"


def _incidents(s: CoreState) -> Iterator[str]:
    # Incidents are looked up by their number less those that are forgotten; a gap would give a remedy to another
    # fault's node.
    if [i.id for i in s.incidents] != list(range(s.forgotten + 1, s.forgotten + len(s.incidents) + 1)):
        yield "incidents are not numbered one after the other"
    closed = s.closed - s.forgotten
    if not 0 <= closed <= len(s.incidents) or any(i.open for i in s.incidents[:closed]):
        yield f"not all of the first {s.closed} incidents are closed"


def _snapshots(s: CoreState) -> Iterator[str]:
    keys = Counter((x.step, x.generation, x.world) for x in s.storage.snapshots)
    yield from (
        f"the snapshot of step {key[0]} is in the state {count} times"
        for key, count in keys.items()
        if count > 1
    )
    for snapshot in s.storage.snapshots:
        ranks = {h.copy.key.rank for h in snapshot.shards}
        # A shard of such a rank is of a run of another size. Joined with the others it would be a state that
        # no run ever had.
        if not ranks <= set(range(snapshot.world)):
            yield f"the snapshot of step {snapshot.step} has shards of ranks that do not exist"
        # The most expensive lie of all: older snapshots are given up when a newer one is complete, so a wrong
        # mark here would lose the job's only good copy.
        if snapshot.complete and ranks != set(range(snapshot.world)):
            yield f"the snapshot of step {snapshot.step} counts as complete without all of its shards"
        for shard in snapshot.shards:
            gone = [
                n
                for n in (*shard.nodes, *shard.asked)
                if n not in s.membership.nodes or not s.membership.nodes[n].alive
            ]
            if gone:
                yield f"lost nodes count as holders of the snapshot of step {snapshot.step}: {gone}"


def _tiers(s: CoreState) -> Iterator[str]:
    urls = {t.url for t in s.spec.saving.tiers}
    # One checkpoint at a time per tier. Two would compete for a disk that is too slow for one, and the older
    # could be published after the newer.
    under_way = Counter(x.tier for x in s.storage.storing)
    yield from (
        f"{count} checkpoints are on their way to {url}" for url, count in under_way.items() if count > 1
    )
    yield from (
        f"a checkpoint is on its way to {url}, which is no tier of the job" for url in set(under_way) - urls
    )
    steps = [d.step for d in (s.storage.durable, *s.storage.older) if d is not None]
    # Whoever cannot read the newest goes on to the next of the list. Out of order, a job would go back
    # further than it must.
    if steps != sorted(steps, reverse=True):
        yield f"checkpoints are not in order from the newest to the oldest: {steps}"
