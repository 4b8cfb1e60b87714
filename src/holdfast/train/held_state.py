"""The state that this worker holds: its step, how it is restored, and where it is saved when training ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from holdfast.checkpoint.policy import Retention
from holdfast.errors import HoldfastError
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.protocol.snapshots import DurableTier, tiers_of
from holdfast.tensors import staging
from holdfast.tensors.dtensor_shards import local_of
from holdfast.tensors.loaded import has_bytes, write_into
from holdfast.tensors.tree import buffer_of
from holdfast.tensors.wrappers import inside_of, parts_of
from holdfast.train import restore, state_image
from holdfast.train.buffer_rules import BufferRules
from holdfast.train.constants import NAME as constants_name
from holdfast.train.constants import Constants
from holdfast.train.data_cursor import NAME, DataCursor
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.place import Place
from holdfast.train.restore import StateRestorer
from holdfast.train.snapshots import StateSnapshots
from holdfast.train.state_guard import StateGuard, UsedState
from holdfast.train.state_image import Protected

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
        self.snapshots = StateSnapshots(link, faults, device)
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
        self._record = link.record
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
        """The buffers of the protected modules."""
        return state_image.buffers_of(self._protected)

    @property
    def digest(self) -> str:
        """A checksum of the whole state."""
        return state_image.digest(self._protected)

    @property
    def covered(self) -> tuple[str, ...]:
        """The names of the protected objects in `replicated_digest`, which must be the same on all replicas."""
        own = tuple(name for name in self._compared if name not in (NAME, constants_name))
        return own + self._constants.names

    @property
    def replicated_digest(self) -> str:
        """A checksum of everything that must be the same in every replica: all but buffers that each worker keeps for itself,
        and objects whose attribute `compared` is false."""
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
        """A checksum of the parameters."""
        return state_image.parameters_digest(self._protected)

    def image(self) -> state_image.Image:
        """The state as the last commit left it. Training may go on while it is read, but the next update may not."""
        self.buffer_rules.put_back()
        return state_image.capture(self._protected, self.committed or 0, self._buffers.copy_of)

    def constant_image(self) -> state_image.Image | None:
        """The state that never changes, for newcomers with other bytes; None: there is none."""
        return self._constants.image() if self._constants else None

    def restore(self, form: m.JoinGeneration) -> tuple[int, float]:
        """Fetches the state of the generation's start; until it is complete this worker holds none."""
        began = time.monotonic()
        # From here to the end of the transfer the live tensors are a mixture. If this worker is lost in
        # between and reports, it must report that it holds nothing.
        self.committed = None
        self.snapshots.before_update()
        self._record.wait_for(-1)
        self._record.enter(Phase.TRANSFER)
        self._faults.reach(Phase.TRANSFER, form.generation.start)
        cursor = self._protected.get(NAME)
        if isinstance(cursor, DataCursor):
            cursor.from_peer = bool(form.donors)
        restored = self._restorer.restore(form)
        self._record.beat()
        if isinstance(cursor, DataCursor):
            cursor.adapt(self._protected)
        # The copies are of the buffers before the transfer. Rolling back to them would undo it.
        self._buffers.forget()
        self.buffer_rules.keep()
        self.committed = form.generation.start
        return restored, time.monotonic() - began

    def begin_step(self) -> None:
        """Begins a step, from the committed state."""
        committed = self.committed or 0
        self.snapshots.expect(committed, lambda: state_image.capture(self._protected, committed).index.nbytes)
        # The snapshot begins before the step, since the state is complete now and stays as it is until the
        # update.
        self.buffer_rules.begin(self._place.micro_batches)
        self.snapshots.begin(committed, self.image)
        self._buffers.keep()

    def before_update(self) -> None:
        """Notes that the state is about to change, as it may now."""
        # The snapshot's thread reads the live tensors. The update may not begin before it has ended or was
        # given up: its copy would be of two steps.
        self.snapshots.before_update()
        self.guard.release()

    @contextmanager
    def updating(self, scheduler: Any, skipped: bool) -> Iterator[None]:
        """Around a step's update. Before anything of the script's the buffers become what their rules say: a callback may read
        the sums, and begin to count anew. skipped: they stay what they were."""
        self.used.before(scheduler)
        self.buffer_rules.commit(skipped)
        yield
        self.used.after(scheduler)

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
        """Drops the step: buffers get the values that they had before it."""
        self._buffers.put_back()

    # ------------------------------------------------------------ where training ends

    def leave(self, order: m.Stop) -> None:
        """Saves the state where the coordinator's order says, because the job was asked to stop."""
        if order.keep and self.committed:
            self._kept = self._save_last(self.committed, ordered=True)
        if order.save_to is not None and self.committed is not None:
            self._save(order.save_to, self.committed)

    def finish(self, stopped: bool) -> bool:
        """After the last step: saves the result as a checkpoint, unless training was stopped early. True when the agent has it."""
        return self._kept or (not stopped and bool(self.committed) and self._save_last(self.committed or 0))

    def check_constants(self) -> None:
        """Raises StateChanged if state that must never change did, in a way that torch does not count."""
        self._constants.check()

    def _save_last(self, step: int, ordered: bool = False) -> bool:
        """The result of training becomes a checkpoint: the agent brings it to every durable tier from its memory. True
        when it has it. Where there is no memory for it rank 0 writes it itself, unless it holds a shard only. ordered:
        also if this worker did not take the snapshots."""
        tiers = tiers_of(self._link.start.env)
        if not tiers:
            return False
        self._record.enter(Phase.TIER)
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
            restore.save(
                state_image.capture(self._protected, step),
                tier.url,
                Retention(tier.keep, tier.keep_every),
                lambda nbytes: self._record.beat(),
            )
        except HoldfastError as trouble:
            error = str(trouble)
        self._link.send(m.Saved(step, tier.url, error))


