"""This worker as a replica: its place in the generation, its state, and how it comes through a fault."""

from __future__ import annotations

import logging
import math
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from holdfast.errors import JobStopped, NonFiniteGradient, StateLost, StepFault
from holdfast.protocol import messages as m
from holdfast.protocol.phases import BLOCK_STEPS, Phase
from holdfast.train.buffer_rules import BufferRules
from holdfast.train.constants import Constants
from holdfast.train.faults import FaultPlan
from holdfast.train.generation_group import Group
from holdfast.train.held_state import HeldState
from holdfast.train.link import Link
from holdfast.train.peer_transfer import Endpoint
from holdfast.train.place import Place
from holdfast.train.progress_report import CommittedStep, ProgressReport, Stage, StepOutcome
from holdfast.train.reduction import Gradients
from holdfast.train.state_image import Protected
from holdfast.train.step_timing import PhaseReport

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding

_log = logging.getLogger(__name__)
CHECKED_STEPS = 20
"""After a gradient that was not finite so many steps are looked at before they are summed, to see whose it is if there is
another one."""


class RunMainAgain(BaseException):
    """`main` is to be run again, as the holder of another shard. No error: `holdfast.start` catches it, and nobody else should."""

    def __init__(self, shard_index: int) -> None:
        super().__init__(f"main is run again, as shard {shard_index}")
        self.shard_index = shard_index


