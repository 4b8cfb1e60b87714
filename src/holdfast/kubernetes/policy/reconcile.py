"""Decides what the operator does for a job, from what it has observed of it. Pure: no clock, no connection, no memory.

The same observation gives the same plan, so it does not matter which process was the operator before, how much of its plan was
carried out, or whether an answer was lost. No recovery waits for the operator: spares are pods that run already.

Rules that hold for every plan:
- A pod is created only with a number that was written to the status before, and that no pod has had.
- A pod is deleted by its uid, and only if the coordinator gave its node up, its processes have ended, it never joined, or
  the run is ending.
- Complete and Failed are final.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.objects.pod import PodSeen, TerminationMessage
from holdfast.kubernetes.objects.resource import HoldfastJob, HoldfastJobSpec, quantity_of_limit
from holdfast.kubernetes.objects.status import ConditionType, JobStatus, from_timestamp
from holdfast.kubernetes.policy import queues
from holdfast.kubernetes.policy.conditions import JobEnd, size_to_ask, status_of
from holdfast.kubernetes.policy.losses import (
    crashing_nodes,
    loss_look_again_s,
    missing_from_sight,
    returning_nodes,
    returns_look_again_s,
    unseen_coordinator,
    unseen_nodes,
    why_lost,
    why_nothing_works,
)
from holdfast.kubernetes.policy.machines import answer_mark_order, held_warnings, marks_kept_up
from holdfast.kubernetes.policy.plan import (
    Action,
    AddFinalizer,
    AskResize,
    AskStop,
    DeleteJob,
    DeleteObject,
    DeletePod,
    FindPod,
    MakeCoordinator,
    MakeNode,
    MakeObject,
    Number,
    Observed,
    Plan,
    PointService,
    RemoveFinalizer,
    SizeGroup,
    Tell,
    TellPlace,
    Warn,
)
from holdfast.protocol.engine_orders import (
    MarkNode,
    NodeGoing,
    NodeOutOfMemory,
    NodeTaken,
    OrderDone,
    ProvideNode,
    RebootNode,
    ReleaseNode,
)
from holdfast.protocol.notices import NoticeCause

ANSWERS_S = 20.0
"""Seconds to wait for the answer of a running coordinator before the job counts as one that has no state."""
LOST_GRACE_S = 1
"""Grace period of a lost node's pod, in seconds. Never 0: that removes the object while the processes may still run, and gives
their machine away. With 1 the kubelet confirms their end, also after a network cut that heals, and quota is free two seconds
later."""
OOM_FROM_S, OOM_UNTIL_S = 2.0, 60.0
"""When the coordinator is told that the kernel killed a container for memory, in seconds after that: it looks for the cause of a
loss for a minute."""
LEAVE_S = 60.0
"""Seconds that the save of a deleted job may take beyond its pods' grace period."""
MOST_MADE = 64
"""Number of pods that one plan creates, at most; the next plan sees what became of them."""
DELETED, SUSPENDED = "the job is deleted", "the job is suspended"
NOT_SAVED = (
    "the job was deleted, and its coordinator did not end it within spec.disruption.graceSeconds and a minute; what it had \
saved before is kept"
)
ACTIVE_DEADLINE = "spec.runPolicy.activeDeadlineSeconds is over"
BESIDE = ("Secret", "ConfigMap", "PodGroup", "Service", "PodDisruptionBudget", "NetworkPolicy")
OF_A_RUN = ("PodGroup", "ConfigMap")
"""Kinds that are created anew for every run. The ConfigMap records the spec that the run was started with, and so which scheduler
the PodGroup is for; it is deleted last."""
CANNOT_BOOT = "this version boots no machines: the job goes on without it"


def reconcile(seen: Observed) -> Plan:
    """The next actions, in order, and the status."""
    job = current(seen)
    if job is not None and (unseen := unseen_coordinator(seen, job)) is not None:
        # Everything else depends on it: whether the coordinator ended in order, and which nodes it has.
        return Plan((FindPod(unseen),), status_of(seen, job))
    plan = _plan(seen)
    # These actions go first, so that the next plan has the pods that they find.
    return msgspec.structs.replace(plan, actions=(*missing_from_sight(seen, job), *plan.actions))


