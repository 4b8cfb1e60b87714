"""This worker as a replica: its place in the generation, its state, and how it recovers from a fault."""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.errors import JobStopped, NonFiniteGradient, StateLost, StepFault
from holdfast.protocol import messages as m
from holdfast.protocol.job import tree_fan_out
from holdfast.protocol.phases import BLOCK_STEPS, Phase
from holdfast.train.buffer_rules import Advice, BufferRules
from holdfast.train.constants import Constants
from holdfast.train.faults import FaultPlan
from holdfast.train.generation_group import GenerationGroup
from holdfast.train.held_state import HeldState
from holdfast.train.link import Link
from holdfast.train.peer_transfer import PeerEndpoint
from holdfast.train.place import Place, WorkShare
from holdfast.train.reduction import Gradients
from holdfast.train.replay import put_aside
from holdfast.train.state_image import Protected
from holdfast.train.step_report import CommittedStep, PhaseReport, ProgressReport
from holdfast.train.step_sum import addends

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding
    from holdfast.train.step_sum import ControlMessage

_log = logging.getLogger(__name__)
CHECKED_STEPS = 20
"""After a gradient that was not finite so many steps are looked at before they are summed, to see whose it is if there is
another one."""


class RunMainAgain(BaseException):
    """`main` is to be run again, as the holder of another shard. No error: `holdfast.start` catches it, and nobody else should."""

    def __init__(self, shard_index: int) -> None:
        super().__init__(f"main is run again, as shard {shard_index}")
        self.shard_index = shard_index


class StepStage(Enum):
    """How far a step got on this worker."""

    OPEN = "open"
    """Its gradient is not complete everywhere, as far as is known here: it can only be dropped."""

    PREPARED = "prepared"
    """The complete gradient is here and the state is untouched: the step can be committed, or dropped."""

    PARTIALLY_APPLIED = "partially applied"
    """The update began and did not end. The state is neither that before the step nor that after it, so it counts as lost
    here: finishing it would update some tensors twice."""

    COMMITTED = "committed"
    """The state is that after the step."""


class Transaction:
    """A step's, which the step owns: how far it got on this worker, and its update. After a fault its replica commits or drops it.

    Attributes:
        index: number of the step, from 0.
        stage: how far it got.
        generation: whose members computed it, once it is prepared.
    """

    def __init__(self, replica: Replica, index: int) -> None:
        self.index, self.stage, self.generation = index, StepStage.OPEN, 0
        self._replica = replica
        self._update: Callable[[float], CommittedStep] | None = None

    def prepare(self, update: Callable[[float], CommittedStep]) -> None:
        """The complete gradient is here. update: updates the state, without any other worker. It takes the moment
        (`time.perf_counter`) at which the decision was known."""
        self._update = update
        self.generation = self._replica.place.generation
        self.stage = StepStage.PREPARED

    def commit(self, resolved: bool = False) -> None:
        """Updates the state of a PREPARED step, and of no other: after its vote, or much later, while this worker waits for a new
        generation whose members never computed this step. Called at most once. resolved: that was decided after a fault."""
        decided_s = time.perf_counter()
        self._replica.begin_update(self.index)
        assert self.stage is StepStage.PREPARED
        assert self._update is not None
        # Pessimistic on purpose: set before the update and taken back after it. If the process is struck in
        # between, what is reported is that nothing usable is held.
        self.stage = StepStage.PARTIALLY_APPLIED
        step = self._update(decided_s)
        self.stage = StepStage.COMMITTED
        self._replica.end_update(step, resolved)


