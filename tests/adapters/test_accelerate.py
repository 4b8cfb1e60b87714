"""Accelerate at level 2: what a job computes is what one undisturbed process computes, bit by bit."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import accelerate.logging
import accelerate.utils
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration
from ends import LIMIT_S, by_itself, ends
from harness import run
from resized import check, smaller_and_whole_again
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import holdfast.accelerate
from holdfast.accelerate import Accelerator
from holdfast.adapters.accelerate.accelerator import REFUSED, SPLITTING
from holdfast.errors import StateChanged, UsageError

SCRIPT = Path(__file__).parent / "train_accelerate.py"
STEPS = 18
"""Of train_accelerate.py: 96 samples, 16 of them in a step, 3 times."""

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("accelerate")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    """By one process, which computes all micro-batches of a step."""
    folder = tmp_path_factory.mktemp("alone")
    end = by_itself(folder, SCRIPT, folder, 4)
    assert end["committed"] == [*range(STEPS)]
    assert end["main"]
    assert sorted(map(int, end["evaluated"])) == [5, 11, 17]
    return end


def in_a_job(home: Path, *options: object, nodes: str = "2", worlds: tuple[int, ...] = (2,)) -> list[dict]:
    """By two workers. worlds: the sizes that the job begins with."""
    ran = run(home, "--nnodes", nodes, *options, SCRIPT, home / "out", 2, timeout=LIMIT_S)
    check(ran, *worlds)
    return longest_first(home)


def longest_first(home: Path) -> list[dict]:
    return sorted(ends(home / "out"), key=lambda end: -len(end["committed"]))


def assert_same(ended: list[dict], wanted: dict) -> None:
    """Each worker's state at the end, and all that it saw on the way."""
    for end in ended:
        assert (end["state"], end["rate"]) == (wanted["state"], wanted["rate"])
        assert end["committed"] == wanted["committed"][-len(end["committed"]) :]
        # A worker that leaves between its commit and its look at the step has no entry for that one.
        assert end["losses"].items() <= wanted["losses"].items()
        assert end["evaluated"].items() <= wanted["evaluated"].items()
    assert [end["main"] for end in ended].count(True) == 1


@pytest.mark.long
@pytest.mark.capability("level 2", "kill")
def test_a_killed_worker_changes_nothing(tmp_path, undisturbed):
    """The newcomer comes in the middle of an epoch."""
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", "kill-worker:rank=0,step=8")
    assert_same(ended, undisturbed)
    survivor, newcomer = ended
    assert survivor["committed"] == [*range(STEPS)]  # each step once
    assert len(survivor["losses"]) == STEPS
    assert 0 < len(newcomer["committed"]) < STEPS


@pytest.mark.nightly
@pytest.mark.capability("kill")
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "vote", "update", "commit"])
def test_a_kill_in_any_phase(tmp_path, undisturbed, phase):
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", f"kill-worker:rank=1,step=7,phase={phase}")
    assert len(ended) == 2
    assert_same(ended, undisturbed)


@pytest.mark.nightly
@pytest.mark.capability("resize")
def test_a_job_that_gets_smaller(tmp_path, undisturbed):
    fault = ("--fault", "kill-node:node=1,step=5")
    assert_same(in_a_job(tmp_path, *fault, nodes="1:2", worlds=(2, 1)), undisturbed)


@pytest.mark.nightly
@pytest.mark.capability("resize")
def test_a_job_that_gets_smaller_and_whole_again(tmp_path, monkeypatch, undisturbed):
    smaller_and_whole_again(tmp_path, monkeypatch, SCRIPT, tmp_path / "out", 2)
    assert_same(longest_first(tmp_path), undisturbed)


@pytest.mark.parametrize("version", ["1.1.1", "1.16.0"])
def test_a_version_that_is_not_supported_is_refused(monkeypatch, version):
    monkeypatch.setattr(accelerate, "__version__", version)
    with pytest.raises(UsageError, match=r"accelerate>=1\.2,<1\.16"):
        Accelerator()


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.fixture
def accelerator():
    PartialState._reset_state()
    AcceleratorState._reset_state()
    return Accelerator()


