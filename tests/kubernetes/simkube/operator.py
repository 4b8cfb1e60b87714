"""An operator process: its watches are behind, and it may die between any two requests. It decides by `reconcile` alone."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.objects.kueue import WorkloadSeen
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.policy.conditions import begun
from holdfast.kubernetes.policy.losses import newest_of, voters
from holdfast.kubernetes.policy.plan import (
    Action,
    AddFinalizer,
    AskResize,
    AskStop,
    CoordinatorReport,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteWorkload,
    FindPod,
    FinishWorkload,
    LabelPod,
    MakeCoordinator,
    MakeNode,
    MakeObject,
    MakeWorkload,
    Number,
    Observed,
    Plan,
    PointService,
    QueueAction,
    ReleaseQuota,
    RemoveFinalizer,
    SizeGroup,
    Tell,
    TellReady,
)
from holdfast.kubernetes.policy.reconcile import reconcile
from holdfast.kubernetes.tasks.expectations import Expectations
from simkube.cluster import Cluster, Silent
from simkube.server import Conflict, Exists, JobObject, NoAnswer, NotFound, Server


class Operator:
    """`work` takes a few events in, makes a plan and carries some of it out."""

    def __init__(self, server: Server, cluster: Cluster) -> None:
        self.server, self.cluster = server, cluster
        self.expected = Expectations("llm")
        self.job: JobObject | None = None
        self.gone = False
        self.position: int | None = None
        self.listing: tuple[list[PodSeen], int] | None = None
        self.uid = ""
        self.known: dict[str, PodSeen] = {}
        """By uid, of all jobs: the watch tells them whether the job is known or not."""
        self.workloads: dict[str, WorkloadSeen] | None = None
        self.versions: dict[str, int] = {}
        self.silent = "", 0.0
        """The coordinator's pod that was asked last, and since when in vain."""

    # ------------------------------------------------------------ what it sees

    def look(self, most: int | None = None) -> None:
        """Reads the watch, at most so many events; a watch that was cut begins anew with a list."""
        if self.server.down:
            return
        if self.position is None and self.listing is None:
            self.listing = self.server.listed(), len(self.server.log)
        # The answer may be on its way while pods are made: the operator works on with what it knows.
        if self.listing is not None and (most is None or not self.expected.pods.all):
            pods, version = self.listing
            self.known = {pod.uid: pod for pod in pods}
            self.expected.listed([pod for pod in pods if self.is_mine(pod)], version)
            self.position, self.listing = version, None
        if self.position is not None:
            self._watch(self.position, most)
        if most is None or self.job is None or self.server.dice.random() < 0.7:
            self.take_job()
        if most is None or self.server.dice.random() < 0.7:
            self.look_at_queue()

    def take_job(self) -> None:
        """As the watch has it. A job of another uid is another job: nothing is remembered of it, and its pods are those that
        the watch of pods has told."""
        self.job = self.server.object
        if self.job is not None and self.job.uid != self.uid:
            self.uid, self.expected = self.job.uid, Expectations("llm")
            self.expected.listed([pod for pod in self.known.values() if self.is_mine(pod)], 0)

    def is_mine(self, pod: PodSeen) -> bool:
        return self.server.owners[pod.uid] == self.uid

    def _watch(self, position: int, most: int | None) -> None:
        end = len(self.server.log) if most is None else min(len(self.server.log), position + most)
        for kind, pod in self.server.log[position:end]:
            if kind == "gone":
                self.known.pop(pod.uid, None)
            else:
                self.known[pod.uid] = pod
            if self.is_mine(pod) and kind == "gone":
                self.expected.pods.lost_sight(pod)
            elif self.is_mine(pod):
                self.expected.saw(pod)
        self.position = end

    def look_at_queue(self) -> None:
        chosen = self.cluster.choices.of if self.cluster.choices is not None else {}
        self.workloads = {
            name: msgspec.structs.replace(one, machines=frozenset(chosen.get(one.uid, ())))
            for name, one in self.server.workloads.items()
        }
        self.versions = dict(self.server.versions)

    def cut(self) -> None:
        """The watch ends; its place in the log is lost (410)."""
        self.position, self.listing = None, None

    def observed(self) -> Observed | None:
        if self.job is None:
            return None
        try:
            said: CoordinatorReport | None = self.cluster.said(self.job.uid)
            assert said is not None
            alive = [name for name, node in said.nodes.items() if node.alive]
            self.expected.meet(said.term, alive, [order.order_id for order in said.orders])
        except Silent:
            said = None
        there = self.server.object
        is_now = there is not None and there.uid == self.job.uid
        beside = self.server.beside if is_now and not self.server.down else {}
        newest = newest_of(self.expected.pods.all, self.job.status.term)
        hearings = {}
        if said is None:
            hearings = self.cluster.hearings(voters(self.expected.pods.all, self.job.status.run))
        is_new = newest is not None and newest.phase == "Running" and newest.uid != self.silent[0]
        if newest is not None and (said is not None or is_new):
            self.silent = newest.uid, self.cluster.now_s
        return Observed(
            job=self.job.job,
            accepted=beside.get("ConfigMap"),
            generation=self.job.generation,
            finalizer=self.job.finalizer,
            deleted_s=self.job.deleted_s,
            status=self.job.status,
            pods=self.expected.pods.all,
            machines=self.cluster.seen_machines(),
            workloads=self.workloads,
            objects=frozenset(beside),
            service_term=beside.get("Service"),
            group_members=beside.get("PodGroup"),
            granted=frozenset(self.expected.granted),
            absent=self.expected.pods.absent,
            told=self.expected.told,
            said=said,
            released=self.expected.released(said, self.cluster.now_s),
            asked_nodes=self.expected.asked_nodes,
            hearings=hearings,
            silent_s=self.cluster.now_s - self.silent[1],
            now_s=self.cluster.now_s,
        )

    # ------------------------------------------------------------ what it does

    def plan(self) -> Plan | None:
        seen = self.observed()
        return None if seen is None else reconcile(seen)

    def work(self, most: int | None = None) -> int:
        """Returns how many actions it carried out."""
        plan = self.plan()
        if plan is None:
            return 0
        done = 0
        news = [action for action in plan.actions if self.expected.is_news(action)]
        for action in news[:most]:
            try:
                self._do(action)
            except (Conflict, NotFound):
                self.look()
                self.look_at_queue()
                return done + 1
            except (NoAnswer, Silent):
                return done
            done += 1
        if done == len(news) and not any(isinstance(action, Number) for action in news):
            done += self._write_status(plan)
        return done

    def _write_status(self, plan: Plan) -> int:
        assert self.job is not None
        if plan.status == self.job.status:
            return 0

        def change(job: JobObject) -> None:
            job.status = plan.status

        try:
            self.job = self.server.call(lambda: self.server.change_job(change, self.job.version))
        except (Conflict, NotFound):
            # The answer may be about another job of this name. Only the watch says that it is this one's turn.
            there = self.server.object
            if there is None or there.uid == self.uid:
                self.job = there
        except NoAnswer:
            return 0
        return 1

    def _do(self, action: Action) -> None:
        server, call = self.server, self.server.call
        assert self.job is not None
        match action:
            case AddFinalizer():
                self.job = call(lambda: server.change_job(_set(finalizer=True), self.job.version))
            case RemoveFinalizer():
                self.job = call(lambda: server.change_job(_set(finalizer=False), self.job.version))
            case Number():
                self._number(action)
            case MakeObject(kind):
                value: Any = True
                if kind == "ConfigMap":
                    value = self.job.job
                elif kind == "PodGroup":
                    value = self.job.job.spec.fewest
                elif kind == "Service":
                    value = self.job.status.term
                call(lambda: server.make_beside(kind, self.uid, value))
            case DeleteObject(kind):
                call(lambda: self._delete_beside(kind))
            case SizeGroup(members):
                call(lambda: self._change_beside("PodGroup", members))
            case PointService(term):
                call(lambda: self._change_beside("Service", term))
            case MakeNode(number, avoid, workload):
                name = names.node_name("llm", number)
                self._make(name, number, coordinator=False, workload=workload, avoids=avoid)
            case MakeCoordinator(term):
                self._make(names.coordinator_name("llm", term), term, coordinator=True)
            case FindPod(name):
                there = call(lambda: server.pods.get(name))
                if there is None or not self.is_mine(there):
                    self.expected.pods.not_there(name)
                else:
                    self.expected.saw(there)
            case LabelPod(name=name, uid=uid):
                try:
                    self.expected.saw(call(lambda: server.label_pod(name, uid)))
                except (NotFound, Conflict):
                    self.expected.pods.gone(name, uid)
            case DeletePod(name=name, uid=uid, reason=reason, version=version):
                try:
                    self.expected.saw(call(lambda: server.delete_pod(name, uid, reason, self.uid, version)))
                except NotFound:
                    self.expected.pods.gone(name, uid)
                except Conflict:
                    if version is None:
                        self.expected.pods.gone(name, uid)
                    else:
                        self._do(FindPod(name))
            case Tell(news):
                self.cluster.tell(self.uid, news)
                self.expected.did(action)
            case AskStop(reason, cause):
                self.cluster.stop(self.uid, reason, cause)
            case AskResize(nodes):
                self.cluster.resize(self.uid, nodes)
                self.expected.did(action)
            case DeleteJob():
                call(lambda: server.change_job(_set(deleted_s=self.cluster.now_s)))
            case _:
                self._ask_queue(action)

    def _number(self, action: Number) -> None:
        assert self.job is not None
        before = (self.job.status.term or 0, self.job.status.next_number or 0)
        version = self.job.version

        def change(job: JobObject) -> None:
            if action.begins:
                job.status = begun(
                    job.status, action.run, action.term, action.next_number, self.cluster.now_s
                )
            else:
                job.status = msgspec.structs.replace(
                    job.status, run=action.run, term=action.term, next_number=action.next_number
                )

        self.job = self.server.call(lambda: self.server.change_job(change, version))
        self.expected.numbered(action, before)

    def _ask_queue(self, action: QueueAction) -> None:
        server, call = self.server, self.server.call
        assert self.job is not None
        match action:
            case MakeWorkload(number, nodes):
                name = names.workload_name("llm", number)
                made = WorkloadSeen(name=name, uid="", number=number, nodes=nodes, queue=self.job.job.queue)
                call(lambda: server.make_workload(made))
            case DeleteWorkload(name=name, uid=uid):
                call(lambda: server.delete_workload(name, uid))
            case ReleaseQuota(name):
                fields = {"admitted": False, "reserved": False, "ready": False}
                call(lambda: server.change_workload(name, self.versions[name], **fields))
            case FinishWorkload(name):
                call(lambda: server.change_workload(name, self.versions[name], finished=True))
            case TellReady(name):
                call(lambda: server.change_workload(name, self.versions[name], ready=True))
        self.look_at_queue()

    def _make(
        self,
        name: str,
        number: int,
        coordinator: bool,
        workload: str = "",
        avoids: frozenset[str] = frozenset(),
    ) -> None:
        assert self.job is not None
        if name in self.expected.doubtful:
            there = self.server.call(lambda: self.server.pods.get(name))
            self._saw(name, there)
            return
        run = self.job.status.run or 0
        pod = PodSeen(
            name=name,
            uid="",
            coordinator=coordinator,
            number=number,
            run=run,
            workload=workload,
            avoids=avoids,
            gated=not coordinator and self.cluster.choices is not None,
        )
        try:
            made = self.server.call(lambda: self.server.make_pod(pod, self.uid))
        except Exists:
            made = self.server.pods[name]
        except NoAnswer:
            self.expected.doubtful.add(name)
            raise
        self._saw(name, made)

    def _change_beside(self, kind: str, value: Any) -> None:
        if self.server.object is not None and self.server.object.uid == self.uid:
            self.server.beside[kind] = value

    def _delete_beside(self, kind: str) -> None:
        # By its uid, so never another job's.
        if self.server.object is not None and self.server.object.uid == self.uid:
            self.server.beside.pop(kind, None)

    def _saw(self, name: str, pod: PodSeen | None) -> None:
        # One of a job before has the name, or nobody has: another number is free.
        if pod is None or not self.is_mine(pod):
            self.expected.burn(name)
        else:
            self.expected.saw(pod)


def _set(**fields: Any) -> Any:
    def change(job: JobObject) -> None:
        for name, value in fields.items():
            setattr(job, name, value)

    return change
