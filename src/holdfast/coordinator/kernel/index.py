"""Nodes and workers by phase: whoever asks for the few that leave does not look at the thousands that train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from holdfast.coordinator.kernel.membership_state import MembershipState, Node, Worker
from holdfast.coordinator.kernel.phases import NodePhase, WorkerPhase
from holdfast.protocol.place import NodePlace

T = TypeVar("T", Node, Worker)


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


class Index:
    """Where nodes and workers are found without a look at all. Written by `transitions` alone.

    It is no part of the state: each process makes it from the state that it starts with. `differences` compares both,
    after every event of the random schedules.

    Attributes:
        alive_nodes, alive_workers: those that are not gone, by name, in the order in which they came.
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
        self._came = 0
        for node in membership.nodes.values():
            self._enter_node(node)
        for worker in membership.workers.values():
            self._enter_worker(worker)
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
        """Nodes that are not gone and that their history speaks against, in the order in which they came."""
        return _listed(self._lemons)

    @property
    def any_place(self) -> bool:
        """Of some node that lives it is known where it stands."""
        return bool(self._at)

    def nodes_at(self, place: NodePlace) -> list[Node]:
        """Nodes that are not gone and stand in this place, of whatever level; none where the place is empty."""
        return list(self._at.get(place, {}).values())

    # ------------------------------------------------------------ kept

    def add_node(self, node: Node) -> None:
        """A node came, or a new one in the place of one of its name."""
        self._enter_node(node)
        self.renew(node)

    def _enter_node(self, node: Node) -> None:
        # One counter for nodes and workers, and it only rises. A node that joins again gets a new number, so
        # it counts as the newest. In the state it does too, because it was taken out and put in again.
        self._came += 1
        self._numbers[node.name] = self._came
        self._nodes[node.phase].put(self._came, node)
        if node.alive:
            self.alive_nodes[node.name] = node
            for place in _within(node.place):
                self._at.setdefault(place, {})[node.name] = node

    def move_node(self, node: Node, was: NodePhase) -> None:
        """A node changed its phase."""
        self._nodes[was].drop(node.name)
        self._nodes[node.phase].put(self._numbers[node.name], node)
        if not node.alive:
            self._remove(node)
        self.renew(node)

    def drop_node(self, node: Node) -> None:
        """A node is forgotten."""
        for group in (*self._nodes.values(), self._with_room, self._lemons):
            group.drop(node.name)
        self._remove(node)
        del self._numbers[node.name]

    def _remove(self, node: Node) -> None:
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
        self._came += 1
        self._numbers[worker.name] = self._came
        self._workers[worker.phase].put(self._came, worker)
        if worker.phase is not WorkerPhase.GONE:
            self.alive_workers[worker.name] = worker
            self._workers_of.setdefault(worker.node, {})[worker.name] = worker

    def move_worker(self, worker: Worker, was: WorkerPhase) -> None:
        """A worker changed its phase."""
        self._workers[was].drop(worker.name)
        self._workers[worker.phase].put(self._numbers[worker.name], worker)
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
        del self._numbers[worker.name]

    def renew(self, node: Node) -> None:
        """What depends on more than the node's phase: whether it has room, and whether it is a lemon."""
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
        """Where it is not what a look at the whole state gives."""
        fresh = Index(self._membership, self._nproc)
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


_KINDS = (
    *("alive nodes", "alive workers", "places", "workers of nodes", "nodes with room", "lemons"),
    *(phase.value for phase in (*NodePhase, *WorkerPhase)),
)


def _within(place: NodePlace) -> Iterator[NodePlace]:
    """The place, and those that it is in."""
    return (place[:level] for level in range(1, len(place) + 1))
