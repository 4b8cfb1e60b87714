"""The exact reduction: the same bits however the micro-batches are spread over workers.

Every micro-batch's gradient is a leaf of one tree of additions (`place.py`). A worker adds up its subtrees bucket by
bucket, with a stack, while it computes; autograd makes the sum of two neighbouring leaves itself. Then each worker
receives one slice of every subtree of all workers, adds these up in the order of the tree and sends the slice of the
sum to all. That moves as many bytes as an all-reduce where every worker has one subtree, and up to
(subtrees + 1) / 2 times as many elsewhere.

A parameter that took no part in a micro-batch has a gradient of +0 there, which is added like any other: adding it
changes -0, so leaving it out would show. One that took part in none has no gradient in the end (`reduction.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import xxhash

from holdfast.errors import UsageError
from holdfast.tensors.dtensor_shards import like, local_of
from holdfast.tensors.tree import buffer_of
from holdfast.train.generation_group import GenerationGroup
from holdfast.train.place import folds, shares, subtrees
from holdfast.train.reduction import (
    BucketedSum,
    Chunk,
    GradientBuffer,
    check_dense,
    clip,
    flip_bit,
    scale_and_square,
)

Reduction = Literal["fast", "exact"]

SMALL = 1 << 14
"""A bucket of so few elements goes to everyone whole: one collective instead of two."""


def prepare(reduction: Reduction, device: torch.device) -> int | None:
    """Makes the process compute alike in every world; returns its number of threads where that matters.

    A worker that has its machine to itself has as many threads as cores if nobody says otherwise, one of several has one:
    sums within a micro-batch (layer norms, convolutions) differ in their last bits between the two.

    Raises:
        UsageError: an unknown reduction, or a device whose operations may differ from run to run.
    """
    if reduction not in get_args(Reduction):
        raise UsageError(f'reduction={reduction!r}; choose "fast" or "exact"')
    if reduction == "fast":
        return None
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        raise UsageError(
            'reduction="exact" on CUDA needs torch.use_deterministic_algorithms(True) before run.steps '
            "(and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment)"
        )
    # The thread count is not forced on a worker of several, which has one already, nor on a user who chose. It is
    # returned, so that a state made with another number is refused instead of giving other bits.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.get_num_threads()


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What one world size means for the exchange."""

    micro_batches: int
    """Leaves of the tree of additions."""
    rank: int
    """This worker's, among those with the same shard."""
    world: int
    """Workers with the same shard that compute."""
    idle: int
    """Further ones, which compute nothing."""
    leaf_folds: list[int]
    """For this worker's micro-batches."""
    pieces: list[int]
    """Subtrees of every worker."""
    piece_folds: list[int]
    """For all subtrees, in the order of the ranks."""

    @staticmethod
    def of(micro_batches: int, rank: int, world: int, idle: int) -> _Layout:
        # Idle members of the replica group hold the same shard and take part in the exchange with no subtree, so
        # that they can make the update as well.
        numbers = [*shares(micro_batches, world), *([range(0)] * idle)]
        parts = [subtrees(micro_batches, mine) for mine in numbers]
        leaves = [(m, m + 1) for m in numbers[rank]]
        return _Layout(
            micro_batches=micro_batches,
            rank=rank,
            world=world,
            idle=idle,
            leaf_folds=folds(micro_batches, leaves),
            pieces=[len(nodes) for nodes in parts],
            piece_folds=folds(micro_batches, [node for nodes in parts for node in nodes]),
        )