def _plan(seen: Observed) -> Plan:
    status = seen.status
    if seen.deleted_s is not None:
        return _deleted(seen)
    if status.has_ended:
        return _over(seen)
    job = current(seen)
    if job is None:  # the object is invalid, and nothing of it runs
        return Plan((), status_of(seen, None))
    if job.spec.run_policy.suspend:
        return _suspended(seen, job)
    if not seen.finalizer:
        # Before anything that could be lost exists.
        return Plan((AddFinalizer(),), status_of(seen, job))
    if (ended := _end(seen, job)) is not None:
        # The status is written before anything is deleted. Otherwise the missing pods would look lost and be replaced.
        return Plan((), status_of(seen, job, ended))
    if (held := _why_held(seen, job)) is not None:
        return _held(seen, job, held)
    return _running(seen, job)


def current(seen: Observed) -> HoldfastJob | None:
    """The job as it was started, with those fields of the object that may change while it runs. None: nothing can run."""
    if seen.accepted is None:
        return seen.job
    # The object was changed into an invalid one. The run continues as it was accepted: a typing error in `kubectl edit`
    # must not end a training run of weeks.
    if seen.job is None:
        return seen.accepted
    spec = msgspec.structs.replace(
        # Only these two fields. Running pods were created from all others, and nobody wants a job whose halves have
        # different images or checkpoints.
        seen.accepted.spec,
        nodes=seen.job.spec.nodes,
        run_policy=seen.job.spec.run_policy,
    )
    return msgspec.structs.replace(seen.accepted, spec=spec)


# ------------------------------------------------------------ a run


def _running(seen: Observed, job: HoldfastJob) -> Plan:
    status = seen.status
    run, term, next_number = status.run or 0, status.term or 0, status.next_number or 0
    if run == 0 or status.holds(ConditionType.SUSPENDED):
        # Pods of the run before must be gone: one that still saves must not run beside one that already loads.
        old = [_delete(pod, SUSPENDED) for pod in seen.pods if not pod.deleting]
        left = _left(seen)
        if seen.pods or left:
            return Plan((*old, *left), status)
        numbers = Number(run=run + 1, term=term + 1, next_number=next_number, begins=True)
        return Plan((numbers,), status_of(seen, job))
    actions: list[Action] = [MakeObject(kind) for kind in beside(job) if kind not in seen.objects]
    actions += _group(seen, job)
    actions += _coordinator(seen, job, term)
    actions += _nodes(seen, job)
    if _active_deadline_is_over(seen, job):
        actions.append(AskStop(ACTIVE_DEADLINE, NoticeCause.TIME_LIMIT))
    merged = _numbers_together(actions, run, term, next_number)
    after = queues.waiting_status(seen, job, status_of(seen, job))
    if after.waiting is not None and after.waiting.until is not None:
        # Written before a pod is deleted, so that a next operator does not start the job again at once.
        return Plan((), after)
    return Plan(merged, after, _due_s(seen, job, after))


def beside(job: HoldfastJob) -> tuple[str, ...]:
    """Kinds of the objects that a running job has beside its pods."""
    without = {"PodDisruptionBudget"} if job.spec.disruption.max_unavailable == "Any" else set()
    without |= {"PodGroup"} if job.spec.scheduling.gang is None else set()
    return tuple(kind for kind in BESIDE if kind not in without)


def _left(seen: Observed) -> tuple[DeleteObject, ...]:
    """Deletes the objects of a run that is over, which the next run must not find."""
    return tuple(DeleteObject(kind) for kind in OF_A_RUN if kind in seen.objects)


def _group(seen: Observed, job: HoldfastJob) -> Iterable[Action]:
    """Adapts the PodGroup's minimum to the job's size. A group with a minimum above the number of its nodes is never complete, so
    that its scheduler would not bind replacements either."""
    # The accepted minimum: without minNodes, a job that was enlarged still continues with the number that it started with.
    fewest = (seen.accepted or job).spec.fewest
    members = max(1, min(fewest, wanted_nodes(seen, job)))
    if seen.group_members is not None and seen.group_members != members:
        yield SizeGroup(members)


def _why_held(seen: Observed, job: HoldfastJob) -> str | None:
    termination_message = _termination_message(seen)
    # It was stopped because its quota was taken back, whatever the Workloads show by now: its pods go, but it has not ended.
    if termination_message is not None and queues.was_taken_back(termination_message, job):
        return f"{queues.TAKEN_BACK}: it was stopped for that"
    if queues.back_off_s(seen) is not None:
        return queues.why_back_off(seen, job)
    return queues.why_held(seen, job)


