"""What holdfast.transformers refuses, before anything is trained, and the seams of transformers that it stands on."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
import transformers
from bodies import digest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_callback import ExportableState

import holdfast
import holdfast.transformers as adapter
from holdfast.adapters import world
from holdfast.adapters.huggingface import arguments
from holdfast.adapters.huggingface import trainer as trainer_module
from holdfast.adapters.versions import TRANSFORMERS
from holdfast.errors import StateChanged, UsageError


class Four(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": torch.ones(2), "labels": torch.ones(1)}


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.line(x) - labels).square().mean()}


def args(folder, **options):
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", max_steps=1, **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "no", "save_strategy": "no"},
            "load_best_model_at_end",
        ),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"optim": "lomo"}, "optim=lomo"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "lr_scheduler_type"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, "lr_scheduler_type=greedy"),
        ({"optim": "schedule_free_adamw"}, "optim=schedule_free_adamw"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy=sequential"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path, options, what):
    with pytest.raises(UsageError, match=what):
        arguments.refuse(args(tmp_path, **options), Four())


def from_the_command_line(folder):
    words = [
        "--output_dir",
        folder,
        "--max_steps",
        1,
        "--use_cpu",
        True,
        "--report_to",
        "none",
        "--local_rank",
        0,
    ]
    words += ["--ddp_backend", "gloo", "--ddp_timeout", 300, "--ddp_find_unused_parameters", False]
    (found,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([str(word) for word in words])
    return found


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda folder: args(folder, ddp_backend="nccl", ddp_bucket_cap_mb=10, local_rank=0, fsdp=""),
            "ddp_bucket_cap_mb=10, ddp_backend=nccl: ignored",
        ),
        (
            from_the_command_line,
            "ddp_find_unused_parameters=False, ddp_backend=gloo, ddp_timeout=300: ignored",
        ),
        (lambda folder: args(folder, ddp_broadcast_buffers=False), "ddp_broadcast_buffers=False: ignored"),
    ],
)
def test_what_is_for_ddp_is_ignored_with_a_line(tmp_path, caplog, make, told):
    trainer = adapter.Trainer(model=Line(), args=make(tmp_path), train_dataset=Four())
    assert trainer.train().global_step == 1
    assert [told in record.getMessage() for record in caplog.records if "ignored" in record.msg] == [True]


def test_nothing_is_said_of_ddp_where_nothing_was_set(tmp_path):
    assert arguments.of_ddp(args(tmp_path, local_rank=0, fsdp="")) == {}


def test_a_reference_model_that_follows_the_trained_one_is_refused(tmp_path):
    own = args(tmp_path)
    own.sync_ref_model = True  # of TRL's DPOConfig
    with pytest.raises(UsageError, match="sync_ref_model=True: it changes the reference model"):
        arguments.refuse(own, Four())


@pytest.mark.framework("transformers")
@pytest.mark.capability("sharded", refused=True)
def test_sharding_is_refused_with_the_way_to_it(tmp_path):
    with pytest.raises(UsageError, match=r"fsdp=.*holdfast\.start"):
        arguments.refuse(args(tmp_path, fsdp=True), Four())


def test_all_that_cannot_work_is_said_at_once(tmp_path):
    with pytest.raises(UsageError) as error:
        arguments.refuse(args(tmp_path, optim="lomo", auto_find_batch_size=True), Stream())
    assert str(error.value).count("\n") == 3


def test_a_stream_is_refused_by_train(tmp_path):
    trainer = adapter.Trainer(model=Line(), args=args(tmp_path), train_dataset=Stream())
    with pytest.raises(UsageError, match="map-style"):
        trainer.train()


def test_parameters_that_appear_later_are_refused(tmp_path):
    model = Line()
    model.line = torch.nn.LazyLinear(1)
    trainer = adapter.Trainer(model=model, args=args(tmp_path), train_dataset=Four())
    with pytest.raises(UsageError, match=r"line\.weight does not have a shape"):
        trainer.train()


def test_a_rule_for_a_buffer_that_is_not_there_is_refused(tmp_path):
    kind = adapter.wrap(transformers.Trainer, buffers={"model.seen": "sum"})
    trainer = kind(model=Line(), args=args(tmp_path), train_dataset=Four())
    line = r'wrap\(Trainer, buffers=\{"model\.seen": "sum"\}\): none of the protected modules has a buffer of this name'
    with pytest.raises(UsageError, match=line):
        trainer.train()


def test_what_a_job_does_by_itself_is_refused(tmp_path):
    trainer = adapter.Trainer(model=Line(), args=args(tmp_path), train_dataset=Four())
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(UsageError, match="resume_from_checkpoint"):
        trainer._init_training_state(1, 1, 1, str(tmp_path / "checkpoint-1"), None)


@pytest.mark.parametrize("version", ["1.9.2", "1.17.0"])
def test_a_version_of_trl_that_is_not_supported_is_refused(monkeypatch, version):
    kind = type("SFTTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.sft_trainer"})
    versions = {"trl": version}
    monkeypatch.setattr(trainer_module.metadata, "version", versions.__getitem__)
    with pytest.raises(UsageError, match=r"pip install 'trl>=1\.10,<1\.17'"):
        adapter.wrap(type("Mine", (kind,), {}))


@pytest.mark.parametrize("version", ["0.20.0", "0.22.0"])
def test_a_version_of_peft_that_is_not_supported_is_refused(tmp_path, monkeypatch, version):
    monkeypatch.setattr(trainer_module, "is_peft_model", lambda model: True)
    real = trainer_module.metadata.version
    monkeypatch.setattr(
        trainer_module.metadata, "version", lambda name: version if name == "peft" else real(name)
    )
    with pytest.raises(UsageError, match=r"pip install 'peft>=0\.21,<0\.22'"):
        adapter.Trainer(model=Line(), args=args(tmp_path), train_dataset=Four())


def test_a_trainer_with_a_loop_of_its_own_is_refused():
    class Own(transformers.Trainer):
        def _run_epoch(self, *args, **kwargs):
            """Another loop."""

    with pytest.raises(UsageError, match=r"Own.*_run_epoch"):
        adapter.wrap(Own)
    with pytest.raises(UsageError, match="must be a subclass of"):
        adapter.wrap(dict)


@pytest.mark.parametrize("version", ["4.57.0", "5.19.1", "5.25.0", "6.0"])
def test_other_versions_are_refused(version):
    with pytest.raises(UsageError, match=version):
        TRANSFORMERS.check(version, "holdfast.transformers")


def test_a_scheduler_of_the_scripts_own_that_looks_at_a_metric_is_refused(tmp_path):
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizers = (optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    trainer = adapter.Trainer(model=model, args=args(tmp_path), train_dataset=Four(), optimizers=optimizers)
    with pytest.raises(UsageError, match="ReduceLROnPlateau"):
        trainer.train()


class Twice(BatchSampler):
    """Batches of the script's own, which has a shuffling sampler as well."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