class _Bucket:
    """A chunk, and the sums over subtrees that this worker has of it so far."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.parameters, self.direct = chunk, chunk.parameters, chunk.direct
        self.index_of = {p: i for i, p in enumerate(self.parameters)}
        self.digests = False
        self.digest = 0
        self.arrived: set[torch.nn.Parameter] = set()
        self.used: set[torch.nn.Parameter] = set()
        self.stack: list[GradientBuffer] = []
        self.leaf: GradientBuffer | None = None
        self.works: list[Any] = []
        self.forget()

    def forget(self) -> None:
        """Takes new memory, when gloo keeps the old."""
        self.free: list[GradientBuffer] = []
        self.stack, self.leaf = [], None
        self.inbox: torch.Tensor | None = None
        self.summands: list[torch.Tensor] = []

    def begin(self) -> None:
        """The step before is over."""
        self.free += [] if self.direct else self.stack
        self.stack, self.leaf = [], None
        self.works, self.summands = [], []
        self.used.clear()
        for p in self.parameters:
            p.grad = None

    def open(self, joins: bool) -> None:
        """A micro-batch begins. joins: autograd adds its gradients to those of the one before."""
        self.arrived.clear()
        if joins:
            self.leaf = self.stack[-1]
        elif self.direct:
            self.leaf = None
        else:
            self.leaf = self.free.pop() if self.free else GradientBuffer(self.chunk)
        for i, p in enumerate(self.parameters):
            p.grad = self.leaf.grads[i] if joins and self.leaf is not None else None

    def take(self, p: torch.nn.Parameter) -> None:
        """A gradient is there."""
        if self.leaf is not None:
            index = self.index_of[p]
            into, grad = self.leaf.grads[index], p.grad
            if grad is not None and grad is not into:
                self.leaf.views[index].copy_(local_of(grad))
                p.grad = into
        self.arrived.add(p)
        self.used.add(p)

    def fill(self, joins: bool) -> None:
        """Parameters that took no part in the micro-batch have a gradient of +0."""
        # A gradient that is missing here may be there on another worker. Leaving it out would make the tree
        # depend on who computed the micro-batch.
        for i, p in enumerate(self.parameters):
            if p not in self.arrived:
                if joins:
                    assert self.leaf is not None
                    # Adding +0 is not nothing: -0 + 0 is +0. A worker that computes this leaf alone makes the
                    # same addition, so the bits agree.
                    self.leaf.views[i].add_(0.0)
                elif self.leaf is not None:
                    self.leaf.views[i].zero_()
                else:
                    p.grad = like(torch.zeros_like(local_of(p), memory_format=torch.contiguous_format), p)

    def close(self, joins: bool, fold: int) -> None:
        """The micro-batch is complete: adds up the subtrees that it completes."""
        if not joins:
            if self.leaf is None:
                grad = self.parameters[0].grad
                assert grad is not None
                self.leaf = GradientBuffer(self.chunk, local_of(grad).contiguous())
            self.stack.append(self.leaf)
            if self.digests:
                # Before the additions below: the next leaf is added into this memory.
                self.digest = _digest([self.leaf.body])
        # Autograd has made the first addition of a fold already where the leaf joined the one before it,
        # because its gradient was accumulated into that one.
        for _ in range(fold - joins):
            right = self.stack.pop()
            # Left plus right, never the reverse. Addition of two numbers commutes, but the place of the
            # result decides which memory is reused, and the next fold expects the sum on the left.
            self.stack[-1].flat.add_(right.flat)
            if not self.direct:
                self.free.append(right)

    def result(self) -> GradientBuffer:
        """Where the sum over all replicas goes."""
        if not self.stack:
            only = None
            if self.direct:
                first = local_of(self.parameters[0])
                only = torch.empty_like(first, memory_format=torch.contiguous_format)
            self.stack.append(GradientBuffer(self.chunk, only))
        return self.stack[0]


class ExactSum(BucketedSum):
    """The exact one. See the module."""

    exact = True

    _layout: _Layout | None = None
    _leaf = 0
    _apart: int | None = None
    _inside = _several = False

    def _fill_buckets(self, chunks: list[Chunk]) -> None:
        self._buckets = [_Bucket(chunk) for chunk in chunks]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    # ------------------------------------------------------------ this worker's micro-batches

    def begin(self) -> None:
        super().begin()
        self._leaf, self._apart = 0, None
        self._inside = False

    def _open_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.begin()

    def expect(self, micro_batches: int, rank: int, world: int, idle: int = 0) -> None:
        old, new = self._layout, (micro_batches, rank, world, idle)
        if old is None or (old.micro_batches, old.rank, old.world, old.idle) != new:
            self._layout = _Layout.of(*new)

    def before_backward(self, passes: int = 1) -> None:
        self._inside, self._several = True, passes > 1
        for bucket in self._buckets:
            bucket.digests = self._leaf == self._apart
            bucket.open(self._joins)

    def after_backward(self) -> None:
        joins, fold = self._joins, self._fold
        for bucket in self._buckets:
            if len(bucket.arrived) < len(bucket.parameters):
                bucket.fill(joins)
                bucket.arrived.update(bucket.parameters)
                bucket.close(joins, fold)
            elif self._several or not bucket.parameters:
                bucket.close(joins, fold)
        self._leaf += 1
        self._inside = False
        if self._group is not None:
            self.flush(self._group)

    @property
    def _fold(self) -> int:
        assert self._layout is not None
        return self._layout.leaf_folds[self._leaf]

    @property
    def _joins(self) -> bool:
        """What a leaf is added to first is the leaf before it: the left half is never larger than the right one."""
        # A leaf whose bits are compared is kept apart, and added here instead of by autograd: a leaf next to
        # another worker's is added in the same way, so the sums have the same bits.
        # So is one of several passes: autograd would add the first of them to the sum before it adds the second.
        return self._fold > 0 and self._leaf != self._apart and not self._several

    # ------------------------------------------------------------ computed twice

    def keep_apart(self, leaf: int) -> None:
        """The gradient of this worker's micro-batch number `leaf`, from 0, is asked for in this step. After `begin`."""
        self._apart = leaf

    def digest_apart(self) -> int:
        """A checksum of that gradient, of 63 bits. After its `after_backward`."""
        return _joined(bucket.digest for bucket in self._buckets)

    def before_again(self) -> None:
        """A backward pass follows whose gradient counts nowhere."""
        # The sums keep their tensors, and `finish` puts them back: autograd must not add to what is on its way.
        for bucket in self._buckets:
            for p in bucket.parameters:
                p.grad = None

    def digest_again(self) -> int:
        """The checksum of the gradient of that backward pass, as `digest_apart`; it is dropped."""
        self._flip_injected([p.grad for p in self._buckets[0].parameters] if self._buckets else [])
        digests = [_digest(_whole(p) for p in bucket.parameters) for bucket in self._buckets]
        self.before_again()
        return _joined(digests)

    def _flip_injected(self, grads: Iterable[torch.Tensor | None]) -> None:
        for grad in grads:
            if self._flips and grad is not None:
                self._flips = not flip_bit(local_of(grad))

    def _arrived(self, p: torch.Tensor) -> None:
        assert isinstance(p, torch.nn.Parameter)
        if not self._inside:
            return  # a backward pass of the script's own
        check_dense(p)
        bucket = self._bucket_of[p]
        # A second arrival would be added to a bucket that may be on its way to the others. Re-entrant
        # checkpointing runs a backward pass within the backward pass and is the known cause.
        if p in bucket.arrived and not self._several:
            raise UsageError(
                'reduction="exact": a parameter received its gradient twice in one backward pass; activation '
                "checkpointing needs use_reentrant=False"
            )
        # The copy is made inside autograd's hook, while the gradient is still in the cache.
        bucket.take(p)
        if self._flips:
            self._flip_injected([p.grad])
        # Of several passes nobody knows here which is the last: `after_backward` closes the leaf.
        if len(bucket.arrived) == len(bucket.parameters) and not self._several:
            bucket.close(self._joins, self._fold)
            if self._group is not None:
                self._launch_full(self._group)

    # ------------------------------------------------------------ all replicas

    def last(self, group: GenerationGroup) -> None:
        self._group = group

    def _launch_full(self, group: GenerationGroup) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            # One with flags alone is never full: it goes when the backward pass has ended, as its leaf is closed then.
            if len(bucket.arrived) < len(bucket.parameters) or not bucket.parameters:
                return
            self._launch(bucket, group)

    def flush(self, group: GenerationGroup) -> None:
        self._group = group
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next], group)

    def _launch(self, bucket: _Bucket, group: GenerationGroup) -> None:
        if self.poison and bucket.stack and bucket.parameters:
            bucket.stack[-1].body[0] = math.nan
            self.poison = False
        if bucket.chunk.flags and bucket.stack:
            # All leaves of this worker are closed. Flags are counts, whose sums do not depend on the order: one of its
            # subtrees has those of all.
            for part in bucket.stack:
                part.flags.zero_()
            self._flag(bucket.stack[0].flags, self._unused())
        if group.size > 1:
            if self._one_sum:
                bucket.works.append(group.allreduce(bucket.result().flat))
            else:
                self._send_subtrees(bucket, group)
        self._next += 1
        self._changed()

    def _unused(self) -> list[torch.nn.Parameter]:
        """By this worker's micro-batches."""
        return [
            p
            for bucket in self._buckets
            if len(bucket.used) < len(bucket.parameters)
            for p in bucket.parameters
            if p not in bucket.used
        ]

    @property
    def _one_sum(self) -> bool:
        """Two subtrees on two workers: one addition, and a + b is b + a."""
        assert self._layout is not None
        # Then an all-reduce adds exactly these two numbers, and a + b is b + a in floating point. With a
        # third one gloo's order of additions would count.
        return self._layout.pieces == [1, 1]

    def _send_subtrees(self, bucket: _Bucket, group: GenerationGroup) -> None:
        """Every member gets its slice of this worker's subtrees; this one gets its slice of everyone's."""
        assert self._layout is not None
        # Each worker adds up one slice of the bucket, for all. So the additions are made once, in one order,
        # and everybody receives the same bits; adding up everywhere would also have to move every subtree to
        # everyone.
        slices = _slices(bucket.chunk.size, group.size)
        own = slices[group.rank][1] - slices[group.rank][0]
        pieces = self._layout.pieces
        need = sum(pieces) * own
        if bucket.inbox is None or bucket.inbox.numel() < need:
            bucket.inbox = torch.empty(need, dtype=bucket.chunk.dtype, device=bucket.chunk.device)
        found: dict[tuple[int, int], torch.Tensor] = {}
        at = 0
        # The n-th subtrees of all workers go in one collective. Every member calls the same number of
        # collectives, also one with fewer subtrees, which then sends nothing.
        for number in range(max(pieces)):
            senders = [rank for rank in range(group.size) if pieces[rank] > number]
            received = bucket.inbox[at : at + len(senders) * own]
            at += len(received)
            for index, rank in enumerate(senders):
                found[rank, number] = received[index * own : (index + 1) * own]
            counts = [own if rank in senders else 0 for rank in range(group.size)]
            if number < len(bucket.stack):
                sent, given = bucket.stack[number].flat, [high - low for low, high in slices]
                if bucket.chunk.size <= SMALL:
                    sent = sent.repeat(group.size)
            else:
                sent, given = bucket.inbox[:0], [0] * group.size
            bucket.works.append(group.exchange(received, counts, sent, given))
        # By rank first and number second: that is the order of the leaves in the tree, for which
        # `piece_folds` was made.
        bucket.summands = [found[index] for index in sorted(found)]

    def _send_slice(self, bucket: _Bucket, group: GenerationGroup) -> None:
        """Adds up this worker's slice of all subtrees and gives it to all."""
        assert self._layout is not None
        if self._one_sum:
            return
        self._wait(bucket, group)
        total = bucket.result().flat
        slices = _slices(bucket.chunk.size, group.size)
        low, high = slices[group.rank]
        _add_up(bucket.summands, self._layout.piece_folds, total[low:high])
        if bucket.chunk.size <= SMALL:
            return
        bucket.works = [group.broadcast(total[a:b], rank) for rank, (a, b) in enumerate(slices) if a < b]

    def finish(self, scale: Callable[[], float]) -> float:
        squares: Any = 0.0
        for number, bucket in enumerate(self._buckets):
            group = self._group
            assert group is not None
            if group.size > 1:
                # The next bucket's slice goes out before this bucket is waited for, so that its transfer and
                # this one's scaling overlap. Every member launches in this same order, or two of them would
                # wait for each other.
                for ahead in self._buckets[number + 1 : number + 2] if number else self._buckets[:2]:
                    self._send_slice(ahead, group)
                self._wait(bucket, group)
            total = bucket.result()
            for p, grad in zip(bucket.parameters, total.grads, strict=True):
                p.grad = grad
            squares += scale_and_square(total.body, scale()) * bucket.chunk.counts
        if self._buckets:
            self._leave_alone(self._buckets[-1].result().flags, self._unused())
        return float(squares)

    def _wait(self, bucket: _Bucket, group: GenerationGroup) -> None:
        while bucket.works:
            group.wait(bucket.works[0])
            bucket.works.pop(0)
            self._changed()

    def clip(self, norm: float, max_norm: float) -> None:
        clip([bucket.result().body for bucket in self._buckets], norm, max_norm)

    def local_is_finite(self) -> bool:
        return all(bool(part.body.isfinite().all()) for bucket in self._buckets for part in bucket.stack)

    def drain(self, group: GenerationGroup) -> None:
        for bucket in self._buckets:
            works, bucket.works = bucket.works, []
            # A list and not `any`, which would stop at the first: each operation has its own time to let go,
            # and one that was not waited for could still write into memory that is used again.
            if [work for work in works if not group.drain(work)]:  # each of them has its time
                bucket.forget()


