"""Which samples stand where in the training that Lightning's loops would do, as a dataset with an order of its own.

A step of the job has as many micro-batches as the workers of a full job take batches between two updates. Where an epoch of
Lightning's has fewer of them (its last update has the batches that are left, and `GradientAccumulationScheduler` changes their
number) the others are vacant: they hold no sample.
"""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from holdfast.data.fingerprint import identity
from holdfast.data.order import SampleOrder
from holdfast.data.seeds import micro_seed, seed_generators

Ids = npt.NDArray[np.int64]
VACANT = -1
"""In the place of a sample's number."""
SHARES = 1 << 20
"""The weights of the batches of an update are multiples of its inverse. So their sum is exactly 1."""


class LoopPosition(NamedTuple):
    """Where a micro-batch of a step is in Lightning's loops."""

    epoch: int
    batch: int
    """Number of the batch in its epoch, on each worker."""
    number: int
    """Of the batches of its update, from 0."""
    batches: int
    """How many batches the update has."""
    accumulate: int
    """How many it would have if the epoch did not end."""
    rank: int
    """Of the worker of a full job that Lightning would give it to."""

    @property
    def is_vacant(self) -> bool:
        """Whether there is no such batch."""
        return self.number >= self.batches

    @property
    def share(self) -> float:
        """What it weighs in the gradient. Lightning divides the losses by `accumulate`, also in an update with fewer
        batches: there the vacant ones weigh what is missing, and add nothing."""
        if self.number >= self.accumulate:
            return 0.0
        shares = [(self.number + i) * SHARES // self.accumulate for i in (0, 1)]
        return (shares[1] - shares[0]) / SHARES


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How many batches and updates Lightning's epochs have on each worker of a full job."""

    samples: int
    """That an epoch's sampler yields."""
    micro_batch: int
    workers: int
    drop_last: bool
    batches: int
    """Of an epoch, after `limit_train_batches`."""
    accumulate: tuple[tuple[int, int], ...]
    """From which epoch on an update has so many batches, in the order of epochs, the first from epoch 0."""

    @property
    def most(self) -> int:
        """Batches of an update, at most: so many micro-batches has each worker of a full job in every step."""
        return max(batches for _, batches in self.accumulate)

    @property
    def global_batch(self) -> int:
        """Positions of a step, vacant ones included."""
        return self.most * self.workers * self.micro_batch

    def accumulated(self, epoch: int) -> int:
        """Batches of an update in this epoch."""
        return next(batches for first, batches in reversed(self.accumulate) if epoch >= first)

    def steps(self, epochs: int) -> int:
        """Updates in the first epochs."""
        ends = [first for first, _ in self.accumulate[1:]] + [epochs]
        return sum(
            max(0, min(end, epochs) - first) * -(-self.batches // batches)
            for (first, batches), end in zip(self.accumulate, ends, strict=True)
        )

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch that a step is in, and its number there."""
        starts = [self.steps(first) for first, _ in self.accumulate]
        at = bisect_right(starts, step) - 1
        first, batches = self.accumulate[at]
        more, within = divmod(step - starts[at], -(-self.batches // batches))
        return first + more, within

    def slot(self, step: int, micro: int) -> LoopPosition:
        """Where a micro-batch of a step is in Lightning's loops."""
        epoch, within = self.epoch_of(step)
        accumulate = self.accumulated(epoch)
        rank, number = divmod(micro, self.most)
        first = within * accumulate
        return LoopPosition(
            epoch=epoch,
            batch=first + number,
            number=number,
            batches=min(accumulate, self.batches - first),
            accumulate=accumulate,
            rank=rank,
        )

    def places(self, slot: LoopPosition) -> Ids:
        """The micro-batch's places in its epoch's order; fewer than `micro_batch` in the last batch.

        An update has the samples that it has under DDP, where a sampler deals them and begins again where they do not come out
        even. But they are dealt in whole micro-batches: so an update is made of the same ones at any number of workers.
        """
        if slot.is_vacant:
            return np.empty(0, np.int64)
        size, each = self.micro_batch, -(-self.samples // self.workers)
        first = (slot.batch - slot.number) * size
        of_each = min(first + slot.batches * size, each) - first
        start = first * self.workers + slot.rank * of_each + slot.number * size
        return np.arange(start, start + min(size, of_each - slot.number * size)) % self.samples


class Dealt:
    """A script's dataset, in the order in which its loader yields samples, epoch after epoch."""

    def __init__(self, loader: Any, plan: EpochPlan) -> None:
        """loader: the script's DataLoader, before anything was drawn from its sampler."""
        self.dataset = dataset = loader.dataset
        self.plan = plan
        self._loader = loader
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._several  # torch's DataLoader asks for all samples of a batch at once
        if getattr(dataset, "deterministic", False):
            self.deterministic = True

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return None if number == VACANT else self.dataset[number]

    def _several(self, numbers: list[int]) -> list[Any]:
        there = [number for number in numbers if number != VACANT]
        return list(self.dataset.__getitems__(there)) if there else []

    def __getstate__(self) -> dict[str, Any]:
        # Processes that decode get numbers, and need no order: a sampler may hold a generator, which cannot be pickled.
        return {**self.__dict__, "_loader": None}

    def order(self, seed: int) -> LightningOrder:
        """Which sample stands at which position of the job."""
        return LightningOrder(self.plan, self._epochs(seed))

    def identity(self) -> dict[str, Any]:
        """Of the dataset, if it has one, and of the order of the first epoch: workers that would draw other samples are told
        before they train."""
        own = identity(self.dataset) or {}
        each = min(self.plan.samples, self.plan.batches * self.plan.micro_batch * self.plan.workers)
        order = xxhash.xxh3_64_hexdigest(self._epochs(0)(0, np.arange(min(each, 1 << 16))).tobytes())
        told = f"{own.get('fingerprint', '')}/{order}/{self.plan.samples}"
        return {**own, "fingerprint": told}

    def _epochs(self, seed: int) -> Callable[[int, Ids], Ids]:
        """Epoch and places in it to samples."""
        sampler, samples = self._loader.sampler, self.plan.samples
        if isinstance(sampler, SequentialSampler):
            return lambda epoch, places: places
        if type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement:
            # A function of the position, which needs no list of a large dataset's samples.
            every = SampleOrder(len(self.dataset), seed)
            return lambda epoch, places: every.at_many(epoch * samples + places)
        if isinstance(sampler, DistributedSampler):
            # One that yields all samples: the job deals them to its workers.
            sampler = DistributedSampler(self.dataset, 1, 0, sampler.shuffle, sampler.seed, sampler.drop_last)
        drawn = Drawn(sampler, self._loader, self.plan, seed)
        return lambda epoch, places: drawn.epoch(epoch)[places]


class Drawn:
    """The samples of each epoch, as a sampler yields them that may keep a generator, or count its epochs."""

    def __init__(self, sampler: Any, loader: Any, plan: EpochPlan, seed: int) -> None:
        # Not the dataset, which a sampler may refer to.
        self._shared = {id(loader.dataset): loader.dataset}
        self._first, self._plan, self._seed = self._copied(sampler), plan, seed
        own = getattr(sampler, "generator", None)
        self._draws_for_processes = isinstance(own, torch.Generator) and own is loader.generator
        self._reads_ahead = loader.num_workers > 0
        self._begin()

    def _begin(self) -> None:
        self._sampler = self._copied(self._first)
        self._next = 0
        self._kept: dict[int, Ids] = {}

    def _copied(self, sampler: Any) -> Any:
        return copy.deepcopy(sampler, dict(self._shared))

    def epoch(self, epoch: int) -> Ids:
        """Which samples it has. Drawn one epoch after the other from the first, as by a process that trains all of them: a
        newcomer comes to the same ones."""
        if epoch not in self._kept:
            if epoch < self._next:
                self._begin()
            while self._next <= epoch:
                self._kept = {e: ids for e, ids in self._kept.items() if e == self._next - 1}
                self._kept[self._next] = self._drawn(self._next)
                self._next += 1
        return self._kept[epoch]

    def _drawn(self, epoch: int) -> Ids:
        sampler, plan = self._sampler, self._plan
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        if self._draws_for_processes:
            # As a DataLoader does when its iterator is made, from the generator that it was given for the order. So the
            # permutations that follow are those of plain Lightning.
            torch.empty((), dtype=torch.int64).random_(generator=sampler.generator)
        before = _generators()
        try:
            seed_generators(micro_seed(self._seed, epoch, 0), torch.device("cpu"))
            if plan.workers == 1 and not self._reads_ahead:
                # No further than Lightning's loop asks: a sampler draws more when it comes to its end.
                batches = BatchSampler(sampler, plan.micro_batch, plan.drop_last)
                found = [number for batch in islice(batches, plan.batches) for number in batch]
            else:
                found = list(sampler)
        finally:
            _put_back(before)
        return np.asarray(found, np.int64)


def _generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _put_back(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class LightningOrder:
    """Which sample stands at which position of the job; vacant ones included."""

    def __init__(self, plan: EpochPlan, epochs: Callable[[int, Ids], Ids]) -> None:
        self._plan, self._epochs = plan, epochs

    def at_many(self, positions: Any) -> Ids:
        """The samples at consecutive positions, that begin and end with a micro-batch."""
        size = self._plan.micro_batch
        per_step = self._plan.global_batch // size
        first, last = int(positions[0]) // size, int(positions[-1]) // size
        found = [self.micro_batch(*divmod(number, per_step)) for number in range(first, last + 1)]
        every = np.concatenate(found)
        low = int(positions[0]) - first * size
        return every[low : low + len(positions)]

    def micro_batch(self, step: int, micro: int) -> Ids:
        """The samples of one micro-batch, filled up with vacant ones."""
        slot = self._plan.slot(step, micro)
        found = np.full(self._plan.micro_batch, VACANT, np.int64)
        places = self._plan.places(slot)
        if len(places):
            found[: len(places)] = self._epochs(slot.epoch, places)
        return found


class Collate:
    """The loader's own, without vacant samples; None for a batch of nothing else."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        there = [sample for sample in samples if sample is not None]
        return self._collate(there) if there else None


def accumulation(trainer: Any) -> tuple[tuple[int, int], ...]:
    """`EpochPlan.accumulate`, of `accumulate_grad_batches` or of a `GradientAccumulationScheduler`."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return tuple((epoch, callback.scheduling[epoch]) for epoch in callback.epochs)
    return ((0, trainer.accumulate_grad_batches),)


def validations(trainer: Any, plan: EpochPlan, until: int) -> Iterator[tuple[int, int]]:
    """Epoch and number of each batch after which Lightning validates by `val_check_interval`, in so many updates."""
    every, check = trainer.val_check_batch, trainer.check_val_every_n_epoch
    for epoch in count():
        if plan.steps(epoch) >= until:
            return
        if check is not None and (epoch + 1) % check:
            continue
        before = epoch * plan.batches if check is None else 0
        yield from ((epoch, b) for b in range(plan.batches) if (before + b + 1) % every == 0)
