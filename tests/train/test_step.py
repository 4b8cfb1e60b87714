import gc
import math
import os
import threading

import pytest
import torch

import holdfast as hf
from holdfast.data.order import SampleOrder
from holdfast.data.seeds import micro_seed, seed_generators
from holdfast.errors import NonFiniteGradient, UsageError
from holdfast.protocol.phases import Phase
from holdfast.tensors import staging


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        return torch.randn(4, generator=rng), torch.tensor(i % 3)


def train(
    until=5,
    micro_batch=4,
    global_batch=16,
    before=lambda step: None,
    scaler=None,
    factor=lambda step: 1.0,
    on_commit=(),
    **apply,
):
    """A job of one; returns its losses, gradient norms and final parameters. factor: of a step's losses."""
    out = {}

    def main(run):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        if scaler is not None:
            run.protect(scaler=scaler)
            apply["scaler"] = scaler
        for callback in on_commit:
            run.on_commit(callback)
        losses, norms = [], []
        for step in run.steps(Points(), global_batch=global_batch, micro_batch=micro_batch, until=until):
            with step:
                before(step)
                for x, y in step:
                    loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") * factor(
                        step.index
                    )
                    step.backward(loss if scaler is None else scaler.scale(loss), weight=len(x))
                step.apply(optimizer, **apply)
            losses.append(step.loss)
            norms.append(step.grad_norm)
            out.setdefault("after", []).append([p.detach().clone() for p in model.parameters()])
        out["losses"], out["norms"], out["parameters"] = losses, norms, out["after"][-1]

    hf.start(main)
    return out


def test_a_job_of_one_trains_the_same_twice():
    a, b = train(), train()
    assert a["losses"] == b["losses"]
    assert all(map(torch.equal, a["parameters"], b["parameters"]))
    assert all(math.isfinite(loss) for loss in a["losses"])


def test_a_job_of_one_leaves_no_thread_and_no_descriptor_behind():
    train(until=1)  # what the process opens once and keeps
    gc.collect()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="mine"):
        train(before=fail)
    train()
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_loss_that_is_fetched_beside_the_backward_pass_is_the_same(monkeypatch):
    a = train(max_grad_norm=1.0)
    monkeypatch.setattr(staging, "FAR", {"cpu"})  # as if it were a GPU's
    b = train(max_grad_norm=1.0)
    assert a["losses"] == b["losses"]
    assert all(map(torch.equal, a["parameters"], b["parameters"]))


def test_clipping_is_that_of_torch():
    a = train(until=1, max_grad_norm=1e-3)
    b = train(until=1)
    assert any(not torch.equal(x, y) for x, y in zip(a["parameters"], b["parameters"], strict=True))


def fail(step):
    raise RuntimeError("mine")


def test_an_error_in_a_job_of_one_is_the_scripts():
    with pytest.raises(RuntimeError, match="mine"):
        train(before=fail)


def test_sizes_that_do_not_fit_are_refused_before_anything_is_computed():
    with pytest.raises(UsageError, match="not a multiple"):
        train(micro_batch=5)


def test_batches_that_are_loaded_before_are_those_that_come():
    """Each once, with the same chance; and numbers that are counted over them can be summed."""
    seen = {"loaded": [], "summed": []}

    def ahead(step):
        loaded = step.load()
        seen["loaded"] += [x for x, y in loaded]
        seen["summed"].append(step.sum({"samples": [len(x) for x, y in loaded]})["samples"])

    found, plain = train(before=ahead), train()
    assert (found["losses"], found["norms"]) == (plain["losses"], plain["norms"])
    assert all(map(torch.equal, found["parameters"], plain["parameters"]))
    assert seen["summed"] == [16.0] * 5
    order = SampleOrder(64, 0).at_many(range(80))
    assert torch.equal(torch.cat(seen["loaded"]), torch.stack([Points()[int(i)][0] for i in order]))


def test_a_step_without_apply_is_an_error():
    def main(run):
        model = torch.nn.Linear(4, 3)
        run.protect(model=model)
        for step in run.steps(Points(), global_batch=4, micro_batch=4, until=1):
            with step:
                pass

    with pytest.raises(UsageError, match=r"step\.apply"):
        hf.start(main)


def test_apply_before_every_backward_is_an_error():
    def main(run):
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=8, micro_batch=4, until=1):
            with step:
                for x, y in step:
                    step.backward(
                        torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=len(x)
                    )
                    break
                step.apply(optimizer)

    with pytest.raises(UsageError, match="1 micro-batches"):
        hf.start(main)


def test_nothing_protected_is_an_error():
    with pytest.raises(UsageError, match=r"run\.protect"):
        hf.start(lambda run: list(run.steps(Points(), global_batch=4, micro_batch=4, until=1)))


def test_micro_seeds_do_not_collide():
    seeds = {micro_seed(0, step, micro) for step in range(200) for micro in range(64)}
    assert len(seeds) == 200 * 64
    assert micro_seed(1, 0, 0) not in seeds


def test_a_relaxed_watchdog_after_the_last_step_changes_nothing():
    def main(run):
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=4, micro_batch=4, until=1):
            with step:
                for x, _ in step:
                    step.backward(model(x).sum())
                step.apply(optimizer)
        with run.relaxed_watchdog():
            phases.append(run._replica.link.record.phase)
        phases.append(run._replica.link.record.phase)

    phases = []
    hf.start(main)
    assert phases == [Phase.DONE] * 2


# ---------------------------------------------------------------- what belongs to a commit


