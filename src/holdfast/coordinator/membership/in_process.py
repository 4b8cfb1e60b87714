"""Level 2: after a fault the survivors keep their processes, and only the lost worker is replaced."""

from __future__ import annotations

from holdfast.coordinator.health import queries as health
from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.context import Context, ForgetLast, SwapLemons
from holdfast.coordinator.kernel.state import Incident, JobPhase, Node, Timer, Worker, WorkerPhase
from holdfast.coordinator.membership import (
    failures,
    generations,
    nodes,
    processes,
    replicas,
    resize,
    shutdown,
)
from holdfast.coordinator.storage import queries as storage
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.causes import Cause


class InProcessMode:
    """Mode: see `holdfast.coordinator.kernel.context`."""

    replaces_one = True
    saves_together = True

    def on_attached(self, context: Context) -> None:
        """The job is at level 2 already."""

    def on_exit(self, context: Context, worker: Worker, message: m.Exited) -> None:
        """A worker that has completed all steps may end; any other one is lost."""
        membership = context.state.membership
        root_cause = membership.root_causes[worker.name]
        if worker.phase is WorkerPhase.DONE:
            transitions.enter(context, worker, WorkerPhase.GONE)
            if (
                # A positive code after the last step is the script's, for example in its own evaluation. A
                # signal then is the machine's, and the steps are done and saved.
                message.code > 0 and membership.outcome is None
            ):  # a signal is the machine's fault, and its steps are done
                shutdown.request(
                    context, _failed_where(membership.until, worker.committed), "failed", root_cause
                )
        elif worker.told_to_end:  # it refused the job, which ends for that
            transitions.enter(context, worker, WorkerPhase.GONE)
        else:
            cause = root_cause.cause if root_cause.traceback else failures.cause_of(message)
            failures.lose_worker(context, worker, cause, message)

    def on_worker_lost(
        self, context: Context, worker: Worker, was: WorkerPhase, cause: Cause, message: m.Exited | None
    ) -> None:
        """The generation ends if it was a member; another worker takes its place."""
        membership = context.state.membership
        # Nobody takes its place in a job that is stopping, and one that is done has nothing left to lose.
        if membership.phase is JobPhase.STOPPING or was is WorkerPhase.DONE:
            return
        processes.count_restart(context, worker)
        # Only a member's loss disturbs training. A spare that dies is started again, and costs the budget but
        # no incident.
        member = was in (WorkerPhase.MEMBER, WorkerPhase.PARKED)
        early = was in (WorkerPhase.STARTING, WorkerPhase.ATTACHED)
        if member or membership.number == 0:
            context.open_incident(cause, node=worker.node, workers=[worker.name])
        # Judged before the generation is ended: a verdict stops the job, and the end of the generation then
        # leads to saving instead of to the next attempt.
        if message is not None and (member or early):
            failures.judge_exit(context, worker, message, early)
        if member:
            generations.break_generation(context, cause)
        if early and message is not None:
            failures.did_not_start(context, worker, cause)

    def on_never_started(self, context: Context, worker: Worker) -> None:
        """Its slot gets another worker."""

    def explain_earlier(
        self, context: Context, node: Node, workers: list[Worker], cause: Cause
    ) -> Incident | None:
        """None: a worker that lost its peer leaves the generation without reporting an error, so there is no earlier report to
        explain."""
        return None

    def on_node_lost(self, context: Context, workers: list[Worker], cause: Cause) -> None:
        """The generation ends if any was a member."""
        if workers:
            generations.break_generation(context, cause)

    def evict(self, context: Context, node: Node, workers: list[Worker], cause: Cause) -> None:
        """Removes the workers from the generation."""
        failures.condemn(context, workers, cause)

    def on_stall(
        self, context: Context, culprits: list[Worker], cause: causes.Hang, allowed: dict[str, float]
    ) -> None:
        """Removes the workers for which the others wait. If no worker differs and all have made no progress for too long, the
        step is tried again."""
        inspection = context.transient(failures.Inspection)
        # With a culprit it is replaced. Without one nothing is done unless every worker was seen and all of
        # them have stood still too long: half a picture has named innocent workers.
        if culprits:
            failures.condemn(context, culprits, cause)
        elif not inspection.unheard and all(v.idle_s >= allowed[v.worker] for v in inspection.views):
            failures.nobody_differs(context, cause)

    def change_members(self, context: Context) -> None:
        """Members change at a step's edge: see `resize.change_due`."""

    def on_out_of_time(self, context: Context) -> None:
        """Drops a step in flight that takes too long, and saves what was committed, on another worker if necessary."""
        s = context.state
        # The step in flight is given up, not the job: what was committed is still to be saved, and each case
        # below waits for one thing less than the one before.
        if s.membership.phase is JobPhase.RUNNING:
            generations.break_generation(context, causes.Stopping())
        elif s.membership.phase is JobPhase.BREAKING:
            failures.end_stuck(context)
        # Some have not been told to leave yet because others were saving for them. Those did not finish, so
        # they are taken out and the next ones save.
        elif any(w.name not in s.membership.stops for w in context.workers_in(WorkerPhase.PARKED)):
            stuck = [w for w in context.workers_in(WorkerPhase.PARKED) if w.name in s.membership.stops]
            failures.condemn(context, stuck, causes.NotSaved())
            context.request(ForgetLast())
            s.deadlines.set(Timer.STOP, context.now + context.timing.start_s)
        elif s.membership.phase is JobPhase.STOPPING and not context.reached(
            until_s := storage.moves_until_s(context)
        ):
            s.deadlines.set(Timer.STOP, until_s)
        elif s.membership.phase is JobPhase.STOPPING:
            processes.ask_all_to_end(context, grace_s=0.0)
            shutdown.end(context)

    def due(self, context: Context) -> None:
        """Ends workers that did not become ready in time."""
        failures.end_late_starters(context)

    def advance(self, context: Context) -> None:
        """Ends what is to end, starts workers, and forms the next generation."""
        membership = context.state.membership
        if membership.phase is JobPhase.STOPPING:
            # A job that is stopping starts, forms and repairs nothing any more.
            shutdown.advance(context)
            return
        # Before anything is started: when somebody has all steps, a new worker could only come too late, and
        # a new generation would do steps that nobody needs.
        if shutdown.finishing(context):
            return
        replicas.give_up(context)
        if membership.phase is JobPhase.BREAKING and not context.count_workers(WorkerPhase.MEMBER):
            generations.gather(context)
            nodes.write_off(context)  # which comes sooner now that nobody trains
            # The break may be the effect of what a rule found on a node. That is decided first: a worker that it ends would
            # be taken into the next generation, and break it at once.
            if health.decides_now(context):
                context.look_again()
                return
        if membership.stop_reason is None:
            # Workers are started while the members of the broken generation still park, not after: a start
            # takes seconds, parking milliseconds, and both then overlap.
            nodes.staff(context)
        if membership.phase is JobPhase.RUNNING:
            if membership.stop_reason is not None:
                generations.end_at_commit(context, "stop")
            else:
                context.request(SwapLemons())
                replicas.rebuild(context)  # for those that are to leave since just now: they wait for it
                if (reason := resize.change_due(context)) is not None:
                    generations.end_at_commit(context, reason)
        # Once more after the members have changed: who is spare, and for which shard, depends on it.
        if membership.stop_reason is None:
            replicas.rebuild(context)
        if membership.phase is JobPhase.GATHERING:
            if membership.stop_reason is None:
                generations.try_form(context)
            if membership.stop_reason is not None:  # asked for before, or given up just now
                shutdown.begin(context)


def _failed_where(until: int | None, committed: int | None) -> str:
    """Why the job ends whose script failed when it had left its loop over steps. An error between two steps is one way out of
    the loop, and `break` is another."""
    if until is None or committed is None or committed >= until:
        return "the script failed after its last step"
    return f"the script failed after {committed} of {until} steps"
