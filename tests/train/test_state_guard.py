"""Protected state changes in commits only: what is found, what is no change, and what also= does."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import holdfast as hf
from holdfast.errors import StateChanged, UsageError
from holdfast.tensors import staging
from holdfast.train import state_guard
from holdfast.train.buffer_rules import Advice


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        return torch.randn(4, generator=rng), torch.tensor(i % 3)


class Count:
    """State of the script's own."""

    def __init__(self):
        self.seen, self.best, self.row = 0, float("nan"), torch.zeros(3)

    def state_dict(self):
        return {"seen": self.seen, "best": float(self.best), "row": self.row}

    def load_state_dict(self, state):
        self.seen, self.best, self.row = state["seen"], state["best"], state["row"]


class Copies(Count):
    """Its `state_dict` gives copies."""

    def state_dict(self):
        return {"seen": self.seen, "row": self.row.clone()}


class Things:
    """What a script has, and where it may do something to it."""

    def __init__(self, network=None, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = network or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.average = average.requires_grad_(False)
        self.count, self.copies = Count(), Copies()
        self.more = {}

    def protected(self):
        names = ("model", "optimizer", "scheduler", "average", "count", "copies")
        return {name: getattr(self, name) for name in names} | self.more


def nothing(things, step):
    """The script does nothing there."""


def train(
    things, top=nothing, before=nothing, after=nothing, bottom=nothing, until=8, run=lambda run: None, also=()
):
    """A job of one. Each place is called with the things and the number of the step."""

    def main(r):
        things.run = r
        run(r)
        r.protect(**things.protected())
        for step in r.steps(Points(), global_batch=8, micro_batch=4, until=until):
            top(things, step.index)
            with step:
                for x, y in step:
                    step.backward(cross_entropy(things.model(x), y, reduction="sum"), weight=len(x))
                before(things, step.index)
                step.apply(things.optimizer, scheduler=things.scheduler, also=also)
                after(things, step.index)
            bottom(things, step.index)

    hf.start(main)


def average_by_data(things, step):
    for mine, theirs in zip(things.average.parameters(), things.model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def average_through_numpy(things, step):
    np.multiply(next(things.average.parameters()).numpy(), 0.9, out=next(things.average.parameters()).numpy())


def average_by_torch(things, step):
    things.average.update_parameters(things.model)


def one_row(things, step):
    with torch.no_grad():
        next(things.model.parameters())[7].mul_(0.5)


def count(things, step):
    things.count.seen += 1


def replace(things, step):
    things.count.row = things.count.row + 1


def replace_where_copies_are_given(things, step):
    things.copies.row = things.copies.row + 1


def schedule(things, step):
    if step:  # torch warns of one that is before the optimizer's first
        things.scheduler.step()


def set_rate(things, step):
    things.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def moments(things, step):
    next(iter(things.optimizer.state.values()))["exp_avg"].mul_(0.5)


CHANGES = [
    (average_by_torch, "average.", "average.update_parameters(model)"),
    (average_by_data, "average.module.", "also=lambda: average.update_parameters(model)"),
    (average_through_numpy, "average.module.0.weight", "also="),
    (one_row, "model.0.weight", "also="),
    (count, "count.seen", "also=lambda: update(count)"),
    (replace, "count.row", "also="),
    (replace_where_copies_are_given, "copies.row", "also="),
    (schedule, "", "step.apply(optimizer, scheduler=scheduler)"),
]


@pytest.mark.parametrize(("change", "path", "remedy"), CHANGES, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.parametrize("place", ["before", "bottom"])
def test_a_change_outside_of_the_commit_is_found_in_the_first_steps(change, path, remedy, place):
    # The average's first update copies the weights that it was made of: in step 0 that changes nothing.
    with pytest.raises(StateChanged) as caught:
        train(Things(), **{place: change}, until=3)
    text = str(caught.value)
    assert text.startswith(path)
    assert remedy in text
    if place == "bottom":
        first = 1 if change is schedule else 0
        assert f"changed between step {first}'s commit and step {first + 1}" in text
    else:
        assert "before step.apply" in text


@pytest.mark.parametrize("change", [set_rate, moments])
def test_what_an_optimizer_holds_does_not_change_after_the_commit(change):
    with pytest.raises(StateChanged, match=r"optimizer\.(param_groups\.0\.lr|state\.0\.exp_avg) changed"):
        train(Things(), after=change, until=3)


def test_a_change_before_the_with_is_found():
    with pytest.raises(StateChanged, match=r"count\.seen changed in step 0 before step\.apply"):
        train(Things(), top=count, until=3)


@pytest.mark.parametrize(
    "change", [average_by_torch, average_by_data, one_row, count, replace], ids=lambda x: x.__name__
)
def test_a_change_that_begins_late_is_found_too(change):
    def late(things, step):
        if step >= 20:
            change(things, step)

    with pytest.raises(StateChanged, match=r"step (20|21|22|23)'s commit"):
        train(Things(), bottom=late, until=60)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("place", ["before", "bottom"])
def test_a_single_write_of_one_parameter_is_found(index, another, place):
    """At most one of the four has a part of it compared in that step without a sign."""

    def once(things, step):
        parameter = list(things.model.parameters())[index]
        if step == 20 and another:
            parameter.data = 0.5 * parameter.data
        elif step == 20:
            with torch.no_grad():
                parameter.mul_(0.5)

    with pytest.raises(StateChanged, match=r"model\.[01]\.\w+ changed (between step 20's commit|in step 20)"):
        train(Things(), **{place: once}, until=24)


ELEMENTS = {
    "model.1.weight": lambda things: things.model[1].weight,
    "model.2.running_var": lambda things: things.model[2].running_var,
    "average.module.0.bias": lambda things: things.average.module[0].bias,
    "average.module.2.running_mean": lambda things: things.average.module[2].running_mean,
    "optimizer.state.2.exp_avg_sq": lambda things: things.optimizer.state[things.model[1].weight][
        "exp_avg_sq"
    ],
    "count.row": lambda things: things.count.row,
}


@pytest.mark.parametrize("path", ELEMENTS)
@pytest.mark.parametrize("step", [3, 10, 30])
def test_one_element_that_is_written_once_is_found_in_any_step(path, step):
    def write(things, at):
        if at == step:
            with torch.no_grad():
                ELEMENTS[path](things).view(-1)[-1] += 1e-6

    network = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3).requires_grad_(False).eval()
    )
    with pytest.raises(
        StateChanged, match=rf"{path} changed between step {step}'s commit and step {step + 1}:"
    ):
        train(Things(network), bottom=write, until=step + 4)


def test_what_torch_does_not_count_is_found_when_its_tensor_has_its_turn():
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), *(torch.nn.Linear(3, 3) for _ in range(39)))

    def write(things, step):
        if step >= 10:
            things.model[20].weight.data.mul_(0.999)

    with pytest.raises(StateChanged, match=r"model\.20\.weight changed between step (\d+)'s") as caught:
        train(Things(network, torch.optim.SGD), bottom=write, until=40)
    assert int(str(caught.value).split("step ")[1].split("'")[0]) <= 10 + 80 / state_guard.PIECES


