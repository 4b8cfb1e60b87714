"""The candidate that lost: gradients as 64-bit integers, whose sum has no order.

Every micro-batch's gradient is multiplied by a power of two, one for each bucket, and rounded; integers are added on the
worker and by an all-reduce. The power comes from the largest element of all micro-batches, less the headroom of their
number, so nothing overflows. It is known only after the last backward pass: `FixedPointSum` keeps the gradients of all
micro-batches until then. `AheadSum` takes it from the step before and can add while it computes: the best case, which
leaves out what happens when an element grows beyond the headroom (all compute the step again), and that the powers
would be part of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from holdfast.train.generation_group import GenerationGroup
from holdfast.train.gloo_group import GLOO_TIMEOUT
from holdfast.train.reduction import Gradients, clip, grouped, scale_and_square

BITS = 62
DRIFT_BITS = 8
"""Headroom of `AheadSum` for elements that grow from one step to the next."""


class _Bucket:
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        size = sum(p.numel() for p in parameters)
        self.total = torch.zeros(size, dtype=torch.int64)
        self.flat = torch.empty(size)
        parts = [p.numel() for p in parameters]
        self.totals = [v.view(p.shape) for v, p in zip(self.total.split(parts), parameters, strict=True)]
        self.grads = [v.view(p.shape) for v, p in zip(self.flat.split(parts), parameters, strict=True)]
        self.kept: list[list[torch.Tensor]] = []
        self.largest = 0.0
        self.power = 0
        self.missing = 0
        self.work: object = None

    def add(self, index: int, grad: torch.Tensor) -> None:
        self.totals[index].add_((grad * 2.0**self.power).to(torch.int64))


class FixedPointSum(Gradients):
    """The power of two of a step comes from that step."""

    exact = True
    ahead = False

    def __init__(self, parameters: Iterable[torch.nn.Parameter], changed: Callable[[], None]) -> None:
        self._buckets = [_Bucket(chunk.parameters) for chunk in grouped(list(parameters)) if chunk.parameters]
        self._place = {p: (b, i) for b in self._buckets for i, p in enumerate(b.parameters)}
        self._group: GenerationGroup | None = None
        self._headroom = 0
        self._next = 0
        self.poison = False
        for p in self._place:
            p.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        self._group, self._next = None, 0
        for bucket in self._buckets:
            bucket.total.zero_()
            bucket.kept.clear()

    def expect(self, micro_batches: int, rank: int, world: int) -> None:
        self._headroom = math.ceil(math.log2(micro_batches))

    def before_backward(self) -> None:
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            for p in bucket.parameters:
                p.grad = None

    def _arrived(self, p: torch.Tensor) -> None:
        bucket, index = self._place[p]
        if self.ahead:
            bucket.largest = max(bucket.largest, float(p.grad.abs().max()))
            bucket.add(index, p.grad)
            p.grad = None
        bucket.missing -= 1
        if self.ahead and self._group is not None:
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._buckets[self._next].work = self._group.allreduce(self._buckets[self._next].total)
                self._next += 1

    def after_backward(self) -> None:
        for bucket in self._buckets:
            if not self.ahead:
                bucket.kept.append([p.grad for p in bucket.parameters])
                bucket.largest = max(bucket.largest, *(float(g.abs().max()) for g in bucket.kept[-1]))

    def last(self, group: GenerationGroup) -> None:
        self._group = group

    def flush(self, group: GenerationGroup) -> None:
        if self.ahead:
            return
        self._agree(group, 0)
        for bucket in self._buckets:
            for kept in bucket.kept:
                for index, grad in enumerate(kept):
                    bucket.add(index, grad)
            bucket.work = group.allreduce(bucket.total)

    def _agree(self, group: GenerationGroup, drift_bits: int) -> None:
        largest = torch.tensor([bucket.largest for bucket in self._buckets])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = GLOO_TIMEOUT
        group.wait(group.start(lambda gloo: gloo.allreduce([largest], options)))
        for bucket, most in zip(self._buckets, largest.tolist(), strict=True):
            bucket.power = BITS - self._headroom - drift_bits - math.frexp(most)[1]
            bucket.largest = 0.0

    def finish(self, scale: Callable[[], float]) -> float:
        squares = 0.0
        for bucket in self._buckets:
            self._group.wait(bucket.work)
            torch.mul(bucket.total, 2.0**-bucket.power, out=bucket.flat)
            for p, grad in zip(bucket.parameters, bucket.grads, strict=True):
                p.grad = grad
            squares += scale_and_square(bucket.flat, scale())
        if self.ahead:
            self._agree(self._group, DRIFT_BITS)
        return squares

    def clip(self, norm: float, max_norm: float) -> None:
        clip([bucket.flat for bucket in self._buckets], norm, max_norm)

    def local_is_finite(self) -> bool:
        return True

    def drain(self, group: GenerationGroup) -> None:
        pass


class AheadSum(FixedPointSum):
    """The power of two of a step comes from the step before."""

    ahead = True
