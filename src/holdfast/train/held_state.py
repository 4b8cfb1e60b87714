"""The state that this worker holds: of which step it is, how it comes here, and where it is kept when training ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from holdfast.checkpoint.policy import Retention
from holdfast.errors import HoldfastError
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.protocol.snapshots import DurableTier, tiers_of
from holdfast.train import checkpoint_restore, state_image
from holdfast.train.added_state import UsedState
from holdfast.train.buffer_rules import BufferRules
from holdfast.train.constants import NAME as constants_name
from holdfast.train.constants import Constants
from holdfast.train.data_cursor import NAME, DataCursor
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.module_buffers import ModuleBuffers
from holdfast.train.place import Place
from holdfast.train.restore import StateRestorer
from holdfast.train.snapshots import Snapshots
from holdfast.train.state_guard import StateGuard
from holdfast.train.state_sums import StateSums

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding


class HeldState:
    """The protected objects as they are here.

    Attributes:
        committed: steps that count here; None while this worker holds no usable state.
        guard: whether the state is what the newest commit left.
        snapshots: copies of it, taken while training goes on.
        buffer_rules: what becomes of buffers that forward passes change.
        sums: checksums of it, for the comparison with others who hold the same.
        used: what a commit uses besides.
    """

    def __init__(
        self,
        link: Link,
        faults: FaultPlan,
        protected: state_image.Protected,
        device: torch.device,
        sharding: Sharding | None,
        place: Place,
        buffer_rules: BufferRules,
        constants: Constants,
    ) -> None:
        """sharding: of a replica of several workers, whose state is sharded."""
        self.committed: int | None = None
        self.snapshots = Snapshots(link, faults, device)
        self.guard = StateGuard(
            {
                name: thing
                for name, thing in protected.items()
                if name != NAME and not getattr(thing, "changes_between_steps", False)
            },
            buffer_rules.paths,
            constants,
            buffer_rules.advice,
            buffer_rules.unnamed,
        )
        self._link, self._faults, self._place = link, faults, place
        self.buffer_rules = buffer_rules
        self._page = link.page
        if constants:
            protected = state_image.WithConstants(
                {**protected, constants_name: constants}, constants.left_out(protected)
            )
        self._protected = protected
        self._constants = constants
        self.used = UsedState(protected)
        self._buffers = ModuleBuffers(state_image.buffers_of(protected))
        self._restorer = StateRestorer(link, protected, sharding, constants)
        self._kept = False
        self._optimizers = [t for t in protected.values() if isinstance(t, torch.optim.Optimizer)]
        self._checked: list[int] = []
        self.sums = StateSums(protected)
        faults.flip = self.sums.flip

    def module_buffers(self) -> list[torch.Tensor]:
        """Those of the protected modules."""
        return state_image.buffers_of(self._protected)

    @property
    def digest(self) -> str:
        """Of everything."""
        return state_image.digest(self._protected)

    @property
    def covered(self) -> tuple[str, ...]:
        """What `replicated_digest` is over: the names of what is protected, and is to be the same."""
        own = tuple(name for name in self._compared if name not in (NAME, constants_name))
        return own + self._constants.names

    @property
    def replicated_digest(self) -> str:
        """Of all that is to be the same in every replica: everything but buffers that are each worker's own, and objects whose
        attribute `compared` is false."""
        return state_image.digest(self._compared, self.buffer_rules.own)

    @property
    def _compared(self) -> state_image.Protected:
        compared = {
            name: thing for name, thing in self._protected.items() if getattr(thing, "compared", True)
        }
        if isinstance(self._protected, state_image.WithConstants):
            return state_image.WithConstants(compared, self._protected.left_out)
        return compared

    @property
    def parameters_digest(self) -> str:
        """Of the parameters alone."""
        return state_image.parameters_digest(self._protected)

    def image(self) -> state_image.Image:
        """As the commit left it. Training may go on while it is read; the next update may not."""
        self.buffer_rules.put_back()
        return state_image.capture(self._protected, self.committed or 0, self._buffers.copy_of)

    def constant_image(self) -> state_image.Image | None:
        """What never changes, for newcomers that have other bytes; None: there is nothing of that kind."""
        return self._constants.image() if self._constants else None

    def restore(self, form: m.JoinGeneration) -> tuple[int, float]:
        """Fetches the state of the generation's start; until it is complete this worker holds none."""
        began = time.monotonic()
        # From here to the end of the transfer the live tensors are a mixture. If this worker is lost in
        # between and reports, it must report that it holds nothing.
        self.committed = None
        self.snapshots.before_update()
        self._page.wait_for(-1)
        self._page.enter(Phase.TRANSFER)
        self._faults.reach(Phase.TRANSFER, form.generation.start)
        cursor = self._protected.get(NAME)
        if isinstance(cursor, DataCursor):
            cursor.from_peer = bool(form.donors)
        restored = self._restorer.restore(form)
        self._page.beat()
        if isinstance(cursor, DataCursor):
            cursor.adapt(self._protected)
        # The copies are of the buffers before the transfer. Rolling back to them would undo it.
        self._buffers.forget()
        self.buffer_rules.keep()
        self.committed = form.generation.start
        return restored, time.monotonic() - began

    def begin_step(self) -> None:
        """A step starts from what was committed."""
        committed = self.committed or 0
        self.snapshots.expect(committed, lambda: state_image.capture(self._protected, committed).index.nbytes)
        # The snapshot begins before the step, since the state is complete now and stays as it is until the
        # update.
        self.buffer_rules.begin(self._place.micro_batches)
        self.snapshots.begin(committed, self.image)
        self._buffers.keep()

    def before_update(self) -> None:
        """The state is about to change, as it may."""
        # The snapshot's thread reads the live tensors. The update may not begin before it has ended or was
        # given up: its copy would be of two steps.
        self.snapshots.before_update()
        self.guard.release()

    def after_step(self) -> None:
        """The script asks for the next step.

        Raises:
            StateChanged: something changed since the commit.
            UsageError: an optimizer keeps what could not be restored.
        """
        # An optimizer makes what it keeps of a parameter in the first update of that parameter.
        kept = [len(optimizer.state) for optimizer in self._optimizers]
        if kept != self._checked:
            state_image.check_restorable(self._protected)
            self._checked = kept
        self.guard.after_step()
        # Before anybody can fetch the state: an evaluation may have run forward passes.
        self.buffer_rules.put_back()

    def roll_back(self) -> None:
        """The step is dropped: buffers become what they were before it."""
        self._buffers.put_back()

    # ------------------------------------------------------------ where training ends

    def leave(self, order: m.Stop) -> None:
        """The job was asked to stop: the state goes where the order says."""
        if order.keep and self.committed:
            self._kept = self._save_last(self.committed, ordered=True)
        if order.save_to is not None and self.committed is not None:
            self._save(order.save_to, self.committed)

    def finish(self, stopped: bool) -> bool:
        """After the last step: the result becomes a checkpoint, unless training was stopped. True when the agent has it."""
        return self._kept or (not stopped and bool(self.committed) and self._save_last(self.committed or 0))

    def check_constants(self) -> None:
        """Raises StateChanged where what never changes did, in a way that torch does not count."""
        self._constants.check()

    def _save_last(self, step: int, ordered: bool = False) -> bool:
        """The result of training becomes a checkpoint: the agent brings it to every durable tier from its memory. True
        when it has it. Where there is no memory for it rank 0 writes it itself, unless it holds a shard only. ordered:
        also if this worker did not take the snapshots."""
        tiers = tiers_of(self._link.start.env)
        if not tiers:
            return False
        self._page.enter(Phase.TIER)
        saves = ordered or self.snapshots.saves
        # The agent's memory outlives this process, so the copy there is brought to every tier while the job
        # already ends.
        held = saves and self.snapshots.last(step, lambda: state_image.capture(self._protected, step))
        # Rank 0 alone, and only where it holds everything: two writers of one checkpoint would publish two
        # manifests, and a shard alone is no checkpoint.
        if not held and not self._place.rank and self._place.shard_count == 1:
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
        self._link.send(m.Saved(step, tier.url, error))