def test_a_commit_that_somebody_else_makes_is_found():
    """Moments of more tensors than are looked at in a step have moved with the parameters."""
    with pytest.raises(StateChanged, match=r"model\.0\.weight changed between step 5"):
        train(Things(), bottom=lambda things, step: step == 5 and things.optimizer.step(), until=8)


def swap(things, step):
    kept = [p.detach().clone() for p in things.model.parameters()]
    with torch.no_grad():
        for p, q in zip(things.model.parameters(), things.average.parameters(), strict=True):
            p.copy_(q)
        for p, old in zip(things.model.parameters(), kept, strict=True):
            p.copy_(old)


def swap_where_it_may(things, step):
    with things.run.relaxed_watchdog():
        swap(things, step)


def swap_by_data(things, step):
    for p, q in zip(things.model.parameters(), things.average.parameters(), strict=True):
        p.data, q.data = q.data, p.data
    for p, q in zip(things.model.parameters(), things.average.parameters(), strict=True):
        p.data, q.data = q.data, p.data


@pytest.mark.parametrize("step", [0, 3, 4, 9])
def test_a_swap_whose_content_nobody_compares_is_told_where_it_goes(step):
    with pytest.raises(
        StateChanged, match=r"model\.0\.weight changed .* inside `with run\.relaxed_watchdog\(\):`"
    ):
        train(Things(), bottom=lambda things, at: swap(things, at) if at == step else None, until=12)


