"""This worker as a replica: its place in the generation, its state, and how it comes through a fault."""

from __future__ import annotations

import logging
import math
import statistics
import time
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from holdfast.checkpoint.policy import Retention
from holdfast.errors import (
    HoldfastError,
    JobStopped,
    NonFiniteGradient,
    StateLost,
    StepFault,
    UsageError,
)
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase, Spent
from holdfast.protocol.snapshots import DurableTier, tiers_of
from holdfast.train import checkpoint_restore, state_image
from holdfast.train.control_channel import ChannelListener
from holdfast.train.data_cursor import NAME, DataCursor
from holdfast.train.faults import FaultPlan
from holdfast.train.generation_group import Group
from holdfast.train.link import Link
from holdfast.train.module_buffers import ModuleBuffers
from holdfast.train.outcome import CommittedStep, Stage, StepOutcome
from holdfast.train.peer_transfer import DonorServer
from holdfast.train.reduction import Gradients
from holdfast.train.restore import StateRestorer
from holdfast.train.snapshots import Snapshots
from holdfast.train.state_guard import StateGuard
from holdfast.train.step_timing import StepTimer
from holdfast.train.summation_order import Seat, seat, weighs, words

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding

_log = logging.getLogger(__name__)
PROGRESS_EVERY_S = 0.05
MEDIAN_OVER = 31
KEPT_LOSSES = 64
FIGURE_SHOWN = 20
"""Characters of a name that is too long, in the message that refuses it."""

CHECKED_STEPS = 20
"""After a gradient that was not finite so many steps are looked at before they are summed, to see whose it is if there is
another one."""


class RunMainAgain(BaseException):
    """`main` is to be run again, as the holder of another shard. No error: `holdfast.start` catches it, and nobody else should."""

    def __init__(self, shard_index: int) -> None:
        super().__init__(f"main is run again, as shard {shard_index}")
        self.shard_index = shard_index


class Endpoint:
    """Where other workers reach this process. It lasts as long as the process, also when `main` is run again."""

    def __init__(self, host: str, token: str, worker: str) -> None:
        self.listener = ChannelListener(host, token, worker)
        self.donor = DonorServer(host, token, worker)

    def close(self) -> None:
        """Nobody reaches this process any more."""
        self.listener.close()
        self.donor.close()


class World(NamedTuple):
    """The members of a generation, as one of them sees it.

    Attributes:
        rank: this worker's, from 0; `size` or more where `replica` is -1.
        size: workers that compute: those of complete replicas. With replicas of several workers it is always a
            multiple of `shard * tensor`.
        generation: number of the generation; grows with every change.
        micro_batches: the numbers of those micro-batches of a global batch that this worker computes.
        replica: number of its replica; -1 while other workers of that are missing: then it computes nothing.
    """

    rank: int
    size: int
    generation: int
    micro_batches: range
    replica: int = 0