def _held(seen: Observed, job: HoldfastJob, why: str) -> Plan:
    """The plan for a job that has to wait: what still runs of it is stopped in order, and then its quota is requested."""
    # A job that gives its machines back has not trained: it has nothing to save, and a coordinator that was asked to stop
    # would report the job as over.
    if seen.pods and _saves(seen) and queues.back_off_s(seen) is None:
        return Plan(_stop(seen, job, why, NoticeCause.PREEMPTION), status_of(seen, job, stopping=why))
    if seen.pods:
        actions = tuple(_delete(pod, why) for pod in seen.pods if not pod.deleting)
        return Plan(actions, status_of(seen, job, stopping=why))
    status = status_of(seen, job, held=why)
    # The next run starts with the object's spec of then, so what records this run's is deleted.
    if left := _left(seen):
        return Plan(left, status)
    # Written before the quota is given back. Kueue may admit the job again at once, and a new run begins only if the status
    # says that the last one is over.
    if seen.status.run and not seen.status.holds(ConditionType.SUSPENDED):
        return Plan((), status, queues.back_off_s(seen))
    return Plan(tuple(queues.ask(seen, job)), status, queues.back_off_s(seen))


def _coordinator(seen: Observed, job: HoldfastJob, term: int) -> Iterable[Action]:
    name = names.coordinator_name(job.id.name, term)
    pods = [pod for pod in seen.pods if pod.coordinator]
    newest = next((pod for pod in pods if pod.number == term), None)
    for old in pods:
        if old.number != term and not old.deleting:
            yield _delete(old, f"term {term} has begun", LOST_GRACE_S)
    if newest is None:
        # Unless this operator has just numbered it, a pod of this term may have existed. Then the term is over.
        if name in seen.granted:
            yield MakeCoordinator(term, frozenset(pod.machine for pod in pods if pod.machine is not None))
            if "Service" in seen.objects and seen.service_term != term:
                yield PointService(term)
        else:
            yield Number(run=0, term=term + 1, next_number=0)
    elif newest.deleting or newest.ended or (lost := why_lost(seen)) is not None:
        if not newest.deleting and not newest.ended:
            yield _delete(newest, f"it is lost: {lost}", LOST_GRACE_S)
        yield Number(run=0, term=term + 1, next_number=0)
    elif "Service" in seen.objects and seen.service_term != term:
        yield PointService(term)


def _nodes(seen: Observed, job: HoldfastJob) -> Iterable[Action]:
    mine = {pod.name: pod for pod in seen.pods if not pod.coordinator}
    # Orders come first, even if the job may be over: one that is not acknowledged stays open at the coordinator and returns
    # at every look.
    yield from _orders(seen, job, mine)
    yield from marks_kept_up(seen, job)
    yield from held_warnings(seen.machines, mine.values())
    if _may_be_over(seen, mine.values()):
        return
    for pod in _of_an_old_run(seen, mine.values()):
        yield _delete(pod, f"run {pod.run} is over", LOST_GRACE_S)
        del mine[pod.name]
    here = _here(seen, job, mine.values())
    allowed = queues.granted(seen, job, here)
    beyond = queues.beyond(seen, allowed, here)
    unlent = queues.taken_back(seen, job) | beyond | queues.misplaced(seen)
    yield from _news(seen, job, mine, unlent)
    yield from _places(seen, mine.values())
    for pod in mine.values():
        if pod.ended and pod.end:
            # A kubelet asks a node to leave before it reports why, and its message is deleted together with the pod.
            text = f"{pod.name} on {pod.machine}: {pod.how_ended}"
            yield Warn(reason="PodEnded", text=text, about=pod.uid)
        if pod.ended and not pod.deleting:
            yield _delete(pod, f"its processes are over ({pod.how_ended})")
    lost = lost_nodes(seen)
    for pod in mine.values():
        # Its release order may have been acknowledged by an operator that had an older view, such as a former leader that
        # was suspended and resumed.
        if pod.stays and pod.name not in lost and _given_up(seen, pod):
            yield _delete(pod, "the coordinator gave it up")
        elif pod.stays and pod.name in unlent and _never_joined(seen, pod):
            yield _delete(pod, unlent[pod.name])
    yield from _crashing(seen, mine, here, wanted_nodes(seen, job))
    yield from _too_careful(seen, here)
    for pod in queues.crowded(seen, here):
        yield _delete(pod, f"all machines of {pod.workload} are in use", as_seen=True)
    here = [pod for pod in here if pod.name not in beyond]
    wanted = wanted_nodes(seen, job)
    unseen = unseen_nodes(seen, job)
    missing = wanted - len(here) - len(unseen)
    if allowed is not None:
        yield from queues.ask_on(seen, job, wanted, here)
        missing = min(missing, allowed.nodes - len(here))
    yield from _make(seen, job, missing, allowed)
    # Never while the coordinator does not answer: it may just have accepted the node that looks superfluous from here.
    if missing < 0 and seen.said is not None:
        yield from _surplus(seen, here, -missing)


