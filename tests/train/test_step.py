import gc
import math
import os
import threading

import pytest
import torch

import holdfast as hf
from holdfast.data.seeds import micro_seed
from holdfast.errors import UsageError
from holdfast.protocol.phases import Phase
from holdfast.tensors import staging


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        return torch.randn(4, generator=rng), torch.tensor(i % 3)


def train(until=5, micro_batch=4, global_batch=16, before=lambda step: None, **apply):
    """A job of one; returns its losses and final parameters."""
    out = {}

    def main(run):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        losses = []
        for step in run.steps(Points(), global_batch=global_batch, micro_batch=micro_batch, until=until):
            with step:
                before(step)
                for x, y in step:
                    step.backward(
                        torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=len(x)
                    )
                step.apply(optimizer, **apply)
            losses.append(step.loss)
        out["losses"], out["parameters"] = losses, [p.detach().clone() for p in model.parameters()]

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
            phases.append(run._replica.link.page.phase)
        phases.append(run._replica.link.page.phase)

    phases = []
    hf.start(main)
    assert phases == [Phase.DONE] * 2


def test_the_old_name_of_the_relaxed_watchdog_works_and_warns():
    def main(run):
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=4, micro_batch=4, until=1):
            with step:
                for x, y in step:
                    step.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"))
                step.apply(optimizer)
            with pytest.warns(DeprecationWarning, match=r"run\.relaxed_watchdog\(\)") as warned, run.aside():
                phases.append(run._replica.link.page.phase)
            assert warned[0].filename == __file__
            with run.relaxed_watchdog():
                phases.append(run._replica.link.page.phase)

    phases = []
    hf.start(main)
    assert phases == [Phase.ASIDE] * 2
