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
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from holdfast.tensors.dtensor_shards import like, local_of
from holdfast.train.generation_group import Group
from holdfast.train.placements import settled

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
DIRECT_BYTES = 4 << 20
"""A gradient of this size costs more to copy than a call of its own to gloo."""
CACHE_BLOCK = 1 << 17
"""Elements that are scaled and summed at a time, so that the second pass finds them in the cache."""


class _Bucket:
    """Parameters that are summed together. `flat` is what gloo sums: memory that the bucket owns or, with
    `direct`, the gradient of the only parameter."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.direct = is_large(parameters[0])
        self.counts = True
        self.missing = len(parameters)
        self.work: Any = None
        self.allocate()

    def allocate(self) -> None:
        """Takes new memory, when gloo keeps the old."""
        # All parameters of a bucket have one dtype and one device (`grouped`), so one flat tensor can hold
        # them.
        first = self.parameters[0]
        self.views: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []
        if self.direct:
            self.flat = torch.zeros(0, dtype=first.dtype, device=first.device)
            return
        pieces = [local_of(p) for p in self.parameters]
        self.flat = torch.zeros(sum(p.numel() for p in pieces), dtype=first.dtype, device=first.device)
        parts = torch.split(self.flat, [p.numel() for p in pieces])
        self.views = [part.view(p.shape) for part, p in zip(parts, pieces, strict=True)]
        self.grads = [like(view, p) for view, p in zip(self.views, self.parameters, strict=True)]

    def fill(self, filled: set[torch.nn.Parameter]) -> None:
        """Makes `flat` whole: a parameter that took no part in any backward pass has a gradient of 0."""
        # Where autograd put it: copying a large gradient costs more than a call of its own to gloo. It is
        # looked up at every step, because autograd may have chosen new memory.
        if self.direct:
            p = self.parameters[0]
            grad = torch.zeros_like(local_of(p)) if p.grad is None else local_of(p.grad)
            if p.grad is None or not grad.is_contiguous():
                grad = grad.contiguous()
                p.grad = like(grad, p)
            self.flat = grad.view(-1)
            return
        for p, view, grad in zip(self.parameters, self.views, self.grads, strict=True):
            # The flat memory still holds the sum of the step before. Without this it would be added in as
            # this step's gradient.
            if p not in filled:
                view.zero_()
                p.grad = grad


class Gradients(Protocol):
    """The gradients of a set of parameters, summed over micro-batches and replicas.

    Use per step: `begin`, `expect`, for every micro-batch `before_backward`, the backward pass and
    `after_backward` (with `last(group)` before the last one), `flush(group)`, `finish(scale)`, and `clip`."""

    exact: bool
    """The result does not depend on who computed which micro-batches."""
    poison: bool
    """An injected fault: the next bucket to go has a NaN."""

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        ...

    def expect(self, micro_batches: int, rank: int, world: int, idle: int = 0) -> None:
        """How many micro-batches the step has, and whose share this worker computes. idle: so many members of the group,
        the last ones, compute none."""
        ...

    def before_backward(self, passes: int = 1) -> None:
        """The next micro-batch's backward pass begins. passes: it has so many, each of a part of the micro-batch."""
        ...

    def after_backward(self) -> None:
        """It has ended."""
        ...

    def last(self, group: Group) -> None:
        """The next backward pass is the step's last: buckets may go as soon as they are full."""
        ...

    def flush(self, group: Group) -> None:
        """Launches what the backward passes left over (parameters that took no part)."""
        ...

    def finish(self, scale: Callable[[], float]) -> float:
        """Waits for the sums and multiplies them by `scale()`; returns the sum of the squares of the result: of the
        shard that is here, without what another worker of the replica counts.

        One that is not finite means that a gradient was not.

        Raises:
            CollectiveFailed: a replica is gone; the gradients are worthless.
        """
        ...

    def clip(self, norm: float, max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_ does."""
        ...

    def local_is_finite(self) -> bool:
        """Whether this rank's own gradients are finite. Call before `last` lets them go."""
        ...

    def drain(self, group: Group) -> None:
        """After an abort: waits until gloo has let go of the buckets; takes new ones for those it keeps."""
        ...

    def flip(self) -> None:
        """An injected fault: one bit of the next gradient is wrong."""
        ...

    def close(self) -> None:
        """Nobody sums these gradients any more: the parameters' hooks are taken off."""
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


class GradientSum(Gradients):
    """The fast one: autograd adds up the micro-batches, and an all-reduce the replicas.

    The order of the additions, and so the last bits, depend on the world size. The relative error of the whole gradient
    (its difference from the true sum, over the norm) is at most 1e-6 where the terms do not cancel: as in
    DistributedDataParallel.
    """

    exact = False

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        changed: Callable[[], None],
        counts: Callable[[torch.Tensor], bool] = lambda p: True,
    ) -> None:
        """changed: called at every launch and completion: the worker's sign of life. counts: whether a parameter's
        gradient adds to the norm here; with tensor parallelism several workers of a replica may have the same."""
        chosen = [p for p in parameters if p.requires_grad]
        self._buckets = [_Bucket(group) for group in grouped(chosen, counts)]
        for bucket in self._buckets:
            bucket.counts = counts(bucket.parameters[0])
        self._bucket_of = {
            p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)
        }
        self._group: Group | None = None
        self._next = 0
        self._filled: set[torch.nn.Parameter] = set()
        self._changed = changed
        self.poison = self._flips = False
        self._hooks = watch(chosen, self._arrived)

    def close(self) -> None:
        self._hooks.close()

    def begin(self) -> None:
        self._group, self._next = None, 0
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

    def last(self, group: Group) -> None:
        self._group = group

    def _arrived(self, p: torch.Tensor) -> None:
        assert isinstance(p, torch.nn.Parameter)
        bucket, index = self._bucket_of[p]
        if not bucket.direct:
            view, grad = bucket.grads[index], p.grad
            if grad is not None and grad is not view:
                bucket.views[index].copy_(local_of(grad))
                p.grad = view
                self._filled.add(p)
        if self._group is not None:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_full(self._group)

    def _launch_full(self, group: Group) -> None:
        # In one fixed order, whatever the order of arrival. Collectives have no names: a replica that
        # launched bucket 3 before 2 would be added to another's bucket 2.
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._launch(self._buckets[self._next], group)

    def _launch(self, bucket: _Bucket, group: Group) -> None:
        # Filled at the launch and not at the end of the backward pass, so a bucket with an unused parameter
        # delays only itself.
        bucket.fill(self._filled)
        if self.poison:
            bucket.flat[0] = math.nan
            self.poison = False
        if self._flips:
            self._flips = not flip_bit(bucket.flat)
        if group.size > 1:
            bucket.work = group.allreduce(bucket.flat)
        self._next += 1
        self._changed()

    def flush(self, group: Group) -> None:
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
            squares += scale_and_square(bucket.flat, scale()) * bucket.counts
        return float(squares)

    def clip(self, norm: float, max_norm: float) -> None:
        clip([bucket.flat for bucket in self._buckets], norm, max_norm)

    def flip(self) -> None:
        self._flips = True

    def local_is_finite(self) -> bool:
        return all(p.grad is None or bool(local_of(p.grad).isfinite().all()) for p in self._bucket_of)

    def drain(self, group: Group) -> None:
        for bucket in self._buckets:
            work, bucket.work = bucket.work, None
            # Gloo keeps that memory and may still write into it. The bucket takes new memory, and the old is
            # left to gloo; used again, it would be changed in the middle of the next step.
            if work is not None and not group.drain(work):
                bucket.allocate()


def grouped(
    parameters: list[torch.nn.Parameter], counts: Callable[[torch.Tensor], bool] = lambda p: True
) -> list[list[torch.nn.Parameter]]:
    """Buckets in the order in which the backward pass fills them; of one dtype and device each, and all of their
    parameters count here or none."""
    buckets: list[list[torch.nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], tuple[list[torch.nn.Parameter], int]] = {}
    # The backward pass runs against the order of registration, so the first bucket fills first and its
    # transfer overlaps with the rest.
    for p in reversed(parameters):
        key = (p.dtype, p.device, counts(p))
        size = nbytes_of(p)
        # A small first bucket starts the network early; with a large one it would idle until a fifth of the
        # backward pass is done.
        limit = FIRST_BUCKET_BYTES if len(buckets) <= 1 else BUCKET_BYTES
        if is_large(p):
            buckets.append([p])
            continue
        bucket, used = open_buckets.get(key, (None, 0))
        if bucket is None or used + size > limit:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(p)
        open_buckets[key] = (bucket, used + size)
    return buckets


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