def _of_an_old_run(seen: Observed, nodes: Iterable[PodSeen]) -> list[PodSeen]:
    """Pods of an earlier run. They were created late, by an operator that was suspended while another one ended that run, and may
    have another image. The coordinator does not have them alive, so deleting them costs no step."""
    if seen.said is None:
        return []
    alive, run = seen.said.alive, seen.status.run
    return [pod for pod in nodes if pod.stays and pod.run not in (0, run) and pod.name not in alive]


def _too_careful(seen: Observed, here: Iterable[PodSeen]) -> Iterable[Action]:
    """Deletes pods that wait for a machine but exclude one that may be used again. A pod's affinity cannot be changed, so others
    are created in their place."""
    away = {name for name, machine in seen.machines.items() if not machine.ready}
    # A machine whose kubelet has not confirmed the end of an old pod may still be switched off.
    away |= {pod.machine for pod in seen.pods if pod.deleting and pod.machine is not None}
    bad = _avoided(seen) | away
    for pod in here:
        if pod.unschedulable and pod.machine is None and (again := pod.avoids - bad):
            reason = f"it avoids {', '.join(sorted(again))}, which may be used again"
            yield _delete(pod, reason, as_seen=True)


def _places(seen: Observed, nodes: Iterable[PodSeen]) -> Iterable[Action]:
    """Tells agents their machines' places, which are known only once a pod has a machine. An agent waits a little for this."""
    for pod in nodes:
        machine = seen.machines.get(pod.machine or "")
        if pod.waits_for_place and pod.stays and machine is not None:
            yield TellPlace(name=pod.name, uid=pod.uid, place=machine.place or names.NO_PLACE)


def _crashing(
    seen: Observed, mine: Mapping[str, PodSeen], here: Iterable[PodSeen], wanted: int
) -> Iterable[Action]:
    """Deletes crashing nodes once as many others as are wanted have a machine. If there is no other machine, a crashing node may
    still come to work on its own."""
    if sum(pod.machine is not None for pod in here) >= wanted:
        for name, crash in crashing_nodes(seen).items():
            pod = mine[name]
            reason = f"it ends again and again on {pod.machine}: {crash}"
            yield _delete(pod, reason, LOST_GRACE_S, as_seen=True)


def _here(seen: Observed, job: HoldfastJob, nodes: Iterable[PodSeen]) -> list[PodSeen]:
    """The pods that count as nodes of the job."""
    # Nodes on machines that are to be emptied do not count: each is replaced while it still trains, so that its successor
    # has a machine and its image by the time it leaves.
    gone = lost_nodes(seen) | going_nodes(seen) | queues.taken_back(seen, job).keys()
    gone |= crashing_nodes(seen).keys()
    return [pod for pod in nodes if pod.stays and pod.name not in gone and not _given_up(seen, pod)]


def _make(seen: Observed, job: HoldfastJob, missing: int, allowed: queues.Granted | None) -> Iterable[Action]:
    unmade = sorted(
        number
        for name in seen.granted - {pod.name for pod in seen.pods}
        if (number := names.number_of(job.id.name, name)) is not None
    )
    avoid = _avoided(seen)
    # A pod takes two reconciliations: the first writes its number, the second creates it. An operator that is killed in
    # between wastes a number, but never creates a pod that is not accounted for.
    for place, number in enumerate(unmade[: max(0, min(missing, MOST_MADE))]):
        yield MakeNode(number, avoid, "" if allowed is None else allowed.free[place])
    count = min(missing, MOST_MADE) - len(unmade)
    if count > 0:
        yield Number(run=0, term=0, next_number=(seen.status.next_number or 0) + count)


