"""Sums gradients over the replicas while the backward pass still runs: what both reductions share, and the fast one.

Parameters are grouped into buckets in the reverse order of their registration, the first one small (as
DistributedDataParallel does: Li et al., VLDB 2020, section 3.2.3). Small gradients are copied once into the flat
memory of their bucket, of which `parameter.grad` is a view from then on; a large one is a bucket of its own and
is summed where autograd put it. Buckets are launched in one fixed order on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import xxhash
from torch.distributed.tensor import DTensor

from holdfast.errors import UsageError
from holdfast.tensors.dtensor_shards import like, local_of
from holdfast.train.generation_group import GenerationGroup
from holdfast.train.placements import settled

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
DIRECT_BYTES = 4 << 20
"""A gradient of this size costs more to copy than a call of its own to gloo."""
CACHE_BLOCK = 1 << 17
"""Elements that are scaled and summed at a time, so that the second pass finds them in the cache."""


class Chunk:
    """Parameters of one dtype on one device, whose gradients are summed in one collective.

    Attributes:
        parameters: in the order in which they lie in memory.
        direct: one large parameter, whose gradient is summed where autograd put it.
        counts: whether their gradients add to the norm on this worker.
        flags: how many numbers are sent after the gradients: one for each parameter that is trained, in the chunk that goes last, and none elsewhere.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], like_that: torch.Tensor, counts: bool) -> None:
        """like_that: gives the dtype and the device; a chunk may have flags alone."""
        self.parameters, self.counts, self.flags = parameters, counts, 0
        self.direct = bool(parameters) and is_large(parameters[0])
        # Sums of complex numbers are sums of their parts, and gloo and NCCL add up real ones alone.
        self.dtype, self.device = like_that.dtype.to_real(), like_that.device

    @cached_property
    def size(self) -> int:
        """Numbers that are sent."""
        return sum(_reals(local_of(p)).numel() for p in self.parameters) + self.flags