SHUFFLED = RandomSampler(range(4))
LOADERS = {
    "WeightedRandomSampler": lambda: DataLoader(Four(), sampler=WeightedRandomSampler([1.0] * 4, 4)),
    "SequentialSampler": lambda: DataLoader(Four()),
    r"RandomSampler\(replacement=True\)": lambda: DataLoader(Four(), sampler=RandomSampler(range(4), True)),
    r"RandomSampler\(num_samples=2\) of 4": lambda: DataLoader(
        Four(), sampler=RandomSampler(range(4), num_samples=2)
    ),
    "Skewed": lambda: DataLoader(Four(), sampler=type("Skewed", (RandomSampler,), {})(range(4))),
    "Twice": lambda: DataLoader(Four(), batch_sampler=Twice(SHUFFLED, 2, False)),
    "batches of 4 samples, but a micro-batch has 2: set per_device_train_batch_size=4": lambda: DataLoader(
        Four(), batch_size=4, shuffle=True
    ),
}


@pytest.mark.parametrize("what", LOADERS)
def test_samples_of_the_scripts_own_choice_are_refused(tmp_path, what):
    class Own(transformers.Trainer):
        def get_train_dataloader(self):
            return LOADERS[what]()

    own = args(tmp_path, per_device_train_batch_size=2)
    trainer = adapter.wrap(Own)(model=Line(), args=own, train_dataset=Four())
    with pytest.raises(UsageError, match=what):
        trainer.train()