def test_a_swap_that_puts_back_something_else_is_found():
    def swap_almost(things, step):
        with things.run.relaxed_watchdog():
            swap(things, step)
            if step == 9:
                list(things.model.parameters())[2].data[1, 2] += 1e-6

    with pytest.raises(StateChanged, match=r"model\.1\.weight changed between step 9's commit and step 10"):
        train(Things(), bottom=swap_almost, until=12)


def evaluate(things, step):
    things.model.eval()
    with torch.no_grad():
        things.model(torch.randn(5, 4))
        things.average(torch.randn(5, 4))
    things.model.train()


def evaluate_alone(things, step):
    things.model.eval()
    with torch.no_grad():
        things.model(torch.randn(5, 4))
    things.model.train()


def norms():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


class Tally(torch.nn.Module):
    """Counts what it sees, in a buffer: as routers of experts do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x):
        self.seen += len(x)
        self.cache += 1
        return self.inner(x)


@pytest.mark.parametrize(
    ("network", "options", "places"),
    [
        (None, {}, {"bottom": evaluate}),
        (None, {}, {"bottom": swap_where_it_may}),
        (None, {}, {"top": swap_where_it_may}),
        (None, {}, {"top": swap_by_data}),
        (None, {}, {"top": set_rate}),
        (None, {}, {"before": set_rate}),
        (None, {"fused": True}, {}),
        (None, {"foreach": True}, {}),
        (norms, {}, {"bottom": evaluate, "run": lambda run: run.buffers("mean", "*.1.*")}),
        (
            norms,
            {},
            {
                "bottom": lambda things, step: things.model(torch.randn(5, 4)),
                "run": lambda run: run.buffers("restore", "model.1.*"),
            },
        ),
        (
            norms,
            {},
            {
                "bottom": lambda things, step: update_bn([torch.randn(5, 4)], things.average),
                "run": lambda run: (
                    run.buffers("own", "model.*"),
                    run.buffers("restore", "average.module.*"),
                ),
            },
        ),
        (Tally, {}, {"bottom": evaluate, "run": lambda run: run.buffers("sum", "*.seen")}),
    ],
)
def test_a_correct_script_is_left_alone(network, options, places):
    things = Things(network and network(), **options)
    train(things, **places, also=lambda: things.average.update_parameters(things.model), until=8)
    assert int(things.average.n_averaged) == 8


class Rows(torch.nn.Module):
    """State without parameters: an average in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("row", torch.zeros(3))

    def change(self, things, step):
        self.row += 1


def test_buffers_of_a_module_without_parameters_are_state_unless_they_are_each_workers_own():
    things = Things()
    things.more["rows"] = Rows()
    with pytest.raises(StateChanged, match=r"rows\.row changed between step 0's commit and step 1"):
        train(things, bottom=things.more["rows"].change, until=3)
    things = Things()
    things.more["rows"] = Rows()
    own = things.more["rows"].change
    train(things, before=own, bottom=own, until=3, run=lambda run: run.buffers("own", "rows.row"))
    assert float(things.more["rows"].row[0]) == 6


