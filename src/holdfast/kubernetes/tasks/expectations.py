"""What the operator has done for one job and not yet seen. All of it may be lost.

A watch is behind: what was made a moment ago is not there yet, and would be made again. So answers are taken in at once,
and a pod that has gone is remembered by its uid, in case an older answer brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.policy.plan import (
    Action,
    AskResize,
    CoordinatorReport,
    DeletePod,
    Number,
    Released,
    Tell,
    Warn,
)
from holdfast.protocol.engine_orders import NodeOutOfMemory, OrderDone, ReleaseNode

MOST_GONE = 4096
"""Uids and names of pods that are gone: more than pods of one job that go within the life of a request."""


class PodTable:
    """The job's pods, from the watch and from answers, whichever comes first."""

    def __init__(self) -> None:
        self._pods: dict[str, PodSeen] = {}
        self._gone: dict[str, None] = {}
        self._absent: dict[str, None] = {}

    @property
    def all(self) -> tuple[PodSeen, ...]:
        """By name."""
        return tuple(self._pods[name] for name in sorted(self._pods))

    @property
    def absent(self) -> frozenset[str]:
        """Names of pods that were there, or may have been, and are not."""
        return frozenset(self._absent)

    def __contains__(self, name: str) -> bool:
        return name in self._pods

    def put(self, pod: PodSeen) -> None:
        """The pod is there, and so."""
        # A uid is never given twice. Without this, an answer that left the server before the deletion would
        # bring the pod back, and it would count as a node for ever: no watch tells of its end again.
        if pod.uid in self._gone:
            return
        known = self._pods.get(pod.name)
        # The watch may have told more already than the answer to a request: what it told is not told again. Going back, a pod
        # of which the scheduler had said that it has no machine would count as one that nobody has looked at, for ever.
        if known is not None and known.uid == pod.uid and known.version > pod.version:
            return
        # A deletion is never taken back, so a pod without one is the older news.
        if known is not None and known.uid == pod.uid and known.deleting and not pod.deleting:
            return
        self._pods[pod.name] = pod

    def gone(self, name: str, uid: str) -> None:
        """The pod is not there any more, and never will be."""
        _remember(self._gone, uid)
        if (known := self._pods.get(name)) is None:
            _remember(self._absent, name)
        elif known.uid == uid:
            del self._pods[name]
            _remember(self._absent, name)

    def lost_sight(self, pod: PodSeen) -> None:
        """The watch tells of it no more."""
        # A pod that somebody has deleted is gone. The watch says the same of one that has only lost its label.
        if pod.deleting:
            self.gone(pod.name, pod.uid)
        elif (known := self._pods.get(pod.name)) is not None and known.uid == pod.uid:
            if known.deleting:
                self.gone(pod.name, pod.uid)
            else:
                self._pods[pod.name] = msgspec.structs.replace(known, unsure=True)

    def not_there(self, name: str) -> None:
        """There is no pod of this name that is the job's."""
        if (known := self._pods.get(name)) is not None:
            self.gone(name, known.uid)
        _remember(self._absent, name)

    def replace(self, pods: Iterable[PodSeen], version: int) -> None:
        """All that there were at this version, after a watch that could not be resumed."""
        listed = {pod.uid: pod for pod in pods}
        for pod in self.all:
            # A pod that is newer than the list was made while the list was on its way. Taken for gone it would run
            # unseen: what the watch tells of a uid that is gone is not believed.
            if pod.uid not in listed and pod.version <= version:
                self.lost_sight(pod)
        for pod in listed.values():
            self.put(pod)


def _remember(known: dict[str, None], name: str) -> None:
    known[name] = None
    while len(known) > MOST_GONE:
        del known[next(iter(known))]