def prepared(accelerator) -> Accelerator:
    accelerator.prepare(torch.nn.Linear(2, 1))
    return accelerator


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_work_are_refused(accelerator, name):
    assert callable(getattr(accelerate.Accelerator, name))
    with pytest.raises(UsageError, match=rf"accelerator\.{name}\(\): .*; "):
        getattr(accelerator, name)(torch.nn.Linear(2, 1))


def test_a_loop_of_the_scripts_own_is_led_to_steps(accelerator):
    with pytest.raises(UsageError, match=r"outside of a step.*accelerator\.steps\(loader, until=N\)"):
        accelerator.backward(torch.zeros(()))


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (DataLoader(torch.zeros(4, 2), batch_size=2), "SequentialSampler"),
        (DataLoader(Stream()), "_InfiniteConstantSampler"),
        (DataLoader(torch.zeros(4, 2), sampler=RandomSampler(range(4), replacement=True)), "RandomSampler"),
        (DataLoader(torch.zeros(4, 2), sampler=RandomSampler(range(4), num_samples=2)), "num_samples=2"),
        ([torch.zeros(2)], "NoneType"),
    ],
)
def test_loaders_that_cannot_be_dealt(accelerator, loader, what):
    with pytest.raises(UsageError, match=what):
        next(prepared(accelerator).steps(loader, until=1))


def test_steps_before_prepare(accelerator):
    with pytest.raises(UsageError, match="does not have a model"):
        next(accelerator.steps(DataLoader(torch.zeros(4, 2), shuffle=True), until=1))


@pytest.mark.capability("sharded", refused=True)
@pytest.mark.parametrize("name", SPLITTING)
def test_plugins_that_split_a_model(name):
    with pytest.raises(UsageError, match=name):
        Accelerator(**{name: object()})


def test_batches_that_are_split_are_refused():
    PartialState._reset_state()
    AcceleratorState._reset_state()
    with pytest.raises(UsageError, match="split_batches"):
        Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))


def test_accelerates_own_fsdp_by_the_environment():
    """Set by `accelerate launch`: Accelerate would leave it out in a world of one, without a word."""
    code = "from holdfast.accelerate import Accelerator; Accelerator()"
    env = dict(os.environ, ACCELERATE_USE_FSDP="true")
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 1
    assert "not with `accelerate launch`" in ran.stderr


def test_the_seams_of_accelerate():
    for name in ("_models", "_optimizers", "_schedulers", "_custom_objects"):
        assert hasattr(Accelerator(), name)
    assert "self.__dict__ = self._shared_state" in inspect.getsource(PartialState.__init__)
    assert list(inspect.signature(accelerate.Accelerator.backward).parameters)[:2] == ["self", "loss"]