def test_callbacks_are_called_in_every_commit_after_the_update_in_their_order():
    called = []

    def first(step):
        called.append((step.index, step.loss))

    out = train(on_commit=[first, lambda step: called.append(step.index)], also=lambda: called.append("also"))
    steps = [("also", (i, loss), i) for i, loss in enumerate(out["losses"])]
    assert called == [word for words in steps for word in words]


def test_a_callback_that_comes_late_or_cannot_be_called_is_refused():
    def main(run):
        with pytest.raises(UsageError, match="a str is not callable"):
            run.on_commit("me")
        model = torch.nn.Linear(4, 3)
        run.protect(model=model)
        next(run.steps(Points(), global_batch=4, micro_batch=4, until=1))
        run.on_commit(print)

    with pytest.raises(UsageError, match=r"run\.on_commit\(\) was called after run\.steps\(\)"):
        hf.start(main)


def infinite_at(bad):
    return lambda step: math.inf if step == bad else 1.0


def test_a_step_that_is_not_finite_is_committed_without_an_update():
    called, skipped = [], []
    out = train(
        factor=infinite_at(2),
        skip_nonfinite=True,
        max_grad_norm=1.0,
        also=lambda: called.append(1),
        on_commit=[lambda step: skipped.append(step.skipped)],
    )
    assert skipped == [False, False, True, False, False]
    assert len(called) == 4
    _, before, at, after, _ = out["after"]
    assert all(map(torch.equal, before, at))
    assert not any(map(torch.equal, at, after))
    assert [math.isfinite(norm) for norm in out["norms"]] == [True, True, False, True, True]


def test_without_the_option_a_gradient_that_is_not_finite_is_an_error():
    with pytest.raises(NonFiniteGradient):
        train(factor=infinite_at(2))


def test_the_scaler_does_what_torch_does():
    """The same batches under torch's own scaler: scale after each step, parameters at the end, and the losses unscaled."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, backoff_factor=2.0**-3)

    ours, theirs, scales = scaler(), scaler(), []
    out = train(
        until=12,
        micro_batch=16,
        scaler=ours,
        max_grad_norm=0.1,
        on_commit=[lambda step: scales.append((ours.get_scale(), step.skipped))],
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = holdfast_order(12)
    expected = []
    for index, batch in enumerate(order):
        x, y = torch.utils.data.default_collate([Points()[i] for i in batch])
        optimizer.zero_grad()
        seed_generators(micro_seed(0, index, 0), torch.device("cpu"))
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        scaled = theirs.scale(loss)
        assert out["losses"][index] == (loss.item() / 16 if scaled.isfinite() else math.inf)
        scaled.backward()
        theirs.unscale_(optimizer)
        for p in model.parameters():
            p.grad.div_(16)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        theirs.step(optimizer)
        before = theirs.get_scale()
        theirs.update()
        expected.append((theirs.get_scale(), theirs.get_scale() < before))
    assert scales == expected
    assert {skipped for _, skipped in scales} == {True, False}
    assert ours.state_dict() == theirs.state_dict()
    assert all(
        torch.allclose(a, b, rtol=1e-6) for a, b in zip(out["parameters"], model.parameters(), strict=True)
    )


def holdfast_order(steps):
    order = SampleOrder(len(Points()), 0)
    return [[order.at(i) for i in range(16 * step, 16 * (step + 1))] for step in range(steps)]


def test_a_scaler_that_is_not_protected_is_refused():
    def main(run):
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=4, micro_batch=4, until=1):
            with step:
                for x, _ in step:
                    step.backward(model(x).sum())
                step.apply(optimizer, scaler=torch.amp.GradScaler("cpu"))

    with pytest.raises(UsageError, match=r"run\.protect\(scaler=scaler\)"):
        hf.start(main)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_gradient_that_the_script_changes_before_apply_is_refused_with_what_works(reduction):
    """It is this worker's part alone. The hook that the message names gets the summed gradient, as plain torch's does."""

    def loop(change, hook=None):
        found = []

        def main(run):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if hook is not None:
                optimizer.register_step_pre_hook(hook)
            run.protect(model=model, optimizer=optimizer)
            for step in run.steps(Points(), global_batch=8, micro_batch=4, until=2, reduction=reduction):
                with step:
                    for x, _ in step:
                        step.backward(model(x).square().sum(), weight=len(x))
                    change(model)
                    step.apply(optimizer)
            found.extend(p.detach().clone() for p in model.parameters())

        hf.start(main)
        return found

    def noise(optimizer, args, kwargs):
        for p in optimizer.param_groups[0]["params"]:
            p.grad.clamp_(-0.01, 0.01)

    def replaced(model):
        model.bias.grad = torch.ones(3)

    with pytest.raises(UsageError, match="register_step_pre_hook"):
        loop(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    with pytest.raises(UsageError, match="max_grad_norm"):
        loop(replaced)
    plain, clamped = loop(lambda model: model.weight.grad.norm()), loop(lambda model: None, noise)
    torch.manual_seed(0)
    start = torch.nn.Linear(4, 3)
    assert all(
        (p - q).abs().max() <= 2 * 0.001 + 1e-6 for p, q in zip(start.parameters(), clamped, strict=True)
    )
    assert not torch.equal(plain[0], clamped[0])


def test_sparse_gradients_are_refused():
    def main(run):
        model = torch.nn.Embedding(8, 4, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=8, micro_batch=4, until=2):
            with step:
                for _, y in step:
                    step.backward(model(y).sum(), weight=len(y))
                step.apply(optimizer)

    with pytest.raises(UsageError, match="sparse=True"):
        hf.start(main)