def _whole(p: torch.nn.Parameter) -> torch.Tensor:
    """Its gradient as it lies in a bucket: +0 where it took no part."""
    local = local_of(p)
    return torch.zeros_like(local) if p.grad is None else local_of(p.grad)


def _digest(parts: Iterable[torch.Tensor]) -> int:
    """Of the bytes of all of them, one after the other."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        flat = part.detach().contiguous().view(-1)
        if flat.numel():
            hasher.update(buffer_of(flat.cpu()))
    return hasher.intdigest()


def _joined(digests: Iterable[int]) -> int:
    """One number of 63 bits: a message holds it with its sign."""
    return xxhash.xxh3_64_intdigest(b"".join(d.to_bytes(8, "little") for d in digests)) >> 1


def _slices(size: int, world: int) -> list[tuple[int, int]]:
    """Which elements of a bucket each worker adds up: all of them, if there are few."""
    if size <= SMALL:
        return [(0, size)] * world
    return [(rank * size // world, (rank + 1) * size // world) for rank in range(world)]


def _add_up(summands: list[torch.Tensor], fold: list[int], into: torch.Tensor) -> None:
    """The sum of all subtrees, in the order of the tree. Changes the summands."""
    stack: list[torch.Tensor] = []
    for number, (summand, times) in enumerate(zip(summands, fold, strict=True)):
        stack.append(summand)
        for left in range(times, 0, -1):
            right = stack.pop()
            whole = number == len(summands) - 1 and left == 1
            torch.add(stack[-1], right, out=into if whole else stack[-1])
    if len(summands) == 1:
        into.copy_(summands[0])
