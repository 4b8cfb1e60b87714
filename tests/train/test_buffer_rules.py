"""Buffers after a step depend on the global batch alone: not on how many workers computed it, nor on what came between."""

import itertools

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.train.buffer_rules import BufferRules

MICROS = 6


class Changed(torch.nn.Module):
    def __init__(self, replaced=False):
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 0.1))
        self.register_buffer("loads", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("flags", torch.tensor([True]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.replaced = replaced

    def forward(self, micro):
        rng = torch.Generator().manual_seed(micro)
        mean = self.mean * 0.9 + torch.rand(3, generator=rng) * 0.1
        if self.replaced:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        self.loads[micro % 3] += 1


class Both:
    """The group of two workers that compute one after the other: the first one's part waits for the second's."""

    size = 2

    def __init__(self):
        self.parts = []

    def allreduce(self, rows):
        self.parts.append(rows)

    def wait(self, work):
        if len(self.parts) == 2:
            a, b = self.parts
            a += b
            b.copy_(a)


class Alone:
    size = 1


DECLARED = [("restore", ()), ("mean", ("model.mean", "model.mask")), ("sum", ("model.loads",))]


def rules_of(model, exact=True, declared=DECLARED):
    return BufferRules({"model": model}, declared, sharded=False, exact=exact)


def computed(model, rules, micros):
    rules.begin(MICROS)
    for micro in micros:
        model(micro)
        rules.after_micro(micro)


class Shards:
    """Two workers of one replica, in the same way."""

    def __init__(self):
        self.both = Both()

    def sum_over_shards(self, rows):
        self.both.wait(self.both.allreduce(rows))


def test_shards_of_replicas_commit_what_one_worker_does():
    """Two replicas of two workers, whose micro-batches lie among each other. Fast too: each shard has a sum of its own over the
    replicas, and all have the same bits."""
    alone = Changed()
    rules = rules_of(alone)
    computed(alone, rules, range(MICROS))
    rules.reduce(Alone())
    rules.commit(skipped=False)
    dealt = [[(0, 4), (1,)], [(3, 5), (2,)]]
    models = [[Changed(), Changed()] for _ in dealt]
    workers = [
        [BufferRules({"model": m}, DECLARED, sharded=True, exact=False) for m in replica]
        for replica in models
    ]
    for replica in range(2):
        shards = Shards()
        for shard in range(2):
            computed(models[replica][shard], workers[replica][shard], dealt[replica][shard])
            workers[replica][shard].reduce_inside(shards)
    for shard in range(2):
        column = Both()
        for replica in range(2):
            workers[replica][shard].reduce(column)
    for replica, shard in itertools.product(range(2), range(2)):
        workers[replica][shard].commit(skipped=False)
        for name, buffer in models[replica][shard].named_buffers():
            assert torch.equal(buffer, dict(alone.named_buffers())[name]), name


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_two_workers_commit_what_one_does(exact, replaced):
    alone = Changed()
    rules = rules_of(alone, exact)
    computed(alone, rules, range(MICROS))
    rules.reduce(Alone())
    rules.commit(skipped=False)
    group, models = Both(), [Changed(replaced), Changed()]
    pair = [rules_of(model, exact) for model in models]
    for model, worker, micros in zip(models, pair, [range(2), range(2, MICROS)], strict=True):
        computed(model, worker, micros)
        worker.reduce(group)
    for model, worker in zip(models, pair, strict=True):
        worker.commit(skipped=False)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(alone.named_buffers())[name]), name
    assert alone.loads.tolist() == [2, 2, 2]
    drawn = [torch.rand(3, generator=torch.Generator().manual_seed(i)) for i in range(MICROS)]
    assert torch.allclose(alone.mean, 0.09 + 0.1 * torch.stack(drawn).mean(0))
    assert alone.mask.tolist() == [0.0, float("-inf")]


def test_a_step_that_is_dropped_or_skipped_and_an_evaluation_leave_no_trace():
    model = Changed()
    rules = rules_of(model)
    was = {name: b.clone() for name, b in model.named_buffers()}
    computed(model, rules, range(3))
    computed(model, rules, range(MICROS))  # the same step again
    rules.reduce(Alone())
    rules.commit(skipped=True)
    rules.keep()
    assert all(torch.equal(b, was[name]) for name, b in model.named_buffers())
    computed(model, rules, range(MICROS))
    rules.reduce(Alone())
    rules.commit(skipped=False)
    rules.keep()
    committed = model.loads.clone()
    model(0)  # an evaluation
    rules.put_back()
    assert torch.equal(model.loads, committed)
    assert committed.tolist() == [2, 2, 2]


def test_what_was_fetched_is_what_the_next_step_starts_from():
    model = Changed()
    rules = rules_of(model)
    computed(model, rules, range(MICROS))
    model.loads.fill_(7)
    rules.keep()
    model(0)  # an evaluation before the newcomer's first step
    rules.begin(MICROS)
    assert model.loads.tolist() == [7, 7, 7]


def test_an_evaluation_before_the_first_step_leaves_no_trace():
    model = Changed()
    rules = rules_of(model)
    model(0)
    rules.begin(MICROS)
    assert model.loads.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ([("mean", ("model.means",))], "no protected module has a buffer of this name.*model.mean"),
        ([("mean", ("model.cache",))], "no protected module has a buffer of this name"),
        (
            [("sum", ("model.flags",))],
            r"is of torch\.bool.*run\.buffers\(\"restore\", \"model\.flags\"",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(declared, words):
    with pytest.raises(UsageError, match=words):
        rules_of(Changed(), declared=declared)
