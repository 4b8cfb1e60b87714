"""One job's task in the operator: it observes, decides, acts and writes the status. Each job has its own, so that one that is
stuck does not delay the others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoApiAnswer, Object
from holdfast.kubernetes.names import FINALIZER, NOTE_SKIP_SAVE
from holdfast.kubernetes.objects import kueue, render
from holdfast.kubernetes.objects.check import check, convert
from holdfast.kubernetes.objects.machine import MachineSeen
from holdfast.kubernetes.objects.pod import pod_seen
from holdfast.kubernetes.objects.resource import HoldfastJob, ObjectName, job_path
from holdfast.kubernetes.objects.status import (
    JobStatus,
    decided_from,
    from_timestamp,
    status_of,
    status_patch,
    written,
)
from holdfast.kubernetes.policy.conditions import JobNews, begun, news
from holdfast.kubernetes.policy.losses import newest_of, voters
from holdfast.kubernetes.policy.machines import Setting
from holdfast.kubernetes.policy.plan import (
    Action,
    AddFinalizer,
    AskResize,
    AskStop,
    CoordinatorReport,
    DeleteJob,
    DeleteObject,
    DeletePod,
    FindPod,
    LabelPod,
    MakeCoordinator,
    MakeNode,
    MakeObject,
    MakeWorkload,
    MarkMachine,
    Number,
    Observed,
    Plan,
    PointService,
    QueueAction,
    RemoveFinalizer,
    SizeGroup,
    Tell,
    TellPlace,
    UnmarkMachine,
    Warn,
)
from holdfast.kubernetes.policy.reconcile import current, reconcile
from holdfast.kubernetes.tasks.coordinator_link import JobLink, ask_nodes
from holdfast.kubernetes.tasks.expectations import Expectations
from holdfast.kubernetes.tasks.job_events import JobEvents
from holdfast.kubernetes.tasks.job_objects import JobObjects, JobPods, JobQueue
from holdfast.kubernetes.tasks.machine_marks import NodeMarks
from holdfast.protocol.job_options import Timing
from holdfast.protocol.network.endpoint import Hearing
from holdfast.protocol.network.lookup import Lookup

_log = logging.getLogger(__name__)
STATUS_EVERY_S = 5.0
"""Shortest interval between two writes of a status whose conditions have not changed."""
MOST_AT_ONCE = 16
"""Number of concurrent requests for the pods of one job, since the API server has other clients too."""
WRITES = 3
"""Number of tries to write a status as long as what it was decided from has not changed."""
MAKES = (MakeCoordinator, MakeNode, MakeObject, MakeWorkload)
"""Actions that a namespace refuses while it is being deleted."""
LOOK_EVERY_S = 5.0
"""Interval at which the report of a coordinator that answers is read."""


class JobTask:
    """The task of one job. `put` and the methods of `expected` take in what the watches report; `wake` starts a look."""

    def __init__(
        self,
        *,
        api: Api,
        raw: Object,
        machines: Mapping[str, MachineSeen],
        setting: Setting,
        lookup: Callable[[str], Lookup],
        marks: NodeMarks,
    ) -> None:
        """lookup: finds the coordinator at an address."""
        self._marks = marks
        self._api, self._raw, self._machines, self._setting = api, raw, machines, setting
        metadata = raw["metadata"]
        self.name, self.namespace, self.uid = metadata["name"], metadata["namespace"], metadata["uid"]
        self.expected = Expectations(self.name)
        self._awake = asyncio.Event()
        self._is_gone = False
        self._namespace_ends = False
        self._written: tuple[JobStatus, float] | None = None
        self._path = job_path(self.namespace, self.name)
        self.queue = JobQueue(api, self.name, self.namespace, self.uid)
        self._objects = JobObjects(api, self.name, self.namespace, self.uid)
        self._pods = JobPods(api, self.name, self.namespace, self.uid, self.expected, self.wake)
        self._events = JobEvents(api, ObjectName(namespace=self.namespace, name=self.name, uid=self.uid))
        self._link = JobLink(self.name, self.expected, lookup, self.wake)

    def wake(self) -> None:
        """Has the task look, since something may have changed."""
        self._awake.set()

    def put(self, raw: Object) -> None:
        """Takes in a version of the job's object. One that is older than the known version is ignored."""
        # After a refused write the object that is read may be another job that a person has since created under this name. If
        # it were taken for this one, both this task and that job's own would create pods for it.
        if raw["metadata"]["uid"] != self.uid:
            self._is_gone = True
            return
        # A watch may report an older version than the answer to our own write. Going back to it would undo what was decided
        # since, and the next write would be refused because of its old version.
        if int(raw["metadata"]["resourceVersion"]) >= int(self._raw["metadata"]["resourceVersion"]):
            self._raw = raw
        self.wake()

    def put_pod(self, raw: Object, gone: bool) -> None:
        """Takes in a pod from the watch. Pods of other jobs are ignored."""
        if (pod := pod_seen(raw, self.name, self.uid)) is not None:
            if gone:
                self.expected.pods.lost_sight(pod)
            else:
                self.expected.saw(pod)
            self.wake()

    def list_pods(self, all_: Iterable[Object], version: int) -> None:
        """Takes in a list of the pods of all jobs at this version."""
        mine = (pod for raw in all_ if (pod := pod_seen(raw, self.name, self.uid)) is not None)
        self.expected.listed(mine, version)
        self.wake()

    async def run(self) -> None:
        """Runs the job's reconciliation until cancelled."""
        backoff, due_s = Backoff(), 0.0
        self.wake()
        try:
            while True:
                try:
                    async with asyncio.timeout(due_s or None):
                        await self._awake.wait()
                except TimeoutError:
                    pass
                # Cleared before the look and not after it, so that a change during the look starts another one. In the
                # other order it would not be seen before the next change.
                self._awake.clear()
                try:
                    due_s = await self._once()
                    backoff.reset()
                except (ApiError, NoApiAnswer) as error:
                    if isinstance(error, ApiError) and error.namespace_ends:
                        # A repeated request would be refused again, until the job is deleted as well, which wakes this task.
                        _log.info("nothing more is made: %s", error, extra={"job": self.name})
                        self._namespace_ends = True
                        continue
                    _log.info("%s; it is tried again", error, extra={"job": self.name})
                    await backoff.wait(error)
                    self.wake()
        finally:
            await self._link.close()
            await self._events.close()

    async def _once(self) -> float:
        """One look: observes, decides, acts and writes the status.

        Returns:
            Seconds until the next look is due; 0: when something changes.

        Raises:
            ApiError, NoApiAnswer: a request failed.
        """
        if self._is_gone:
            return 0.0  # until the watch reports the deletion and the operator cancels this task
        if not self._objects.known:
            await self._objects.read(self._raw)
        seen = await self._observe()
        # All decisions are in `reconcile`, which is pure. This task may be cancelled between any two actions,
        # or its process killed: the next look begins from what the API server has, and each action may be
        # done again.
        plan = reconcile(seen)
        if self._namespace_ends:
            kept = tuple(one for one in plan.actions if not isinstance(one, MAKES))
            plan = msgspec.structs.replace(plan, actions=kept)
        error = await self._act(plan, seen)
        # The plan was made without the results of these actions, so the next look follows at once.
        if any(
            isinstance(action, Number | AddFinalizer | MakeObject | DeleteObject | SizeGroup)
            for action in plan.actions
        ):
            self.wake()
        due = [plan.look_again_s] if plan.look_again_s is not None else []
        if not any(isinstance(action, Number) for action in plan.actions):
            due += await self._say(plan)
        # Raised only now, because the API server's refusal has to be in the status.
        if error is not None:
            raise error
        if self._link.listens:
            due.append(LOOK_EVERY_S)
        return max(0.05, min(due)) if due else 0.0

    async def _act(self, plan: Plan, seen: Observed) -> ApiError | NoApiAnswer | None:
        """Carries out the plan. Returns the first failure; actions that do not depend on it are carried out all the same."""
        error: ApiError | NoApiAnswer | None = None
        for together in _together(plan.actions):
            news = [action for action in together if self.expected.is_news(action)]
            # One pod that is refused is enough: a quota, for example, would refuse the other sixty as well.
            if error is not None:
                news = [action for action in news if not isinstance(action, MakeNode | MakeCoordinator)]
            for some in (news[:1], news[1:]) if isinstance(together[0], MakeNode) else (news,):
                failures = await self._do_at_once(some, seen)
                for failure in failures:
                    if isinstance(failure, NoApiAnswer):
                        return failure  # each of the other actions would wait for an answer just as long
                error = error or next(iter(failures), None)
                if error is not None and isinstance(together[0], MakeNode):
                    break
        return error

    async def _do_at_once(self, actions: Sequence[Action], seen: Observed) -> list[ApiError | NoApiAnswer]:
        """Carries out independent actions concurrently. Returns their failures."""
        gate = asyncio.Semaphore(MOST_AT_ONCE)

        async def do(action: Action) -> ApiError | NoApiAnswer | None:
            async with gate:
                try:
                    await self._do(action, seen)
                except (ApiError, NoApiAnswer) as error:
                    return error
            return None

        return [error for error in await asyncio.gather(*map(do, actions)) if error is not None]

    # ------------------------------------------------------------ observing

    async def _observe(self) -> Observed:
        metadata = self._raw["metadata"]
        problems = check(self._raw)
        status = status_of(self._raw, NoApiAnswer)
        job = None if problems else convert(self._raw)
        report = await self._ask(status, job)
        hearings = {} if report is not None else await self._ask_nodes(status)
        return Observed(
            job=job,
            accepted=self._objects.accepted(self._raw),
            problems=problems,
            refused=self.expected.refused,
            generation=metadata.get("generation", 1),
            finalizer=FINALIZER in metadata.get("finalizers", ()),
            deleted_s=from_timestamp(metadata.get("deletionTimestamp")),
            skip_save=metadata.get("annotations", {}).get(NOTE_SKIP_SAVE) == "true",
            status=status,
            pods=self.expected.pods.all,
            machines=self._machines,
            workloads=self.queue.seen,
            no_workloads=self.queue.unknown,
            objects=self._objects.kinds,
            service_term=self._objects.service_term,
            group_members=self._objects.group_members,
            granted=frozenset(self.expected.granted),
            absent=self.expected.pods.absent,
            told=self.expected.told,
            said=report,
            released=self.expected.released(report, time.monotonic()),
            asked_nodes=self.expected.asked_nodes,
            refused_resize=self.expected.refused_resize,
            marking=self._setting.marking,
            most_marked_percent=self._setting.most_marked_percent,
            no_marks=self._marks.refused,
            hearings=hearings,
            silent_s=self._link.silent_s,
            now_s=self._api.now_s(),
        )

    async def _ask(self, status: JobStatus, job: HoldfastJob | None) -> CoordinatorReport | None:
        pod, token = newest_of(self.expected.pods.all, status.term), self._objects.token
        answers = pod is not None and pod.stays and pod.phase == "Running" and token is not None
        timing = job.spec.timing if job is not None else Timing()
        await self._link.follow(pod if answers else None, token or "", timing.detection_s)
        return await self._link.ask()

    async def _ask_nodes(self, status: JobStatus) -> dict[str, Hearing | None]:
        """What nodes report of their connection to the coordinator, which does not answer this operator."""
        pods, token = self.expected.pods.all, self._objects.token
        if token is None:
            return {}
        machines = {pod.machine for pod in pods if pod.coordinator}
        return await ask_nodes(voters(pods, status.run), token, newest_of(pods, status.term), machines)

    # ------------------------------------------------------------ acting

    async def _do(self, action: Action, seen: Observed) -> None:
        match action:
            case AddFinalizer():
                await self._set_finalizers([*self._raw["metadata"].get("finalizers", ()), FINALIZER])
            case RemoveFinalizer():
                kept = [one for one in self._raw["metadata"].get("finalizers", ()) if one != FINALIZER]
                await self._set_finalizers(kept)
            case Number():
                await self._number(action, seen)
            case MakeObject(kind):
                await self._make_beside(kind, seen)
            case DeleteObject(kind):
                await self._objects.delete(kind)
            case PointService(term):
                await self._objects.point_service(term)
            case SizeGroup(members):
                await self._objects.size_group(members)
            case MakeNode(number, avoid, workload):
                job = self._job(seen)
                places = any(machine.place for machine in self._machines.values())
                pod = render.agent_pod(job, number, self._run(seen), avoid, self._setting, places)
                await self._pods.make(await self._placed(pod, workload, names.NODE_ROLE))
            case MakeCoordinator(term, avoid):
                job = self._job(seen)
                pod = render.coordinator_pod(job, term, self._run(seen), self._setting, avoid)
                base = names.workload_name(self.name, None) if job.queue else ""
                await self._pods.make(await self._placed(pod, base, names.COORDINATOR_ROLE))
            case FindPod():
                await self._pods.find(action)
            case LabelPod(name=name):
                bare = next(one for one in seen.pods if one.name == name)
                await self._pods.label(action, render.pod_labels(self.name, bare, self._run(seen)))
            case TellPlace():
                await self._pods.tell_place(action)
            case MarkMachine(machine, mark):
                await self._marks.put(machine, mark)
                self.wake()  # the next look acknowledges the order, since the mark is there
            case UnmarkMachine(machine):
                await self._marks.take_back(machine, self.uid)
            case Warn(reason=reason, text=text):
                _log.warning("%s: %s", reason, text, extra={"job": self.name})
                self.expected.did(action)
                self._events.tell(JobNews("Warning", reason, text))
            case DeletePod():
                await self._pods.delete(action)
            # With its uid, since an object of the same name that a person has created since is another job.
            case DeleteJob():
                await self._api.delete(self._path, self.uid)
            case Tell() | AskStop() | AskResize():
                await self._link.talk(action)
            case _:
                await self._ask_queue(action, seen)

    async def _make_beside(self, kind: str, seen: Observed) -> None:
        try:
            await self._objects.make(kind, self._job(seen), seen.status.term or 0, self._setting)
        except ApiError as error:
            self.expected.refused = f"{kind}: {error}"
            raise

    async def _ask_queue(self, action: QueueAction, seen: Observed) -> None:
        try:
            await self.queue.do(action, current(seen), self._setting)
            self.expected.refused = None
        except ApiError as error:
            self.expected.refused = f"Kueue's Workload: {error}"
            raise
        finally:
            self.wake()

    async def _placed(self, pod: Object, workload: str, role: str) -> Object:
        """The pod with what the admission of its Workload adds to it. workload: empty: the job is in no queue."""
        return kueue.placed(pod, await self.queue.where(workload, role), workload) if workload else pod

    def _job(self, seen: Observed) -> HoldfastJob:
        job = current(seen)
        assert job is not None, "a plan that makes something is of a job that can run"
        return job

    def _run(self, seen: Observed) -> int:
        return seen.status.run or 0

    async def _set_finalizers(self, kept: list[str]) -> None:
        metadata = {"finalizers": kept, "resourceVersion": self._raw["metadata"]["resourceVersion"]}
        await self._changed(self._api.merge(self._path, {"metadata": metadata}))

    async def _number(self, action: Number, seen: Observed) -> None:
        before = seen.status
        run, term, number = action.run, action.term, action.next_number
        after = (
            begun(before, run, term, number, seen.now_s)
            if action.begins
            else msgspec.structs.replace(before, run=run, term=term, next_number=number)
        )
        # The numbers count only once they are written. If the object has changed in the meantime, no names are granted and the
        # next look decides again.
        if await self._write(after):
            self.expected.numbered(action, (before.term or 0, before.next_number or 0))
            self._objects.doubt()

    # ------------------------------------------------------------ the status

    async def _say(self, plan: Plan) -> list[float]:
        """Writes the status: at once if a condition changed, else every `STATUS_EVERY_S` at most.

        Returns:
            The seconds until a postponed write is due, if there is one.
        """
        now_s = time.monotonic()
        before = status_of(self._raw, NoApiAnswer)
        if written(plan.status) == written(before):
            return []
        if self._written is not None and _conditions(plan.status) == _conditions(before):
            # Steps and losses change all the time, and every write is sent to every watcher. Programs wait for conditions, so a
            # change of one of these is written at once.
            left_s = self._written[1] + STATUS_EVERY_S - now_s
            if left_s > 0:
                return [left_s]
        await self._write(plan.status)
        self._written = (plan.status, now_s)
        return []

    async def _write(self, status: JobStatus) -> bool:
        """Writes the status, and posts Events for what it changes. False: the object has changed; the next look decides again."""
        for _ in range(WRITES):
            before = self._raw
            if await self._apply(status):
                # Only for a status that was written: the next operator compares with it, so that no Event is posted twice.
                for one in news(status_of(before, NoApiAnswer), status):
                    self._events.tell(one)
                return True
            # A retry, because a script that keeps changing labels of the object could otherwise have each look's write refused:
            # between its observation and its write a look waits for several answers, and a retry for one.
            if self._raw is before or _decides(self._raw) != _decides(before):
                return False
        return False

    async def _apply(self, status: JobStatus) -> bool:
        before = self._raw
        request = self._api.test_and_set(f"{self._path}/status", status_patch(before, status))
        try:
            return await self._changed(request)
        except ApiError as error:
            if error.status != 422:
                raise
            self.put(await self._api.get(self._path))
            # What was tested has not changed, so the refusal is about the status itself.
            if decided_from(self._raw) == decided_from(before):
                raise
            return False

    async def _changed(self, request: Awaitable[Object]) -> bool:
        """Takes in the answer to a write. False: the object was changed or deleted in the meantime; the next look decides
        again."""
        try:
            self.put(await request)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            if error.status == 409:
                self.put(await self._api.get(self._path))
            return False
        return True


def _decides(raw: Object) -> Object:
    """The parts of the object that decisions depend on, so without labels and foreign annotations."""
    metadata = raw["metadata"]
    seen = {key: metadata.get(key) for key in ("uid", "generation", "deletionTimestamp", "finalizers")}
    skip = metadata.get("annotations", {}).get(NOTE_SKIP_SAVE)
    return {**seen, "skip": skip, "status": raw.get("status")}


def _together(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """The plan's actions in order, grouped by what can be done concurrently: adjacent actions of one kind for several pods. A
    thousand requests one after the other would take as long as a thousand answers."""
    for kind, some in itertools.groupby(actions, type):
        if kind in (MakeNode, FindPod, LabelPod, TellPlace, DeletePod):
            yield list(some)
        else:
            yield from ([action] for action in some)


def _conditions(status: JobStatus) -> dict[str, str]:
    """The parts of a status whose change must be written at once."""
    # Besides conditions: the coordinator's address, which commands use, and the size to request, which is requested only after
    # it was written.
    where = status.coordinator
    found = {"state": status.state or "", "coordinator": f"{where.pod} {where.address}" if where else ""}
    found["asking"] = str(status.asking_nodes)
    return {one.type: one.status for one in status.conditions} | found
