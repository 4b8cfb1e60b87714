"""The operator: creates and maintains the pods of all HoldfastJobs of a cluster.

It has no state of its own, so it can be killed at any moment, and no recovery of a job depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from holdfast.kubernetes.client.api import Api, ApiError, Object
from holdfast.kubernetes.client.informer import Informer
from holdfast.kubernetes.names import COORDINATOR_ROLE, LABEL_MANAGER, LABEL_ROLE, MANAGER
from holdfast.kubernetes.objects.machine import MachineSeen, machine_seen
from holdfast.kubernetes.objects.resource import GROUP, PLURAL, VERSION
from holdfast.kubernetes.policy.machines import Setting, braked
from holdfast.kubernetes.tasks import job_objects
from holdfast.kubernetes.tasks.job_task import JobTask
from holdfast.kubernetes.tasks.machine_marks import NodeMarks, NodeReplacement
from holdfast.protocol.network.lookup import Lookup

_log = logging.getLogger("holdfast.operator")
OURS = {"labelSelector": f"{LABEL_MANAGER}={MANAGER}"}
KUEUE_AGAIN_S = 30.0
"""Seconds between two tries to watch Workloads while a job names a queue but the cluster has no Kueue."""


class Operator:
    """The operator of all jobs of a cluster or of one namespace."""

    def __init__(
        self, api: Api, setting: Setting, lookup: Callable[[str], Lookup], namespace: str = ""
    ) -> None:
        """lookup: finds the coordinator at an address. namespace: whose jobs are managed; empty: all."""
        self._api, self._setting, self._lookup = api, setting, lookup
        scope = f"/namespaces/{namespace}" if namespace else ""
        self._jobs_path = f"/apis/{GROUP}/{VERSION}{scope}/{PLURAL}"
        self._pods_path = f"/api/v1{scope}/pods"
        self._tasks: dict[str, tuple[JobTask, asyncio.Task[None]]] = {}
        self._machines: dict[str, MachineSeen] = {}
        self._machine_versions: dict[str, int] = {}
        self._machines_known = asyncio.Event()
        self._marks = NodeMarks(
            api,
            self._machines,
            self._on_machine,
            setting.marking,
            setting.most_marked_percent,
            self._replacing(),
        )
        self._pods: dict[str, Object] = {}
        self._workloads_path = f"{job_objects.PATH}{scope}/workloads"
        self._workloads: dict[str, Object] | None = None
        self._no_workloads = "they are not listed yet"
        self._queued = asyncio.Event()

    def _replacing(self) -> NodeReplacement | None:
        wanted = self._setting.replacements
        if wanted is None:
            return None
        return NodeReplacement(self._api, self._setting.namespace, wanted, self._has_nodes)

    async def run(self) -> None:
        """Runs until cancelled. Raises an ExceptionGroup with an ApiError if a permission is missing."""
        pods = Informer(
            api=self._api,
            path=self._pods_path,
            query=OURS,
            on_list=self._list_pods,
            on_change=lambda pod: self._on_pod(pod, gone=False),
            on_gone=lambda pod: self._on_pod(pod, gone=True),
        )
        jobs = Informer(
            api=self._api,
            path=self._jobs_path,
            query={},
            on_list=self._list_jobs,
            on_change=self._on_job,
            on_gone=self._on_job_gone,
        )
        machines = Informer(
            api=self._api,
            path="/api/v1/nodes",
            query={},
            on_list=self._list_machines,
            on_change=self._on_machine,
            on_gone=self._on_machine_gone,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pods.run())
                group.create_task(self._watch_machines(machines))
                if self._setting.marking != "none":
                    group.create_task(self._marks.run())
                # Pods first, because a job whose pods are not known yet would be given new ones. Machines too, because pods
                # that are created before they are known would not be told their places.
                await pods.listed.wait()
                await self._machines_known.wait()
                group.create_task(jobs.run())
                group.create_task(self._watch_workloads())
        finally:
            await self._end([task for _, task in self._tasks.values()])

    async def _watch_machines(self, machines: Informer) -> None:
        try:
            await machines.run()
        except ApiError as error:
            if error.status != 403:
                raise
            # A site may leave out this permission. Then cordons and taints have no effect, but everything else works.
            _log.warning("machines are not watched: %s", error)
            self._machines_known.set()

    async def _watch_workloads(self) -> None:
        # Only once a job names a queue: most clusters have no Kueue, and sites may leave out the permission.
        await self._queued.wait()
        while True:
            workloads = Informer(
                api=self._api,
                path=self._workloads_path,
                query=OURS,
                on_list=self._list_workloads,
                on_change=lambda raw: self._on_workload(raw, gone=False),
                on_gone=lambda raw: self._on_workload(raw, gone=True),
            )
            try:
                await workloads.run()
            except ApiError as error:
                missing = "Kueue v1beta2 is not installed" if error.status == 404 else str(error)
                _log.warning("Kueue's Workloads are not watched: %s", missing)
                self._unknown_workloads(missing)
            await asyncio.sleep(random.uniform(KUEUE_AGAIN_S / 2, KUEUE_AGAIN_S))

    # ------------------------------------------------------------ what the watches report

    def _list_workloads(self, all_: list[Object], version: str) -> None:
        self._workloads = {one["metadata"]["uid"]: one for one in all_}
        for job, _ in self._tasks.values():
            job.queue.listed(all_)
            job.wake()

    def _unknown_workloads(self, why: str) -> None:
        self._workloads, self._no_workloads = None, why
        for job, _ in self._tasks.values():
            job.queue.unknown = why
            job.wake()

    def _on_workload(self, raw: Object, gone: bool) -> None:
        uid = raw["metadata"]["uid"]
        assert self._workloads is not None, "changes follow a list"
        if gone:
            self._workloads.pop(uid, None)
        else:
            self._workloads[uid] = raw
        for owner in raw["metadata"].get("ownerReferences", ()):
            if (known := self._tasks.get(owner.get("uid", ""))) is not None:
                job = known[0]
                if gone:
                    job.queue.gone(raw)
                else:
                    job.queue.put(raw)
                job.wake()

    def _list_jobs(self, all_: list[Object], version: str) -> None:
        there = {one["metadata"]["uid"] for one in all_}
        for uid in set(self._tasks) - there:
            self._drop(uid)
        for one in all_:
            self._on_job(one)

    def _on_job(self, raw: Object) -> None:
        uid = raw["metadata"]["uid"]
        # By uid and never by name: a job that was deleted and created again under the same name is another one, for which
        # nothing that the task remembers of the first one applies.
        if uid not in self._tasks:
            job = JobTask(
                api=self._api,
                raw=raw,
                machines=self._machines,
                setting=self._setting,
                lookup=self._lookup,
                marks=self._marks,
            )
            job.list_pods(self._pods.values(), 0)
            if self._workloads is None:
                job.queue.unknown = self._no_workloads
            else:
                job.queue.listed(self._workloads.values())
            running = asyncio.create_task(job.run())
            running.add_done_callback(lambda task: self._on_end(uid, task))
            self._tasks[uid] = (job, running)
        if job_objects.has_queue(raw):
            self._queued.set()
        self._tasks[uid][0].put(raw)

    def _on_end(self, uid: str, task: asyncio.Task[None]) -> None:
        # An error in one job's task must not end the tasks of all others. It is started again when the job changes.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a job's task broke", exc_info=error, extra={"uid": uid})
            self._tasks.pop(uid, None)

    def _on_job_gone(self, raw: Object) -> None:
        self._drop(raw["metadata"]["uid"])

    def _drop(self, uid: str) -> None:
        if (known := self._tasks.pop(uid, None)) is not None:
            known[1].cancel()

    def _list_pods(self, all_: list[Object], version: str) -> None:
        self._pods = {one["metadata"]["uid"]: one for one in all_}
        for job, _ in self._tasks.values():
            job.list_pods(all_, int(version))

    def _on_pod(self, raw: Object, gone: bool) -> None:
        uid = raw["metadata"]["uid"]
        if gone:
            self._pods.pop(uid, None)
            self._marks.wake()
        else:
            self._pods[uid] = raw
        for owner in raw["metadata"].get("ownerReferences", ()):
            if (known := self._tasks.get(owner.get("uid", ""))) is not None:
                known[0].put_pod(raw, gone)

    def _list_machines(self, all_: list[Object], version: str) -> None:
        self._machines.clear()
        self._machine_versions.clear()
        for one in all_:
            self._put_machine(one)
        self._brake()
        self._machines_known.set()
        self._wake_all()

    def _on_machine(self, raw: Object) -> None:
        # Kubelets update their Nodes every few seconds. Only what `MachineSeen` has of a Node counts as a change.
        if self._put_machine(raw):
            self._brake()
            self._wake_all()

    def _put_machine(self, raw: Object) -> bool:
        """Takes in a Node. Returns whether anything of its `MachineSeen` has changed."""
        name, version = raw["metadata"]["name"], int(raw["metadata"].get("resourceVersion", 0))
        # A watch may lag behind the answer to our own mark. Going back, the mark would not count towards the limit.
        if version < self._machine_versions.get(name, 0):
            return False
        self._machine_versions[name] = version
        seen = machine_seen(raw, self._setting.topology_labels, self._setting.going_conditions)
        before = self._machines.get(name)
        seen = msgspec.structs.replace(seen, held=before.held if before is not None else None)
        self._machines[name] = seen
        return before != seen

    def _brake(self) -> bool:
        """Limits how many machines jobs leave because of a condition, see `braked`. Returns whether anything has changed."""
        changed = list(braked(self._machines, self._setting.most_left_percent))
        for machine in changed:
            if machine.held is not None and self._machines[machine.name].held is None:
                _log.warning("stays in use: %s", machine.held, extra={"machine": machine.name})
            self._machines[machine.name] = machine
        return bool(changed)

    def _on_machine_gone(self, raw: Object) -> None:
        self._machines.pop(raw["metadata"]["name"], None)
        self._machine_versions.pop(raw["metadata"]["name"], None)
        if self._brake():
            self._wake_all()

    def _has_nodes(self, machine: str) -> bool:
        """Whether nodes of jobs may run on a machine. Coordinators do not count: training continues without one, and it is
        replaced."""
        known = self._machines.get(machine)
        # On a dead machine the object of a deleted pod stays although nothing of it runs.
        dead = known is not None and not known.ready
        return any(
            one.get("spec", {}).get("nodeName") == machine
            and one["metadata"].get("labels", {}).get(LABEL_ROLE) != COORDINATOR_ROLE
            and one.get("status", {}).get("phase") not in ("Succeeded", "Failed")
            and not (dead and "deletionTimestamp" in one["metadata"])
            for one in self._pods.values()
        )

    def _wake_all(self) -> None:
        self._marks.wake()
        for job, _ in self._tasks.values():
            job.wake()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
