"""Runs a script as it is, under plain Python or torchrun, with the samples and the random numbers that a job would deal it.

dealt.py SEED MICRO_BATCH ACCUMULATE loads|randint|randn SCRIPT ARGUMENTS...

What decides of chance is replaced from outside: samplers, the draws of a dataset, and the generators before each forward
pass. So each rank computes the micro-batches that this rank of a job computes, and everything else is the script's.
"""

import os
import runpy
import sys
from collections import deque
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from torch.nn.modules import module as modules
from torch.utils.data import RandomSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.distributed import DistributedSampler

from holdfast.data.order import SampleOrder
from holdfast.data.seeds import loading_seed, micro_seed, seed_generators

CPU = torch.device("cpu")


class Dealer:
    """seed: of the job. accumulate: micro-batches of a step for each rank."""

    def __init__(self, seed, micro_batch, accumulate):
        self.seed, self.micro_batch, self.accumulate = seed, micro_batch, accumulate
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.dealt, self.computed, self.drawn, self.depth = 0, 0, 0, 0
        self.emitted, self.evaluated = deque(), False

    def number(self, count):
        """Step and number in the global batch of what this rank computes after `count` others."""
        step, own = divmod(count, self.accumulate)
        return step, self.rank * self.accumulate + own

    def ids(self, samples, step, micro):
        size = self.micro_batch * self.accumulate * self.world
        return (
            SampleOrder(samples, self.seed).micro_batch_samples(step, micro, self.micro_batch, size).tolist()
        )

    def emit(self, samples, step, micro):
        ids = self.ids(samples, step, micro)
        self.emitted.append((ids, step, micro))
        return ids

    # ------------------------------------------------------------ what is replaced

    def of_this_rank(self, sampler):
        """DistributedSampler.__iter__"""
        if not sampler.shuffle:
            return plain_distributed(sampler)
        numbers = range(self.dealt, self.dealt + len(sampler) // self.micro_batch)
        self.dealt = numbers.stop
        return (i for n in numbers for i in self.emit(len(sampler.dataset), *self.number(n)))

    def of_all_ranks(self, sampler):
        """RandomSampler.__iter__, where batches are dealt to the ranks by turns: each rank goes through all of them."""
        batches = range(self.dealt, self.dealt + len(sampler) // self.micro_batch)
        self.dealt = batches.stop
        for batch in batches:
            step, place = divmod(batch, self.accumulate * self.world)
            own, rank = divmod(place, self.world)
            yield from self.emit(len(sampler.data_source), step, rank * self.accumulate + own)

    def fetch(self, fetcher, asked):
        """What a dataset draws depends on the micro-batch alone."""
        while self.emitted:
            ids, step, micro = self.emitted.popleft()
            if ids == asked:
                seed_generators(loading_seed(self.seed, step, micro), CPU)
                break
        return plain_fetch(fetcher, asked)

    def draw(self, plain, *args, **options):
        """Of a script that draws its samples: each call in training is a micro-batch. Evaluations draw by the step."""
        step, micro = self.number(self.drawn)
        if torch.is_grad_enabled():
            self.drawn += 1
            self.evaluated = False
            seed_generators(loading_seed(self.seed, step, micro), CPU)
        elif not self.evaluated:
            self.evaluated = True
            torch.manual_seed((self.drawn - 1) // self.accumulate)
        return plain(*args, **options)

    def before_forward(self, module, args):
        training = module.training and torch.is_grad_enabled() and any(True for _ in module.parameters())
        if training and not self.depth:
            seed_generators(micro_seed(self.seed, *self.number(self.computed)), CPU)
            self.computed += 1
        self.depth += 1

    def after_forward(self, module, args, output):
        self.depth -= 1


plain_distributed = DistributedSampler.__iter__
plain_fetch = _MapDatasetFetcher.fetch


@contextmanager
def dealing(seed, micro_batch, accumulate, how="loads"):
    """Inside, scripts that this process runs get what a job deals. how: they load samples, or the function of torch's by which
    they draw each micro-batch."""
    dealer = Dealer(seed, micro_batch, accumulate)
    with ExitStack() as stack:
        for owner, name, new in (
            (DistributedSampler, "__iter__", lambda sampler: dealer.of_this_rank(sampler)),
            (RandomSampler, "__iter__", lambda sampler: dealer.of_all_ranks(sampler)),
            (_MapDatasetFetcher, "fetch", lambda fetcher, asked: dealer.fetch(fetcher, asked)),
            *([] if how == "loads" else [(torch, how, partial(dealer.draw, getattr(torch, how)))]),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.callback(modules.register_module_forward_pre_hook(dealer.before_forward).remove)
        after = modules.register_module_forward_hook(dealer.after_forward, always_call=True)
        stack.callback(after.remove)
        yield


def execute(script, *args):
    """As `python script args` does, in this process."""
    with mock.patch.object(sys, "argv", [str(script), *args]):
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    seed, micro_batch, accumulate, how, script, *args = sys.argv[1:]
    with dealing(int(seed), int(micro_batch), int(accumulate), how):
        execute(script, *args)
