"""One step: this worker's micro-batches, the reduction, the vote, the update, the commit."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from holdfast.data.seeds import micro_seed, seed_generators
from holdfast.errors import GradientMismatch, NonFiniteGradient, UsageError
from holdfast.protocol.phases import Phase
from holdfast.tensors import staging
from holdfast.train.exact import ExactSum
from holdfast.train.replay import Replay, replay_of
from holdfast.train.replica import Replica, StepStage, Transaction
from holdfast.train.step_report import CommittedStep

if TYPE_CHECKING:
    from holdfast.train.data_cursor import DataCursor
    from holdfast.train.step_sum import ControlMessage


class Batches(Protocol):
    """Where a step's micro-batches come from."""

    def aim(self, step: int, position: int, micros: range) -> None:
        """This worker's share of the step that begins at sample `position`, and of those after it."""
        ...

    def load(self, step: int, micro: int) -> Any:
        """Micro-batch number `micro` of the step, on the run's device."""
        ...

    def again(self, step: int, micro: int) -> Any:
        """Any micro-batch of this step, computed once more: it counts nowhere."""
        ...

    def giving(self, step: int, generation: int) -> None:
        """All of this worker's part of the step was loaded, and its gradient is about to go out."""
        ...

    def committed(self, step: int, generation: int) -> None:
        """The step that was prepared in this generation counts."""
        ...

    def count(self) -> int:
        """Micro-batches in a global batch."""
        ...


