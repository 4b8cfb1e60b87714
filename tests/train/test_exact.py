"""The exact reduction: losses, norms and parameters do not depend on the world size, bit by bit.

Workers are threads with real groups; `Step` and the reduction are the real ones.
"""

import functools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from cluster import Cluster, Worker, compute

import holdfast as hf
from holdfast.errors import CollectiveFault, UsageError
from holdfast.train import exact
from holdfast.train.data_cursor import DataCursor
from holdfast.train.exact import ExactSum, prepare
from holdfast.train.place import share
from holdfast.train.reduction import GradientSum
from holdfast.train.step import Step

WIDTH = 12
CPU = torch.device("cpu")


class Batches:
    """Micro-batches of uneven weight."""

    def __init__(self, count, lengths=lambda micro: 3):
        self._count = count
        self._lengths = lengths

    def count(self):
        return self._count

    def aim(self, step, cursor, micros):
        pass

    def giving(self, step, generation):
        pass

    def committed(self, step, generation):
        pass

    def load(self, step, micro):
        rng = torch.Generator().manual_seed(step * 1000 + micro)
        length = self._lengths(micro)
        return torch.randn(length, WIDTH, generator=rng), torch.randint(0, 5, (length,), generator=rng)


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 70), torch.nn.LayerNorm(70), torch.nn.Dropout(0.3), torch.nn.Linear(70, 5)
    )


class Tied(torch.nn.Module):
    """Tied weights, a parameter that only some micro-batches use, and one that none uses."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, 5)
        self.sometimes = torch.nn.Parameter(torch.randn(5))
        self.never = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        hidden = torch.tanh(x @ self.inner.weight) @ self.inner.weight.T
        out = self.head(hidden)
        return out + self.sometimes if float(x[0, 0]) > 0 else out


def train(worlds, micro_batches, build=mlp, clip=None, lengths=lambda micro: 3, kind=ExactSum, unit=0.1):
    """One step in each of the worlds, in turn. Returns losses, norms and the final parameters, of rank 0, after a
    look that all ranks have the same."""
    widest = max(worlds)
    cluster = Cluster(widest)
    models = [build() for _ in range(widest)]
    workers = [Worker(m, torch.optim.AdamW(m.parameters(), lr=1e-2), kind, micro_batches) for m in models]
    computing = threading.Lock()
    losses, number, groups = [], 0, []
    try:
        for index, world in enumerate(worlds):
            if len(groups) != world:
                for group in groups:
                    group.close()
                number += 1
                generation = cluster.generation(number, range(world))
                groups = [cluster.group(generation, rank) for rank in range(world)]
                cluster.each(lambda g: g.join("secret"), groups)
                for worker, group in zip(workers, groups, strict=False):
                    worker.join(group)

            def step_of(worker, index=index):
                # Of torch each thread has its own number, and this one stands for a process.
                torch.set_num_threads(1)
                cursor = DataCursor(3 * micro_batches, 0, None, None, "refuse")
                cursor.samples = index * 3 * micro_batches
                step = Step(worker, Batches(micro_batches, lengths), index, 7, cursor)
                worker.model.seen = index

                def one(batch):
                    x, y = batch
                    loss = torch.nn.functional.cross_entropy(worker.model(x), y, reduction="sum")
                    step.backward(loss, weight=len(x) * unit)

                with step:
                    compute(step, computing, one)
                    step.apply(worker.optimizer, max_grad_norm=clip)
                return step.loss

            said = cluster.each(step_of, workers[:world])
            assert len(set(said)) == 1
            losses.append(said[0])
            assert all(same(parameters(worker), parameters(workers[0])) for worker in workers[:world])
            for newcomer in workers[world:]:
                newcomer.take_state_of(workers[0])
    finally:
        for group in groups:
            group.close()
        cluster.close()
    assert all(worker.without == workers[0].without for worker in workers[: min(worlds)])
    return losses, workers[0].norms, parameters(workers[0]), workers[0].without


def parameters(worker):
    return [p.detach().clone() for p in worker.model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True)
    )


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1] == b[1]
    assert same(a[2], b[2])


@functools.cache
def alone(micro_batches, steps=4, **how):
    return train([1] * steps, micro_batches, **how)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("micro_batches", [5, 8, 12])
def test_every_world_has_the_bits_of_one_worker(world, micro_batches):
    assert_same(train([world] * 4, micro_batches), alone(micro_batches))


def test_any_sequence_of_worlds_has_the_bits_of_one_worker():
    assert_same(train([1, 2, 3, 5, 4, 4, 2, 1, 5, 3], 7), train([1] * 10, 7))


def test_clipping_does_not_depend_on_the_world():
    clipped = alone(8, clip=0.05)
    assert not same(clipped[2], alone(8)[2])
    for world in (2, 3):
        assert_same(train([world] * 4, 8, clip=0.05), clipped)


def lengths(micro):
    return 1 + micro * micro % 7


@pytest.mark.parametrize("world", [2, 3, 5])
def test_uneven_weights_do_not_depend_on_the_world(world):
    assert_same(train([world] * 4, 6, lengths=lengths), alone(6, lengths=lengths))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tied_and_unused_parameters(world):
    assert_same(train([world] * 4, 6, build=Tied), alone(6, build=Tied))


class Branches(torch.nn.Module):
    """Parameters that are used by all micro-batches, by some, by those of one step alone, and by none; complex ones too."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__()
        self.always, self.never = torch.nn.Linear(WIDTH, 5), torch.nn.Linear(WIDTH, 5)
        self.by_one = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 5) for _ in range(6))
        self.at_first = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.seen = 0

    def forward(self, x):
        out = self.always(x) + self.frozen
        chosen = int(abs(float(x[0, 0])) * 4) % 6
        out = out + self.by_one[chosen](x) if chosen % 2 else out
        return out + self.at_first.abs() if self.seen == 0 else out