WINDOW_BYTES = 256 << 10
WINDOW_TENSORS = 8
"""A look reads no more of either: some 50 us for the bytes, and 20 us for each tensor."""
EVERY_BLOCKS = 4
"""A look after every so many blocks of `BLOCK_STEPS` steps."""


class StateSums:
    """The parameters and moments that are here, in host memory. A GPU's are not looked at: the host would wait for them.

    By these checksums replicas are compared. All replicas hold the same bits, also under the fast reduction, and a processor or a
    memory that errs without a sign breaks that. Reading all of the state would cost too much, so each look reads one window, another
    one each time, and the same on all workers of a shard.
    """

    def __init__(self, objects: Protected) -> None:
        self._objects = objects
        self._optimizers = [t for t in objects.values() if isinstance(t, torch.optim.Optimizer)]
        self._known: tuple[list[int], list[_Window]] | None = None

    def after(self, block: int) -> int | None:
        """The checksum of a window after this block of steps; after the last window comes the first. None: it is not time to
        look, or there is nothing to read."""
        if block % EVERY_BLOCKS:
            return None
        windows = self._laid_out()
        if not windows:
            return None
        hasher = xxhash.xxh3_64()
        # Which window it is follows from the block's number and the layout alone. So all workers of a shard read the same
        # bytes without a message, and one that came late reads with the others from its first block on.
        for piece, begin, end in windows[block // EVERY_BLOCKS % len(windows)]:
            # In the order of its elements, however they lie in memory: moments that were made here may lie as a
            # channels-last parameter does, and those that were loaded do not.
            hasher.update(buffer_of(staging.flat(piece.now().contiguous())[begin:end]))
        # Of 64 bits the upper one is left out: what stores a count signed can hold it.
        return hasher.intdigest() >> 1

    def _laid_out(self) -> list[_Window]:
        """What is read at each look. Laid out anew when an optimizer keeps more than before, since a newcomer has all of it at
        once, and both must read the same."""
        # Sizes of dictionaries alone: to list all tensors takes milliseconds in a model of some hundred.
        kept = [sum(map(len, optimizer.state.values())) for optimizer in self._optimizers]
        if self._known is None or self._known[0] != kept:
            self._known = kept, list(_windows(self._pieces()))
        return self._known[1]

    def flip(self) -> None:
        """An injected fault: one bit of the first parameter changes, as in a memory that errs."""
        for piece in self._pieces():
            if (tensor := piece.now()).numel() and tensor.is_contiguous():
                # In the upper part of the mantissa, of 16, 32 and 64 bits: the lowest bit is lost again in the rounding of
                # later updates.
                staging.flat(tensor)[max(0, tensor.itemsize - 2)] ^= 8
                return

    def _pieces(self) -> Iterator[_Piece]:
        """In an order that is the same on all workers. An optimizer's own order is that in which it met its parameters, and of
        one that was loaded another."""
        for thing in self._objects.values():
            if isinstance(thing, torch.nn.Module):
                yield from (part for p in thing.parameters() for part in _Piece(p).parts())
            elif isinstance(thing, torch.optim.Optimizer):
                for p in (p for group in thing.param_groups for p in group["params"]):
                    state = thing.state.get(p, {})
                    kept = (_Piece(p, thing, k) for k in sorted(state) if isinstance(state[k], torch.Tensor))
                    yield from (part for piece in kept for part in piece.parts())


class _Piece(NamedTuple):
    """Where a tensor of the state is found. The tensor itself is not kept: an optimizer may put another in its place."""

    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    """Whose state of the parameter it is; None: it is the parameter."""
    key: str = ""
    part: str = ""
    """Of a tensor that is made of others: which of them, see `wrappers.parts_of`."""

    def whole(self) -> torch.Tensor:
        """The tensor that it is a part of."""
        if self.optimizer is None:
            return self.parameter
        whole: torch.Tensor = self.optimizer.state[self.parameter][self.key]
        return whole

    def now(self) -> torch.Tensor:
        """What of it is here."""
        part = self.whole()
        for name in self.part.split(".")[1:]:
            part = getattr(inside_of(part), name)
        return local_of(part).detach()

    def parts(self) -> Iterator[_Piece]:
        """It itself, or what it is made of."""
        for path, _ in parts_of("", self.whole()):
            yield self._replace(part=path)


_Window = list[tuple[_Piece, int, int]]
"""Pieces, with the first byte of each that is read and the one after the last."""


def _windows(pieces: Iterable[_Piece]) -> Iterator[_Window]:
    window: _Window = []
    room = WINDOW_BYTES
    for piece in pieces:
        tensor, begin = piece.now(), 0
        while tensor.device.type == "cpu" and begin < tensor.nbytes:
            # A large tensor is cut into several windows and small ones share one: a look costs the same in any model, and
            # a larger state only takes more looks until all of it was read.
            end = min(begin + room, tensor.nbytes)
            window.append((piece, begin, end))
            begin, room = end, room - (end - begin)
            if not room or len(window) == WINDOW_TENSORS:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window


SMALL_BYTES = 1 << 20
SAMPLES = 512


class ModuleBuffers:
    """The buffers of the protected modules.

    They are kept as they were before the step, so that a step that is dropped leaves no trace in them. A forward pass may change a
    buffer (running statistics), and no gradient tells. Small ones are copied before every step. A large one is copied again only when
    it changed since its last copy: torch counts changes in place, and a sample of its values is compared for those that are made behind
    torch's back (the statistics of a batch norm are).
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._kept = [_Kept(b) for b in buffers]
        self._by_address = {k.buffer.data_ptr(): k for k in self._kept if has_bytes(k.buffer)}

    def keep(self) -> None:
        """Copies the buffers before a step."""
        for kept in self._kept:
            kept.keep()

    def put_back(self) -> None:
        """Restores the buffers, because the step is dropped."""
        for kept in self._kept:
            kept.put_back()

    def forget(self) -> None:
        """Discards the copies: the buffers were filled from outside, in a way that torch does not count."""
        for kept in self._kept:
            kept.copy = None

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a buffer's present value, in memory that no step changes, so that it can be read while training goes on."""
        kept = self._by_address.get(tensor.data_ptr())
        if kept is None or kept.buffer.shape != tensor.shape:
            return tensor.detach().clone()
        return kept.keep()


class _Kept:
    """One buffer and its newest copy."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        # Others are no part of the state, such as a sparse matrix; they are copied whole.
        self._plain = has_bytes(buffer)
        self.large = self._plain and buffer.numel() * buffer.element_size() > SMALL_BYTES
        self._stride = max(1, buffer.numel() // SAMPLES)
        self.copy: torch.Tensor | None = None
        self._version = -1

    def same(self) -> bool:
        """The copy is what the buffer holds. Small ones are not looked at."""
        # A small buffer is copied anew in every step: comparing costs as much as copying.
        if self.copy is None or not self.large or self.buffer._version != self._version:
            return False
        return torch.equal(self._sample(self.buffer), self._sample(self.copy))

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1)[:: self._stride]

    def keep(self) -> torch.Tensor:
        """A copy of the buffer as it is now; an older copy is never written to: a snapshot's thread or a newcomer may be reading it."""
        if self.copy is None or not self.same():
            self.copy, self._version = self.buffer.detach().clone(), self.buffer._version
        return self.copy

    def put_back(self) -> None:
        """The buffer becomes what its copy is."""
        if self.copy is not None and not self.same():
            if self._plain:
                write_into(self.buffer, self.copy)
            else:
                with torch.no_grad():
                    self.buffer.copy_(self.copy)
            # The write itself counted as a change. Without this the buffer would be copied again in the next
            # step.
            self._version = self.buffer._version
