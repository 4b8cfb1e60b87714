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
        ([("mean", ("model.means",))], "none of the protected modules has a buffer of this name.*model.mean"),
        ([("mean", ("model.cache",))], "none of the protected modules has a buffer of this name"),
        (
            [("sum", ("model.flags",))],
            r"its dtype torch\.bool.*run\.buffers\(\"restore\", \"model\.flags\"",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(declared, words):
    with pytest.raises(UsageError, match=words):
        rules_of(Changed(), declared=declared)


class Norms(torch.nn.Module):
    """Running statistics of each kind: averages, cumulative ones, a module that is called twice, and a power iteration."""

    def __init__(self):
        super().__init__()
        self.norm, self.slow = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4, momentum=0.01)
        self.cumulative = torch.nn.BatchNorm1d(4, momentum=None)
        self.twice = torch.nn.BatchNorm1d(4)
        self.instance = torch.nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x):
        x = self.norm(x) + self.slow(x) + self.cumulative(x)
        self.instance(x[:, :, None].expand(-1, -1, 3))
        return self.twice(self.twice(x) * 2 + 1)


def inputs(micro):
    rng = torch.Generator().manual_seed(micro)
    return torch.randn(8, 4, generator=rng) * (1 + micro) + micro


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("split", [MICROS, 2, 5])
def test_running_statistics_are_those_of_plain_torch(exact, split):
    """Of one worker that computes the micro-batches of the global batch one after the other."""
    plain, ours = Norms(), [Norms(), Norms()]
    rules = [BufferRules({"model": model}, (), sharded=False, exact=exact) for model in ours]
    for step in range(3):
        micros = range(step * MICROS, (step + 1) * MICROS)
        for micro in micros:
            plain(inputs(micro))
        group = Both()
        for model, rule, mine in zip(ours, rules, (micros[:split], micros[split:]), strict=True):
            rule.begin(MICROS)
            for micro in mine:
                model(inputs(micro))
                rule.after_micro(micro % MICROS)
            rule.reduce(group)
        for rule in rules:
            rule.commit(False)
            rule.keep()
        for model in ours:
            for (name, expected), found in zip(plain.named_buffers(), model.buffers(), strict=True):
                torch.testing.assert_close(
                    found, expected, rtol=2e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert all(torch.equal(a, b) for a, b in zip(ours[0].buffers(), ours[1].buffers(), strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_of_one_micro_batch_running_statistics_have_plain_torchs_bits(exact):
    plain, ours = Norms().double(), Norms().double()
    rule = BufferRules({"model": ours}, (), sharded=False, exact=exact)
    for step in range(50):
        plain(inputs(step).double())
        rule.begin(1)
        ours(inputs(step).double())
        rule.after_micro(0)
        rule.commit(False)
        rule.keep()
        assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True)), step


@pytest.mark.parametrize("old", [False, True])
def test_spectral_norm_keeps_its_vectors_at_norm_1(old):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    if old:
        model = torch.nn.Sequential(torch.nn.utils.spectral_norm(layer))
    else:
        model = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(layer))
    rule = BufferRules({"model": model}, (), sharded=False, exact=True)
    for _ in range(40):
        rule.begin(MICROS)
        for micro in range(MICROS):
            model(torch.randn(2, 8))
            rule.after_micro(micro)
        rule.commit(False)
        rule.keep()
    assert len(rule.paths) == 2
    assert all(abs(float(v.norm()) - 1) < 1e-3 for v in model.buffers() if v.dim() == 1)
    model.eval()
    model(torch.randn(2, 8))
    assert abs(float(torch.linalg.matrix_norm(model[0].weight.detach(), 2)) - 1) < 1e-2


@pytest.mark.parametrize(
    ("model", "pattern", "rule"),
    [
        (lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)), "model.*._u", "mean"),
        (lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4)), "model.weight_v", "mean"),
        (lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(4)), "model.0.running_var", "sequence"),
        (lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(4)), "*", "sequence"),
    ],
)
def test_a_sum_of_what_is_no_count_is_refused(model, pattern, rule):
    with pytest.raises(
        UsageError,
        match=f'would grow without bound; use this rule only for counts. This buffer gets the rule "{rule}"',
    ):
        BufferRules({"model": model()}, [("sum", (pattern,))], sharded=False, exact=True)
    BufferRules(
        {"model": torch.nn.BatchNorm1d(4)}, [("sum", ("*.num_batches_tracked",))], sharded=False, exact=True
    )


class Range(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.full((2,), float("inf")))
        self.register_buffer("most", torch.full((2,), float("-inf")))

    def forward(self, x):
        self.least, self.most = torch.minimum(self.least, x), torch.maximum(self.most, x)


def test_ranges_are_those_of_all_micro_batches_and_a_mean_of_them_is_refused():
    values = torch.tensor([[1.0, 5.0], [-2.0, 7.0], [3.0, -1.0]])

    def step(declared):
        model = Range()
        rule = BufferRules({"model": model}, declared, sharded=False, exact=False)
        rule.begin(3)
        for micro, value in enumerate(values):
            model(value)
            rule.after_micro(micro)
        rule.reduce(Alone())
        rule.commit(False)
        return model

    ranged = step([("min", ("model.least",)), ("max", ("model.most",))])
    assert torch.equal(ranged.least, values.amin(0))
    assert torch.equal(ranged.most, values.amax(0))
    with pytest.raises(UsageError, match=r'model\.least was infinite.*run\.buffers\("min", "model\.least"\)'):
        step([("mean", ())])


def test_an_average_by_sequence_is_for_modules_whose_momentum_is_known():
    with pytest.raises(UsageError, match=r"for the running averages of torch's normalization layers"):
        BufferRules({"model": Range()}, [("sequence", ())], sharded=False, exact=False)