@pytest.mark.parametrize(
    ("network", "path", "line"),
    [
        (
            Tally,
            r"model\.seen",
            r'run\.buffers\("mean", "model\.seen"\).*run\.buffers\("sum", "model\.seen"\) for a count',
        ),
    ],
)
def test_a_forward_pass_that_changes_buffers_without_a_rule_is_told_the_line(network, path, line):
    with pytest.raises(StateChanged, match=rf"{path} changed in step 0 before step\.apply.*write {line}"):
        train(Things(network()), until=3)


class Trainers(Advice):
    """Of a trainer whose user has no step and no run."""

    def buffer(self, rule, path):
        return f"Trainer({path}={rule})"

    def commit(self, call):
        return f"Trainer(call={call})"

    def unprotected(self, name):
        return None


def test_the_advice_is_that_of_the_adapter():
    with pytest.raises(StateChanged) as caught:
        train(Things(Tally()), until=3, run=lambda run: setattr(run, "advice", Trainers()))
    text = str(caught.value)
    assert "write Trainer(model.seen=mean) before training" in text
    assert "Trainer(model.seen=sum) for a count" in text
    assert "Make the change in the commit: Trainer(call=update(model));" in text
    assert "run." not in text


def test_buffers_of_an_average_change_in_commits_only():
    with pytest.raises(StateChanged, match=r"average\.module\.1\.running_mean changed between"):
        train(
            Things(norms()),
            run=lambda run: run.buffers("mean", "model.*"),
            bottom=lambda things, step: update_bn([torch.randn(5, 4)], things.average),
            until=3,
        )


def another_weight(things, step):
    if step == 5:
        things.model[0].weight = torch.nn.Parameter(things.model[0].weight.detach().clone())


def another_buffer(things, step):
    if step == 5:
        things.average.n_averaged = things.average.n_averaged + 1


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (another_weight, r"model\.0\.weight"),
        (another_buffer, r"average\.n_averaged"),
    ],
)
def test_what_is_replaced_by_another_is_found(change, path):
    with pytest.raises(StateChanged, match=rf"{path} changed between step [567]'s"):
        train(Things(), bottom=change, also=lambda: None, until=10)


def add_module(things):
    things.model.add_module("late", torch.nn.Linear(3, 3))


def add_parameter(things):
    things.model[0].register_parameter("late", torch.nn.Parameter(torch.zeros(3)))


def put_where_none_was(things):
    things.model[1].bias = torch.nn.Parameter(torch.zeros(3))


def put_another_module(things):
    things.model[1] = torch.nn.Sequential(torch.nn.Linear(8, 3))


def add_buffer(things):
    things.average.module[0].register_buffer("late", torch.zeros(3))


def add_group(things):
    things.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def add_to_group(things):
    things.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize("place", ["before", "bottom"])