def plain_torch(micro_batches, steps, build, clip, lengths=lambda micro: 3, unit=0.1):
    """The same loop in plain torch; which parameters had no gradient in each step, and the parameters in the end."""
    model, batches, without = build(), Batches(micro_batches, lengths), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(steps):
        model.seen = index
        optimizer.zero_grad()
        weight = sum(lengths(micro) * unit for micro in range(micro_batches))
        for micro in range(micro_batches):
            x, y = batches.load(index, micro)
            torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= weight
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        without.append([name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    return without, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [GradientSum, ExactSum])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("large", [None, 240, 1], ids=["none large", "some large", "all large"])
def test_what_nobody_used_has_no_gradient_as_in_plain_torch(kind, world, large, monkeypatch):
    if large:  # gradients of so many bytes are summed where autograd put them
        monkeypatch.setattr("holdfast.train.reduction.DIRECT_BYTES", large)
    expected, parameters = plain_torch(4, 4, Branches, clip=0.5)
    *_, found, without = train([world] * 4, 4, build=Branches, clip=0.5, kind=kind)
    assert without == expected
    assert "never.weight" in without[0]
    assert "at_first" not in without[0]
    assert without[1] != without[2]
    for ours, theirs in zip(found, parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [GradientSum, ExactSum])
def test_workers_that_train_different_parameters_are_refused(kind):
    built = []

    def build():
        built.append(mlp())
        built[-1][0].requires_grad_(len(built) != 2)
        return built[-1]

    with pytest.raises(UsageError, match=r"the workers do not all train the same parameters.*>= 1000"):
        train([3], 6, build=build, kind=kind)


@pytest.mark.parametrize("kind", [GradientSum, ExactSum])
def test_layers_that_are_frozen_and_thawed_between_steps(kind):
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    sums = kind(net.parameters(), lambda: None)
    layouts = []
    for trained in ([0, 1, 2], [2], [0, 2], [0, 1, 2]):
        for number, layer in enumerate(net):
            layer.requires_grad_(number in trained)
        sums.begin()
        sums.expect(1, 0, 1)
        sums.before_backward()
        net(torch.ones(1, 3)).sum().backward()
        sums.after_backward()
        sums.flush(SimpleNamespace(size=1))
        sums.finish(lambda: 1.0)
        assert [n for n, layer in enumerate(net) if layer.weight.grad is not None] == trained
        layouts.append(sums.layout)
    assert layouts[0] == layouts[3]
    assert len(set(layouts)) == 3


@pytest.mark.parametrize("world", [2, 3])
def test_large_and_sliced_buckets(world, monkeypatch):
    """The paths of a large model, with a small one: gradients summed where autograd put them, slices, broadcasts."""
    expected = alone(7)
    monkeypatch.setattr(exact, "SMALL", 16)
    monkeypatch.setattr("holdfast.train.reduction.DIRECT_BYTES", 4 * 300)
    monkeypatch.setattr("holdfast.train.reduction.BUCKET_BYTES", 4 * 100)
    monkeypatch.setattr("holdfast.train.reduction.FIRST_BUCKET_BYTES", 4 * 20)
    assert_same(train([world] * 4, 7), train([1] * 4, 7))
    assert (
        expected[0] == train([world] * 4, 7)[0]
    )  # the norm is summed by buckets; unclipped it changes nothing


def test_fast_differs_in_bits_and_stays_within_its_tolerance():
    """Why there are two, and what is promised of the fast one."""
    one, three = (train([world], 12, kind=GradientSum, clip=1e9) for world in (1, 3))
    assert one[0] == pytest.approx(three[0], rel=1e-6)
    assert one[1] == pytest.approx(three[1], rel=1e-6)


@pytest.mark.parametrize("kind", [GradientSum, ExactSum])
def test_the_error_of_the_gradient_is_within_the_tolerance(kind):
    cluster = Cluster(3)
    groups = cluster.join(1)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=rng)
    torch.manual_seed(3)
    reference = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
    nets = [
        torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2)) for _ in groups
    ]
    for net in nets:
        net.load_state_dict(reference.state_dict())

    def work(group):
        net = nets[group.rank]
        sums = kind(net.parameters(), lambda: None)
        sums.begin()
        sums.expect(12, group.rank, 3)
        mine = share(12, group.rank, 3)
        for micro in mine:
            sums.before_backward()
            if micro == mine[-1]:
                sums.last(group)
            net(inputs[2 * micro : 2 * micro + 2]).square().sum().backward()
            sums.after_backward()
        sums.flush(group)
        sums.finish(lambda: 1 / 24)
        return torch.cat([p.grad.flatten().clone() for p in net.parameters()])

    found = cluster.each(work, groups)
    whole = reference.double()
    (whole(inputs.double()).square().sum() / 24).backward()
    true = torch.cat([p.grad.flatten() for p in whole.parameters()])
    for gradient in found:
        assert float((gradient.double() - true).norm() / true.norm()) < 1e-6
    for group in groups:
        group.close()
    cluster.close()