def _avoided(seen: Observed) -> frozenset[str]:
    """Machines on which no new pod is to run."""
    left = lost_nodes(seen) | crashing_nodes(seen).keys()
    machines = frozenset(pod.machine for pod in seen.pods if pod.name in left and pod.machine)
    # The scheduler heeds cordons and taints by itself but ignores conditions. A pod on such a machine would be replaced at
    # once, and again and again if every machine is sick.
    machines |= {machine.name for machine in seen.machines.values() if machine.is_avoided}
    return machines | (seen.said.bad_machines if seen.said else frozenset())


def _may_be_over(seen: Observed, nodes: Iterable[PodSeen]) -> bool:
    """Whether the job may be about to end, so that nodes that have ended must not be replaced.

    Agents end in order when their coordinator tells them to, and at the end of a job they are gone before the coordinator. While
    it does not answer, a node that ended in order may mean either. Its next report decides that, or its pod's termination
    message.
    """
    if seen.said is not None:
        return seen.said.outcome is not None
    return any(pod.phase == "Succeeded" and not pod.deleting for pod in nodes)


def wanted_nodes(seen: Observed, job: HoldfastJob) -> int:
    """Number of nodes that the job should have, spares included: by the coordinator's report, else by its last one in the status,
    else by the object."""
    if seen.said is not None:
        return seen.said.wanted
    known = seen.status.nodes.wanted if seen.status.nodes is not None else None
    return job.spec.wanted if known is None else known


def lost_nodes(seen: Observed) -> frozenset[str]:
    """Nodes that the coordinator gave up, without the `returning_nodes`."""
    orders = seen.said.orders if seen.said else ()
    given_up = frozenset(order.node for order in orders if isinstance(order, ReleaseNode))
    return given_up - returning_nodes(seen) if given_up else given_up


def going_nodes(seen: Observed) -> frozenset[str]:
    """Nodes on machines that are to be emptied. Their replacements are created before they leave."""
    return frozenset(
        pod.name
        for pod in seen.pods
        if not pod.coordinator
        and pod.machine is not None
        and (machine := seen.machines.get(pod.machine)) is not None
        and machine.why_left is not None
    )


def _given_up(seen: Observed, pod: PodSeen) -> bool:
    return _is_lost(seen, pod) and pod.name not in returning_nodes(seen)


def _is_lost(seen: Observed, pod: PodSeen) -> bool:
    known = seen.said.nodes.get(pod.name) if seen.said is not None else None
    # Only if the coordinator lists it as not alive. A node that it does not list has not joined yet, which is no reason to
    # delete its pod.
    return known is not None and not known.alive


def _surplus(seen: Observed, here: list[PodSeen], count: int) -> Iterable[Action]:
    """Deletes superfluous pods that never joined. Among those that did, the coordinator chooses which leave."""
    # Pods without a machine go first, since they hold no resources, and then the newest.
    idle = [pod for pod in here if _never_joined(seen, pod)]
    for pod in sorted(idle, key=lambda pod: (pod.machine is not None, -pod.number))[:count]:
        yield _delete(pod, "the job wants fewer nodes")


def _never_joined(seen: Observed, pod: PodSeen) -> bool:
    """Whether it is neither in the coordinator's list nor ready. Such a pod takes no part in training, so deleting it costs no
    step."""
    return seen.said is not None and pod.name not in seen.said.nodes and not pod.ready


def _orders(seen: Observed, job: HoldfastJob, mine: dict[str, PodSeen]) -> Iterable[Action]:
    """Carries out the coordinator's orders, and acknowledges those that are done."""
    if seen.said is None:
        return
    gone = lost_nodes(seen) | going_nodes(seen) | crashing_nodes(seen).keys()
    # Nodes that leave do not count: an order for a node is done when as many as are wanted stay, and not when some pod has
    # been created.
    enough = sum(pod.stays and pod.name not in gone for pod in mine.values()) >= seen.said.wanted
    for order in seen.said.orders:
        match order:
            case ReleaseNode():
                pod = mine.get(order.node)
                if pod is None or pod.deleting:
                    yield Tell(OrderDone(order.order_id))
                elif order.node in gone:
                    # as_seen: its agent may be back by now. Its container was restarted then, and its version changed.
                    grace_s = None if order.planned else LOST_GRACE_S
                    yield _delete(pod, order.reason, grace_s, as_seen=order.may_return)
            case ProvideNode() if enough:
                yield Tell(OrderDone(order.order_id))
            case MarkNode():
                yield from answer_mark_order(seen, job, mine.get(order.node), order)
            case RebootNode():
                yield Tell(OrderDone(order.order_id, CANNOT_BOOT))


