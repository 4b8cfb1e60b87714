"""What the operator does for a job, from what it knows of it. Pure: no clock, no connection, no memory.

The same values give the same plan, so it does not matter who was operator before, what of its plan was carried out, or
whether an answer was lost. A recovery never waits for any of it: spares are pods that run already.

Rules that hold for every plan:
- A pod is made only under a number that was written down before, and that no pod had.
- A pod is deleted by its uid, and only if the coordinator gave its node up, its processes are over, it never joined, or
  the run is at its end.
- Complete and Failed are for ever.
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
"""So long a coordinator that runs is waited for before the job counts as one without a state."""
LOST_GRACE_S = 1
"""Of a lost node's pod. Never 0: that removes the object while the processes may run, and gives their machine away. With 1
the kubelet confirms their end, also after a cut that heals, and quotas are free two seconds later."""
OOM_FROM_S, OOM_UNTIL_S = 2.0, 60.0
"""How long after a container was killed for memory its coordinator is told: it looks for the reason of a loss for a minute."""
LEAVE_S = 60.0
"""How much longer than its pods' grace the save of a deleted job may take."""
MOST_MADE = 64
"""Pods that one plan makes: the next one sees what became of them."""
DELETED, SUSPENDED = "the job is deleted", "the job is suspended"
NOT_SAVED = (
    "the job was deleted, and its coordinator did not end it within spec.disruption.graceSeconds and a minute; what it had \
saved before is kept"
)
ACTIVE_DEADLINE = "spec.runPolicy.activeDeadlineSeconds is over"
BESIDE = ("Secret", "ConfigMap", "PodGroup", "Service", "PodDisruptionBudget", "NetworkPolicy")
OF_A_RUN = ("PodGroup", "ConfigMap")
"""Made anew for every run. The ConfigMap says what the run was started with, and so whose the PodGroup is: it goes last."""
CANNOT_BOOT = "this version boots no machines: the job goes on without it"


def reconcile(seen: Observed) -> Plan:
    """The next actions, in order, and the status."""
    job = current(seen)
    if job is not None and (unseen := unseen_coordinator(seen, job)) is not None:
        # Its word is needed for everything else: whether it ended in order, and which nodes it has.
        return Plan((FindPod(unseen),), status_of(seen, job))
    plan = _plan(seen)
    # First: the next plan is made with what is found.
    return msgspec.structs.replace(plan, actions=(*missing_from_sight(seen, job), *plan.actions))


def _plan(seen: Observed) -> Plan:
    status = seen.status
    if seen.deleted_s is not None:
        return _deleted(seen)
    if status.has_ended:
        return _over(seen)
    job = current(seen)
    if job is None:  # it cannot work, and nothing of it runs
        return Plan((), status_of(seen, None))
    if job.spec.run_policy.suspend:
        return _suspended(seen, job)
    if not seen.finalizer:
        # Before anything that could be lost exists.
        return Plan((AddFinalizer(),), status_of(seen, job))
    if (ended := _end(seen, job)) is not None:
        # The status first. What is deleted below the job must not look like a loss, or it would start again.
        return Plan((), status_of(seen, job, ended))
    if (held := _why_held(seen, job)) is not None:
        return _held(seen, job, held)
    return _running(seen, job)