class Replica:
    """The worker's side of the commit protocol (design section 5).

    Attributes:
        device: where this worker computes.
        group: connections of the running generation.
        committed: steps that count here; None while this worker holds no usable state.
        checks_local: look at this rank's own gradients before they are summed (after one was not finite).
        stopped: the job was asked to stop; no further step is to be begun.
        state_guard: whether the state is what the newest commit left.
    """

    group: Group

    def __init__(
        self,
        link: Link,
        faults: FaultPlan,
        protected: state_image.Protected,
        gradients: Gradients,
        device: torch.device,
        alone: bool = False,
        sharding: Sharding | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        """alone: there is no job; an error of the script's ends it, as in any script. sharding: of a replica of several
        workers, whose state is sharded. endpoint: where others reach this process, if it is known to them already."""
        self.link = link
        self.sharding = sharding
        self.device = device
        self.gradients = gradients
        self.committed: int | None = None
        self.form: m.JoinGeneration | None = None
        self.checks_local = False
        self._checked = 0
        self._faults = faults
        self._alone = alone
        self._protected = protected
        self._page = link.page
        host = link.start.host
        # Listener and donor outlive `main`: when it runs again for another shard the ports that the
        # coordinator knows must stay the same.
        endpoint = endpoint or Endpoint(host, link.token, link.start.worker)
        self._listener, self._donor = endpoint.listener, endpoint.donor
        self._buffers = ModuleBuffers(state_image.buffers_of(protected))
        self.state_guard = StateGuard(
            {
                name: thing
                for name, thing in protected.items()
                if name != NAME and not getattr(thing, "changes_between_steps", False)
            }
        )
        self._snapshots = Snapshots(link, faults, device)
        self._restorer = StateRestorer(link, protected, sharding)
        self._durations: deque[float] = deque(maxlen=MEDIAN_OVER)
        self._losses: deque[tuple[int, float, float]] = deque(maxlen=KEPT_LOSSES)
        self._unsent: list[tuple[int, float, float]] = []
        self._tells = False
        self._timer = StepTimer()
        self._spent: list[Spent] = []
        self._sent_at = 0.0
        self._first_in_generation = True
        self._ends_here = False
        self._before_call = Phase.COMMIT
        self._kept = False
        self._micro_batches = 0
        self.stopped = False
        self._last: StepOutcome | None = None
        self.last_loss: float | None = None
        self._figures: dict[int, dict[str, float]] = {}
        self._figure_names: set[str] = set()
        faults.poison = self._poison

    # ------------------------------------------------------------ membership

    @property
    def rank(self) -> int:
        """Rank in the running generation."""
        return self.form.rank if self.form else 0

    @property
    def world_size(self) -> int:
        """Workers that compute in the running generation."""
        return self.form.generation.strength if self.form else 1

    @property
    def generation(self) -> int:
        """Number of the newest generation that this worker was told to join; 0 before the first."""
        return self.form.generation.number if self.form else 0

    @property
    def world(self) -> World:
        """The running generation, as a script sees it."""
        mine = self.seat(self._micro_batches).micro_batches if self.form and self._micro_batches else range(0)
        replica = self.form.generation.members[self.rank].replica if self.form else 0
        return World(self.rank, self.world_size, self.generation, mine, replica)

    def seat(self, micro_batches: int) -> Seat:
        """What this worker computes of the running generation's steps."""
        assert self.form is not None
        return seat(micro_batches, self.form.generation, self.rank)

    @property
    def weighs(self) -> bool:
        """Whether this worker says what its micro-batches weigh; in a tensor dimension one does."""
        assert self.form is not None
        return weighs(self.form.generation, self.rank)

    def words(self, micro_batches: int) -> list[int]:
        """How many words every member says of a step under the exact reduction."""
        assert self.form is not None
        return words(micro_batches, self.form.generation)

    def over_shards(self, step: int, squares: float) -> float:
        """The sum of the squares of the whole gradient, from that of this worker's shard."""
        assert self.form is not None
        shards = self.form.generation.shard_count
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

    def announce(self, micro_batches: int) -> None:
        """Says that this worker is ready, and waits until it is a member. micro_batches: in a global batch."""
        self._micro_batches = micro_batches
        digest = state_image.digest(self._protected)
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
            self.form = order
            self._page.generation = self.generation
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
            # Rank 0 may be a newcomer now, which never computed this step: then the others tell its loss, or nobody does.
            self._tells = True
            self.commit(step)
            self._flush_losses()
            self._tells = False
        else:
            self._roll_back()

    def _join(self, form: m.JoinGeneration) -> None:
        began = time.monotonic()
        self._timer.forget()
        generation = form.generation
        replica = generation.members[form.rank].replica
        # Connections of a replica that came through the break whole are kept. Closing and making them again
        # would cost more than all the rest of a recovery.
        if self.sharding and (replica < 0 or generation.number in generation.rows[replica : replica + 1]):
            self.sharding.groups.renew(beside=replica < 0)
        self._snapshots.join(form)
        reads_for_all = form.serve and form.restore
        if reads_for_all:
            # A donor that reads the state from a tier itself must not yet answer with what it holds: that is
            # the state of another step.
            self._donor.publish(self.generation - 1, None)  # who asks for this one is told that it is to come
        else:
            self._donor.publish(self.generation, self._image() if form.serve else None)
        restored = 0
        restore_s = None
        if form.restore:
            restored, restore_s = self._restore(form)
            if reads_for_all:
                self._donor.publish(self.generation, self._image())
        elif self.committed is None:
            self.committed = generation.start
        # A fresh start for whoever watches the page: a collective count or a peer of the old generation would
        # look like progress, or like a culprit.
        self._page.wait_for(-1)
        self._page.committed, self._page.collectives = self.committed or 0, 0
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
        # Before `join`, which may wait for a lost member. If the generation broke meanwhile, `guard` aborts at once,
        # and `join` fails instead of waiting.
        self.link.guard(
            generation.number,
            group.abort_all,
            group.halt if groups else None,
            groups.run_to if groups else None,
        )
        self.group.channel.waits, self.group.channel.reached = self._wait_for, self._page.beat
        self.group.join(self.link.token)
        # Everybody is connected, and the generation may already be over. Reporting Joined for it would let
        # the coordinator take this worker for one that trains.
        self.link.check(generation.number)
        self._page.beat()
        self._first_in_generation = True
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
        self.state_guard.note(self.committed or 0, from_peer=form.restore and bool(form.donors))

    def _image(self) -> state_image.Image:
        return state_image.capture(self._protected, self.committed or 0, self._buffers.copy_of)

    def _restore(self, form: m.JoinGeneration) -> tuple[int, float]:
        """Fetches the state of the generation's start; until it is whole this worker holds none."""
        began = time.monotonic()
        # From here to the end of the transfer the live tensors are a mixture. If this worker is lost in
        # between and reports, it must report that it holds nothing.
        self.committed = None
        self._snapshots.before_update()
        self._page.wait_for(-1)
        self._page.enter(Phase.TRANSFER)
        self._faults.reach(Phase.TRANSFER, form.generation.start)
        restored = self._restorer.restore(form)
        cursor = self._protected.get(NAME)
        if isinstance(cursor, DataCursor):
            cursor.adapt(self._protected)
        # The copies are of the buffers before the transfer. Rolling back to them would undo it.
        self._buffers.forget()
        self.committed = form.generation.start
        return restored, time.monotonic() - began

    def _part(self, error: Exception) -> None:
        """Leaves a generation that cannot go on, and reports what this worker holds."""
        number = self.generation
        _log.info("leaving a generation: %r", error, extra={"generation": number, "rank": self.rank})
        # Only what fails before the coordinator has spoken is evidence. After a break every collective fails,
        # and such reports would only point at the survivors.
        if not self.link.broken(number):
            step = self.committed if self.committed is not None else -1
            lost = isinstance(error, StateLost)
            detail = str(error) if lost else f"{type(error).__name__}: {error}"
            self.link.send(m.CollectiveError(number, step, detail, lost))
            # This worker does not judge. A collective that failed here may be this worker's own fault, a
            # peer's or the network's; the coordinator sees all reports and decides for all.
            self.link.wait_broken(number)
        self._park()

    def _park(self) -> None:
        number = self.generation
        self._page.enter(Phase.PARKED)
        begun = -1
        # The order matters. First `abort`, so that no thread waits for a peer. Then `leave`, which settles
        # how many collectives of the replica were run. Then `drain`, because gloo may write into gradients
        # until it has let go of them. `close` comes last: it frees what the others still used.
        if hasattr(self, "group"):
            self.group.abort()
            begun = self.group.leave(self.group.generation == number and self.link.broken(number))
            self.gradients.drain(self.group)
            self.link.unguard()
            self.group.close()
        step = self._last
        prepared = step is not None and step.stage is Stage.PREPARED
        # A torn step has updated some tensors and not others. Neither the step before nor the one after is
        # here, so nothing may be reported as held; the state is fetched from a peer.
        held = None if step is not None and step.stage is Stage.TORN else self.committed
        self.committed = held
        self._flush_losses()
        self.link.send(
            m.Parked(
                generation=number, committed=held, prepared=prepared, losses=tuple(self._losses), begun=begun
            )
        )

    def _leave(self, order: m.Stop) -> None:
        self._settle(order.apply)
        if order.keep and self.committed:
            self._kept = self._save_last(self.committed, ordered=True)
        if order.save_to is not None and self.committed is not None:
            self._save(order.save_to, self.committed)
        raise JobStopped("the job was asked to stop")

    def _save_last(self, step: int, ordered: bool = False) -> bool:
        """The result of training becomes a checkpoint: the agent brings it to every durable tier from its memory. True
        when it has it. Where there is no memory for it rank 0 writes it itself, unless it holds a shard only. ordered:
        also if this worker did not take the snapshots."""
        tiers = tiers_of(self.link.start.env)
        if not tiers:
            return False
        self._page.enter(Phase.TIER)
        saves = ordered or self._snapshots.saves
        # The agent's memory outlives this process, so the copy there is brought to every tier while the job
        # already ends.
        held = saves and self._snapshots.last(step, lambda: state_image.capture(self._protected, step))
        if not held and not self.rank and self.form is not None and self.form.generation.shard_count == 1:
            for tier in tiers:
                self._save(tier, step)
        return held

    def _save(self, tier: DurableTier, step: int) -> None:
        error = None
        try:
            checkpoint_restore.save(
                state_image.capture(self._protected, step),
                tier.url,
                Retention(tier.keep, tier.keep_every),
                lambda nbytes: self._page.beat(),
            )
        except HoldfastError as trouble:
            error = str(trouble)
        self.link.send(m.Saved(step, tier.url, error))

    # ------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """The step starts from what was committed."""
        # The snapshot begins before the step, since the state is complete now and stays as it is until the
        # update.
        self._snapshots.begin(self.committed or 0, self._image)
        self.gradients.begin()
        self._buffers.keep()
        self._page.enter(Phase.DATA)
        self._timer.begin()

    def enter(self, phase: Phase, step: int) -> None:
        """The step is in this phase now; an injected fault may be waiting for it."""
        if self._faults.slow > 1.0:
            self._faults.drag(self._timer.phase, self._timer.lasted_s())
        if phase is not Phase.DATA:
            self._page.enter(phase)
        self._timer.enter(phase)
        self._faults.reach(phase, step)

    def alive(self) -> None:
        """A collective was started or has ended: a sign of life for whoever looks for the odd one out."""
        self._page.collectives += 1
        self._page.beat()

    def on_collective(self, begins: bool) -> None:
        """A collective of this worker's own replica begins, or has ended. Whoever looks for the one that holds the others
        up sees that this one waits."""
        self._timer.on_collective(begins)
        if begins:
            self._before_call = self._page.phase
        self._page.enter(Phase.REDUCE if begins else self._before_call)
        self.alive()

    def check(self) -> None:
        """Raises GenerationBroken when there is no use in going on with this step. In a replica of several workers nobody
        leaves it alone, but at a call to the others."""
        # A worker of a sharded replica that left a step at once would leave the others of its replica inside
        # a collective. It goes on to the next one, where `ReplicaGroups.begin` decides for all.
        if self.sharding is None or self.sharding.groups.aborted:
            self.link.check(self.generation)

    def _wait_for(self, rank: int) -> None:
        self._page.wait_for(rank)
        self._timer.wait_for(rank)

    def vote(self, step: int) -> None:
        """Closes the reduction: returns when every member holds the complete gradient.

        The word also carries whether the generation is to end at this commit, so all leave together, and rank 0's
        whether it is to be saved.
        """
        # Read once, before the vote goes out. A planned change that arrives later waits for the next commit;
        # deciding on it now would be a decision of this worker alone, and the others would train on.
        ends = 1.0 if self.link.yielding(self.generation) else 0.0
        saves = 1.0 if self.rank == 0 and self._snapshots.due(step + 1) else 0.0
        channel = self.group.channel
        channel.send(step, (1.0, ends, saves))
        self.alive()
        # A member votes once its gradient is complete. So whoever has heard all votes knows that each member
        # can make this update without another word from anybody: this is what makes the commit safe although
        # members may be lost in the next moment.
        words = channel.receive(step, [(1.0, ends, saves)])
        # Any member may ask, and all see the same words, so all leave at the same commit.
        self._ends_here = any(e > 0 for _, e, _ in words)
        if any(x > 0 for _, _, x in words):
            self._snapshots.want()

    def commit(self, prepared: StepOutcome) -> None:
        """A prepared step counts: updates the state, notes that, and tells the agent now and then."""
        decided_s = time.perf_counter()
        self.enter(Phase.UPDATE, prepared.index)
        # The snapshot's thread reads the live tensors. The update may not begin before it has ended or was
        # given up: its copy would be of two steps.
        self._snapshots.before_update()
        self.state_guard.release()
        step = prepared.finish(decided_s)
        # From here on this worker holds the state after the step. It must be noted before anything can raise (a fault that
        # is injected at this phase does): what is reported on parking would otherwise be a state that is gone.
        self.committed = step.index + 1
        self.enter(Phase.COMMIT, step.index)
        self._note(step)

    def _note(self, step: CommittedStep) -> None:
        self._checked -= self.checks_local
        self.checks_local = self._checked > 0
        self.last_loss = step.loss
        self._page.committed = step.index + 1
        self._page.beat()
        self._durations.append(step.took_s)
        entry = (step.index, step.loss, step.took_s)
        self._losses.append(entry)
        self._unsent.append(entry)
        if (
            spent := self._timer.commit(step.index, step.micro_batches, step.own_loss, step.loss)
        ) is not None:
            self._spent.append(spent)
        # Steps of a millisecond would flood the coordinator. The first of a generation is always reported: it
        # ends the incident, and a recovery's duration is measured by it.
        now = time.monotonic()
        if self._first_in_generation or now - self._sent_at >= PROGRESS_EVERY_S:
            self._first_in_generation = False
            self._sent_at = now
            self._flush_losses()
        self.state_guard.note(step.index + 1)

    def _flush_losses(self) -> None:
        if not self._unsent and not self._figures:
            return
        first = self.rank == 0 or self._tells
        losses = tuple(self._unsent) if first else ()
        figures = tuple(self._figures.items()) if first else ()
        self._unsent.clear()
        self._figures = {}
        median = statistics.median(self._durations) if self._durations else None
        spent, self._spent = tuple(self._spent), []
        self.link.send(
            m.Progress(
                generation=self.generation,
                committed=self.committed or 0,
                median_s=median,
                losses=losses,
                figures=figures,
                spent=spent,
            )
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Figures of a committed step, sent with the next word of progress.

        Raises:
            UsageError: too many names, or one that is too long.
        """
        self._figure_names |= values.keys()
        long = next((name for name in values if len(name) > m.FIGURE_NAME), None)
        if long is not None or len(self._figure_names) > m.MOST_FIGURES:
            what = f"{long[:FIGURE_SHOWN]}…" if long else f"{len(self._figure_names)} names"
            raise UsageError(
                f"run.log({what}): at most {m.MOST_FIGURES} names of {m.FIGURE_NAME} characters can be logged in a run; "
                'keep numbers that change out of the names: run.log(norm=x), not run.log(**{f"norm_{step}": x})'
            )
        self._figures.setdefault(step, {}).update(values)
        if self._durations[-1] >= PROGRESS_EVERY_S:
            self._flush_losses()  # the next commit's word is a whole step away, and this worker may not live to say it

    def off_step(self, on: bool) -> None:
        """The script begins or ends work of its own between two steps, or after the last: then nobody waits for it."""
        if self._page.phase == Phase.DONE:
            return
        if on and self._page.phase not in (Phase.COMMIT, Phase.JOIN):
            raise UsageError("run.relaxed_watchdog() is for work between two steps; leave `with step` first")
        self.link.send(m.OffStep(on))
        self._page.enter(Phase.ASIDE if on else Phase.COMMIT)

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
            self.link.wait_broken(self.generation)
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
            extra={"generation": self.generation, "rank": self.rank, "step": step.index},
        )
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        self.link.send(
            m.Failed(
                generation=self.generation,
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
        self._buffers.put_back()

    def _poison(self) -> None:
        self.gradients.poison = True

    # ------------------------------------------------------------ the end

    def done(self, stopped: bool) -> None:
        """All steps are done: says what this worker ends with."""
        self._snapshots.close()
        if self.link.failed:
            return
        self._flush_losses()
        held = self._kept or (not stopped and bool(self.committed) and self._save_last(self.committed or 0))
        self._page.enter(Phase.DONE)
        self.link.unguard()
        digest = state_image.parameters_digest(self._protected)
        self.link.send(
            m.Done(
                committed=self.committed or 0,
                params_xxh3=digest,
                loss=self.last_loss,
                stopped=stopped,
                held=held,
            )
        )
        self._donor.publish(self.generation + 1, None)