def _news(
    seen: Observed, job: HoldfastJob, mine: dict[str, PodSeen], unlent: Mapping[str, str]
) -> Iterable[Action]:
    """Tells the coordinator what happens to its nodes' pods and machines. A loss that is announced costs no step.

    Args:
        mine: the job's node pods, by name.
        unlent: nodes without quota, each with the reason.
    """
    if seen.said is None:
        return
    yield from _memory_news(seen, job, mine)
    released, going = lost_nodes(seen), going_nodes(seen)
    for name in sorted(seen.said.alive - released - seen.told):
        pod = mine.get(name)
        if pod is None:
            # Only names that the operator gives: agents that were started by hand have no pods. And only if the API server
            # has confirmed it: a pod that merely lost its label is still training.
            if names.number_of(job.id.name, name) is not None and name in seen.absent:
                yield Tell(NodeTaken(name, "its pod is gone"), name)
        elif pod.ended:
            yield Tell(NodeTaken(name, f"its pod has ended ({pod.how_ended})"), name)
        elif pod.deleting:
            within_s = float(job.spec.disruption.grace_seconds)
            yield Tell(NodeGoing(name, "its pod is being deleted", within_s), name)
        elif name in unlent:
            # With a deadline, so that it does not wait for a replacement: without quota there will be none.
            within_s = float(job.spec.disruption.grace_seconds)
            yield Tell(NodeGoing(name, unlent[name], within_s, NoticeCause.PREEMPTION), name)
        elif name in going:
            yield Tell(NodeGoing(name, f"{pod.machine}: {seen.machines[pod.machine or ''].why_left}"), name)
    size = size_to_ask(seen, job)
    if size is not None and seen.status.asking_nodes == size:
        yield AskResize(size)


def _memory_news(seen: Observed, job: HoldfastJob, mine: dict[str, PodSeen]) -> Iterable[Action]:
    """Tells the coordinator of containers that the kernel killed for memory. It sees only that the node is lost: no process is
    left there that could report why."""
    limit = quantity_of_limit(job.spec, "memory")
    for name, pod in mine.items():
        if pod.out_of_memory_s is None:
            continue
        age_s = seen.now_s - pod.out_of_memory_s
        # Not immediately, because the message makes sense only once the coordinator knows of the loss. But as soon as it
        # does, because the pod may be about to go, and its status with it.
        if (0.0 if _is_lost(seen, pod) else OOM_FROM_S) <= age_s <= OOM_UNTIL_S:
            news = NodeOutOfMemory(name, None if limit is None else int(limit), age_s)
            yield Tell(news, f"{name} at {pod.out_of_memory_s:.0f}")


def _numbers_together(actions: list[Action], run: int, term: int, next_number: int) -> tuple[Action, ...]:
    """The actions with all `Number`s merged into one at the end, so that the counters take one write."""
    numbers = [one for one in actions if isinstance(one, Number)]
    rest: list[Action] = [one for one in actions if not isinstance(one, Number)]
    if numbers:
        rest.append(
            Number(
                run=run,
                term=max(term, *(one.term for one in numbers)),
                next_number=max(next_number, *(one.next_number for one in numbers)),
            )
        )
    return tuple(rest)


# ------------------------------------------------------------ its end


def _end(seen: Observed, job: HoldfastJob) -> JobEnd | None:
    """How the run ended; None: it has not."""
    termination_message = _termination_message(seen)
    if termination_message is not None and queues.was_taken_back(termination_message, job):
        return None  # it goes on when it is admitted again
    if termination_message is not None and termination_message.outcome == "finished":
        return JobEnd(None, termination_message.reason or "the script has ended", termination_message)
    if termination_message is not None:
        reason = "ScriptFailed" if termination_message.outcome == "failed" else "Stopped"
        if termination_message.cause == NoticeCause.TIME_LIMIT:
            reason = "ActiveDeadline"
        return JobEnd(reason, termination_message.reason or termination_message.outcome, termination_message)
    if queues.has_trained(seen, seen.status):
        return None
    if (broken := why_nothing_works(seen, job)) is not None:
        return JobEnd(*broken)
    counts_s = queues.counts_from_s(seen, job)
    policy = job.spec.run_policy
    # Time in a queue does not count towards the deadline, but time between two tries does.
    waits = seen.status.holds(ConditionType.SUSPENDED) and seen.status.waiting is None
    late = not waits and counts_s is not None and seen.now_s - counts_s >= policy.startup_deadline_seconds
    if late:
        return JobEnd("StartupDeadline", _why_not_started(seen))
    return None