def test_a_mean_of_means_would_be_wrong():
    """With uneven micro-batches it is another gradient; ours is that of the one big batch."""
    batches = Batches(6, lengths)
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 5)
    start = [p.detach().clone() for p in model.parameters()]

    def gradient_of(loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    data = [batches.load(0, m) for m in range(6)]
    true = gradient_of(
        torch.nn.functional.cross_entropy(
            model(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])
        )
    )
    means = sum(gradient_of(torch.nn.functional.cross_entropy(model(x), y)) for x, y in data) / 6

    def build():
        linear = torch.nn.Linear(WIDTH, 5)
        with torch.no_grad():
            for p, value in zip(linear.parameters(), start, strict=True):
                p.copy_(value)
        return linear

    _, norms, *_ = train([3], 6, build=build, lengths=lengths, unit=1.0)
    assert norms[0] == pytest.approx(true.norm().item(), rel=1e-5)
    assert abs(means.norm().item() / true.norm().item() - 1) > 0.01


def test_an_abort_frees_who_waits_for_a_slice():
    cluster = Cluster(3)
    for number in range(1, 6):
        groups = cluster.join(number)
        nets = [torch.nn.Linear(300, 300) for _ in groups]
        sums = [ExactSum(net.parameters(), lambda: None) for net in nets]
        waiting = threading.Barrier(3)

        def reduce(own, group):
            own.flush(group)
            own.finish(lambda: 1.0)

        def work(group, nets=nets, sums=sums, waiting=waiting, groups=groups, reduce=reduce):
            own = sums[group.rank]
            own.begin()
            own.expect(6, group.rank, 3)
            for _ in range(2):
                own.before_backward()
                nets[group.rank](torch.ones(2, 300)).sum().backward()
                own.after_backward()
            waiting.wait()
            if group.rank == 2:
                for other in groups:
                    other.abort()
            else:
                with pytest.raises(CollectiveFault):
                    reduce(own, group)
            own.drain(group)
            group.close()
            return True

        assert all(cluster.each(work, groups))
    cluster.close()


@pytest.mark.parametrize("checks_local", [False, True])
def test_a_poisoned_gradient_is_seen_by_all(checks_local):
    """Also in the retry, where each rank looks at its own gradients before any of them goes."""
    cluster = Cluster(3)
    groups = cluster.join(1)
    nets = [torch.nn.Linear(4, 4) for _ in groups]

    def work(group):
        sums = ExactSum(nets[group.rank].parameters(), lambda: None)
        sums.poison = group.rank == 1
        sums.begin()
        sums.expect(3, group.rank, 3)
        sums.before_backward()
        if not checks_local:
            sums.last(group)
        nets[group.rank](torch.ones(1, 4)).sum().backward()
        sums.after_backward()
        assert not checks_local or sums.local_is_finite()
        sums.flush(group)
        return sums.finish(lambda: 1.0)

    assert all(math.isnan(norm) for norm in cluster.each(work, groups))
    for group in groups:
        group.close()
    cluster.close()


