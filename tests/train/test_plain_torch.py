"""The oracle is plain torch: programs are drawn, and trained by an ordinary loop and by a job of one.

Both see the same micro-batches in the same order, and seed what draws random numbers in the same way. So they are to agree on
everything: bit by bit where a step has one micro-batch, and within rounding where autograd adds up several.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast as hf
from holdfast.data.order import SampleOrder
from holdfast.data.seeds import micro_seed, seed_generators

SAMPLES, MICRO, STEPS, WIDTH = 60, 3, 4, 6


class Points(torch.utils.data.Dataset):
    deterministic = True

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        return torch.randn(WIDTH, generator=rng), torch.tensor(i % 4), 1 + i % 3


class Branches(torch.nn.Module):
    """Uses one of its parts by what it sees, another in the first step alone, and one never."""

    def __init__(self):
        super().__init__()
        self.always, self.never = torch.nn.Linear(WIDTH, 4), torch.nn.Linear(WIDTH, 4)
        self.sometimes = torch.nn.Linear(WIDTH, 4)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        out = self.always(x)
        return out + self.sometimes(x) if float(x[0, 0]) > 0.5 or self.seen == 1 else out


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4)
        self.back = torch.nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.inner.weight

    def forward(self, x):
        return self.head(torch.tanh(self.back(torch.tanh(self.inner(x)))))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.GRU(2, 5, batch_first=True), torch.nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.cell(x.view(len(x), -1, 2))[0][:, -1])


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(1, 8), torch.nn.Linear(8, 4)
        self.attend, self.norm = (
            torch.nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True),
            torch.nn.LayerNorm(8),
        )

    def forward(self, x):
        x = self.embed(x[:, :, None])
        return self.head(self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1))


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head((x * self.turn).abs())


def frozen():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return model


MODELS = {
    "mlp": lambda: torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4)
    ),
    "batch norm": lambda: torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    ),
    "conv": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, WIDTH)),
        torch.nn.Conv1d(1, 3, 3),
        torch.nn.BatchNorm1d(3, momentum=None),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 4),
    ),
    "branches": Branches,
    "tied": Tied,
    "recurrent": Recurrent,
    "attention": Attention,
    "complex": Complex,
    "frozen": frozen,
}
optim = torch.optim
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: optim.ASGD(p, lr=0.05),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}
NO_COMPLEX = {"adamw fused", "adafactor", "rprop"}
SCHEDULERS = {
    "none": lambda o: None,
    "step": lambda o: StepLR(o, 2, 0.5),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=STEPS + 1, cycle_momentum=False),
    "cosine": lambda o: CosineAnnealingWarmRestarts(o, 2),
    "lambda": lambda o: LambdaLR(o, lambda n: 1 / (1 + n)),
    "sequential": lambda o: SequentialLR(o, [LambdaLR(o, lambda n: (n + 1) / 3), ExponentialLR(o, 0.9)], [2]),
    "chained": lambda o: ChainedScheduler([StepLR(o, 1, 0.9), ExponentialLR(o, 0.9)]),
}


class Program:
    """A drawn training, built anew for each side."""

    def __init__(self, model, optimizer, scheduler, groups, average, autocast, double):
        torch.manual_seed(0)
        self.model = MODELS[model]()
        if double and model != "complex":
            self.model.double()
        params = list(self.model.parameters())
        if groups:
            decays, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
            params = [{"params": decays}, {"params": others, "lr": 0.003}]
        self.optimizer = OPTIMIZERS[optimizer](params)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.average = (
            AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
            if average
            else None
        )
        self.autocast, self.dtype = autocast, next(self.model.parameters()).dtype
        self.without, self.rates, self.norms = [], [], []
        self.optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, *_):
        self.without.append([name for name, p in self.model.named_parameters() if p.grad is None])
        self.rates.append([group["lr"] for group in self.optimizer.param_groups])

    def loss(self, batch):
        x, y, weights = batch
        x = x if self.dtype.is_complex else x.to(self.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            out = self.model(x)
        losses = cross_entropy(out.float() if self.autocast else out, y, reduction="none")
        return (losses * weights).sum(), float(weights.sum())

    def also(self):
        if self.average is not None:
            self.average.update_parameters(self.model)


def plainly(program, micros, clip, seed):
    """The ordinary loop."""
    order, data, losses = SampleOrder(SAMPLES, seed), Points(), []
    for index in range(STEPS):
        program.optimizer.zero_grad()
        total, weight = 0.0, 0.0
        for micro in range(micros):
            begin = (index * micros + micro) * MICRO
            ids = order.at_many(torch.arange(begin, begin + MICRO).numpy())
            batch = torch.utils.data.default_collate([data[int(i)] for i in ids])
            seed_generators(micro_seed(seed, index, micro), torch.device("cpu"))
            loss, counted = program.loss(batch)
            total, weight = total + float(loss.detach()), weight + counted
            loss.backward()
        for p in program.model.parameters():
            if p.grad is not None:
                p.grad *= 1 / weight
        if clip is not None:
            program.norms.append(float(torch.nn.utils.clip_grad_norm_(program.model.parameters(), clip)))
        seed_generators(micro_seed(seed, index, micros), torch.device("cpu"))
        program.optimizer.step()
        if program.scheduler is not None:
            program.scheduler.step()
        program.also()
        losses.append(total / weight)
    return losses


def as_a_job(program, micros, clip, seed, reduction):
    """The same with a run."""
    losses = []

    def main(run):
        things = {"model": program.model, "optimizer": program.optimizer}
        things |= {} if program.scheduler is None else {"scheduler": program.scheduler}
        things |= {} if program.average is None else {"average": program.average}
        run.protect(**things)
        steps = run.steps(
            Points(),
            global_batch=micros * MICRO,
            micro_batch=MICRO,
            until=STEPS,
            seed=seed,
            reduction=reduction,
        )
        for step in steps:
            with step:
                for batch in step:
                    loss, weight = program.loss(batch)
                    step.backward(loss, weight=weight)
                step.apply(
                    program.optimizer, max_grad_norm=clip, scheduler=program.scheduler, also=program.also
                )
            losses.append(step.loss)
            if clip is not None:
                program.norms.append(step.grad_norm)

    hf.start(main)
    return losses


def state_of(program):
    things = (program.model, program.optimizer, program.scheduler, program.average)
    return [thing.state_dict() for thing in things if thing is not None]


def assert_alike(found, expected, path, exactly, tolerance):
    assert type(found) is type(expected), path
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype, path
        if exactly:
            assert torch.equal(found, expected), (path, (found - expected).abs().max())
        else:
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{path}: {m}"
            )
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), path
        for key in found:
            assert_alike(found[key], expected[key], f"{path}.{key}", exactly, tolerance)
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_alike(a, b, f"{path}.{i}", exactly, tolerance)
    elif isinstance(found, float):
        assert found == expected if exactly else math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-6), (
            path
        )
    elif isinstance(found, int | str | bool | None):
        assert found == expected, path


PROGRAMS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(list(MODELS)),
        "optimizer": st.sampled_from(list(OPTIMIZERS)),
        "scheduler": st.sampled_from(list(SCHEDULERS)),
        "groups": st.booleans(),
        "average": st.booleans(),
        "autocast": st.booleans(),
        "double": st.booleans(),
    }
)


def check(program, micros, clip, seed, reduction):
    if program["model"] == "complex":
        program = program | {"autocast": False, "groups": False}
        if program["optimizer"] in NO_COMPLEX:
            program = program | {"optimizer": "adamw"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, ours = Program(**program), Program(**program)
        expected = plainly(plain, micros, clip, seed)
        found = as_a_job(ours, micros, clip, seed, reduction)
    finally:
        torch.set_num_threads(threads)
    # What is decided, not computed, is the same in any case.
    assert ours.without == plain.without
    assert ours.rates == plain.rates
    # One micro-batch has nothing to be added up. A norm is summed in another order, and running statistics of several
    # micro-batches are computed from those that the step began with.
    exactly = micros == 1 and clip is None
    # Signs of a gradient near 0, and its square root, make large differences of the smallest ones.
    rough = program["optimizer"] in (
        "rprop",
        "adadelta",
        "rmsprop",
        "adamax",
        "adafactor",
        "radam",
        "nadam",
        "adam",
    )
    tolerance = 2e-2 if program["autocast"] or rough else 2e-3
    assert_alike(found, expected, "loss", False, tolerance)
    if clip is not None:
        assert ours.norms == pytest.approx(plain.norms, rel=1e-3)
    assert_alike(state_of(ours), state_of(plain), "", exactly, tolerance)


QUIETLY = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
DRAWN = {
    "program": PROGRAMS,
    "micros": st.sampled_from([1, 1, 2, 4]),
    "clip": st.sampled_from([None, None, 0.1, 100.0]),
    "seed": st.integers(0, 1000),
    "reduction": st.sampled_from(["fast", "exact"]),
}
PLAIN = {
    "model": "mlp",
    "optimizer": "sgd",
    "scheduler": "none",
    "groups": False,
    "average": False,
    "autocast": False,
    "double": False,
}


@given(**DRAWN)
@settings(max_examples=30, **QUIETLY)
@example(PLAIN | {"model": "branches"}, 2, None, 0, "fast")
@example(PLAIN | {"model": "branches", "optimizer": "adamw"}, 4, 0.1, 0, "exact")
@example(PLAIN | {"model": "batch norm"}, 4, None, 0, "fast")
@example(PLAIN | {"model": "conv"}, 4, None, 0, "fast")
@example(PLAIN | {"model": "complex"}, 2, 0.1, 0, "fast")
def test_a_job_of_one_trains_what_plain_torch_does(program, micros, clip, seed, reduction):
    check(program, micros, clip, seed, reduction)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_many_more_programs():
    """HOLDFAST_PROGRAMS: how many."""
    drawn = []

    @given(**DRAWN)
    @settings(max_examples=int(os.environ.get("HOLDFAST_PROGRAMS", "2000")), **QUIETLY)
    def many(program, micros, clip, seed, reduction):
        drawn.append(1)
        check(program, micros, clip, seed, reduction)

    many()
    print(f"{len(drawn)} programs were drawn")