def _termination_message(seen: Observed) -> TerminationMessage | None:
    """The termination message of this run's coordinator; None: there is none. Those of earlier runs do not count."""
    run = seen.status.run or 0
    pods = [
        pod for pod in seen.pods if pod.coordinator and pod.run == run and pod.termination_message is not None
    ]
    # That of the highest term: an older coordinator that was cut off may have ended with another message, while the job
    # continued.
    newest = max(pods, key=lambda pod: pod.number, default=None)
    return None if newest is None else newest.termination_message


def _why_not_started(seen: Observed) -> str:
    waits = sorted(f"{pod.name}: {pod.waits}" for pod in seen.pods if pod.waits)
    return "no step within spec.runPolicy.startupDeadlineSeconds" + (f"; {waits[0]}" if waits else "")


def _over(seen: Observed) -> Plan:
    """The plan for a job that has ended. Nothing of it is started again, whichever of its objects is deleted."""
    job = current(seen)  # its runPolicy may change at any time, even after the end
    failed = seen.status.holds(ConditionType.FAILED)
    policy = job.spec.run_policy if job is not None else None
    clean = policy.clean_pods if policy is not None else "KeepFailed"
    actions: list[Action] = []
    for pod in seen.pods:
        keep = pod.ended and (clean == "None" or (clean == "KeepFailed" and failed))
        if not pod.deleting and not keep:
            actions.append(_delete(pod, "the job is over"))
    actions += queues.end(seen, succeeded=not failed)
    if seen.finalizer:
        actions.append(RemoveFinalizer())
    look_again_s = None
    if policy is not None and policy.ttl_seconds_after_finished is not None:
        ended_s = from_timestamp(seen.status.completion_time)
        due_s = (ended_s if ended_s is not None else seen.now_s) + policy.ttl_seconds_after_finished
        if seen.now_s >= due_s:
            actions.append(DeleteJob())
        else:
            look_again_s = due_s - seen.now_s
    return Plan(tuple(actions), seen.status, look_again_s)


def _deleted(seen: Observed) -> Plan:
    if not seen.finalizer:
        return Plan((), seen.status)
    job = current(seen)
    over = seen.status.has_ended
    grace_s = job.spec.disruption.grace_seconds if job is not None else 0
    assert seen.deleted_s is not None
    left_s = seen.deleted_s + grace_s + LEAVE_S - seen.now_s
    if over or seen.skip_save or left_s <= 0 or not _saves(seen):
        # An agent that is asked to leave waits for its coordinator's permission, up to its grace period. There is no need for
        # that if nothing is to be saved.
        at_once = LOST_GRACE_S if seen.skip_save and not over else None
        # If only the pods show that there is nothing to save, that may be out of date: they may be training by now.
        as_seen = not (over or seen.skip_save or left_s <= 0 or _termination_message(seen) is not None)
        actions = [_delete(pod, DELETED, at_once, as_seen) for pod in seen.pods if not pod.deleting]
        # The status of a job that has ended is kept: removing the finalizer may take several tries, and somebody may be
        # waiting for the condition.
        status = seen.status if over else status_of(seen, job, stopping=DELETED)
        # The finalizer does not wait until the pods are gone: with a lost machine the object would never go.
        is_late = not over and left_s <= 0 and _saves(seen)
        warnings = [Warn(reason="NotSaved", text=NOT_SAVED, about="deletion")] if is_late else []
        return Plan((*warnings, *actions, RemoveFinalizer()), status)
    return Plan(_stop(seen, job, DELETED), status_of(seen, job, stopping=DELETED), left_s)


def _suspended(seen: Observed, job: HoldfastJob) -> Plan:
    if seen.pods and _saves(seen) and not seen.skip_save:
        # No deadline: a job that is suspended and not deleted has time to save.
        return Plan(_stop(seen, job, SUSPENDED), status_of(seen, job, stopping=SUSPENDED))
    if seen.pods:
        as_seen = _termination_message(seen) is None and not seen.skip_save
        actions = tuple(_delete(pod, SUSPENDED, as_seen=as_seen) for pod in seen.pods if not pod.deleting)
        return Plan(actions, status_of(seen, job, stopping=SUSPENDED))
    # The next run starts with the object's spec of then, and requests its quota again.
    left: list[Action] = [*_left(seen)]
    left += queues.give_up(seen)
    rests = status_of(seen, job, suspended=True)
    return Plan(tuple(left), msgspec.structs.replace(rests, waiting=None))


