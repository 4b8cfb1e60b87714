"""The operator's expectations for one job: what it has done but not yet seen in the watch. Losing all of it does no harm.

A watch lags behind: a pod that was created a moment ago does not appear in it yet, and would be created again. So answers to
requests are taken into account at once, and the uid of a deleted pod is remembered in case an older answer shows that pod again.
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
"""Number of uids and names of deleted pods that are remembered: more than one job's pods that go during a request."""


class PodTable:
    """The job's pods, from the watch and from answers to requests, whichever is newer."""

    def __init__(self) -> None:
        self._pods: dict[str, PodSeen] = {}
        self._gone: dict[str, None] = {}
        self._absent: dict[str, None] = {}

    @property
    def all(self) -> tuple[PodSeen, ...]:
        """Sorted by name."""
        return tuple(self._pods[name] for name in sorted(self._pods))

    @property
    def absent(self) -> frozenset[str]:
        """Names of pods that existed, or may have existed, and do not exist now."""
        return frozenset(self._absent)

    def __contains__(self, name: str) -> bool:
        return name in self._pods

    def put(self, pod: PodSeen) -> None:
        """Takes in a pod as the API server has it. Older versions are ignored."""
        # A uid is never used twice. Without this, an answer that left the server before the deletion would bring the pod
        # back, and it would count as a node for ever, because no watch reports its end again.
        if pod.uid in self._gone:
            return
        known = self._pods.get(pod.name)
        # The watch may already have reported a newer version than the answer to a request, and does not repeat it. If the
        # older one replaced it, a pod that the scheduler found unschedulable would count as not yet looked at, for ever.
        if known is not None and known.uid == pod.uid and known.version > pod.version:
            return
        # A deletion cannot be undone, so a version without a deletion time is the older one.
        if known is not None and known.uid == pod.uid and known.deleting and not pod.deleting:
            return
        self._pods[pod.name] = pod

    def gone(self, name: str, uid: str) -> None:
        """The pod with this uid does not exist any more."""
        _remember(self._gone, uid)
        if (known := self._pods.get(name)) is None:
            _remember(self._absent, name)
        elif known.uid == uid:
            del self._pods[name]
            _remember(self._absent, name)

    def lost_sight(self, pod: PodSeen) -> None:
        """The watch does not show the pod any more."""
        # A pod that was being deleted is gone. But the watch reports the same for one that has only lost its label.
        if pod.deleting:
            self.gone(pod.name, pod.uid)
        elif (known := self._pods.get(pod.name)) is not None and known.uid == pod.uid:
            if known.deleting:
                self.gone(pod.name, pod.uid)
            else:
                self._pods[pod.name] = msgspec.structs.replace(known, unsure=True)

    def not_there(self, name: str) -> None:
        """The job has no pod of this name, according to the API server."""
        if (known := self._pods.get(name)) is not None:
            self.gone(name, known.uid)
        _remember(self._absent, name)

    def replace(self, pods: Iterable[PodSeen], version: int) -> None:
        """Takes in a list of all pods at this version, after a watch that could not be resumed."""
        listed = {pod.uid: pod for pod in pods}
        for pod in self.all:
            # A pod that is newer than the list was created while the list was on its way. If it counted as gone, it would
            # run unnoticed, because reports of a uid that is gone are ignored.
            if pod.uid not in listed and pod.version <= version:
                self.lost_sight(pod)
        for pod in listed.values():
            self.put(pod)


def _remember(known: dict[str, None], name: str) -> None:
    known[name] = None
    while len(known) > MOST_GONE:
        del known[next(iter(known))]