def test_a_backward_pass_of_the_scripts_own_is_left_alone():
    net = torch.nn.Linear(2, 2)
    sums = ExactSum(net.parameters(), lambda: None)
    sums.begin()
    net(torch.ones(1, 2)).sum().backward()
    assert net.weight.grad.tolist() == [[1, 1], [1, 1]]


def steps_alone(use, **how):
    def main(run):
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=sgd)
        points = [(torch.ones(WIDTH), torch.tensor(1))] * 16
        for step in run.steps(points, global_batch=8, micro_batch=2, until=1, **how):
            with step:
                use(step, lambda x, y: torch.nn.functional.cross_entropy(model(x), y, reduction="sum"))
                step.apply(sgd)

    hf.start(main)


def test_micro_batches_are_computed_one_after_the_other():
    """Taken in advance they would have each other's randomness."""
    with pytest.raises(UsageError, match="one after the other"):
        steps_alone(lambda step, loss: list(step), reduction="exact")


def test_one_backward_for_every_micro_batch():
    def use(step, loss):
        for x, y in step:
            step.backward(loss(x, y))
        step.backward(loss(x, y))

    for reduction in ("fast", "exact"):
        with pytest.raises(UsageError, match="once for every micro-batch"):
            steps_alone(use, reduction=reduction)
    with pytest.raises(UsageError, match="before step"):
        steps_alone(lambda step, loss: None)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_layer_that_is_thawed_after_the_first_backward_is_refused(reduction):
    """The gradient of some micro-batches would be summed by nobody."""
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, 5))
    net[0].requires_grad_(False)

    def main(run):
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        run.protect(model=net, optimizer=sgd)
        points = [(torch.ones(WIDTH), torch.tensor(1))] * 16
        for step in run.steps(points, global_batch=8, micro_batch=2, until=1, reduction=reduction):
            with step:
                for x, y in step:
                    step.backward(torch.nn.functional.cross_entropy(net(x), y, reduction="sum"), len(y))
                    net[0].requires_grad_(True)
                step.apply(sgd)

    with pytest.raises(UsageError, match=r"shape \(5, 12\) was unfrozen .* after the first step.backward"):
        hf.start(main)


def test_a_job_of_one_computes_with_as_many_threads_as_a_worker(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        torch.set_num_threads(2)
        assert prepare("exact", CPU) == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert prepare("fast", CPU) is None
        assert torch.get_num_threads() == 2
        assert prepare("exact", CPU) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_exact_is_refused():
    with pytest.raises(UsageError, match='"fast" or "exact"'):
        prepare("quick", CPU)
    with pytest.raises(UsageError, match="use_deterministic_algorithms"):
        prepare("exact", torch.device("cuda"))


@pytest.mark.parametrize("width", [3, 1100])
def test_a_leaf_that_is_kept_apart_changes_no_bit_and_has_its_own_digest(width):
    """Small parameters share memory, and a large one lies where autograd put it."""
    torch.manual_seed(1)
    net, unused = torch.nn.Linear(width, width), torch.nn.Linear(2, 2)
    inputs = torch.randn(4, 2, width)
    sums = ExactSum([*net.parameters(), *unused.parameters()], lambda: None)

    def step(apart):
        sums.begin()
        sums.expect(4, 0, 1)
        if apart is not None:
            sums.keep_apart(apart)
        for batch in inputs:
            sums.before_backward()
            net(batch).square().sum().backward()
            sums.after_backward()
        digest = None if apart is None else sums.digest_apart()
        sums.before_again()
        net(inputs[apart or 0]).square().sum().backward()
        again = sums.digest_again()
        sums.flush(SimpleNamespace(size=1))
        sums.finish(lambda: 0.25)
        assert all(p.grad is None for p in unused.parameters())
        return [p.grad.clone() for p in net.parameters()], digest, again

    plain, _, _ = step(None)
    seen = set()
    for apart in range(4):
        grads, digest, again = step(apart)
        assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
        assert digest == again
        seen.add(digest)
    assert len(seen) == 4
    sums.flip()
    _, digest, again = step(2)
    assert digest == again  # the first leaf was struck, and another one is looked at
    sums.flip()
    _, digest, again = step(0)
    assert digest != again