class Expectations:
    """One job's memory. `granted`, `told` and `asked_nodes` are what `Observed` has.

    Attributes:
        doubtful: names whose pods may have been made: the request was not answered. They are asked for before anything else.
        refused: what the API server said of the job's objects when it last refused one; None: it took them.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.pods = PodTable()
        self.granted: set[str] = set()
        self.doubtful: set[str] = set()
        self.asked_nodes: int | None = None
        self.refused_resize: str | None = None
        self.refused: str | None = None
        self._told: set[str] = set()
        self._told_of_memory: dict[str, str] = {}
        self._released: dict[tuple[str, int], tuple[float, int]] = {}
        """By node and order: when this operator heard of it, and its pod's restarts then."""
        self._acknowledged: set[int] = set()
        self._warned: set[str] = set()
        self._term = 0

    @property
    def told(self) -> frozenset[str]:
        """Nodes of which the coordinator of this term knows already."""
        return frozenset(self._told)

    def meet(self, term: int, alive: Iterable[str], orders: Iterable[int]) -> None:
        """A coordinator answers. One of another term was told nothing."""
        # Each term begins with what agents tell it. News that the one before was told may have been lost with
        # it, so it is told again.
        if term != self._term:
            self._term, self._told, self._acknowledged, self._told_of_memory = term, set(), set(), {}
            # Each term counts its orders anew.
            self._warned = {about for about in self._warned if not about.startswith("order ")}
        # Of a node that is gone nothing is to be remembered: its name does not come again, but a job may be long.
        self._told &= set(alive)
        self._told_of_memory = {name: at for name, at in self._told_of_memory.items() if name in self.pods}
        there = set(orders)
        self._acknowledged &= there
        self._warned &= {f"order {one}" for one in there} | {pod.uid for pod in self.pods.all}

    def released(self, said: CoordinatorReport | None, now_s: float) -> Mapping[str, Released]:
        """Nodes that the coordinator gives up. now_s: of any clock that goes on."""
        if said is not None:  # what was heard of a coordinator that is silent now is kept
            # Between two looks a node may have come back and have been given up again. The second order counts anew: by the
            # first one its pod would seem to have restarted since.
            open_ = [(order.node, order.order_id) for order in said.orders if isinstance(order, ReleaseNode)]
            restarts = {pod.name: pod.restarts for pod in self.pods.all} if open_ else {}
            self._released = {one: self._released.get(one, (now_s, restarts.get(one[0], 0))) for one in open_}
        return {
            node: Released(now_s - since_s, count) for (node, _), (since_s, count) in self._released.items()
        }

    def new_run(self) -> None:
        """What was asked of the run before is not asked of this one."""
        self.asked_nodes, self.refused_resize = None, None

    def numbered(self, action: Number, before: tuple[int, int]) -> None:
        """The counters were written. before: term and next number until then."""
        term, next_number = before
        # A name is granted by a counter that was written first, and to the operator that wrote it alone. One that takes over
        # grants nothing of before: whether a pod of such a name was made and has gone cannot be told, and a second one of
        # its name would be taken for the node that was lost. So numbers may have holes, and no name comes twice.
        self.granted |= {names.node_name(self._job, n) for n in range(next_number, action.next_number)}
        # A term that was passed over is over, whether its coordinator was made or not.
        self.granted = {name for name in self.granted if names.term_of(self._job, name) is None}
        if action.term > term:
            self.granted.add(names.coordinator_name(self._job, action.term))
        if action.begins:
            self.new_run()

    def saw(self, pod: PodSeen) -> None:
        """The API server has it, by a watch or by an answer: whoever made it, its name is used up."""
        self.granted.discard(pod.name)
        self.doubtful.discard(pod.name)
        self.pods.put(pod)

    def burn(self, name: str) -> None:
        """There is no pod of a doubtful name. There may have been one, which is gone: it is not made a second time."""
        self.granted.discard(name)
        self.doubtful.discard(name)

    def listed(self, pods: Iterable[PodSeen], version: int) -> None:
        """All that there were at this version."""
        there = tuple(pods)
        self.granted -= {pod.name for pod in there}
        self.doubtful -= {pod.name for pod in there}
        self.pods.replace(there, version)

    def did(self, action: Action) -> None:
        """An action without an answer of interest is done."""
        match action:
            case Tell(OrderDone(order_id=order_id)):
                self._acknowledged.add(order_id)
            case Warn(about=about):
                self._warned.add(about)
            case Tell(NodeOutOfMemory(node=node), about):
                self._told_of_memory[node] = about
            case Tell(_, about) if about:
                self._told.add(about)
            case AskResize(nodes):
                self.asked_nodes, self.refused_resize = nodes, None
            case DeletePod(name=name, uid=uid):
                for pod in self.pods.all:
                    if pod.name == name and pod.uid == uid:
                        self.pods.put(msgspec.structs.replace(pod, deleting=True))

    def resize_refused(self, nodes: int, why: str) -> None:
        """It is not asked again until the object changes."""
        self.asked_nodes, self.refused_resize = nodes, why

    def is_news(self, action: Action) -> bool:
        """False: it was done, and the coordinator's next word will show it."""
        match action:
            case Tell(OrderDone(order_id=order_id)):
                return order_id not in self._acknowledged
            case Tell(NodeOutOfMemory(node=node), about):
                return self._told_of_memory.get(node) != about
            case Warn(about=about):
                return about not in self._warned
            case _:
                return True