def current(seen: Observed) -> HoldfastJob | None:
    """What the run is to be: as it was started, with what may change while it runs. None: nothing can run."""
    if seen.accepted is None:
        return seen.job
    # The object was changed into one that cannot work. The run goes on as it was accepted: a typing error in
    # `kubectl edit` must not end a training of weeks.
    if seen.job is None:
        return seen.accepted
    spec = msgspec.structs.replace(
        # These two fields alone. All others are in pods that run: two halves of a job with different images
        # or checkpoints would be a job that nobody asked for.
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
        # Pods of the run before have to be gone: one that still saves must not meet one that already loads.
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
        # Written down before a pod is deleted, so whoever is operator next does not begin anew at once.
        return Plan((), after)
    return Plan(merged, after, _due_s(seen, job, after))


def beside(job: HoldfastJob) -> tuple[str, ...]:
    """Kinds of the objects that a running job has beside its pods."""
    without = {"PodDisruptionBudget"} if job.spec.disruption.max_unavailable == "Any" else set()
    without |= {"PodGroup"} if job.spec.scheduling.gang is None else set()
    return tuple(kind for kind in BESIDE if kind not in without)


def _left(seen: Observed) -> tuple[DeleteObject, ...]:
    """What a run that is over leaves, and the next one must not find."""
    return tuple(DeleteObject(kind) for kind in OF_A_RUN if kind in seen.objects)


def _group(seen: Observed, job: HoldfastJob) -> Iterable[Action]:
    """Never more than there are to be: a group that asks for more can never be complete, and would bind no replacement."""
    # Without minNodes a job that was made larger still goes on with as many as it began with.
    fewest = (seen.accepted or job).spec.fewest
    members = max(1, min(fewest, wanted_nodes(seen, job)))
    if seen.group_members is not None and seen.group_members != members:
        yield SizeGroup(members)


def _why_held(seen: Observed, job: HoldfastJob) -> str | None:
    termination_message = _termination_message(seen)
    # It was stopped for that, whatever is known by now: its pods go, and it is not over.
    if termination_message is not None and queues.was_taken_back(termination_message, job):
        return f"{queues.TAKEN_BACK}: it was stopped for that"
    if queues.back_off_s(seen) is not None:
        return queues.why_back_off(seen, job)
    return queues.why_held(seen, job)


def _held(seen: Observed, job: HoldfastJob, why: str) -> Plan:
    """It waits for leave to run; what runs of it is stopped in order."""
    # Who gives machines back has not trained: there is nothing to save, and a coordinator that was asked to stop would say
    # that the job is over.
    if seen.pods and _saves(seen) and queues.back_off_s(seen) is None:
        return Plan(_stop(seen, job, why, NoticeCause.PREEMPTION), status_of(seen, job, stopping=why))
    if seen.pods:
        actions = tuple(_delete(pod, why) for pod in seen.pods if not pod.deleting)
        return Plan(actions, status_of(seen, job, stopping=why))
    status = status_of(seen, job, held=why)
    # What the next run is started with is read anew.
    if left := _left(seen):
        return Plan(left, status)
    # Written down before the quota is given back. Kueue may admit the job in the next moment, and only a run that is known
    # to be over is followed by another one.
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
        # A pod of this term may have been, if this operator did not just number it: then the term is over.
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
    # First, also where the job may be over: an order that nobody acknowledges stays with the coordinator and
    # comes again at every look.
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
            # A kubelet asks a node to leave before it says why, and with the pod its words go.
            text = f"{pod.name} on {pod.machine}: {pod.how_ended}"
            yield Warn(reason="PodEnded", text=text, about=pod.uid)
        if pod.ended and not pod.deleting:
            yield _delete(pod, f"its processes are over ({pod.how_ended})")
    lost = lost_nodes(seen)
    for pod in mine.values():
        # Its order was acknowledged by an operator that saw less than this one: a leader that was stopped and thawed.
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
    # Never while the coordinator is silent: it may just have taken in the node that looks like one too many
    # from here.
    if missing < 0 and seen.said is not None:
        yield from _surplus(seen, here, -missing)


def _of_an_old_run(seen: Observed, nodes: Iterable[PodSeen]) -> list[PodSeen]:
    """Made late, by an operator that stood still while another one ended that run: its image may be another one. It is in
    nobody's list, so its end costs no step."""
    if seen.said is None:
        return []
    alive, run = seen.said.alive, seen.status.run
    return [pod for pod in nodes if pod.stays and pod.run not in (0, run) and pod.name not in alive]


def _too_careful(seen: Observed, here: Iterable[PodSeen]) -> Iterable[Action]:
    """Pods that wait for a machine, and avoid one that may be used again: a pod's affinity cannot be changed. Others come in
    their place."""
    away = {name for name, machine in seen.machines.items() if not machine.ready}
    # A machine whose kubelet has not confirmed the end of its old pod may still be without power.
    away |= {pod.machine for pod in seen.pods if pod.deleting and pod.machine is not None}
    bad = _avoided(seen) | away
    for pod in here:
        if pod.unschedulable and pod.machine is None and (again := pod.avoids - bad):
            reason = f"it avoids {', '.join(sorted(again))}, which may be used again"
            yield _delete(pod, reason, as_seen=True)


def _places(seen: Observed, nodes: Iterable[PodSeen]) -> Iterable[Action]:
    """A pod's place is known when it has a machine, and not before. Its agent waits a little for it."""
    for pod in nodes:
        machine = seen.machines.get(pod.machine or "")
        if pod.waits_for_place and pod.stays and machine is not None:
            yield TellPlace(name=pod.name, uid=pod.uid, place=machine.place or names.NO_PLACE)


def _crashing(
    seen: Observed, mine: Mapping[str, PodSeen], here: Iterable[PodSeen], wanted: int
) -> Iterable[Action]:
    """Deleted once as many as are wanted have a machine: where there is no other one, it may still come to work on this one."""
    if sum(pod.machine is not None for pod in here) >= wanted:
        for name, crash in crashing_nodes(seen).items():
            pod = mine[name]
            reason = f"it ends again and again on {pod.machine}: {crash}"
            yield _delete(pod, reason, LOST_GRACE_S, as_seen=True)


def _here(seen: Observed, job: HoldfastJob, nodes: Iterable[PodSeen]) -> list[PodSeen]:
    """The pods that count as nodes."""
    # Nodes on machines that are to be emptied are not counted: each is replaced while it still trains, so that its
    # successor has been scheduled and has its image when it leaves.
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
    # Two looks for one pod: the first writes its number, the second makes it. An operator that is killed in between has
    # wasted a number, and has not made a pod that nobody counts.
    for place, number in enumerate(unmade[: max(0, min(missing, MOST_MADE))]):
        yield MakeNode(number, avoid, "" if allowed is None else allowed.free[place])
    count = min(missing, MOST_MADE) - len(unmade)
    if count > 0:
        yield Number(run=0, term=0, next_number=(seen.status.next_number or 0) + count)


def _avoided(seen: Observed) -> frozenset[str]:
    """Machines on which nothing new is to run."""
    left = lost_nodes(seen) | crashing_nodes(seen).keys()
    machines = frozenset(pod.machine for pod in seen.pods if pod.name in left and pod.machine)
    # The scheduler keeps away from cordons and taints by itself. Of a condition it knows nothing: what it puts there would be
    # replaced at once, again and again where every machine is sick.
    machines |= {machine.name for machine in seen.machines.values() if machine.is_avoided}
    return machines | (seen.said.bad_machines if seen.said else frozenset())


def _may_be_over(seen: Observed, nodes: Iterable[PodSeen]) -> bool:
    """Whether the job is about to end, so that no node is to be made in the place of one that has ended.

    Agents end in order when their coordinator says so, and at the end of a job they are gone before it is. While it is silent
    nobody knows which of the two it was: it says so when it speaks again, or its pod's last words do.
    """
    if seen.said is not None:
        return seen.said.outcome is not None
    return any(pod.phase == "Succeeded" and not pod.deleting for pod in nodes)


def wanted_nodes(seen: Observed, job: HoldfastJob) -> int:
    """Nodes that are to be there, spares included: the coordinator's word, or the last one, or the object's."""
    if seen.said is not None:
        return seen.said.wanted
    known = seen.status.nodes.wanted if seen.status.nodes is not None else None
    return job.spec.wanted if known is None else known


def lost_nodes(seen: Observed) -> frozenset[str]:
    """Those that the coordinator gave up, and that are not waited for."""
    orders = seen.said.orders if seen.said else ()
    given_up = frozenset(order.node for order in orders if isinstance(order, ReleaseNode))
    return given_up - returning_nodes(seen) if given_up else given_up


def going_nodes(seen: Observed) -> frozenset[str]:
    """Those on machines that are to be emptied. They are replaced first."""
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
    # Only what the coordinator said of it. A node that it does not list has not joined yet, which is no
    # reason to delete its pod.
    return known is not None and not known.alive


def _surplus(seen: Observed, here: list[PodSeen], count: int) -> Iterable[Action]:
    """Pods that are too many and never joined. Of those that did the coordinator chooses who leaves."""
    # Those without a machine go first, since they hold nothing, and of the others the newest.
    idle = [pod for pod in here if _never_joined(seen, pod)]
    for pod in sorted(idle, key=lambda pod: (pod.machine is not None, -pod.number))[:count]:
        yield _delete(pod, "the job wants fewer nodes")


def _never_joined(seen: Observed, pod: PodSeen) -> bool:
    """Neither in the coordinator's list nor ready: such a pod has no part in training, so its end costs no step."""
    return seen.said is not None and pod.name not in seen.said.nodes and not pod.ready


def _orders(seen: Observed, job: HoldfastJob, mine: dict[str, PodSeen]) -> Iterable[Action]:
    """Carries out what the coordinator ordered, and acknowledges what is done."""
    if seen.said is None:
        return
    gone = lost_nodes(seen) | going_nodes(seen) | crashing_nodes(seen).keys()
    # Counted without those that go: an order for a node is done when as many as are wanted stay, and not when
    # any pod was made.
    enough = sum(pod.stays and pod.name not in gone for pod in mine.values()) >= seen.said.wanted
    for order in seen.said.orders:
        match order:
            case ReleaseNode():
                pod = mine.get(order.node)
                if pod is None or pod.deleting:
                    yield Tell(OrderDone(order.order_id))
                elif order.node in gone:
                    # as_seen: its agent may be back by now. Then its container was started again.
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
    """What the coordinator should know of its nodes: a change that is announced costs no step. unlent: nodes without quota,
    and why."""
    if seen.said is None:
        return
    yield from _memory_news(seen, job, mine)
    released, going = lost_nodes(seen), going_nodes(seen)
    for name in sorted(seen.said.alive - released - seen.told):
        pod = mine.get(name)
        if pod is None:
            # Only a name that is ours: an agent that somebody started by hand is the coordinator's affair. And only what the
            # API server has said: a pod that lost its label trains on.
            if names.number_of(job.id.name, name) is not None and name in seen.absent:
                yield Tell(NodeTaken(name, "its pod is gone"), name)
        elif pod.ended:
            yield Tell(NodeTaken(name, f"its pod has ended ({pod.how_ended})"), name)
        elif pod.deleting:
            within_s = float(job.spec.disruption.grace_seconds)
            yield Tell(NodeGoing(name, "its pod is being deleted", within_s), name)
        elif name in unlent:
            # With a deadline: nothing comes in its place, so it must not wait for a replacement.
            within_s = float(job.spec.disruption.grace_seconds)
            yield Tell(NodeGoing(name, unlent[name], within_s, NoticeCause.PREEMPTION), name)
        elif name in going:
            yield Tell(NodeGoing(name, f"{pod.machine}: {seen.machines[pod.machine or ''].why_left}"), name)
    size = size_to_ask(seen, job)
    if size is not None and seen.status.asking_nodes == size:
        yield AskResize(size)


def _memory_news(seen: Observed, job: HoldfastJob, mine: dict[str, PodSeen]) -> Iterable[Action]:
    """Where the kernel killed a whole container, the coordinator has seen a node that was lost, and nobody there can say why."""
    limit = quantity_of_limit(job.spec, "memory")
    for name, pod in mine.items():
        if pod.out_of_memory_s is None:
            continue
        age_s = seen.now_s - pod.out_of_memory_s
        # Not at once: the coordinator has to know of the loss by then, or the news would be about nothing. And no later than it
        # knows: the pod may be about to go, and its status with it.
        if (0.0 if _is_lost(seen, pod) else OOM_FROM_S) <= age_s <= OOM_UNTIL_S:
            news = NodeOutOfMemory(name, None if limit is None else int(limit), age_s)
            yield Tell(news, f"{name} at {pod.out_of_memory_s:.0f}")


def _numbers_together(actions: list[Action], run: int, term: int, next_number: int) -> tuple[Action, ...]:
    """One write for all counters, after everything else that needs none."""
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
    """How the run ended; None: it did not."""
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
    # Time in a queue does not count, and time between two tries does.
    waits = seen.status.holds(ConditionType.SUSPENDED) and seen.status.waiting is None
    late = not waits and counts_s is not None and seen.now_s - counts_s >= policy.startup_deadline_seconds
    if late:
        return JobEnd("StartupDeadline", _why_not_started(seen))
    return None


def _termination_message(seen: Observed) -> TerminationMessage | None:
    """Of this run's coordinator. One of an earlier run has nothing to say about this one."""
    run = seen.status.run or 0
    told = [
        pod for pod in seen.pods if pod.coordinator and pod.run == run and pod.termination_message is not None
    ]
    # The highest term: an older coordinator that was cut off may have ended with other words, about a job
    # that went on.
    newest = max(told, key=lambda pod: pod.number, default=None)
    return None if newest is None else newest.termination_message


def _why_not_started(seen: Observed) -> str:
    waits = sorted(f"{pod.name}: {pod.waits}" for pod in seen.pods if pod.waits)
    return "no step within spec.runPolicy.startupDeadlineSeconds" + (f"; {waits[0]}" if waits else "")


def _over(seen: Observed) -> Plan:
    """For ever: nothing starts again, whatever is deleted below it."""
    job = current(seen)  # its runPolicy may change at any time, also now
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
        # Agents that are asked to leave wait for a coordinator that lets them, as long as their grace is. Somebody who wants nothing
        # saved does not wait for that.
        at_once = LOST_GRACE_S if seen.skip_save and not over else None
        # That there is nothing to save is what the pods show, as everything is that an operator sees late: by now they may train.
        as_seen = not (over or seen.skip_save or left_s <= 0 or _termination_message(seen) is not None)
        actions = [_delete(pod, DELETED, at_once, as_seen) for pod in seen.pods if not pod.deleting]
        # How it ended stays to be read: the finalizer may take more than one try, and somebody may wait for the condition.
        status = seen.status if over else status_of(seen, job, stopping=DELETED)
        # Pods that are being deleted are the kubelet's: an object that waited for a lost machine would never go.
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
    # What the next run is started with is read anew, and its quota asked for anew.
    left: list[Action] = [*_left(seen)]
    left += queues.give_up(seen)
    rests = status_of(seen, job, suspended=True)
    return Plan(tuple(left), msgspec.structs.replace(rests, waiting=None))


def _stop(
    seen: Observed, job: HoldfastJob | None, reason: str, cause: NoticeCause = NoticeCause.STOP
) -> tuple[Action, ...]:
    """Has the state saved. A coordinator that was lost meanwhile is replaced for it: nobody else can."""
    status = seen.status
    actions: list[Action] = [] if job is None else list(_coordinator(seen, job, status.term or 0))
    if seen.said is not None:
        actions.append(AskStop(reason, cause))
    return _numbers_together(actions, status.run or 0, status.term or 0, status.next_number or 0)


def _saves(seen: Observed) -> bool:
    """There is a state to be saved, and nobody has said that it is. A job that never came so far has none: whoever
    suspends one whose image is missing wants its pods gone."""
    if _termination_message(seen) is not None or not seen.pods:
        return False
    if seen.said is not None or _may_answer(seen):
        return True
    # An operator before this one may have deleted all pods because the state was saved, and the coordinator that said so is
    # gone first. Another coordinator would wait in vain for nodes that all leave.
    if not any(pod.stays for pod in seen.pods):
        return False
    # Nodes that had a coordinator may have a state, although this operator has heard of no step.
    met = any(one is not None and one.term > 0 for one in seen.hearings.values())
    return met or queues.has_trained(seen, seen.status)


def _may_answer(seen: Observed) -> bool:
    """A coordinator runs and was not asked in vain for long. An operator that has just begun, and one whose question was lost, know
    of no step; pods that they deleted for that would take the state with them, and wait for a coordinator until their grace is over.
    """
    newest = next((pod for pod in seen.pods if pod.coordinator and pod.number == seen.status.term), None)
    if newest is None or not newest.stays or why_lost(seen):
        return False
    # A coordinator of which the watch shows no start may have nodes already, if theirs run.
    if newest.phase != "Running" and not any(pod.phase == "Running" for pod in seen.pods):
        return False
    word = seen.status.condition(ConditionType.COORDINATOR_READY)
    since_s = None if word is None else from_timestamp(word.last_transition_time)
    return word is None or word.status == "True" or since_s is None or seen.now_s - since_s < ANSWERS_S


def _active_deadline_is_over(seen: Observed, job: HoldfastJob) -> bool:
    began_s, most_s = _began_s(seen), job.spec.run_policy.active_deadline_seconds
    return seen.said is not None and None not in (began_s, most_s) and seen.now_s - began_s >= most_s  # type: ignore[operator]


def _due_s(seen: Observed, job: HoldfastJob, status: JobStatus) -> float | None:
    """When a deadline comes."""
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
    """as_seen: for a reason that the pod itself shows and that may pass. What was seen may be old: by now the pod may have a
    machine, or its agent may work, and train. Then its object has another version."""
    version = pod.version if as_seen else None
    return DeletePod(name=pod.name, uid=pod.uid, reason=reason, grace_s=grace_s, version=version)