def _stop(
    seen: Observed, job: HoldfastJob | None, reason: str, cause: NoticeCause = NoticeCause.STOP
) -> tuple[Action, ...]:
    """Asks the coordinator to save the state and end the job. If the coordinator is lost, it is replaced first, since only a
    coordinator can do this."""
    status = seen.status
    actions: list[Action] = [] if job is None else list(_coordinator(seen, job, status.term or 0))
    if seen.said is not None:
        actions.append(AskStop(reason, cause))
    return _numbers_together(actions, status.run or 0, status.term or 0, status.next_number or 0)


def _saves(seen: Observed) -> bool:
    """Whether there is a state to save, and no coordinator has reported the end yet. A job that has not trained has none: the
    pods of a suspended job whose image is missing, for example, can be deleted at once."""
    if _termination_message(seen) is not None or not seen.pods:
        return False
    if seen.said is not None or _may_answer(seen):
        return True
    # An earlier operator may have deleted all pods because the state was saved, and the pod of the coordinator that reported
    # so may be gone first. A new coordinator would wait in vain for nodes that all leave.
    if not any(pod.stays for pod in seen.pods):
        return False
    # Nodes that have been connected to a coordinator may have a state, even if no step was reported to this operator.
    met = any(one is not None and one.term > 0 for one in seen.hearings.values())
    return met or queues.has_trained(seen, seen.status)


def _may_answer(seen: Observed) -> bool:
    """Whether a coordinator runs and has not been silent for long.

    An operator that has just started, or whose request was lost, knows of no step. If it deleted the pods for that, the state
    would be lost with them, and they would wait for a coordinator until their grace period is over.
    """
    newest = next((pod for pod in seen.pods if pod.coordinator and pod.number == seen.status.term), None)
    if newest is None or not newest.stays or why_lost(seen):
        return False
    # Even if the watch does not show the coordinator as running yet, it may have nodes already, provided that their pods run.
    if newest.phase != "Running" and not any(pod.phase == "Running" for pod in seen.pods):
        return False
    ready = seen.status.condition(ConditionType.COORDINATOR_READY)
    since_s = None if ready is None else from_timestamp(ready.last_transition_time)
    return ready is None or ready.status == "True" or since_s is None or seen.now_s - since_s < ANSWERS_S


def _active_deadline_is_over(seen: Observed, job: HoldfastJob) -> bool:
    began_s, most_s = _began_s(seen), job.spec.run_policy.active_deadline_seconds
    return seen.said is not None and None not in (began_s, most_s) and seen.now_s - began_s >= most_s  # type: ignore[operator]


def _due_s(seen: Observed, job: HoldfastJob, status: JobStatus) -> float | None:
    """Seconds until the next deadline; None: there is none."""
    began_s, counts_s = _began_s(seen), queues.counts_from_s(seen, job)
    if began_s is None:
        return None
    spec: HoldfastJobSpec = job.spec
    due = [] if counts_s is None else [counts_s + spec.run_policy.startup_deadline_seconds]
    for left_s in (
        queues.left_of_patience_s(seen, job, status),
        loss_look_again_s(seen),
        returns_look_again_s(seen),
    ):
        if left_s is not None:
            due.append(seen.now_s + left_s)
    if spec.run_policy.active_deadline_seconds is not None:
        due.append(began_s + spec.run_policy.active_deadline_seconds)
    return min((at - seen.now_s for at in due if at > seen.now_s), default=None)


def _began_s(seen: Observed) -> float | None:
    return from_timestamp(seen.status.start_time)


def _delete(pod: PodSeen, reason: str, grace_s: int | None = None, as_seen: bool = False) -> DeletePod:
    """Deletes a pod.

    Args:
        grace_s: None: the pod's own grace period.
        as_seen: only while the object has the version that was observed. For reasons that may pass: by now the pod may have a
            machine, or its agent may be training, and then its version has changed.
    """
    version = pod.version if as_seen else None
    return DeletePod(name=pod.name, uid=pod.uid, reason=reason, grace_s=grace_s, version=version)