class GradientBuffer:
    """Memory for the gradients of a chunk, in one tensor `flat`: `body` is the gradients, `views` its parts in the shapes of
    the parameters, `grads` what autograd is given of them; `flags` lies behind them."""

    def __init__(self, chunk: Chunk, only: torch.Tensor | None = None) -> None:
        """only: the gradient of the only parameter, where autograd put it."""
        if only is not None:
            self.flat = self.body = _reals(only)
            self.views = [only]
        else:
            pieces = [local_of(p) for p in chunk.parameters]
            sizes = [_reals(p).numel() for p in pieces]
            self.flat = torch.zeros(sum(sizes) + chunk.flags, dtype=chunk.dtype, device=chunk.device)
            self.body = self.flat[: sum(sizes)]
            parts = torch.split(self.body, sizes)
            self.views = [_shaped_like(p, part) for part, p in zip(parts, pieces, strict=True)]
        self.flags = self.flat[self.body.numel() :]
        self._parameters = chunk.parameters

    @cached_property
    def grads(self) -> list[torch.Tensor]:
        return [like(view, p) for view, p in zip(self.views, self._parameters, strict=True)]


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a contiguous tensor, one after the other; of a complex one the parts of each."""
    plain = tensor.detach()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)


def _shaped_like(tensor: torch.Tensor, reals: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(reals.view(*tensor.shape, 2))
    # Autograd's layout contract: a gradient lies as its parameter does, if that is dense. Otherwise torch warns of it, and
    # optimizers take slower paths. (`empty_like` has the strides of a dense tensor alone.)
    if not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride():
        return reals.as_strided(tensor.shape, tensor.stride())
    return reals.view(tensor.shape)


class _Bucket:
    """A chunk, and what is in it in this step. `now.flat` is what gloo sums: memory that the bucket owns or, if it is direct,
    the gradient of the only parameter."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.parameters = chunk, chunk.parameters
        self.missing = len(chunk.parameters)
        self.work: Any = None
        self.allocate()

    def allocate(self) -> None:
        """Takes new memory, when gloo keeps the old."""
        if not self.chunk.direct:
            self.now = GradientBuffer(self.chunk)

    def fill(self, filled: set[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Makes `now` whole: a parameter that took no part in any backward pass adds 0. Returns those."""
        unused = [p for p in self.parameters if p.grad is None]
        # Where autograd put it: copying a large gradient costs more than a call of its own to gloo. It is
        # looked up at every step, because autograd may have chosen new memory.
        if self.chunk.direct:
            p = self.parameters[0]
            grad = torch.zeros_like(local_of(p)) if p.grad is None else local_of(p.grad)
            if p.grad is None or not grad.is_contiguous():
                grad = grad.contiguous()
                p.grad = like(grad, p)
            self.now = GradientBuffer(self.chunk, grad)
            return unused
        for p, view, grad in zip(self.parameters, self.now.views, self.now.grads, strict=True):
            if p in filled:
                continue
            if p.grad is None:
                # The flat memory still holds the sum of the step before. Without this it would be added in as
                # this step's gradient.
                view.zero_()
            else:
                view.copy_(local_of(p.grad))  # which the script has put there itself
            p.grad = grad
        return unused


def check_dense(p: torch.Tensor) -> None:
    """Raises UsageError for a gradient that is not dense."""
    if p.grad is None or p.grad.layout is torch.strided:
        return
    raise UsageError(
        f"a parameter of shape {tuple(p.shape)} received a sparse gradient, which cannot be summed over workers; "
        "create its module without sparse=True, and use an optimizer for dense gradients (AdamW instead of "
        "SparseAdam)"
    )


class Gradients(Protocol):
    """The gradients of a set of parameters, summed over micro-batches and replicas.

    Use per step: `begin`, `expect`, for every micro-batch `before_backward`, the backward pass and
    `after_backward` (with `last(group)` before the last one), `flush(group)`, `finish(scale)`, and `clip`."""

    exact: bool
    """The result does not depend on who computed which micro-batches."""

    @property
    def layout(self) -> int:
        """A 24-bit number that is the same on workers that train the same parameters."""
        ...

    fresh: bool
    """The parameters were not summed before, or other ones were. Whoever uses this sets it back."""
    poison: bool
    """An injected fault: the next bucket to go has a NaN."""

    def begin(self) -> None:
        """Discards the gradients of the previous step."""
        ...

    def expect(self, micro_batches: int, rank: int, world: int, idle: int = 0) -> None:
        """How many micro-batches the step has, and whose share this worker computes. idle: so many members of the group,
        the last ones, compute none."""
        ...

    def admit(self) -> None:
        """Call before the step's first backward pass: parameters that the script has thawed since `begin` are summed, too."""
        ...

    def before_backward(self, passes: int = 1) -> None:
        """Call before the backward pass of each micro-batch. passes: number of passes in which it is computed."""
        ...

    def after_backward(self) -> None:
        """Call after the backward pass of each micro-batch."""
        ...

    def last(self, group: GenerationGroup) -> None:
        """Call before the step's last backward pass: buckets may be sent as soon as they are full."""
        ...

    def seal(self) -> None:
        """All of this worker's backward passes are done.

        Raises:
            UsageError: a parameter was thawed between two of them.
        """
        ...

    def check_sealed(self) -> None:
        """Raises UsageError if the script has changed a gradient since `seal`."""
        ...

    def flush(self, group: GenerationGroup) -> None:
        """Launches what the backward passes left over (parameters that took no part)."""
        ...

    def finish(self, scale: Callable[[], float]) -> float:
        """Waits for the sums and multiplies them by `scale()`; returns the sum of the squares of the result: of the
        shard that is here, without what another worker of the replica counts.

        One that is not finite means that a gradient was not.

        Raises:
            CollectiveFault: a replica is gone; the gradients are worthless.
        """
        ...

    def clip(self, norm: float, max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_ does."""
        ...

    def local_is_finite(self) -> bool:
        """Whether this rank's own gradients are finite. Call before `last` lets them go."""
        ...

    def drain(self, group: GenerationGroup) -> None:
        """After an abort: waits until gloo has released the buckets, and allocates new ones in place of those that it keeps."""
        ...

    def flip(self) -> None:
        """An injected fault: one bit of the next gradient is wrong."""
        ...

    def close(self) -> None:
        """Stops summing these gradients: removes the hooks of the parameters."""
        ...


def watch(parameters: list[torch.nn.Parameter], arrived: Callable[[torch.Tensor], None]) -> ExitStack:
    """`arrived` is called with every parameter whose gradient an autograd pass has added up, until this is closed.

    Autograd's memory holds a hook, and no garbage collector looks into it: a hook that is left keeps the parameters and the
    run alive for as long as the process.
    """
    hooks = ExitStack()
    for p in parameters:
        if isinstance(p, DTensor):
            # Before autograd adds it up: what lies otherwise than its parameter is no piece that others hold too.
            # FSDP2 does the same for what it shards, and calls no such hook.
            lies = p.register_hook(partial(settled, placements=p.placements))  # type: ignore[no-untyped-call]
            hooks.callback(lies.remove)
        handle = p.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        hooks.callback(handle.remove)
    return hooks


class BucketedSum(Gradients):
    """What both reductions share: which parameters are trained, in which buckets they go, and which of them nobody used."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        changed: Callable[[], None],
        counts: Callable[[torch.Tensor], bool] = lambda p: True,
    ) -> None:
        """changed: called at every launch and completion: the worker's sign of life. counts: whether a parameter's
        gradient adds to the norm here; with tensor parallelism several workers of a replica may have the same."""
        self._all, self._counts, self._changed = list(parameters), counts, changed
        self._group: GenerationGroup | None = None
        self._next = 0
        self.poison = self._flips = False
        self._hooks = ExitStack()
        self._lay_out([p.requires_grad for p in self._all])
        self._hooks.enter_context(watch(self._chosen, self._arrived))

    def _lay_out(self, takes: list[bool]) -> None:
        """Which parameters take a gradient may change between two steps, where layers are frozen or thawed."""
        self.fresh = True
        self._takes = takes
        self._chosen = [p for p, takes in zip(self._all, self._takes, strict=True) if takes]
        self._number_of = {p: number for number, p in enumerate(self._chosen)}
        self._chunks = grouped(self._chosen, self._counts)
        self._sealed: tuple[list[int], list[int]] | None = None
        self._fill_buckets(self._chunks)

    def _fill_buckets(self, chunks: list[Chunk]) -> None:
        raise NotImplementedError

    def _arrived(self, p: torch.Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._hooks.close()

    def begin(self) -> None:
        self._group, self._next, self._sealed = None, 0, None
        # Layers may have been frozen or thawed since. A gradient of theirs would be summed by nobody, and workers would
        # go on with different parameters.
        takes = [p.requires_grad for p in self._all]
        if takes != self._takes:
            for p in self._chosen:
                p.grad = None
            self._hooks.close()
            self._lay_out(takes)
            self._hooks.enter_context(watch(self._chosen, self._arrived))
        self._open_buckets()

    def _open_buckets(self) -> None:
        raise NotImplementedError

    def admit(self) -> None:
        # Of a script that thaws a layer within the step, such as a model that does so in its forward pass. What is frozen
        # meanwhile stays in its bucket and has no gradient: it may be thawed again in the next micro-batch.
        if thawed := self._thawed():
            self._lay_out([p.requires_grad or takes for p, takes in zip(self._all, self._takes, strict=True)])
            self._open_buckets()
            self._hooks.enter_context(watch(thawed, self._arrived))

    def _thawed(self) -> list[torch.nn.Parameter]:
        """Parameters that take a gradient and lie in no bucket."""
        return [p for p, takes in zip(self._all, self._takes, strict=True) if p.requires_grad and not takes]

    def seal(self) -> None:
        # Its gradient of some micro-batches would be this worker's alone, and not divided by the weight.
        if thawed := self._thawed():
            raise UsageError(
                f"a parameter of shape {tuple(thawed[0].shape)} was unfrozen (requires_grad) after the first "
                "step.backward() of the step; freeze and unfreeze layers before the step's micro-batches, depending "
                "on the step's index"
            )
        self._sealed = self._signs()

    def check_sealed(self) -> None:
        if self._sealed is None or self._signs() == self._sealed:
            return
        # Some buckets are on their way to the others: the change would be in some workers' sum and not in others'.
        raise UsageError(
            "a gradient was changed between step.backward() and step.apply(), where it is only this worker's part "
            "and may already be being sent to the others. To clip, use step.apply(optimizer, max_grad_norm=1.0); for "
            "other changes of the summed gradient use torch's optimizer.register_step_pre_hook(lambda optimizer, "
            "args, kwargs: ...), which step.apply() calls on every worker"
        )

    def _signs(self) -> tuple[list[int], list[int]]:
        """That a gradient is another tensor, or was written into: a bucket's gradients share one count of writes."""
        grads = [p.grad for p in self._chosen]
        first = [chunk.parameters[0].grad for chunk in self._chunks if chunk.parameters]
        return [id(g) for g in grads], [-1 if g is None else g._version for g in first]

    @property
    def layout(self) -> int:
        """Of 24 bits; the same on workers whose buckets are the same."""
        return xxhash.xxh32_intdigest(bytes(self._takes)) >> 8

    def flip(self) -> None:
        self._flips = True

    def _flag(self, flags: torch.Tensor, unused: Iterable[torch.nn.Parameter]) -> None:
        """Says which parameters this worker used."""
        flags.fill_(1)
        numbers = [self._number_of[p] for p in unused]
        if numbers:
            flags[numbers] = 0

    def _leave_alone(self, flags: torch.Tensor, unused: Iterable[torch.nn.Parameter]) -> None:
        """What nobody used has no gradient. flags: the sum of all workers'. unused: by this one; what one has used,
        somebody has, so who has used all need not look."""
        if unused := list(unused):
            used = (flags > 0).tolist()
            for p in unused:
                if not used[self._number_of[p]]:
                    p.grad = None


class GradientSum(BucketedSum):
    """The fast one: autograd adds up the micro-batches, and an all-reduce the replicas.

    The order of the additions, and so the last bits, depend on the world size. The relative error of the whole gradient
    (its difference from the true sum, over the norm) is at most 1e-6 where the terms do not cancel: as in
    DistributedDataParallel.
    """

    exact = False

    def _fill_buckets(self, chunks: list[Chunk]) -> None:
        self._buckets = [_Bucket(chunk) for chunk in chunks]
        self._bucket_of = {
            p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)
        }
        self._filled: set[torch.nn.Parameter] = set()
        self._unused: list[torch.nn.Parameter] = []

    def begin(self) -> None:
        super().begin()
        self._unused.clear()

    def _open_buckets(self) -> None:
        self._filled.clear()
        for bucket in self._buckets:
            # Gradients are dropped and not zeroed: autograd then writes the first one instead of adding to
            # zeros, which saves a pass over memory.
            bucket.missing, bucket.work = len(bucket.parameters), None
            for p in bucket.parameters:
                p.grad = None

    def expect(self, micro_batches: int, rank: int, world: int, idle: int = 0) -> None:
        """Nothing depends on it."""

    def before_backward(self, passes: int = 1) -> None:
        """Autograd adds to what is there."""

    def after_backward(self) -> None:
        """What is missing is filled in when the bucket goes."""

    def last(self, group: GenerationGroup) -> None:
        self._group = group

    def _arrived(self, p: torch.Tensor) -> None:
        assert isinstance(p, torch.nn.Parameter)
        check_dense(p)
        bucket, index = self._bucket_of[p]
        if not bucket.chunk.direct:
            view, grad = bucket.now.grads[index], p.grad
            if grad is not None and grad is not view:
                bucket.now.views[index].copy_(local_of(grad))
                p.grad = view
                self._filled.add(p)
        if self._group is not None:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_full(self._group)

    def _launch_full(self, group: GenerationGroup) -> None:
        # In one fixed order, whatever the order of arrival. Collectives have no names: a replica that
        # launched bucket 3 before 2 would be added to another's bucket 2.
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._launch(self._buckets[self._next], group)

    def _launch(self, bucket: _Bucket, group: GenerationGroup) -> None:
        # Filled at the launch and not at the end of the backward pass, so a bucket with an unused parameter
        # delays only itself.
        self._unused += bucket.fill(self._filled)
        now = bucket.now
        if bucket.chunk.flags:  # the last one: all others are filled
            self._flag(now.flags, self._unused)
        if self.poison and now.body.numel():
            now.body[0] = math.nan
            self.poison = False
        if self._flips:
            self._flips = not flip_bit(now.body)
        if group.size > 1:
            bucket.work = group.allreduce(now.flat)
        self._next += 1
        self._changed()

    def flush(self, group: GenerationGroup) -> None:
        self._group = group
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next], group)

    def finish(self, scale: Callable[[], float]) -> float:
        squares: Any = 0.0
        for bucket in self._buckets:
            if bucket.work is not None:
                assert self._group is not None
                self._group.wait(bucket.work)
                self._changed()
            # Scaling and the norm share one pass over memory, in blocks that stay in the cache.
            squares += scale_and_square(bucket.now.body, scale()) * bucket.chunk.counts
        if self._buckets:
            self._leave_alone(self._buckets[-1].now.flags, self._unused)
        return float(squares)

    def clip(self, norm: float, max_norm: float) -> None:
        clip([bucket.now.body for bucket in self._buckets], norm, max_norm)

    def local_is_finite(self) -> bool:
        return all(p.grad is None or bool(local_of(p.grad).isfinite().all()) for p in self._bucket_of)

    def drain(self, group: GenerationGroup) -> None:
        for bucket in self._buckets:
            work, bucket.work = bucket.work, None
            # Gloo keeps that memory and may still write into it. The bucket takes new memory, and the old is
            # left to gloo; used again, it would be changed in the middle of the next step.
            if work is not None and not group.drain(work):
                bucket.allocate()


