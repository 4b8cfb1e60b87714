"""One random schedule: faults of all kinds for a while, then quiet; and what has to hold meanwhile and at the end."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from kubejobs import accept
from kubejobs import job as asked

from holdfast.kubernetes.names import LABEL_QUEUE
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.status import ConditionType
from holdfast.kubernetes.policy import queues
from holdfast.kubernetes.policy.reconcile import DELETED, LEAVE_S, SUSPENDED
from holdfast.protocol.engine_orders import ReleaseNode
from simkube.choices import Choices
from simkube.cluster import Cluster
from simkube.operator import Operator
from simkube.server import JobObject, Server

QUIET_TICKS = 1000
QUEUE_FAULTS = (
    "quota",
    "evicted",
    "evicted",
    "activated",
    "deactivated",
    "workload-deleted",
    "queue-unknown",
)


class Schedule:
    """Runs one seed. `problems` has what must not be."""

    def __init__(
        self,
        seed: int,
        ticks: int = 40,
        queued: bool = False,
        gang: bool = False,
        again: bool = False,
        chosen: bool = False,
    ) -> None:
        """
        Args:
            queued: the job waits in a Kueue queue, whose quota changes and is taken back.
            gang: its scheduler binds as many nodes as its PodGroup says, or none.
            again: people delete it often, and make another one of its name while the first one is still going.
            chosen: the queue's Kueue chooses the nodes' machines.
        """
        self.dice = dice = random.Random(seed)
        nodes, spares = dice.randint(1, 4), dice.randint(0, 2)
        queue = {"metadata__labels": {LABEL_QUEUE: "team-a"}} if queued else {}
        group = {"spec__scheduling": {"gang": "PodGroup"}} if gang else {}
        fewest = dice.randint(1, nodes) if queued or gang else 1
        # Without minNodes, each change of the size changes the group's.
        least = {} if gang and dice.random() < 0.5 else {"spec__minNodes": fewest}
        taken = accept(asked(spec__nodes=nodes, spec__spares=spares, **least, **queue, **group))
        self.again, self.first = again, taken
        self.server = Server(dice, taken)
        self.server.on_delete, self.server.on_make = self.deleted, self.was_made
        until = dice.choice((15, 60, 100_000))
        self.cluster = Cluster(dice, self.server, nodes + spares + dice.randint(0, 3), until)
        self.queued, self.cluster.quota = queued, nodes + spares
        if chosen:
            self.cluster.choices = Choices(self.server, self.cluster.machines)
        self.lent: set[str] = set()
        self.taken_back: set[str] = set()
        self.operator = Operator(self.server, self.cluster)
        self.rival: Operator | None = None
        self.rivals = 0
        self.ticks = ticks
        self.problems: list[str] = []
        self.happened: Counter[str] = Counter()
        self.over = False

    def run(self) -> list[str]:
        for _ in range(self.ticks):
            self.cluster.tick()
            if self.again and self.server.object is None and self.server.pods and self.dice.random() < 0.3:
                self.make_again()  # whoever waits for the name alone
            self.something()
            self.operator.look(self.dice.choice((None, None, 0, 1, 3)))
            self.operator.work(self.dice.choice((None, None, 1, 2)))
            if self.rival is not None and self.dice.random() < 0.5:
                self.rival.work()
            self.always()
        self.calm()
        self.fixed_point()
        return self.problems

    # ------------------------------------------------------------ faults

    def something(self) -> None:
        dice, server, cluster = self.dice, self.server, self.cluster
        what = dice.choice(
            [
                "nothing",
                "nothing",
                "power-loss",
                "power-returns",
                "coordinator-cut",
                "pod-killed",
                "container-killed",
                "cordon",
                "uncordon",
                "machine-bad",
                "machine-mended",
                "unlabelled",
                "server-down",
                "server-up",
                "trouble",
                "no-trouble",
                "watch-cut",
                "operator-killed",
                "two-operators",
                "one-operator",
                "scale",
                "suspend",
                "resume",
                "delete",
                "script-fails",
                "object-deleted",
                "job-touched",
                *(QUEUE_FAULTS if self.queued else ()),
                *(("delete", "delete", "made-again", "made-again") if self.again else ()),
            ]
        )
        self.happened[what] += 1
        if what == "power-loss":
            cluster.power_loss()
        elif what == "power-returns":
            cluster.power_returns()
        elif what == "coordinator-cut":
            cluster.cut_coordinator()
        elif what == "pod-killed":
            cluster.kill_pod()
        elif what == "container-killed":
            cluster.kill_container()
        elif what in ("cordon", "uncordon"):
            dice.choice(list(cluster.machines.values())).cordoned = what == "cordon"
        elif what in ("machine-bad", "machine-mended"):
            dice.choice(list(cluster.machines.values())).bad = what == "machine-bad"
        elif what == "unlabelled" and (
            ready := sorted(pod.name for pod in server.pods.values() if pod.ready)
        ):
            server.unlabel(dice.choice(ready))
        elif what in ("server-down", "server-up"):
            server.down = what == "server-down" and dice.random() < 0.5
        elif what in ("trouble", "no-trouble"):
            server.trouble = 0.4 if what == "trouble" else 0.0
        elif what == "watch-cut":
            self.operator.cut()
        elif what == "operator-killed":
            self.operator = Operator(server, cluster)
        elif what == "two-operators":
            # The old leader goes on with what it knew, and reads nothing new.
            self.rival, self.operator = self.operator, Operator(server, cluster)
            self.rivals += 1
        elif what == "one-operator":
            self.rival = None
        elif what == "object-deleted" and server.beside:
            server.beside.pop(dice.choice(sorted(server.beside)))
        elif what in QUEUE_FAULTS:
            self.queue(what)
        elif what == "made-again" and server.object is None:
            self.make_again()
        elif server.object is not None:
            self.user(what)

    def queue(self, what: str) -> None:
        dice, server = self.dice, self.server
        if what == "quota":
            self.cluster.quota = dice.randint(0, 8)
        elif what == "queue-unknown":
            self.operator.workloads = None
        elif server.workloads:
            name = dice.choice(sorted(server.workloads))
            if what == "evicted":
                self.cluster.evict(name)
            elif what in ("activated", "deactivated"):
                server.change_workload(name, active=what == "activated")
            elif dice.random() < 0.3:
                server.delete_workload(name)

    def user(self, what: str) -> None:
        dice, server = self.dice, self.server
        assert server.object is not None
        spec = server.object.job.spec
        if what == "scale" and dice.random() < 0.5:
            spec = msgspec.structs.replace(spec, nodes=dice.randint(1, 4))
        elif what in ("suspend", "resume") and (what == "resume" or dice.random() < 0.3):
            policy = msgspec.structs.replace(spec.run_policy, suspend=what == "suspend")
            spec = msgspec.structs.replace(spec, run_policy=policy)
        elif what == "delete" and dice.random() < (0.5 if self.again else 0.1):
            if server.object.deleted_s is not None:
                return
            self.happened[f"deleted: {server.object.status.state}"] += 1
            server.change_job(lambda job: setattr(job, "deleted_s", self.cluster.now_s))
            return
        elif what == "script-fails" and dice.random() < 0.1:
            self.cluster.script_fails = True
        elif what != "job-touched":
            return

        def change(job: JobObject) -> None:
            job.job = msgspec.structs.replace(job.job, spec=spec)
            job.generation += 1

        server.change_job(change)

    def make_again(self) -> None:
        """Another job, whose name was that of one that is gone."""
        before, server = self.first, self.server
        count = self.happened["made again"] = self.happened["made again"] + 1
        id_ = msgspec.structs.replace(before.id, uid=f"{before.id.uid}-{count}")
        server.make_again(msgspec.structs.replace(before, id=id_))
        self.cluster.saved, self.cluster.script_fails = 0, False
        self.over, self.lent, self.taken_back = False, set(), set()
        self.happened["met pods of the one before"] += bool(server.pods)
        self.happened["met objects of the one before"] += bool(server.left)

    def calm(self) -> None:
        """All faults end; machines are back, and one operator is left."""
        self.server.down, self.server.trouble, self.rival = False, 0.0, None
        for machine in self.cluster.machines.values():
            machine.cordoned = machine.bad = False
        self.cluster.power_returns()
        self.operator.cut()
        for name in list(self.server.workloads):
            self.server.change_workload(name, active=True)
        if self.again and self.server.object is None and self.dice.random() < 0.5:
            self.make_again()

    # ------------------------------------------------------------ what must hold

    def was_made(self, pod: PodSeen) -> None:
        if self.server.made.count(self.server.made[-1]) > 1:
            self.problems.append(f"{pod.name} was made twice")
        # Made for a job that is gone: by an operator that had not heard of it. The garbage collector takes it away.
        if not self.server.is_mine(pod):
            return
        job = self.cluster.job()
        is_grouped = job is not None and job.spec.scheduling.gang is not None
        if is_grouped and not pod.coordinator and "PodGroup" not in self.server.beside:
            self.problems.append(f"{pod.name} was made before its group")
        # A leader that was stopped and thaws makes what it had numbered. The new one deletes it: see `at_rest`.
        if self.over and not self.rivals:
            self.problems.append(f"{pod.name} was made after the end")
        if job is not None and not pod.coordinator and not self.rivals:
            # Of one without its label an operator that starts hears when the coordinator tells of it.
            here = [
                one for one in self.server.mine() if one.stays and not one.coordinator and not one.mislabelled
            ]
            if len(here) - len(self.given_up() & {one.name for one in here}) >= 4 + job.spec.spares:
                self.problems.append(f"{pod.name} is one more than was ever wanted")

    def given_up(self) -> set[str]:
        known = self.cluster.coordinator
        orders = known.orders.values() if known is not None else ()
        going = {name for name, one in self.cluster.machines.items() if one.cordoned or not one.up}
        return {one.node for one in orders if isinstance(one, ReleaseNode)} | {
            pod.name for pod in self.server.pods.values() if pod.machine in going or pod.crash is not None
        }

    def deleted(self, pod: PodSeen, reason: str, by: str) -> None:
        """A pod whose node trains is deleted for one reason only: the end of its run. by: uid of the job whose operator asks."""
        if self.server.owners[pod.uid] != by:
            self.problems.append(f"{pod.name} is another job's and was deleted: {reason}")
        self.happened["elsewhere"] += "again and again" in reason
        known, job = self.cluster.coordinator, self.server.object
        if pod.coordinator or known is None or known.outcome is not None or job is None:
            return
        trains = (
            self.server.is_mine(pod)
            and pod.name in known.training()
            and self.cluster.runs(pod)
            and not pod.deleting
        )
        # Kueue's word, or a person's who has deleted the Workload: either was there.
        unlent = queues.TAKEN_BACK in reason and "llm-base" in self.taken_back
        ends = (
            self.over or reason == SUSPENDED or unlent or (reason == DELETED and self.had_time_to_save(job))
        )
        if trains and not ends and not self.rivals:
            self.problems.append(f"{pod.name} trained and was deleted: {reason}")

    def had_time_to_save(self, job: JobObject) -> bool:
        """It was deleted, and its coordinator did not end in order for as long as it is waited for."""
        most_s = job.job.spec.disruption.grace_seconds + LEAVE_S
        return job.deleted_s is not None and self.cluster.now_s >= job.deleted_s + most_s

    def always(self) -> None:
        job = self.server.object
        there = self.server.workloads
        lent = {name for name, one in there.items() if one.grants}
        self.lent |= lent
        self.taken_back |= self.lent - lent
        operator = self.operator
        if adopted := [pod.name for pod in operator.expected.pods.all if not operator.is_mine(pod)]:
            self.problems.append(f"taken for its own: {adopted}")
        alive = [pod for pod in self.server.mine() if pod.coordinator and pod.stays]
        if len({pod.number for pod in alive}) != len(alive):
            self.problems.append("two coordinators of one term")
        if job is None:
            self.over = True
            return
        ended = job.status.holds(ConditionType.COMPLETE) or job.status.holds(ConditionType.FAILED)
        if self.over and not ended:
            self.problems.append("the end was taken back")
        failed = job.status.condition(ConditionType.FAILED)
        if ended and not self.over and failed is not None and failed.reason == "AgentsCrash":
            self.happened["crashed everywhere"] += 1
            # A machine that is mended in this moment comes too late; a job that has trained is never ended by it.
            if job.status.progress is not None and job.status.progress.step:
                self.problems.append("it has trained, and was ended for crashes")
        self.over = self.over or ended

    def fixed_point(self) -> None:
        """Left alone it comes to rest, at what was asked for."""
        quiet = 0
        for _ in range(QUIET_TICKS):
            before = len(self.server.log)
            self.cluster.tick()
            self.operator.look()
            done = self.operator.work()
            self.always()
            known = self.cluster.coordinator
            # A node that is to leave does so within its time, which here is a throw of the dice.
            leaves = known is not None and any(known.nodes.get(name) for name in known.leaving)
            settled = (done == 0 or (known is not None and done == 1)) and not leaves
            # And so are Kueue's next admission, an agent that gives up, and the garbage collector's next visit.
            settled = settled and not self.cluster.admissible() and not self.cluster.orphans()
            settled = settled and not self.server.left
            # And so is the vote on a coordinator that nobody reaches.
            settled = settled and not self.cluster.is_cut()
            # And so is the patience with a node that may come back in its pod.
            settled = settled and not self.cluster.are_waited_for()
            quiet = quiet + 1 if settled and len(self.server.log) == before else 0
            if quiet > 12:
                break
        else:
            plan = self.operator.plan()
            self.problems.append(f"it does not come to rest: {plan.actions if plan else None}")
            return
        self.at_rest()

    def at_rest(self) -> None:
        job, pods = self.server.object, self.server.mine()
        if orphans := [pod.name for pod in self.server.pods.values() if not self.server.is_mine(pod)]:
            self.problems.append(f"orphans: {orphans}")
        # What is left of a pod that has ended without its label goes with the object.
        pods = [pod for pod in pods if not (pod.mislabelled and pod.ended)]
        if job is None:
            return
        if job.deleted_s is not None:
            self.problems.append("the deleted object is still there")
        elif job.job.spec.run_policy.suspend and not self.over:
            if pods or not job.status.holds(ConditionType.SUSPENDED):
                self.problems.append(f"not suspended: {[pod.name for pod in pods]}")
        elif self.over:
            if any(not pod.ended for pod in pods):
                self.problems.append("pods run after the end")
        elif self.queued and not self.server.workloads["llm-base"].grants:
            if pods or job.status.state != "Queued":
                self.problems.append(f"not let in: {[pod.name for pod in pods]}, {job.status.state}")
            if self.server.workloads["llm-base"].nodes <= self.cluster.quota:
                self.problems.append("there is quota, and it is not let in")
        else:
            self.full(pods)

    def full(self, pods: list[PodSeen]) -> None:
        known = self.cluster.coordinator
        if known is None:
            self.problems.append("nobody coordinates")
            return
        wanted = known.target + known.spares
        there = [pod for pod in pods if not pod.coordinator and pod.stays]
        room = len(self.cluster.machines)
        if self.queued:
            lent = sum(one.nodes for one in self.server.workloads.values() if one.grants)
            most = wanted if self.cluster.choices is None else min(wanted, room)
            if (more := self.cluster.quota - lent) > 0 and lent < most:
                self.problems.append(f"there is quota for {more} more nodes")
            self.lent_to(there, wanted)
            wanted = min(wanted, lent)
        group = self.server.beside.get("PodGroup", 0)
        if len([pod for pod in there if pod.ready]) < min(wanted, room) and group <= room:
            self.problems.append(f"{len(there)} nodes of {wanted}, with {room} machines")
        if len(there) > wanted:
            self.problems.append(f"{len(there)} nodes, wanted are {wanted}")
        # An order for a node that Kueue does not let in stays.
        if known.orders and not self.queued:
            self.problems.append(f"orders stay open: {list(known.orders.values())}")
        job = self.cluster.job()
        if group > max(1, wanted):
            self.problems.append(f"a group of {group} can never be complete")
        asked_for = self.operator.observed()
        if job is not None and asked_for is not None and asked_for.service_term != known.term:
            self.problems.append("the Service points elsewhere")

    def lent_to(self, there: list[PodSeen], wanted: int) -> None:
        known = self.server.workloads
        without = [pod.name for pod in there if pod.workload in known and not known[pod.workload].grants]
        if without:
            self.problems.append(f"{without} have quota no more")
        if len(known) - 1 > max(0, wanted - known["llm-base"].nodes):
            self.problems.append(f"{len(known) - 1} further Workloads, wanted are {wanted} nodes")