class Replica:
    """The worker's side of the commit protocol, which docs/architecture/step.md describes.

    A `Step` owns its transaction: what it computes, how far it got, and its update. The replica offers it what needs the other
    members or the state: the reduction, the vote, and the recovery from a fault.

    Attributes:
        device: where this worker computes.
        place: this worker's in the running generation.
        gradients: those of the step, of all parameters that are trained.
        checks_local: look at this rank's own gradients before they are summed (after one was not finite).
        stopped: the job was asked to stop; no further step is to be begun.
    """

    _group: GenerationGroup

    def __init__(
        self,
        link: Link,
        faults: FaultPlan,
        protected: Protected,
        gradients: Gradients,
        device: torch.device,
        alone: bool = False,
        sharding: Sharding | None = None,
        endpoint: PeerEndpoint | None = None,
        buffer_rules: BufferRules | None = None,
        constants: Constants | None = None,
    ) -> None:
        """alone: there is no job; an error of the script's ends it, as in any script. sharding: of a replica of several
        workers, whose state is sharded. endpoint: where others reach this process, if it is known to them already.
        buffer_rules, constants: none are declared, if left out."""
        self.link = link
        self.sharding = sharding
        self.device = device
        self.gradients = gradients
        self.place = Place(sharding.alike if sharding else None)
        rules = buffer_rules or BufferRules(
            protected, (), sharded=sharding is not None, exact=gradients.exact
        )
        self.state = HeldState(
            link,
            faults,
            protected,
            device,
            sharding=sharding,
            place=self.place,
            buffer_rules=rules,
            constants=constants or Constants({}),
        )
        self.checks_local = False
        self._has_committed = False
        self._checked = 0
        self._faults = faults
        self._fan_out = tree_fan_out(os.environ)
        self._alone = alone
        self._record = link.record
        host = link.start.host
        # Listener and donor outlive `main`: when it runs again for another shard the ports that the
        # coordinator knows must stay the same.
        endpoint = endpoint or PeerEndpoint(host, link.token, link.start.worker)
        self._listener, self._donor = endpoint.listener, endpoint.donor
        self._progress = ProgressReport(link, self.place)
        self._phases = PhaseReport(link, faults)
        self._ends_here = False
        self.stopped = False
        self._last: Transaction | None = None
        faults.poison = self._poison
        faults.tell_progress = lambda: self._progress.flush(self.committed)
        faults.flip_gradient = gradients.flip

    # ------------------------------------------------------------ membership

    def announce(self, micro_batches: int, until: int, samples: str = "") -> None:
        """Reports that this worker is ready, and waits until it is a member.

        micro_batches: number of them in a global batch. until: committed steps after which the script ends. samples: folder of
        their record; empty: there is none.
        """
        self.place.micro_batches = micro_batches
        digest = self.state.digest
        self._record.enter(Phase.IDLE)
        host, ports = self.link.start.host, (self._listener.port, self._donor.port)
        sharding = self.sharding
        shape, shard_index = (sharding.shape, sharding.shard_index) if sharding else ((1, 1), 0)
        self.link.send(
            m.Ready(
                digest=digest,
                host=host,
                vote_port=ports[0],
                data_port=ports[1],
                micro_batches=micro_batches,
                shape=shape,
                shard_index=shard_index,
                until=until,
                samples=samples,
            )
        )
        self.join_next()

    def join_next(self) -> None:
        """Waits for a generation and joins it; tries the next one when it breaks before it runs.

        Raises:
            JobStopped: the job ends here.
        """
        while True:
            order = self.link.next_order()
            if isinstance(order, m.Stop):
                self._leave(order)
            if isinstance(order, m.Rebuild):
                raise RunMainAgain(order.shard_index)
            assert isinstance(order, m.JoinGeneration)
            # The order is taken over before the prepared step is resolved: resolving reports progress, and does
            # so under the new generation's number.
            self.place.form = order
            self._record.generation = self.place.generation
            # Before this worker joins: it may be a donor of the state in which the new generation starts, and
            # newcomers read its live tensors as soon as they are published.
            self._resolve(order.apply)
            try:
                self._join(order)
                return
            except StepFault as error:
                self._part(error)

    def _resolve(self, apply: bool) -> None:
        """The prepared step counts after all, or it is dropped."""
        # Forgotten first. If the update raises below, the step must not be resolved a second time with the
        # next order: that would apply a gradient twice.
        step, self._last = self._last, None
        if step is None or step.stage is StepStage.COMMITTED:
            return
        # `apply` follows one rule for all survivors (`policy.resolve`): if anyone committed the step, or all
        # of them prepared it, it counts everywhere; otherwise it counts nowhere.
        if apply and step.stage is StepStage.PREPARED:
            step.commit(resolved=True)
        else:
            self._roll_back()

    def _join(self, form: m.JoinGeneration) -> None:
        began = time.monotonic()
        self._phases.forget()
        generation = form.generation
        replica = generation.members[form.rank].replica
        # Connections of a replica that came through the break intact are kept. Closing and making them again
        # would cost more than all the rest of a recovery.
        if self.sharding and (
            replica < 0 or generation.number in generation.groups_connected_in[replica : replica + 1]
        ):
            self.sharding.groups.renew(beside=replica < 0)
        self.state.snapshots.join(form)
        restored, restore_s = self._take_state(form)
        self._connect(form, replica)
        # Everybody is connected, and the generation may already be over. Reporting Joined for it would let
        # the coordinator take this worker for one that trains.
        self.link.check(generation.number)
        self._record.beat()
        self._progress.joined()
        join_s = time.monotonic() - began - (restore_s or 0.0)
        self.link.send(m.Joined(generation.number, join_s, restore_s, restored))
        _log.info(
            "joined a generation",
            extra={
                "generation": generation.number,
                "rank": form.rank,
                "world": len(generation.members),
                "join_s": join_s,
                "restore_s": restore_s,
            },
        )
        self.state.guard.note(self.committed, from_peer=form.restore and bool(form.donors))

    def _take_state(self, form: m.JoinGeneration) -> tuple[int, float | None]:
        """Serves and fetches the state as the order says; how much was fetched, and in how many seconds."""
        reads_for_all = form.serve and form.restore
        if reads_for_all:
            # A donor that reads the state from a tier itself must not yet answer with what it holds: that is
            # the state of another step.
            self._donor.publish(
                self.place.generation - 1, None
            )  # who asks for this one is told that it is to come
        else:
            if form.serve:
                self._donor.publish(self.place.generation, self.state.image(), self.state.constant_image())
            else:
                self._donor.publish(self.place.generation, None)
        if form.restore:
            restored = self.state.restore(form)
            if reads_for_all:
                self._donor.publish(self.place.generation, self.state.image(), self.state.constant_image())
            return restored
        if self.state.committed is None:
            self.state.committed = form.generation.start
        return 0, None

    def _connect(self, form: m.JoinGeneration, replica: int) -> None:
        """Connects to the other members. replica: this worker's; -1: none that is complete."""
        generation = form.generation
        # A fresh start for whoever watches the page: a collective count or a peer of the old generation would
        # look like progress, or like a culprit.
        self._record.wait_for(-1)
        self._record.committed, self._record.collectives = self.committed, 0
        self._record.enter(Phase.JOIN)
        groups = (
            self.sharding.groups if self.sharding and replica >= 0 and generation.shard_count > 1 else None
        )
        group = self._group = GenerationGroup(
            generation=generation,
            rank=form.rank,
            host=self.link.start.host,
            listener=self._listener,
            replica=groups,
            device=self.device,
            fan_out=self._fan_out,
        )
        if groups:
            groups.counts.say = lambda begun, stands: self.link.send(
                m.Halted(generation.number, begun, stands)
            )
        # Before `join`, which may wait for a lost member. If the generation broke meanwhile, `guard` aborts at once,
        # and `join` fails instead of waiting.
        self.link.guard(
            generation.number,
            group.abort_all,
            group.halt if groups else None,
            groups.run_to if groups else None,
        )
        channel = group.channel
        channel.waits, channel.late = self._phases.wait_for, self._phases.late
        channel.reached = self._record.beat
        group.join(self.link.token)

    def _part(self, error: Exception) -> None:
        """Leaves a generation that cannot go on, and reports what this worker holds."""
        number = self.place.generation
        _log.info("leaving a generation: %r", error, extra={"generation": number, "rank": self.place.rank})
        # Only what fails before the coordinator has spoken is evidence. After a break every collective fails,
        # and such reports would only point at the survivors.
        if not self.link.broken(number):
            step = self.state.committed if self.state.committed is not None else -1
            lost = isinstance(error, StateLost)
            detail = str(error) if lost else f"{type(error).__name__}: {error}"
            self.link.send(m.CollectiveError(number, step, detail, lost))
            # This worker does not judge. A collective that failed here may be this worker's own fault, a
            # peer's or the network's; the coordinator sees all reports and decides for all.
            self.link.wait_broken(number)
        self._quiesce()

    def _quiesce(self) -> None:
        number = self.place.generation
        self._record.enter(Phase.PARKED)
        agreement = -1
        # The order matters. First `abort`, so that no thread waits for a peer. Then `leave`, which settles
        # that all calls of the replica's groups are complete. Then `drain`, because gloo may write into gradients
        # until it has let go of them. `close` comes last: it frees what the others still used.
        if hasattr(self, "_group"):
            self._group.abort()
            agreement = self._group.leave(self._group.generation == number and self.link.broken(number))
            self.gradients.drain(self._group)
            self.state.buffer_rules.drain(self._group)
            self.link.unguard()
            self._group.close()
        step = self._last
        prepared = step is not None and step.stage is StepStage.PREPARED
        # A partially applied step has updated some tensors and not others. Neither the step before nor the one after is
        # here, so nothing may be reported as held; the state is fetched from a peer.
        held = (
            None if step is not None and step.stage is StepStage.PARTIALLY_APPLIED else self.state.committed
        )
        self.state.committed = held
        self._progress.flush(held or 0)
        self.link.send(
            m.Parked(
                generation=number,
                committed=held,
                prepared=prepared,
                losses=self._progress.losses,
                agreement=agreement,
            )
        )

    def _leave(self, order: m.Stop) -> None:
        self._resolve(order.apply)
        self.state.leave(order)
        raise JobStopped(
            "this worker was asked to leave before its first step, because the job ends or no longer needs it"
        )

    # ------------------------------------------------------------ a step

    @property
    def committed(self) -> int:
        """Number of steps whose result this worker holds."""
        return self.state.committed or 0

    @property
    def stages(self) -> int:
        """Number of pipeline stages of a replica; 1: it is no pipeline."""
        return self.sharding.stages if self.sharding is not None else 1

    @property
    def advice(self) -> Advice:
        """What errors tell the script to write."""
        return self.state.buffer_rules.advice

    def hand_over(self) -> None:
        """The script runs code of its own now, between two steps."""
        self._phases.leave()

    def take_back(self) -> None:
        """The script asks for the next step, or begins it."""
        self._phases.take()

    def begin_step(self) -> None:
        """The step starts from what was committed."""
        self.take_back()
        self.state.begin_step()
        self.gradients.begin()
        self._phases.begin_step()

    def enter(self, phase: Phase, step: int) -> None:
        """The step is in this phase now."""
        self._phases.enter(phase, step)

    def take_share(self) -> WorkShare:
        """What this worker computes of the step that began."""
        # Asked anew at each step and not at the start of a generation: a step that is repeated after a fault
        # is computed by fewer workers, with other shares.
        share = self.place.share()
        self.gradients.expect(share.leaves, share.rank, share.world, share.idle)
        return share

    def check(self) -> None:
        """Raises GenerationBroken when it is useless to go on with this step. In a replica of several workers a worker leaves a
        step only at a call to the others, together with them."""
        # A worker of a sharded replica that left a step at once would leave the others of its replica inside
        # a collective. It goes on to the next one, where `CollectiveCounts.begin` decides for all.
        if self.sharding is None or self.sharding.groups.aborted:
            self.link.check(self.place.generation)

    @contextmanager
    def backward(self, micro: int, last: bool) -> Iterator[None]:
        """A context around the backward pass of micro-batch `micro`. last: it is this worker's last one in the step."""
        self.gradients.before_backward()
        if self.sharding is not None:
            self.sharding.accumulates(not last)
        # Buckets may leave during the last backward pass. Not while local gradients are looked at: a NaN
        # that has left cannot be told from another rank's.
        # Nor before it is known that the others' buckets are the same: gloo ends a process whose sum has another size.
        if last and not self.checks_local and not self.gradients.fresh:
            self.gradients.last(self._group)
        yield
        self._added(micro, last)

    def run_schedule(
        self, schedule: Any, args: tuple[Any, ...], target: Any, more: dict[str, Any], micro: int, last: bool
    ) -> float:
        """Computes micro-batch `micro` together with the other stages of this replica. Returns its loss, on the last stage."""
        assert self.sharding is not None
        # No bucket leaves early: a gradient is complete when the last part of the micro-batch has been added.
        self.gradients.before_backward(passes=schedule._n_microbatches)
        loss = self.sharding.pipelines.run(schedule, args, target, more)
        self._added(micro, last)
        return loss

    def _added(self, micro: int, last: bool) -> None:
        self.gradients.after_backward()
        self.state.buffer_rules.after_micro(micro)
        if last:
            self.gradients.seal()

    # ------------------------------------------------------------ what all members say of a step

    def send_weights(self, step: int, messages: Sequence[ControlMessage]) -> None:
        """Sends the weights of this worker's micro-batches to all members."""
        self._group.channel.send_weights(step, *messages)

    def receive_weights(self, step: int, own: Sequence[ControlMessage]) -> Sequence[ControlMessage]:
        """The weights of all members' micro-batches, as `ControlChannel.receive_weights`. own: what this worker sent."""
        counts = self.place.message_counts() if self.gradients.exact else None
        return self._group.channel.receive_weights(step, own, counts)

    def exchange(self, step: int, message: ControlMessage, counts: bool) -> Sequence[ControlMessage]:
        """Sends one control message to every member; returns those of all members, in the order of the ranks. counts: as in
        `ControlChannel.exchange`."""
        return self._group.channel.exchange(step, message, counts)

    def sum(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """As `Step.sum`."""
        # A worker beside the replicas computes nothing, and of a tensor dimension all compute the same: they
        # say their numbers, and nobody counts them.
        counts = self.place.weighs and self.place.world.replica >= 0
        total = self._group.channel.sum(step, addends(values), counts)
        self._phases.alive()
        return total

    def check_update(self, step: int, **used: Any) -> None:
        """Checks what the update will use, before the step is reduced. used: as in `UsedState.check`.

        Raises:
            UsageError: something of that is not protected, or a gradient was changed after its backward pass.
            StateChanged: protected state was changed since the commit before.
        """
        self.state.used.check(**used)
        # Before this step can be prepared. A change that the script made elsewhere is refused while the step
        # counts nowhere.
        self.state.guard.before_update(step)
        self.enter(Phase.REDUCE, step)
        self.gradients.check_sealed()

    def reduce(self, step: int, scale: Callable[[], float]) -> float:
        """Sums the gradients over all replicas and multiplies them by `scale()`, which waits for the weights of all; returns the
        norm of the whole gradient.

        Raises:
            CollectiveFault: the generation broke.
        """
        if self.sharding is not None:
            self.state.buffer_rules.reduce_inside(self.sharding)
        # Before what is left is launched: sums of other parameters would be of another size. The messages were sent before
        # the last backward pass of each worker, without which no sum can be complete.
        scale()
        self.gradients.fresh = False
        # From here on every collective must be launched, also for parameters that took no part: the others
        # launch them too and would wait.
        self.gradients.flush(self._group)
        return math.sqrt(self._over_shards(step, self.gradients.finish(scale)))

    def _over_shards(self, step: int, squares: float) -> float:
        """The sum of the squares of the whole gradient, from that of this worker's shard."""
        shards = self.place.shard_count
        self._group.intact()
        if shards == 1:
            return squares if squares >= 0 else math.nan
        messages = self.exchange(step, (squares, 0.0, 0.0), self.place.rank < shards)
        # Ranks 0 to shards - 1 are one complete replica. All replicas hold the same sums, so one of them is
        # enough; adding all would count each square several times, and the members beside them hold nothing.
        total = sum(messages[rank][0] for rank in range(shards))  # of one replica: all have the same
        return total if total >= 0 else math.nan

    def reduce_buffers(self) -> None:
        """Sums what forward passes changed in buffers, once it is known that the gradient can be used."""
        self.state.buffer_rules.reduce(self._group)

    def vote(self, step: int) -> None:
        """Closes the reduction: returns when every member holds the complete gradient.

        The message also carries whether the generation is to end at this commit, so all leave together, and rank 0's
        whether it is to be saved.
        """
        self.enter(Phase.VOTE, step)
        # Read once, before the vote goes out. A planned change that arrives later waits for the next commit;
        # deciding on it now would be a decision of this worker alone, and the others would train on.
        ends = 1.0 if self.link.yielding(self.place.generation) else 0.0
        saves = 1.0 if self.place.rank == 0 and self.state.snapshots.due(step + 1) else 0.0
        channel, message = self._group.channel, (1.0, ends, saves)
        channel.send_vote(step, message)
        self._phases.alive()
        # A member votes once its gradient is complete. So whoever has heard all votes knows that each member
        # can make this update without another message from anybody: this is what makes the commit safe although
        # members may be lost in the next moment.
        messages = channel.receive_vote(step, [message])
        # Any member may ask, and all see the same messages, so all leave at the same commit.
        self._ends_here = any(e > 0 for _, e, _ in messages)
        if any(x > 0 for _, _, x in messages):
            self.state.snapshots.want()

    # ------------------------------------------------------------ a step's update

    def begin_update(self, step: int) -> None:
        """Notes that the state is about to change, as it may now."""
        self.enter(Phase.UPDATE, step)
        self.state.before_update()

    def updating(self, scheduler: Any, skipped: bool) -> AbstractContextManager[None]:
        """As `HeldState.updating`."""
        return self.state.updating(scheduler, skipped)

    def end_update(self, step: CommittedStep, resolved: bool = False) -> None:
        """Counts the step as committed, and reports it to the agent, though not every time. resolved: it was decided after a
        fault."""
        self.state.buffer_rules.keep()
        # From here on this worker holds the state after the step. It must be noted before anything can raise (a fault that
        # is injected at this phase does): what is reported on quiescing would otherwise be a state that is gone.
        self.state.committed = step.index + 1
        self._has_committed = True
        self.enter(Phase.COMMIT, step.index)
        self._checked -= self.checks_local
        self.checks_local = self._checked > 0
        self._record.committed = step.index + 1
        self._record.beat()
        spent = self._phases.timer.commit(step.index, step.micro_batches, step.own_loss, step.loss)
        if spent is not None:
            # After the update that ended the block, which all members made before any of them can make another.
            block = spent.first // BLOCK_STEPS
            spent = msgspec.structs.replace(spent, state=self.state.sums.after(block))
        self._progress.note(step, spent, resolved, self._phases.script_s)
        self.state.guard.note(step.index + 1)

    # ------------------------------------------------------------ a micro-batch that is computed twice

    def put_aside(self) -> AbstractContextManager[None]:
        """As `replay.put_aside`."""
        return put_aside(self.state, self.device)

    def disagree(self, step: int, micro: int, digests: Mapping[int, int]) -> None:
        """Reports that several workers computed different gradients of one micro-batch. digests: by rank."""
        generation, members = self.place.generation, self.place.members
        by_worker = {members[rank].worker: digest for rank, digest in digests.items()}
        self.link.send(m.GradientsDiffer(generation=generation, step=step, micro=micro, digests=by_worker))

    # ------------------------------------------------------------ between two steps

    def log(self, step: int, values: dict[str, float]) -> None:
        """As `ProgressReport.log`."""
        self._progress.log(step, values, self.committed)

    def after_step(self) -> None:
        """The script asks for the next step. A generation that was asked to end does so, without a loss.

        Raises:
            StateChanged, UsageError: as in `HeldState.after_step`.
        """
        # First: a generation that ends here hands the state to newcomers, who must not get a change that the script made
        # on its own.
        self.state.after_step()
        if self._ends_here:
            self._ends_here = False
            self._last = None
            self._quiesce()
            self._rejoin()

    @contextmanager
    def off_step(self, proves: bool = False) -> Iterator[None]:
        """The script has work of its own between two steps, or after the last: nobody waits for it meanwhile, and a fault in a
        call to the other workers of the replica is no error of it. proves: the state is afterwards what it was before."""
        self._phases.off_step(True)
        try:
            with self.state.guard.proving() if proves else nullcontext():
                yield
        except BaseException as error:
            # The replica has recovered, so the watchdog's state is the new generation's and is left alone.
            if isinstance(error, Exception) and self._interrupted(error):
                return
            self._phases.off_step(False)
            raise
        self._phases.off_step(False)

    def on_collective(self, begins: bool) -> None:
        """A collective of this worker's own replica begins, or has ended."""
        self._phases.on_collective(begins)

    def alive(self) -> None:
        """A sign of life of a step."""
        self._phases.alive()

    def _interrupted(self, error: Exception) -> bool:
        """Work between two steps raised. True when a fault did that, in a call to the other workers of the replica: they are
        together again, and the work is not done."""
        if self.sharding is None or not (isinstance(error, StepFault) or self.sharding.groups.aborted):
            return False
        self._last = None
        self._part(error)
        self.sharding.reset()
        self._rejoin()
        return True

    # ------------------------------------------------------------ a fault

    def half_made(self, error: Exception) -> bool:
        """Whether the script's own error occurred in the first forward pass of sharded modules, in which they initialize
        themselves. Another attempt would find them half initialized, and fail with an error that hides this one."""
        return (
            self.sharding is not None
            and not self._has_committed
            and not isinstance(error, StepFault | NonFiniteGradient)
            and not self.sharding.groups.aborted
        )

    def recover(self, step: Transaction, error: Exception) -> bool:
        """Handles an error within a step: resolves the step together with the other members. Returns when training can go on."""
        # A job of one has nobody to recover with: the script's error is the script's.
        if self._alone:
            return False
        # Kept before anything is reported. What this worker holds is told on quiescing, and depends on how far
        # this step came.
        self._last = step
        # Torch may have put it in other words.
        aborted = self.sharding is not None and self.sharding.groups.aborted
        if isinstance(error, StepFault) or aborted:
            self._part(error)
        else:
            self._report(step, error)
            self.link.wait_broken(self.place.generation)
            self._quiesce()
        self._rejoin()
        return True

    def _rejoin(self) -> None:
        try:
            self.join_next()
        except JobStopped:
            self.stopped = True

    def _report(self, step: Transaction, error: Exception) -> None:
        # The sum says that somebody's part is not finite, not whose. So for some steps every rank looks at
        # its own part before it is added; all ranks do, since all see the same sum.
        if isinstance(error, NonFiniteGradient):
            self.checks_local, self._checked = True, CHECKED_STEPS
        _log.info(
            "the step failed: %r",
            error,
            extra={"generation": self.place.generation, "rank": self.place.rank, "step": step.index},
        )
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        self.link.send(
            m.Failed(
                generation=self.place.generation,
                step=step.index,
                phase=int(self._record.phase),
                error=type(error).__name__,
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
                where=where,
                own=isinstance(error, NonFiniteGradient) and error.own,
            )
        )

    def _roll_back(self) -> None:
        """The step is dropped: parameters are untouched, buffers become what they were before it."""
        if self.sharding is not None:
            # FSDP2 still holds gradients that were computed and not summed over the replica. The repeated
            # step would add to them.
            self.sharding.reset()
        self.state.roll_back()

    def _poison(self) -> None:
        self.gradients.poison = True

    # ------------------------------------------------------------ the end

    def done(self, stopped: bool) -> None:
        """Reports with which state this worker ends, after its last step."""
        self.state.snapshots.close()
        if self.link.failed:
            return
        self._progress.flush(self.committed)
        self.state.check_constants()
        held = self.state.finish(stopped)
        self._record.enter(Phase.DONE)
        self.link.unguard()
        state = self.state
        self.link.send(
            m.Done(
                committed=self.committed,
                params_xxh3=state.parameters_digest,
                state_xxh3=state.replicated_digest,
                covered=state.covered,
                left_out=state.buffer_rules.own,
                loss=self._progress.last_loss,
                stopped=stopped,
                held=held,
            )
        )
        self._donor.publish(self.place.generation + 1, None)