def grouped(
    parameters: list[torch.nn.Parameter], counts: Callable[[torch.Tensor], bool] = lambda p: True
) -> list[Chunk]:
    """Chunks in the order in which the backward pass fills them; of one dtype and device each, and all of their
    parameters count here or none. The last one has room for the flags of all."""
    chunks: list[Chunk] = []
    open_chunks: dict[tuple[torch.dtype, torch.device, bool], tuple[Chunk, int]] = {}
    # The backward pass runs against the order of registration, so the first bucket fills first and its
    # transfer overlaps with the rest.
    for p in reversed(parameters):
        key = (p.dtype, p.device, counts(p))
        size = nbytes_of(p)
        # A small first bucket starts the network early; with a large one it would idle until a fifth of the
        # backward pass is done.
        limit = FIRST_BUCKET_BYTES if len(chunks) <= 1 else BUCKET_BYTES
        if is_large(p):
            chunks.append(Chunk([p], p, counts(p)))
            continue
        chunk, used = open_chunks.get(key, (None, 0))
        if chunk is None or used + size > limit:
            chunk, used = Chunk([], p, counts(p)), 0
            chunks.append(chunk)
        chunk.parameters.append(p)
        open_chunks[key] = (chunk, used + size)
    if not chunks:
        return []
    # Where autograd put a large gradient there is no room behind it. When the last chunk goes all gradients are known
    # to be there, or to be missing: so the flags need no collective of their own.
    flagged = next((chunk for chunk in reversed(chunks) if not chunk.direct), None)
    if flagged is None:
        flagged = Chunk([], parameters[0], counts=False)
    else:
        chunks.remove(flagged)
    flagged.flags = len(parameters)
    return [*chunks, flagged]