@pytest.mark.parametrize(
    ("add", "path"),
    [
        (add_module, "model.late.weight"),
        (add_parameter, "model.0.late"),
        (put_where_none_was, "model.1.bias"),
        (put_another_module, "model.1.0.weight"),
        (add_buffer, "average.module.0.late"),
        (add_group, "optimizer.param_groups.1"),
        (add_to_group, "optimizer.param_groups.0.params.3"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_added_after_the_first_step_is_named(add, path, place):
    things = Things(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3, bias=False)))
    when = {"before": "in step 4 before step.apply", "bottom": "between step 4's commit and step 5"}[place]
    with pytest.raises(StateChanged, match=f"^{path} was added {when}"):
        train(things, **{place: lambda things, step: add(things) if step == 4 else None})


def test_what_is_added_without_state_is_left_alone():
    """A metric, say, and what a module keeps for itself."""

    def add(things, step):
        things.model[0].register_module(f"metric{step}", torch.nn.CrossEntropyLoss())
        things.model[0].register_buffer(f"cache{step}", torch.zeros(3), persistent=False)

    train(Things(), before=add, bottom=add)


def test_an_optimizer_trains_protected_modules_only():
    things = Things()
    head = torch.nn.Linear(3, 3)
    things.more = {"second": torch.optim.SGD(head.parameters(), 0.1)}
    words = r"run\.protect\(second=.*second\.param_groups\.0\.params\.0, of shape \(3, 3\), which does not belong to a protected module"
    with pytest.raises(UsageError, match=words):
        train(things)
    head.requires_grad_(False)
    train(things)


def test_an_optimizer_that_calls_the_model_is_refused():
    with pytest.raises(UsageError, match=r"LBFGS\.step needs a closure"):
        train(Things(optimizer=torch.optim.LBFGS))


def test_also_is_called_once_for_every_step_in_its_order_after_the_scheduler():
    things, called = Things(), []

    def first():
        called.append(("first", things.scheduler.last_epoch, float(torch.rand(()))))

    def run():
        things, drawn = Things(), []
        train(things, also=[lambda: drawn.append(float(torch.rand(()))), things.count.__init__], until=3)
        return drawn

    train(things, also=[first, lambda: called.append("second")], until=3)
    assert [c if isinstance(c, str) else c[:2] for c in called] == [
        ("first", 1),
        "second",
        ("first", 2),
        "second",
        ("first", 3),
        "second",
    ]
    assert run() == run() == [c[2] for c in called if c != "second"]


@pytest.mark.parametrize("change", [average_by_data, one_row, replace], ids=lambda x: x.__name__)
def test_what_lies_on_an_accelerator_is_added_up_there(change, monkeypatch):
    monkeypatch.setattr(staging, "FAR", {"cpu"})  # as if it were a GPU's
    with pytest.raises(StateChanged, match="between step 0's commit and step 1"):
        train(Things(), bottom=change, until=3)
    things = Things()
    train(
        things, bottom=swap_where_it_may, also=lambda: things.average.update_parameters(things.model), until=8
    )


@pytest.mark.parametrize(("also", "kind"), [([1.0], "float"), (1.0, "float"), (None, "NoneType")])
def test_what_cannot_be_called_is_refused_with_an_example(also, kind):
    things = Things()
    with pytest.raises(
        UsageError, match=rf"step\.apply\(also=\.\.\.\): a {kind} is not callable; pass a func"
    ):
        train(things, also=also)


def test_an_error_in_also_is_the_scripts():
    things = Things()

    def fail():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(things, also=fail)


def test_two_optimizers_may_take_turns_or_step_together():
    def main(run):
        torch.manual_seed(0)
        made = [torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in made]
        run.protect(a=made[0], b=made[1], c=optimizers[0], d=optimizers[1])
        was = copy.deepcopy(made)
        for step in run.steps(Points(), global_batch=8, micro_batch=4, until=3):
            with step:
                for x, y in step:
                    loss = cross_entropy(made[1](made[0](x)), y, reduction="sum")
                    step.backward(loss, weight=len(x))
                if step.index < 2:
                    step.apply(optimizers[step.index])
                else:
                    step.apply(optimizers[0], also=optimizers[1].step)
            now = [not torch.equal(m.weight, w.weight) for m, w in zip(made, was, strict=True)]
            changed.append(now)

    changed = []
    hf.start(main)
    assert changed == [[True, False], [True, True], [True, True]]


class Counting:
    """A schedule without a state_dict, which counts its calls."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    def step(self):
        self.calls += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.calls)


class BySamples(Counting):
    """One that computes from what is counted for it."""

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 0.9


def once(things, also=(), **apply):
    """A job of one of two steps, of which these things are protected: model and optimizer."""

    def main(run):
        run.protect(model=things.model, optimizer=things.optimizer)
        for step in run.steps(Points(), global_batch=8, micro_batch=4, until=2):
            with step:
                for x, y in step:
                    step.backward(cross_entropy(things.model(x), y, reduction="sum"), weight=len(x))
                step.apply(**{"optimizer": things.optimizer, "also": also} | apply)

    hf.start(main)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda t: {"scheduler": t.scheduler}, r"scheduler=\.\.\.\): this StepLR is not protected"),
        (
            lambda t: {"optimizer": torch.optim.SGD(t.model.parameters())},
            r"optimizer=\.\.\.\): this SGD is not",
        ),
        (lambda t: {"scheduler": Counting(t.optimizer)}, r"keeps a count in its attribute calls"),
        (lambda t: {"also": lambda: t.average.update_parameters(t.model)}, None),
        (lambda t: {"also": t.scheduler.step}, r"also=\.\.\.\) uses StepLR, a StepLR that is not protected"),
        (lambda t: {"also": (lambda s: lambda: s.step())(t.scheduler)}, r"uses s, a StepLR that is not"),
        (lambda t: {"also": (lambda s: lambda s=s: s.step())(t.scheduler)}, r"uses s, a StepLR that is not"),
        (
            lambda t: {"also": (lambda a, m: lambda: a.update_parameters(m))(t.average, t.model)},
            r"uses a, an AveragedModel that is not protected",
        ),
        (
            lambda t: {
                "also": (lambda m: lambda: m.requires_grad_(False).weight.mul_(0.9))(torch.nn.Linear(2, 2))
            },
            r"changed m, a Linear that is not protected",
        ),
        (
            lambda t: {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer)},
            r"ReduceLROnPlateau needs a metric.*also=lambda: scheduler\.step\(step\.loss\)",
        ),
    ],
)
def test_what_a_commit_uses_is_protected(given, said):
    things = Things()
    if said is None:  # reached through an object of the script's own: not seen
        once(things, **given(things))
        return
    with pytest.raises(UsageError, match=said):
        once(things, **given(things))


def test_what_a_commit_only_reads_need_not_be_protected():
    things, teacher, seen = Things(), torch.nn.Linear(2, 2), []
    once(things, also=lambda: seen.append(teacher.weight.sum().item()), scheduler=BySamples(things.optimizer))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.Embedding(4, 2, sparse=True), r"model\.0|0 is Embedding with sparse=True"),
        (torch.nn.Embedding(4, 2, max_norm=1.0), r"max_norm=1\.0"),
        (torch.nn.SyncBatchNorm(3), r"SyncBatchNorm, which computes its statistics"),
    ],
)
def test_modules_that_would_train_otherwise_are_refused_by_name(module, said):
    with pytest.raises(UsageError, match=said):
        hf.start(lambda run: run.protect(model=torch.nn.Sequential(module)))


MEANS = {
    "mean": lambda out, y: cross_entropy(out, y),
    "mean over steps": lambda out, y: cross_entropy(out, y) / 2,
    "plain mean": lambda out, y: (out - y[:, None]).square().mean(),
    "sum": lambda out, y: cross_entropy(out, y, reduction="sum"),
    "mean times weight": lambda out, y: cross_entropy(out, y) * len(y),
    "share": lambda out, y: cross_entropy(out, y) / 2,
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_with_a_weight_is_told_once(kind, recwarn):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def main(run):
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=8, micro_batch=4, until=3):
            with step:
                for x, y in step:
                    weight = 1 / 2 if kind == "share" else len(x)
                    step.backward(MEANS[kind](model(x), y), weight=weight)
                step.apply(optimizer)

    hf.start(main)
    told = [str(w.message) for w in recwarn if "this loss is a mean" in str(w.message)]
    assert len(told) == (kind in ("mean", "mean over steps", "plain mean"))


def test_batch_norms_need_no_word_and_what_changes_them_between_steps_is_found():
    things = Things(norms())
    things.average.eval()
    train(things, bottom=evaluate_alone, also=lambda: things.average.update_parameters(things.model), until=4)
    assert int(things.model[1].num_batches_tracked) == 8  # two micro-batches a step
    with pytest.raises(
        StateChanged, match=r"model\.1\.running_mean changed between step 3's .* call model\.eval\(\)"
    ):
        train(Things(norms()), bottom=lambda t, step: step == 3 and t.model(torch.randn(5, 4)), until=6)