def test_an_update_of_the_scripts_own_is_found(accelerator):
    model, loader = torch.nn.Linear(2, 1), DataLoader(torch.ones(4, 2), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    with pytest.raises(StateChanged):  # noqa: PT012
        for step in accelerator.steps(loader, until=2):
            with step:
                for batch in step:
                    accelerator.backward(model(batch).mean())
                optimizer.step()
                step.apply(optimizer)


class Handle(torch.nn.Linear):
    """Holds something which cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def train(accelerator, model, optimizer) -> None:
    loader = DataLoader(torch.ones(4, 2), batch_size=2, shuffle=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in accelerator.steps(loader, until=1):
        with step:
            for batch in step:
                accelerator.backward(model(batch).mean())
            step.apply(optimizer)


def test_a_model_that_cannot_be_copied_trains_as_any_other(accelerator):
    model = Handle(2, 1)
    before = model.weight.detach().clone()
    train(accelerator, model, torch.optim.SGD(model.parameters(), 0.1))
    assert not torch.equal(model.weight, before)


def annealed(parameters) -> torch.optim.Optimizer:
    """It holds a closure, which would have to be saved."""
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.param_groups[0]["anneal"] = lambda rate: rate / 2
    return optimizer


@pytest.mark.parametrize(
    ("model", "optimizer", "what"),
    [
        (torch.nn.Linear, torch.optim.LBFGS, r"LBFGS\.step needs a closure"),
        (torch.nn.Linear, annealed, r"optimizer.*param_groups\.0\.anneal"),
        (
            lambda size, out: torch.nn.LazyLinear(out),
            lambda given: torch.optim.SGD(given, 0.1),
            "does not have a shape",
        ),
    ],
)
def test_what_cannot_be_protected_is_refused_before_a_step(accelerator, model, optimizer, what):
    made = model(2, 1)
    with pytest.raises(UsageError, match=what):
        train(accelerator, made, optimizer(made.parameters()))


def test_what_is_registered_belongs_to_the_state(accelerator):
    """And a second training under plain python has a run of its own."""
    model, loader = torch.nn.Linear(2, 1), DataLoader(torch.ones(4, 2), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
    accelerator.register_for_checkpointing(average)
    counted = []
    with pytest.raises(StateChanged, match=r"registered.*; or do not pass it to register_for_ch"):  # noqa: PT012
        for step in accelerator.steps(loader, until=3):
            with step:
                for batch in step:
                    accelerator.backward(model(batch).mean(), weight=2)
                step.apply(optimizer, also=lambda: average.update_parameters(model))
            counted.append(step.index)
            if step.index == 1:
                average.update_parameters(model)
    assert counted == [0, 1]


def test_a_buffer_without_a_rule_is_told_what_to_write(accelerator):
    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, given):
            self.calls += 1
            return super().forward(given)

    def train(**rules) -> float:
        model, loader = Counting(), DataLoader(torch.ones(4, 2), batch_size=2, shuffle=True)
        prepare = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in accelerator.steps(loader, until=2, **rules):
            with step:
                for batch in step:
                    accelerator.backward(prepare[0](batch).mean())
                step.apply(prepare[1])
        accelerator.free_memory()
        return float(model.calls)

    assert train(buffers={"model.calls": "sum"}) == 2
    with pytest.raises(UsageError, match=r"accelerator\.steps\(loader, until=N, buffers=\{\"model.calls\""):
        train()


# ------------------------------------------------------------ what scripts import beside the Accelerator

IMPORTED = [
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PartialState",
    "ProjectConfiguration",
    "find_executable_batch_size",
    "get_logger",
    "infer_auto_device_map",
    "init_empty_weights",
    "set_seed",
    "utils",
]


@pytest.mark.parametrize("name", IMPORTED)
def test_a_name_of_accelerates_is_there_too(name):
    wanted = next(m for m in (accelerate, accelerate.utils, accelerate.logging) if hasattr(m, name))
    assert getattr(holdfast.accelerate, name) is getattr(wanted, name)


@pytest.mark.parametrize("name", holdfast.accelerate.REFUSED)
def test_a_name_that_cannot_work_is_refused_where_it_is_imported(name):
    with pytest.raises(UsageError, match=rf"from holdfast\.accelerate import {name}: "):
        getattr(holdfast.accelerate, name)


def test_a_name_that_accelerate_has_not_is_no_name():
    with pytest.raises(ImportError, match="cannot import name 'Acelerator'"):
        from holdfast.accelerate import Acelerator  # noqa: F401


def test_what_is_for_ddp_is_ignored_with_a_line(caplog):
    handlers = [
        holdfast.accelerate.InitProcessGroupKwargs(backend="gloo"),
        holdfast.accelerate.DistributedDataParallelKwargs(find_unused_parameters=True),
    ]
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True, kwargs_handlers=handlers).num_processes == 1
    said = [record.getMessage() for record in caplog.records if "ignored" in record.msg]
    assert [text.partition(":")[0] for text in said] == [
        "InitProcessGroupKwargs, DistributedDataParallelKwargs"
    ]