def flip_bit(tensor: torch.Tensor) -> bool:
    """An injected fault: one bit of the first element changes. False: there is none, or it is not contiguous."""
    flat = tensor.detach()
    if not flat.numel() or not flat.is_contiguous():
        return False
    # In the upper part of the mantissa: it is visible after any rounding, and no NaN.
    flat.view(-1).view(torch.uint8)[max(0, flat.element_size() - 2)] ^= 8
    return True


def is_large(p: torch.Tensor) -> bool:
    return nbytes_of(p) >= DIRECT_BYTES


def nbytes_of(p: torch.Tensor) -> int:
    """Of what is here of it."""
    return local_of(p).numel() * p.element_size()


def scale_and_square(flat: torch.Tensor, scale: float) -> Any:
    """Multiplies in place; returns the sum of squares of the result: of a GPU's a tensor, so that the host waits once for
    all buckets."""
    if flat.device.type != "cpu" or flat.dtype not in (torch.float32, torch.float64):
        flat.mul_(scale)
        return torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
    squares = 0.0
    for block in torch.split(flat, CACHE_BLOCK):
        block.mul_(scale)
        squares += float(torch.dot(block, block))
    # A sum of squares overflows single precision long before the gradient does. Only then is it computed
    # again in double precision; an infinite gradient stays infinite.
    if math.isinf(squares):
        return float(torch.linalg.vector_norm(flat.double()).square())
    return squares


def clip(flats: Iterable[torch.Tensor], norm: float, max_norm: float) -> None:
    """As torch.nn.utils.clip_grad_norm_ does."""
    # The constant is torch's, so that a script gets the same numbers as from `clip_grad_norm_`.
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0:
        for flat in flats:
            flat.mul_(factor)