class Expectations:
    """What the operator remembers of one job. For `granted`, `told` and `asked_nodes` see `Observed`.

    Attributes:
        doubtful: names of pods that may have been created, since the request had no answer. They are looked up first.
        refused: the API server's message when it last refused one of the job's objects; None: it accepted them.
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
        """By node and order id: when this operator learned of the order, and the restarts of the node's pod then."""
        self._acknowledged: set[int] = set()
        self._warned: set[str] = set()
        self._term = 0

    @property
    def told(self) -> frozenset[str]:
        """Nodes whose departure the coordinator of this term has been told of."""
        return frozenset(self._told)

    def meet(self, term: int, alive: Iterable[str], orders: Iterable[int]) -> None:
        """Takes note of a coordinator's report. A coordinator of a new term has not been told anything yet.

        Args:
            alive: names of the nodes that are alive.
            orders: ids of the open orders.
        """
        # A new term starts with what agents tell it. News that was sent to the term before may have been lost with it, so it
        # is sent again.
        if term != self._term:
            self._term, self._told, self._acknowledged, self._told_of_memory = term, set(), set(), {}
            # Order ids start again with each term.
            self._warned = {about for about in self._warned if not about.startswith("order ")}
        # Nothing is remembered of nodes that are gone: their names do not come again, and a long job has many.
        self._told &= set(alive)
        self._told_of_memory = {name: at for name, at in self._told_of_memory.items() if name in self.pods}
        there = set(orders)
        self._acknowledged &= there
        self._warned &= {f"order {one}" for one in there} | {pod.uid for pod in self.pods.all}

    def released(self, report: CoordinatorReport | None, now_s: float) -> Mapping[str, Released]:
        """The nodes of the coordinator's open release orders, by name.

        Args:
            report: its report; None: it does not answer, and its last orders still count.
            now_s: a monotonic clock.
        """
        if report is not None:
            # Between two looks a node may have come back and have been given up again. So each order is counted separately:
            # compared with the restarts at the first order, the pod would seem to have been restarted since the second.
            open_ = [
                (order.node, order.order_id) for order in report.orders if isinstance(order, ReleaseNode)
            ]
            restarts = {pod.name: pod.restarts for pod in self.pods.all} if open_ else {}
            self._released = {one: self._released.get(one, (now_s, restarts.get(one[0], 0))) for one in open_}
        return {
            node: Released(now_s - since_s, count) for (node, _), (since_s, count) in self._released.items()
        }

    def new_run(self) -> None:
        """Forgets the size that was requested from the run before."""
        self.asked_nodes, self.refused_resize = None, None

    def numbered(self, action: Number, before: tuple[int, int]) -> None:
        """Grants the names of new pods: the counters have been written. before: term and next number before that."""
        term, next_number = before
        # A name is granted only after its counter was written, and only to the operator that wrote it. An operator that takes
        # over grants none of the earlier names: it cannot know whether such a pod was created and has gone, and a second pod
        # of that name would be taken for the node that was lost. So numbers may have gaps, but no name is used twice.
        self.granted |= {names.node_name(self._job, n) for n in range(next_number, action.next_number)}
        # Earlier terms are over, whether their coordinators were created or not.
        self.granted = {name for name in self.granted if names.term_of(self._job, name) is None}
        if action.term > term:
            self.granted.add(names.coordinator_name(self._job, action.term))
        if action.begins:
            self.new_run()

    def saw(self, pod: PodSeen) -> None:
        """Takes in a pod from a watch or an answer. Its name is used up, whichever operator created it."""
        self.granted.discard(pod.name)
        self.doubtful.discard(pod.name)
        self.pods.put(pod)

    def burn(self, name: str) -> None:
        """Gives up a doubtful name that has no pod. There may have been one that is gone, so the name is not used again."""
        self.granted.discard(name)
        self.doubtful.discard(name)

    def listed(self, pods: Iterable[PodSeen], version: int) -> None:
        """Takes in a list of all pods of the job at this version."""
        there = tuple(pods)
        self.granted -= {pod.name for pod in there}
        self.doubtful -= {pod.name for pod in there}
        self.pods.replace(there, version)

    def did(self, action: Action) -> None:
        """Records an action that was carried out."""
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
        """Records that the coordinator refused this size, which is not requested again until the object changes."""
        self.asked_nodes, self.refused_resize = nodes, why

    def is_news(self, action: Action) -> bool:
        """Whether an action is still to be done. False: it was, and the coordinator's next report will reflect it."""
        match action:
            case Tell(OrderDone(order_id=order_id)):
                return order_id not in self._acknowledged
            case Tell(NodeOutOfMemory(node=node), about):
                return self._told_of_memory.get(node) != about
            case Warn(about=about):
                return about not in self._warned
            case _:
                return True