def test_a_loader_of_the_scripts_own_that_shuffles_trains(tmp_path):
    class Own(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(Four(), batch_size=2, shuffle=True)

    own = args(tmp_path, per_device_train_batch_size=2)
    assert adapter.wrap(Own)(model=Line(), args=own, train_dataset=Four()).train().global_step == 1


def test_means_of_each_device_are_refused_where_there_are_several(tmp_path):
    own = args(tmp_path, average_tokens_across_devices=False)
    arguments.refuse(own, Four())
    with pytest.raises(UsageError, match=r"average_tokens_across_devices=False: .*; remove it"):
        arguments.refuse(own, Four(), workers=2)


def test_the_gpu_of_another_worker_is_refused(tmp_path):
    second = SimpleNamespace(device=torch.device("cpu", 1), rank=1)
    with pytest.raises(UsageError, match="cpu:1"):
        arguments.follow(args(tmp_path), second, 1)


def test_a_process_that_loads_data_is_in_no_job(monkeypatch):
    """It imports the script, for the class of the dataset."""
    monkeypatch.setattr(world, "is_decoder", lambda: True)
    world.enter()
    with pytest.raises(UsageError, match="__main__"):
        world.own_run()


# ------------------------------------------------------------ without a job


def test_two_trainings_of_a_script_without_a_job(tmp_path):
    """Each is a run of its own, with the same arguments."""
    same = args(tmp_path)
    for _ in range(2):
        trainer = adapter.Trainer(model=Line(), args=same, train_dataset=Four())
        assert trainer.train().global_step == 1
    assert type(pickle.loads(pickle.dumps(same))) is TrainingArguments


def test_two_trainings_of_a_model(tmp_path):
    """The first one's hooks are gone."""
    trainer = adapter.Trainer(model=Line(), args=args(tmp_path), train_dataset=Four())
    for _ in range(2):
        assert trainer.train().global_step == 1
    for parameter in trainer.model.parameters():
        assert len(parameter._post_accumulate_grad_hooks) == 1


def test_trainers_in_main_take_the_run_of_main(tmp_path):
    """The first one; without a job, a second training has a run of its own."""
    runs = []

    def main(run):
        for _ in range(2):
            trainer = adapter.Trainer(model=Line(), args=args(tmp_path), train_dataset=Four())
            assert trainer.train().global_step == 1
            runs.append((trainer._holdfast_run is run, trainer._holdfast_run))

    holdfast.start(main)
    (first, one), (second, other) = runs
    assert (first, second) == (True, False)
    assert one is not other
    outside = adapter.Trainer(model=Line(), args=args(tmp_path), train_dataset=Four())
    assert outside._holdfast_run is not one


class Whole(torch.nn.Linear):
    """A module that holds something which cannot be copied, such as a lock or a handle."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def test_a_model_that_cannot_be_copied_trains_as_any_other(tmp_path):
    model = Line()
    model.line = Whole(2, 1)
    trainer = adapter.Trainer(model=model, args=args(tmp_path), train_dataset=Four())
    assert trainer.train().global_step == 1


def test_an_optimizer_that_holds_a_closure_is_refused(tmp_path):
    """It would have to be saved."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["anneal"] = lambda rate: rate / 2
    optimizers = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    trainer = adapter.Trainer(model=model, args=args(tmp_path), train_dataset=Four(), optimizers=optimizers)
    before = model.line.weight.detach().clone()
    with pytest.raises(UsageError, match=r"optimizer\.param_groups\.0\.anneal"):
        trainer.train()
    assert torch.equal(model.line.weight, before)


class Tokens(Dataset):
    """None of the first sample's counts."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        tokens = torch.arange(4)
        return {"input_ids": tokens, "labels": tokens if index else torch.full((4,), -100)}


def test_a_micro_batch_in_which_no_token_counts(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = adapter.Trainer(
        model=transformers.LlamaForCausalLM(config), args=args(tmp_path, **options), train_dataset=Tokens()
    )
    assert 0 < trainer.train().training_loss < 10


class Halving(transformers.TrainerCallback):
    """Changes the model after each step."""

    def on_step_end(self, args, state, control, model=None, **more):
        halve(model)


def halve(model):
    with torch.no_grad():
        model.line.weight.mul_(0.5)


def three_steps(folder, kind, **options):
    given = args(folder)
    given.max_steps = 3
    model = Line()
    with torch.no_grad():
        model.line.weight.fill_(1.0)
    kind(model=model, args=given, train_dataset=Four(), **options).train()
    return model


def test_a_callback_that_changes_the_model_is_told_what_to_write(tmp_path):
    with pytest.raises(StateChanged) as caught:
        three_steps(tmp_path, adapter.Trainer, callbacks=[Halving()])
    text = str(caught.value)
    assert "wrap(Trainer, on_commit=lambda step: update(model))" in text
    assert "step.apply(optimizer" not in text
    assert "run.protect" not in text


def test_what_is_written_so_is_part_of_the_commit(tmp_path):
    seen, models = [], []

    class Keeping(transformers.Trainer):
        def __init__(self, *args, model, **options):
            models.append(model)
            super().__init__(*args, model=model, **options)

    def change(step):
        seen.append(step.index)
        halve(models[0])

    model = three_steps(tmp_path, adapter.wrap(Keeping, on_commit=change))
    assert seen == [0, 1, 2]
    assert model.line.weight.max() < 0.2


# ------------------------------------------------------------ tokens, as TRL's trainers count them


class Masked(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.ones(2), "labels": torch.ones(1), "attention_mask": torch.arange(8) <= index}


class Taking(Line):
    def forward(self, x, labels=None, attention_mask=None):
        return super().forward(x, labels)


class SFTTrainer(transformers.Trainer):
    """Counts as TRL's of this name."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._metrics = {"train": {}, "eval": {}}
        self._total_train_tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
        self._total_train_tokens += tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def log(self, logs, start_time=None):
        super().log({**logs, "num_tokens": self._metrics["train"]["num_tokens"][0]}, start_time)


def test_tokens_are_those_of_committed_steps(tmp_path):
    """With a fault: test_trainer.py, with TRL."""
    given = args(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1)
    given.max_steps = 4
    trainer = adapter.wrap(SFTTrainer)(model=Taking(), args=given, train_dataset=Masked())
    trainer.train()
    counted = [logs["num_tokens"] for logs in trainer.state.log_history if "loss" in logs]
    assert (counted[1], counted[3]) == (36, 72)  # of an epoch, and of two
    assert sorted(counted) == counted


# ------------------------------------------------------------ the seams


SEAMS = {
    "_inner_training_loop": "self batch_size args resume_from_checkpoint trial ignore_keys_for_eval",
    "_init_training_state": (
        "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "_prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    "_run_epoch": (
        "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
        "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
    ),
    "_maybe_log_save_evaluate": (
        "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "_finalize_training": "self trial num_train_samples start_time",
    "_evaluate": "self trial ignore_keys_for_eval skip_scheduler",
    "_save_checkpoint": "self model trial",
    "_get_num_items_in_batch": "self batch_samples device",
    "training_step": "self model inputs num_items_in_batch",
    "get_total_train_batch_size": "self args",
}


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_is_where_it_was(seam):
    """The methods of Trainer that the adapter replaces or calls, with their parameters."""
    assert " ".join(inspect.signature(getattr(transformers.Trainer, seam)).parameters) == SEAMS[seam]


READ = {
    "_inner_training_loop": {"5df39c4094353a55"},
    # 5.23 sums the gradients of a model that was sharded at load time once for a step; the adapter does with each
    # micro-batch, which is as right.
    "_run_epoch": {"e980b3dd7b5ba47b", "a0fca088bae61fb6"},
    # 5.24 reshards such a model before it makes the optimizer.
    "_prepare_for_training": {"b717b8036ed32589", "ca20cc2150647c93"},
    "_maybe_log_save_evaluate": {"c74837fc104e7bc5"},
    "training_step": {"20aeed27666b9f10"},
}
"""Of 5.20 to 5.24. Where the adapter does something in the Trainer's place, it has to learn what a later version adds."""


@pytest.mark.parametrize("name", READ)
def test_what_the_adapter_does_in_its_place_has_been_read(name):
    """Red with a new version: read what changed, do the same in the adapter, and add the digest."""
    assert digest(getattr(transformers.Trainer, name)) in READ[name]


def test_the_loop_asks_in_the_order_that_the_adapter_relies_on():
    """The state comes in `_init_training_state`, which is before the loop clears the sums of losses; and the loop hands
    the epoch's arguments over by name."""
    text = inspect.getsource(transformers.Trainer._inner_training_loop)
    order = [
        "get_train_dataloader",
        "set_initial_training_values",
        "_init_training_state",
        "_prepare_for_training",
    ]
    order += ["_tr_loss = ", "on_train_begin", "_run_epoch(", "model=model", "_finalize_training"]
    places = [text.index(name) for name in order]
    assert places == sorted(places)
    assert "self.accelerator.backward(loss" in inspect.getsource(transformers.Trainer.training_step)


def test_callbacks_export_plain_values():
    assert set(ExportableState.from_state.__code__.co_names) >= {"setattr"}
    assert {"args", "attributes"} == set(transformers.TrainerControl().state())