class Step:
    """A step that is being computed. A context manager: a fault inside is swallowed and the step decided.

    Attributes:
        index: number of the step, from 0.
        samples: how many samples were committed before it.
        loss: global mean loss (sum of losses over sum of weights); NaN until the step is reduced. After a fault that dropped
            the step it is that of the step before, which is the newest that counts: the step is yielded again.
        grad_norm: norm of the global gradient before it was clipped; NaN until the step is reduced.
        skipped: the step is committed without an update, since its gradient is not finite (`skip_nonfinite`).
        scaler: what scales the losses of this step, where a trainer does it and not the script; for `apply`.
    """

    def __init__(
        self,
        replica: Replica,
        batches: Batches,
        index: int,
        seed: int,
        cursor: DataCursor,
        on_commit: Sequence[Callable[[Step], object]] = (),
        replay_every: int = 0,
        loss_before: float = math.nan,
        warns_of_means: bool = False,
    ) -> None:
        """on_commit: what the run calls in every commit. replay_every: a micro-batch of one step of so many is computed twice; 0: of
        none. loss_before: of the step before. warns_of_means: says it where a loss is seen to be a mean."""
        self.index = index
        self.samples = cursor.samples
        self.loss, self._loss_before = math.nan, loss_before
        self.grad_norm = math.nan
        self.skipped = False
        self.scaler: Scaler | None = None
        self._warns_of_means = warns_of_means
        self._transaction = Transaction(replica, index)
        self._began_s = time.perf_counter()
        self._replica = replica
        self._batches = batches
        self._seed = seed
        self._cursor = cursor
        self._on_commit = on_commit
        self._replay_every = replay_every
        self._loss_scale = 1.0
        self._lr: float | None = None
        self._messages: list[ControlMessage] = []
        self._layout = 0.0
        self._mine = range(0)
        self._loaded: dict[int, Any] = {}
        self._left: int | None = None
        self._sent: list[ControlMessage] | None = None
        self._waited = False
        self._entered = False
        self._replay: Replay | None = None
        self._again: int | None = None
        self._is_again = False
        self._replays = 0
        self._prepared_s = 0.0
        self._global_weight: float | None = None

    # ------------------------------------------------------------ what the script uses

    @property
    def committed(self) -> bool:
        """Whether it counts. After a swallowed fault that is decided on leaving the `with`."""
        return self._transaction.stage is StepStage.COMMITTED

    def __enter__(self) -> Step:
        self._began_s = time.perf_counter()
        self._replica.begin_step()
        self._entered = True
        return self

    def __iter__(self) -> Iterator[Any]:
        """This worker's micro-batches of the global batch, in the order of their numbers."""
        replica = self._replica
        mine = self._mine if self._loaded else self._take_share()
        assert self._left is not None, "as many as the share has"
        for done, micro in enumerate(mine):
            if replica.gradients.exact and len(mine) - self._left != done:
                raise UsageError(
                    f"step {self.index}: micro-batch {micro} was requested before step.backward() of the previous "
                    'one; with reduction="exact" compute them one after the other'
                )
            replica.check()
            replica.enter(Phase.DATA, self.index)
            batch = self._loaded.pop(micro) if self._loaded else self._batches.load(self.index, micro)
            replica.enter(Phase.FORWARD, self.index)
            # Chance depends on the run's seed, the step and the micro-batch, and not on who computes it. So a
            # repeated step drops out the same units, on whichever worker.
            seed_generators(micro_seed(self._seed, self.index, micro), replica.device)
            yield batch
        if self._replay is not None and not self._left:
            yield from self._computed_again(self._replay)
            # Settled: what the members computed twice has the same bits.
            self._replay = None
            self._exact.seal()  # gradients are taken off the parameters meanwhile

    def load(self) -> list[Any]:
        """All of this worker's micro-batches, before the first of them is computed: for what is counted over them, and summed
        over the workers with `sum`. `for batch in step` then yields the same ones.

        Raises:
            DataError: a sample of them cannot be loaded.
        """
        self._replica.enter(Phase.DATA, self.index)
        self._loaded = {micro: self._batches.load(self.index, micro) for micro in self._take_share()}
        return list(self._loaded.values())

    def _take_share(self) -> range:
        """The numbers of this worker's micro-batches in the global batch, which are computed next."""
        self._check_entered()
        share = self._replica.take_share()
        mine = self._mine = share.micro_batches
        self._left = len(mine)
        self._layout = float(self._replica.gradients.layout)
        self._replay = self._drawn(share.leaves)
        if self._replay is not None and self._replay.micro in mine:
            self._exact.keep_apart(mine.index(self._replay.micro))
        self._batches.aim(self.index, self.samples, mine)
        return mine

    def _check_entered(self) -> None:
        # Outside of it a fault is not swallowed, and what the script changes meanwhile is not compared: replicas would come apart.
        if not self._entered:
            raise UsageError(
                f"step {self.index}: its micro-batches can be used only inside `with step:`; write that as the first "
                "line of the loop over run.steps(), with the rest of the step indented below it"
            )

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Adds a micro-batch's gradient.

        Args:
            loss: the sum (not the mean) of the losses of the micro-batch, a scalar.
            weight: how many samples or tokens that sum is over. Gradient and loss are divided once, by the
                weight of the whole global batch.
        """
        replica = self._replica
        replica.enter(Phase.BACKWARD, self.index)
        if self._is_again:
            self._backward_again(loss)
            return
        last = self._taken("step.backward()")
        if self._warns_of_means:
            self._warn_of_mean(loss, weight)
        later = None
        if staging.is_far(loss) and type(loss) is torch.Tensor:
            # Asked for when the backward pass is queued: so the GPU need not wait for the host.
            later = staging.number(loss.detach())
        else:
            self._messages.append((float(weight), float(loss.detach()), self._layout))
        # The weight goes out before the last backward pass, so all weights have arrived when the sums are
        # complete, and the scale costs no wait.
        if last:
            self._batches.giving(self.index, replica.place.generation)
            if later is None:
                self._say_weight()
        with replica.backward(self._micro, last):
            loss.backward()  # type: ignore[no-untyped-call]
            if later is not None:
                self._messages.append((float(weight), later(), self._layout))
                if last:
                    self._say_weight()
        self._check_added(last)

    def _warn_of_mean(self, loss: torch.Tensor, weight: float) -> None:
        # Less than one is a part, as of a mean that was divided by the micro-batches, and no number of samples.
        if weight <= 1.0 or (kind := mean_that_it_is(loss)) is None:
            return
        self._warns_of_means = False
        warnings.warn(
            f"step.backward(loss, weight={weight:g}) expects a sum of losses, but this loss is a mean ({kind}): it "
            f"would be divided by the weight a second time, and the gradient would be {weight:g} times too small. "
            'Compute the loss with reduction="sum", or write step.backward(loss * weight, weight=weight)',
            stacklevel=3,
        )

    def pipeline(
        self, schedule: Any, *args: Any, target: Any = None, weight: float = 1.0, **more: Any
    ) -> None:
        """Adds a micro-batch's gradient that the stages of a pipeline compute together, after `run.mesh(stage=...)`. In the place
        of the forward pass and `step.backward`; every stage calls it with the same micro-batch.

        Args:
            schedule: `Schedule1F1B` or `ScheduleGPipe` of torch.distributed.pipelining, with a loss that sums and
                `scale_grads=False`. Its stage is made with `input_args` and `output_args`.
            args: of the first stage; the schedule divides them into its parts.
            target: what the loss gets, on the last stage.
            weight: how many samples or tokens the micro-batch has, as in `backward`.
            more: arguments by name, of every stage.

        Raises:
            UsageError: a replica without stages, or a schedule that cannot be taken up again after a fault.
        """
        replica = self._replica
        if replica.stages == 1:
            raise UsageError(
                "step.pipeline() is for the stages of a pipeline: call run.mesh(stage=...) first"
            )
        replica.enter(Phase.BACKWARD, self.index)
        last = self._taken("step.pipeline()")
        if last:
            self._batches.giving(self.index, replica.place.generation)
        loss = replica.run_schedule(schedule, args, target, more, self._micro, last)
        # The stages weigh the micro-batch together, as workers that share a sample do: the last one says all of it.
        is_last = schedule._stage.is_last
        self._messages.append((float(weight) if is_last else 0.0, loss if is_last else 0.0, self._layout))
        self._check_added(last)

    def _taken(self, call: str) -> bool:
        """One of this worker's micro-batches is being computed; whether it is the last one."""
        if not self._left:
            raise UsageError(
                f"step {self.index}: {call} must be called once for every micro-batch of the step"
            )
        if self._left == len(self._mine):
            # Layers that were thawed since the step began: the messages that go out say which are trained now.
            self._replica.gradients.admit()
            self._layout = float(self._replica.gradients.layout)
        self._left -= 1
        return self._left == 0

    @property
    def _micro(self) -> int:
        """Number of the micro-batch that is being computed."""
        assert self._left is not None, "`_taken` comes first"
        return self._mine[len(self._mine) - self._left - 1]

    def _check_added(self, last: bool) -> None:
        """Its gradient is there."""
        # After a gradient that was not finite: who brings it in? Costs one pass, in one step.
        if last and self._replica.checks_local and not self._replica.gradients.local_is_finite():
            raise NonFiniteGradient(
                f"this rank's own gradient of step {self.index} is not finite. {self._mend()}", own=True
            )
        self._replica.check()

    def sum(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sums numbers over all workers that compute: of an evaluation of the state from which this step starts, for
        example. Every worker calls it, inside `with step` and before the first `step.backward`.

        It is part of the step. A fault in it, or later in the step, repeats the step from its beginning, on whoever is there
        then, newcomers too. So use the result for more than looking at it only if `step.committed`.

        Args:
            values: name to a number; to a list of numbers, all of which are added; or to a tensor, which is added element
                by element. At most 1,024 numbers. The same names, in the same order, on every worker.

        Returns:
            Name to a float, or to a float64 tensor on the CPU, with the same bits on every worker. Lists, and whole
            numbers below 2**53, are rounded once, so their sum does not depend on which worker had which part. A number
            that a worker has added up itself was already rounded there.

        Raises:
            UsageError: called elsewhere in the step, values that cannot be summed, or other names on another worker.
        """
        if (
            not self._entered
            or self._transaction.stage is not StepStage.OPEN
            or self._messages
            or self._sent is not None
        ):
            raise UsageError(
                f"step {self.index}: step.sum() must be called inside `with step`, before the first step.backward()"
            )
        return self._replica.sum(self.index, values)

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        also: Callable[[], object] | Sequence[Callable[[], object]] = (),
        skip_nonfinite: bool = False,
        scaler: Scaler | None = None,
    ) -> None:
        """Reduces over all replicas, agrees with them, updates and commits.

        Args:
            max_grad_norm: clip the global gradient's norm, as `torch.nn.utils.clip_grad_norm_` does.
            scheduler: stepped after the optimizer, as part of the commit. Protected, as the optimizer is.
            also: whatever else changes the protected state in a step, called in this order after the scheduler: an
                average of the weights, a counter, a second optimizer's `step`. It is part of the commit: every replica
                calls it exactly once for every committed step, before anybody can fetch the state. That may be after a
                fault, while this worker waits for the others, who may be gone. So it must use what is here only: a
                collective in it would hang, and of a sharded model it sees this worker's shards. What it draws from
                torch's default generators is the same on every replica. If it raises, the state counts as lost
                here, as when the optimizer raises.
            skip_nonfinite: a gradient that holds NaN or Inf makes a step without an update, instead of one that is
                computed again. It counts: its samples are used, and `run.on_commit` is called. Optimizer, scheduler
                and `also` are not. All replicas decide alike, since they decide by the reduced gradient.
            scaler: a `torch.amp.GradScaler` that is protected and has scaled the losses of this step:
                `step.backward(scaler.scale(loss), weight=n)`. Gradient and loss are divided by its scale here, and its
                update is part of the commit: do not call its `unscale_`, `step` and `update`. Implies `skip_nonfinite`.

        Raises:
            UsageError: some of this worker's micro-batches had no backward, `also` cannot be called, or the scaler is not
                protected.
            StateChanged: protected state was changed since the commit before.
            NonFiniteGradient: the reduced gradient holds NaN or Inf, and steps are not to be skipped for that; `with step`
                retries.
        """
        parts = _callables(also)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "step.apply(scheduler=...): ReduceLROnPlateau needs a metric that is the same on every worker; "
                "protect the scheduler, and call step.apply(also=lambda: scheduler.step(step.loss)), or pass it a "
                "result of step.sum instead of the loss"
            )
        if self._left != 0:
            left = "the" if self._left is None else self._left
            raise UsageError(
                f"step {self.index}: step.apply() was called before step.backward() of {left} micro-batches; call "
                "step.backward(loss, weight=n) instead of loss.backward(), once for every micro-batch"
            )
        if self._replay is not None:
            raise UsageError(
                f"step {self.index}: step.apply() was called before the loop over the step had ended; with --replay "
                "a step may have one more micro-batch than this worker's share, so run `for batch in step` to its end"
            )
        replica = self._replica
        scaler = self.scaler if scaler is None else scaler
        replica.check_update(
            self.index,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            parts=(*parts, *self._on_commit),
        )
        self._loss_scale = scale_of(scaler)
        if self._sent is None:
            self._say_weight()
        norm = self.grad_norm = replica.reduce(self.index, self._scale)
        # Before the vote. All members see the same sum, so all raise here and nobody prepares the step; after
        # a vote somebody might commit it.
        self.skipped = not math.isfinite(norm) and (skip_nonfinite or scaler is not None)
        if not math.isfinite(norm) and not self.skipped:
            raise NonFiniteGradient(
                f"the gradient of step {self.index} is {norm} (loss {self.loss:.6g}). {self._mend(max_grad_norm)}",
                own=not math.isfinite(self._own_loss() or 0.0),
            )
        replica.reduce_buffers()
        if max_grad_norm is not None and not self.skipped:
            replica.gradients.clip(norm, max_grad_norm)
        # Set before the vote is sent. Once another member may have heard it, this worker must report the step
        # as prepared, or the coordinator would drop what another has committed.
        self._transaction.prepare(partial(self._update, optimizer, scheduler, parts, scaler))
        self._prepared_s = time.perf_counter()
        replica.vote(self.index)
        self._transaction.commit()

    # ------------------------------------------------------------ computed twice

    @property
    def _exact(self) -> ExactSum:
        gradients = self._replica.gradients
        assert isinstance(gradients, ExactSum)  # `Run.steps` refuses --replay with the other
        return gradients

    def _drawn(self, micro_batches: int) -> Replay | None:
        if not self._replay_every:
            return None
        nodes = [member.node for member in self._replica.place.members]
        return replay_of(self._replay_every, self._seed, self.index, micro_batches, nodes)

    def _computed_again(self, replay: Replay) -> Iterator[Any]:
        """The micro-batch, where this worker computes it again. All members compare before anybody can prepare the step, so
        a wrong gradient that is seen is never committed.

        Raises:
            GradientMismatch: their bits are not the same.
        """
        rank = self._replica.place.rank
        # The messages with the weights come before, on the same connections.
        self._replica.enter(Phase.REDUCE, self.index)
        own = self._exact.digest_apart() if rank == replay.owner else None
        if rank == replay.checker:
            yield from self._once_more(replay.micro)
            own = self._again
        digests = self._compared(own)
        if len(set(digests.values())) < 2:
            return
        # Of two that differ nobody can tell which errs.
        if replay.third is not None:
            own = None
            if rank == replay.third:
                yield from self._once_more(replay.micro)
                own = self._again
            digests |= self._compared(own)
        self._replica.disagree(self.index, replay.micro, digests)
        raise GradientMismatch(
            f"the gradient of micro-batch {replay.micro} of step {self.index} differs bit by bit from the one that "
            "another worker computed"
        )

    def _once_more(self, micro: int) -> Iterator[Any]:
        """One more micro-batch for the script, of which nothing stays."""
        replica = self._replica
        replica.enter(Phase.FORWARD, self.index)
        with replica.put_aside():
            batch = self._batches.again(self.index, micro)
            seed_generators(micro_seed(self._seed, self.index, micro), replica.device)
            self._is_again, before = True, self._replays
            yield batch
            self._is_again = False
        if self._replays != before + 1:
            raise UsageError(
                f"step {self.index}: step.backward() must be called once for every micro-batch of the step"
            )
        replica.enter(Phase.REDUCE, self.index)

    def _backward_again(self, loss: torch.Tensor) -> None:
        self._exact.before_again()
        loss.backward()  # type: ignore[no-untyped-call]
        self._again = self._exact.digest_again()
        self._replays += 1

    def _compared(self, own: int | None) -> dict[int, int]:
        """Rank to digest, of all members who computed the micro-batch."""
        self._scale()
        message = (0.0, 0.0, 0.0) if own is None else (float(own >> 32), float(own & 0xFFFFFFFF), 1.0)
        messages = self._replica.exchange(self.index, message, own is not None)
        return {r: int(high) << 32 | int(low) for r, (high, low, is_one) in enumerate(messages) if is_one}

    # ------------------------------------------------------------ the commit

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        also: Sequence[Callable[[], object]],
        scaler: Scaler | None,
        decided_s: float,
    ) -> CommittedStep:
        """Updates the state: part of the commit, see `Transaction`."""
        # The same on every replica, also for what an update or the script draws before the next micro-batch.
        # An optimizer or an average that draws random numbers must draw the same everywhere, or the replicas
        # would differ from here on.
        seed_generators(micro_seed(self._seed, self.index, self._batches.count()), self._replica.device)
        with self._replica.updating(scheduler, self.skipped):
            # Before the update: a schedule sets the next step's.
            self._lr = _learning_rate(optimizer)
            if not self.skipped:
                optimizer.step()
            # The samples of a skipped step are used up: the same ones would give the same gradient again.
            self._cursor.advance()
            if (
                scheduler is not None and not self.skipped
            ):  # which may ask for `run.samples`: those with this step
                scheduler.step()
            if scaler is not None:
                advance(scaler, finite=not self.skipped)
            for part in () if self.skipped else also:
                part()
            for call in self._on_commit:
                call(self)
        # The ledger of samples comes after the update and before the stage: a sample is recorded once, for
        # the step that counts.
        self._batches.committed(self.index, self._transaction.generation)
        # A wait for a decision after a fault is left out.
        late_s = decided_s - self._prepared_s if self._waited else 0.0
        return CommittedStep(
            index=self.index,
            loss=self.loss,
            own_loss=self._own_loss(),
            micro_batches=len(self._messages),
            took_s=time.perf_counter() - self._began_s - late_s,
            made_in=self._transaction.generation,
            weight=self._global_weight,
            grad_norm=self.grad_norm if math.isfinite(self.grad_norm) else None,
            lr=self._lr,
            skipped=self.skipped,
        )

    def _own_loss(self) -> float | None:
        """The mean loss of this worker's micro-batches; None if they weigh nothing."""
        weight = sum(w for w, _, _ in self._messages) * self._loss_scale
        return sum(x for _, x, _ in self._messages) / weight if weight > 0 else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._judge(error)
        finally:
            self._replica.hand_over()

    def _judge(self, error: BaseException | None) -> bool:
        """What `__exit__` returns."""
        if error is None:
            if not self.committed:
                raise UsageError(
                    f"step {self.index} ended without step.apply(optimizer): call it once, inside `with step`, "
                    "instead of optimizer.step()"
                )
            return False
        self._waited = True
        # Bad input fails in the same way at each attempt. A KeyboardInterrupt or SystemExit is somebody's
        # wish to end, not a fault.
        if not isinstance(error, Exception) or isinstance(error, UsageError):
            return False
        if self._replica.half_made(error):
            return False
        swallowed = self._replica.recover(self._transaction, error)
        if not self.committed:
            self.loss = self._loss_before
        return swallowed

    def _say_weight(self) -> None:
        """Tells all what this worker's micro-batches weigh: under "exact" one by one, so that the sum over all of them
        does not depend on who computed which."""
        counted = self._messages if self._replica.place.weighs else []
        if not self._replica.gradients.exact:
            counted = [(sum(w for w, _, _ in counted), sum(x for _, x, _ in counted), self._layout)]
        self._sent = counted
        self._replica.send_weights(self.index, counted)

    def _scale(self) -> float:
        """One over the weight of the global batch; known when every replica has said its own."""
        if self._global_weight is None:
            assert self._sent is not None
            messages = self._replica.receive_weights(self.index, self._sent)
            # Each stage of a pipeline has parameters of its own. Elsewhere sums of different parameters would be added up.
            if self._replica.stages == 1 and len({layout for _, _, layout in messages}) > 1:
                raise UsageError(
                    f"step {self.index}: the workers do not all train the same parameters (requires_grad differs): "
                    "freeze and unfreeze layers depending on the step's index (`if step.index >= 1000:`, not `== "
                    "1000`), so that a worker that joins later does the same"
                )
            # Under the exact reduction there is one message for each micro-batch, and `fsum` rounds once. So the
            # scale does not depend on how the micro-batches were spread over the members.
            self._global_weight = math.fsum(w for w, _, _ in messages)
            if not self._global_weight > 0:
                raise UsageError(
                    f"step {self.index}: the weights of the global batch sum to {self._global_weight}; call "
                    "step.backward(loss, weight=number of samples or tokens)"
                )
            self.loss = math.fsum(x for _, x, _ in messages) / self._global_weight / self._loss_scale
        return 1.0 / (self._global_weight * self._loss_scale)

    def _mend(self, max_grad_norm: float | None = 0.0) -> str:
        """What a script can do about a gradient that is not finite."""
        skip = self._replica.advice.skip_nonfinite()
        clip = ", or clip gradients (max_grad_norm=)" if max_grad_norm is None and skip else ""
        return f"Look at the samples of this step, or lower the learning rate{clip}" + (
            f"; {skip} skips the update of such a step and continues" if skip else ""
        )


def mean_that_it_is(loss: torch.Tensor) -> str | None:
    """What computed the loss, if that is seen to be a mean; None also where it is not known."""
    node: Any = loss.grad_fn
    # What leaves a mean a mean, or divides it once more.
    while node is not None and node.name() in (
        "ToCopyBackward0",
        "ViewBackward0",
        "CloneBackward0",
        "DivBackward0",
    ):
        node = node.next_functions[0][0]
    if node is None:
        return None
    # 1 is at::Reduction::Mean.
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1:
        return str(node.name())
    return None


def _learning_rate(optimizer: Any) -> float | None:
    """Of the first group; None where there is none, or only a GPU knows it: nobody waits for a figure."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    if isinstance(rate, torch.Tensor):
        rate = rate.item() if rate.numel() == 1 and not staging.is_far(rate) else None
    return float(rate) if isinstance(rate, int | float) else None


def _callables(
    also: Callable[[], object] | Sequence[Callable[[], object]],
) -> tuple[Callable[[], object], ...]:
    parts = tuple(also) if isinstance(also, Iterable) and not callable(also) else (also,)
    for part in parts:
        if not callable(part):
            raise UsageError(
                f"step.apply(also=...): a {type(part).__name__} is not callable; pass a function, for example "
                "also=lambda: ema.update_parameters(model), or remove also="
            )
    return parts


# ---------------------------------------------------------------- loss scale
# The scale of the loss for fp16, as `torch.amp.GradScaler` has it: what becomes of it in a commit.
#
# The scaler's own `step` and `update` cannot be used: they decide by the gradients that are here, and of a sharded model
# other workers have others. The decision is made from the gradient that all have agreed on, so every replica gets the same
# scale.


class Scaler(Protocol):
    """What is used of a `torch.amp.GradScaler`."""

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        ...

    def get_scale(self) -> float:
        """By what losses are multiplied now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Scale, factors, and how many steps in a row were finite."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        ...


def scale_of(scaler: Scaler | None) -> float:
    """By what the losses of this step were multiplied."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def advance(scaler: Scaler, finite: bool) -> None:
    """A step was committed. finite: its gradients were, and the update was made.

    The rule and its rounding are those of torch's `_amp_update_scale_` (aten/src/ATen/native/cuda/AmpKernels.cu).
    """
    if not scaler.is_enabled():
        return
    state = scaler.state_dict()
    if not finite:
        scale, tracker = _rounded(state["scale"] * state["backoff_factor"]), 0
    else:
        scale, tracker = state["scale"], state["_growth_tracker"] + 1
        if tracker == state["growth_interval"]:
            grown = _rounded(scale * state["growth_factor"])
            scale, tracker = (grown if math.isfinite(grown) else scale), 0
    scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})


def _rounded(scale: float) -> float:
    """To single precision, in which the scaler keeps it."""
    return float(torch.tensor(scale, dtype=torch.float32))