class Replica:
    """The worker's side of the commit protocol, which docs/architecture/step.md describes.

    Attributes:
        device: where this worker computes.
        group: connections of the running generation.
        place: this worker's in the running generation.
        state: what this worker holds.
        phases: where it is in its step.
        checks_local: look at this rank's own gradients before they are summed (after one was not finite).
        stopped: the job was asked to stop; no further step is to be begun.
    """

    group: Group

    def __init__(
        self,
        link: Link,
        faults: FaultPlan,
        protected: Protected,
        gradients: Gradients,
        device: torch.device,
        alone: bool = False,
        sharding: Sharding | None = None,
        endpoint: Endpoint | None = None,
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
        self._alone = alone
        self._page = link.page
        host = link.start.host
        # Listener and donor outlive `main`: when it runs again for another shard the ports that the
        # coordinator knows must stay the same.
        endpoint = endpoint or Endpoint(host, link.token, link.start.worker)
        self._listener, self._donor = endpoint.listener, endpoint.donor
        self._progress = ProgressReport(link, self.place)
        self.phases = PhaseReport(link, faults)
        self._ends_here = False
        self.stopped = False
        self._last: StepOutcome | None = None
        faults.poison = self._poison
        faults.tell_progress = lambda: self._progress.flush(self.state.committed or 0)
        faults.flip_gradient = gradients.flip

    # ------------------------------------------------------------ membership

    def over_shards(self, step: int, squares: float) -> float:
        """The sum of the squares of the whole gradient, from that of this worker's shard."""
        shards = self.place.shard_count
        self.group.intact()
        if shards == 1:
            return squares if squares >= 0 else math.nan
        channel = self.group.channel
        channel.send(step, (squares, 0.0, 0.0))
        words = channel.receive(step, [(squares, 0.0, 0.0)])
        # Ranks 0 to shards - 1 are one complete replica. All replicas hold the same sums, so one of them is
        # enough; adding all would count each square several times, and the members beside them hold nothing.
        total = sum(words[rank][0] for rank in range(shards))  # of one replica: all have the same
        return total if total >= 0 else math.nan

    def announce(self, micro_batches: int, until: int, samples: str = "") -> None:
        """Says that this worker is ready, and waits until it is a member.

        micro_batches: in a global batch. until: committed steps after which the script ends. samples: folder of their
        record; empty: there is none.
        """
        self.place.micro_batches = micro_batches
        digest = self.state.digest
        self._page.enter(Phase.IDLE)
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
            # The order is taken over before the prepared step is settled: settling reports progress, and does
            # so under the new generation's number.
            self.place.form = order
            self._page.generation = self.place.generation
            # Before this worker joins: it may be a donor of the state in which the new generation starts, and
            # newcomers read its live tensors as soon as they are published.
            self._settle(order.apply)
            try:
                self._join(order)
                return
            except StepFault as error:
                self._part(error)

    def _settle(self, apply: bool) -> None:
        """The prepared step counts after all, or it is dropped."""
        # Forgotten first. If the update raises below, the step must not be settled a second time with the
        # next order: that would apply a gradient twice.
        step, self._last = self._last, None
        if step is None or step.stage is Stage.COMMITTED:
            return
        # `apply` follows one rule for all survivors (`policy.settle`): if anyone committed the step, or all
        # of them prepared it, it counts everywhere; otherwise it counts nowhere.
        if apply and step.stage is Stage.PREPARED:
            self.commit(step, settled=True)
        else:
            self._roll_back()

    def _join(self, form: m.JoinGeneration) -> None:
        began = time.monotonic()
        self.phases.forget()
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
        self._page.beat()
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
        self.state.guard.note(self.state.committed or 0, from_peer=form.restore and bool(form.donors))

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
        self._page.wait_for(-1)
        self._page.committed, self._page.collectives = self.state.committed or 0, 0
        self._page.enter(Phase.JOIN)
        groups = (
            self.sharding.groups if self.sharding and replica >= 0 and generation.shard_count > 1 else None
        )
        group = self.group = Group(
            generation=generation,
            rank=form.rank,
            host=self.link.start.host,
            listener=self._listener,
            replica=groups,
            device=self.device,
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
        self.group.channel.waits, self.group.channel.reached = self.phases.wait_for, self._page.beat
        self.group.join(self.link.token)

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
        self._park()

    def _park(self) -> None:
        number = self.place.generation
        self._page.enter(Phase.PARKED)
        agreement = -1
        # The order matters. First `abort`, so that no thread waits for a peer. Then `leave`, which settles
        # that all calls of the replica's groups are complete. Then `drain`, because gloo may write into gradients
        # until it has let go of them. `close` comes last: it frees what the others still used.
        if hasattr(self, "group"):
            self.group.abort()
            agreement = self.group.leave(self.group.generation == number and self.link.broken(number))
            self.gradients.drain(self.group)
            self.state.buffer_rules.drain(self.group)
            self.link.unguard()
            self.group.close()
        step = self._last
        prepared = step is not None and step.stage is Stage.PREPARED
        # A torn step has updated some tensors and not others. Neither the step before nor the one after is
        # here, so nothing may be reported as held; the state is fetched from a peer.
        held = None if step is not None and step.stage is Stage.TORN else self.state.committed
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
        self._settle(order.apply)
        self.state.leave(order)
        raise JobStopped(
            "this worker was asked to leave before its first step, because the job ends or no longer needs it"
        )

    # ------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """The step starts from what was committed."""
        self.state.begin_step()
        self.gradients.begin()
        self.phases.begin_step()

    def check(self) -> None:
        """Raises GenerationBroken when there is no use in going on with this step. In a replica of several workers nobody
        leaves it alone, but at a call to the others."""
        # A worker of a sharded replica that left a step at once would leave the others of its replica inside
        # a collective. It goes on to the next one, where `CollectiveCounts.begin` decides for all.
        if self.sharding is None or self.sharding.groups.aborted:
            self.link.check(self.place.generation)

    def vote(self, step: int) -> None:
        """Closes the reduction: returns when every member holds the complete gradient.

        The word also carries whether the generation is to end at this commit, so all leave together, and rank 0's
        whether it is to be saved.
        """
        # Read once, before the vote goes out. A planned change that arrives later waits for the next commit;
        # deciding on it now would be a decision of this worker alone, and the others would train on.
        ends = 1.0 if self.link.yielding(self.place.generation) else 0.0
        saves = 1.0 if self.place.rank == 0 and self.state.snapshots.due(step + 1) else 0.0
        channel = self.group.channel
        channel.send(step, (1.0, ends, saves))
        self.phases.alive()
        # A member votes once its gradient is complete. So whoever has heard all votes knows that each member
        # can make this update without another word from anybody: this is what makes the commit safe although
        # members may be lost in the next moment.
        words = channel.receive(step, [(1.0, ends, saves)])
        # Any member may ask, and all see the same words, so all leave at the same commit.
        self._ends_here = any(e > 0 for _, e, _ in words)
        if any(x > 0 for _, _, x in words):
            self.state.snapshots.want()

    def commit(self, prepared: StepOutcome, settled: bool = False) -> None:
        """A prepared step counts: updates the state, notes that, and tells the agent now and then. settled: that was decided
        after a fault."""
        decided_s = time.perf_counter()
        self.phases.enter(Phase.UPDATE, prepared.index)
        self.state.before_update()
        step = prepared.finish(decided_s)
        self.state.buffer_rules.keep()
        # From here on this worker holds the state after the step. It must be noted before anything can raise (a fault that
        # is injected at this phase does): what is reported on parking would otherwise be a state that is gone.
        self.state.committed = step.index + 1
        self._has_committed = True
        self.phases.enter(Phase.COMMIT, step.index)
        self._note(step, settled)

    def _note(self, step: CommittedStep, settled: bool) -> None:
        self._checked -= self.checks_local
        self.checks_local = self._checked > 0
        self._page.committed = step.index + 1
        self._page.beat()
        spent = self.phases.timer.commit(step.index, step.micro_batches, step.own_loss, step.loss)
        if spent is not None:
            # After the update that ended the block, which all members made before any of them can make another.
            block = spent.first // BLOCK_STEPS
            spent = msgspec.structs.replace(spent, state=self.state.sums.after(block))
        self._progress.note(step, spent, settled, self.phases.script_s)
        self.state.guard.note(step.index + 1)

    def disagree(self, step: int, micro: int, digests: dict[str, int]) -> None:
        """Says that a micro-batch which several workers computed has not the same gradient."""
        self.link.send(
            m.GradientsDiffer(generation=self.place.generation, step=step, micro=micro, digests=digests)
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """As `ProgressReport.log`."""
        self._progress.log(step, values, self.state.committed or 0)

    def after_commit(self) -> None:
        """Between two steps: a generation that was asked to end does so, without a loss."""
        if self._ends_here:
            self._ends_here = False
            self._last = None
            self._park()
            self._rejoin()

    def interrupted(self, error: Exception) -> bool:
        """Work between two steps raised. True when a fault did that, in a call to the other workers of the replica: they are
        together again, and the work is not done."""
        if self.sharding is None or not (isinstance(error, StepFault) or self.sharding.groups.aborted):
            return False
        self._last = None
        self._part(error)
        self.sharding.reset()
        self._rejoin()
        return True

    def half_made(self, error: Exception) -> bool:
        """Whether the script's own error struck in the first forward pass of sharded modules, which make ready what they need
        there. Another attempt would find them half made, and fail with an error that hides this one."""
        return (
            self.sharding is not None
            and not self._has_committed
            and not isinstance(error, StepFault | NonFiniteGradient)
            and not self.sharding.groups.aborted
        )

    def recover(self, step: StepOutcome, error: Exception) -> bool:
        """A step raised. Decides with the others what becomes of it; returns when training can go on."""
        # A job of one has nobody to recover with: the script's error is the script's.
        if self._alone:
            return False
        # Kept before anything is reported. What this worker holds is told on parking, and depends on how far
        # this step came.
        self._last = step
        # Torch may have put it in other words.
        torn_apart = self.sharding is not None and self.sharding.groups.aborted
        if isinstance(error, StepFault) or torn_apart:
            self._part(error)
        else:
            self._report(step, error)
            self.link.wait_broken(self.place.generation)
            self._park()
        self._rejoin()
        return True

    def _rejoin(self) -> None:
        try:
            self.join_next()
        except JobStopped:
            self.stopped = True

    def _report(self, step: StepOutcome, error: Exception) -> None:
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
                phase=int(self._page.phase),
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
        """All steps are done: says what this worker ends with."""
        self.state.snapshots.close()
        if self.link.failed:
            return
        self._progress.flush(self.state.committed or 0)
        self.state.check_constants()
        held = self.state.finish(stopped)
        self._page.enter(Phase.DONE)
        self.link.unguard()
        state = self.state
        self.link.send(
            m.Done(
                committed=self.state.committed or 0,
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
