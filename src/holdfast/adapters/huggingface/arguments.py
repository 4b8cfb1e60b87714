"""What of TrainingArguments cannot work at level 2, and what of it follows the job."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from holdfast.adapters import world
from holdfast.adapters.accelerate.backend import own_order
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.train.run import Run


def follow(args: TrainingArguments, run: Run, slot: int) -> None:
    """Who saves and who logs follows this worker's rank in the job, which may change with every generation.

    Transformers asks its arguments for that, and they ask Accelerate, which knows of this process alone. So the two
    properties are answered here; `world_size` stays 1, because nothing may be gathered over a process group.

    Raises:
        UsageError: transformers would compute on the GPU of another worker.
    """
    # A process without torchrun's variables takes the first GPU that it sees. All workers of a node would.
    if args.device.type == run.device.type and args.device != run.device:
        raise UsageError(
            f"transformers computes on {args.device}, but the device of this worker is {run.device}: run one worker "
            "on each node (--nproc-per-node 1), or use level 1 (docs/levels.md)"
        )
    # Two trainers may have the same arguments: then they follow already, and `kind` is what was followed first.
    kind = vars(type(args)).get("followed", type(args))
    names = {
        "followed": kind,
        # Asked for and not kept: a run holds its model, and a trainer is made before its training has taken a run.
        "process_index": property(lambda self: world.own_run().rank),
        "local_process_index": property(lambda self: slot),
        # Saved with every checkpoint of the Trainer's, to be read where there may be no Holdfast.
        "__reduce_ex__": lambda self, protocol: (kind.__new__, (kind,), self.__getstate__()),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
    }
    args.__class__ = type(kind.__name__, (kind,), names)
    if args.n_gpu > 1:
        # This process sees all GPUs of its node and has one of them. Trainer would wrap the model in DataParallel.
        args._n_gpu = 1


def of_ddp(args: TrainingArguments) -> dict[str, Any]:
    """What the script has set for DDP and its process group, neither of which there is."""
    return {
        field.name: value
        for field in dataclasses.fields(args)
        if field.name.startswith("ddp_") and (value := getattr(args, field.name)) != field.default
    }


def refuse(args: TrainingArguments, dataset: Any, scheduler: Any = None, workers: int = 1) -> None:
    """Refuses what cannot work, before anything is trained. scheduler: the script's own. workers: of the full job.

    Raises:
        UsageError: with every option that cannot work, and what to write instead.
    """
    wrong = [text for found, text in _checks(args, dataset, scheduler, workers) if found]
    if wrong:
        raise UsageError(
            "holdfast.transformers.Trainer does not support this configuration:\n  " + "\n  ".join(wrong)
        )


def refuse_loader(loader: Any, micro_batch: int) -> None:
    """Refuses a choice of samples of the script's own, and batches of its own: the job deals the samples.

    Raises:
        UsageError: the training data does not come in a random order, or in batches of another size.
    """
    if (own := own_order(loader)) is not None:
        raise UsageError(
            f"holdfast.transformers.Trainer cannot train with {own}, because Holdfast determines the order of "
            "samples; put the selection of samples into the dataset"
        )
    if (size := loader.batch_sampler.batch_size) != micro_batch:
        raise UsageError(
            f"get_train_dataloader() returns batches of {size} samples, but a micro-batch has {micro_batch}: set "
            f"per_device_train_batch_size={size}"
        )


def _checks(args: TrainingArguments, dataset: Any, scheduler: Any, workers: int) -> list[tuple[bool, str]]:
    optimizer = OptimizerNames(args.optim).value
    schedule = SchedulerType(args.lr_scheduler_type).value
    return [
        (
            dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"),
            f"train_dataset is {type(dataset).__name__}, which does not have a length or access to samples by "
            "number: use a map-style dataset, so that every sample is trained exactly once at any number of workers",
        ),
        (
            bool(args.deepspeed),
            "deepspeed=...: DeepSpeed controls the training step itself; use level 1 (docs/levels.md)",
        ),
        (
            bool(args.fsdp),
            "fsdp=...: Accelerate would shard over process groups that break in a fault; call run.mesh(shard=N) in "
            "holdfast.start(main), and load the model with distributed_config=DistributedConfig(fsdp_size=N) "
            "(docs/transformers.md)",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True: the global batch is fixed for a job; set per_device_train_batch_size",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),  # not in every version that is supported
            "enable_jit_checkpoint=True: on SIGTERM it would end the training of this worker only; remove it, "
            "because the job saves its state itself",
        ),
        (
            getattr(args, "sync_ref_model", False),  # of TRL's
            "sync_ref_model=True: it changes the reference model between two steps, which a fault would undo; remove "
            "it",
        ),
        (
            args.load_best_model_at_end,
            "load_best_model_at_end=True: a worker on another node may not have the folder of the best checkpoint; "
            "remove it, keep metric_for_best_model, and load the folder trainer.state.best_model_checkpoint on rank "
            "0 after train()",
        ),
        (
            workers > 1 and not args.average_tokens_across_devices,
            "average_tokens_across_devices=False: the loss is the mean over all tokens of a step, whose weights "
            "would otherwise depend on which worker has which samples; remove it",
        ),
        (
            "lomo" in optimizer or "layerwise" in optimizer,
            f"optim={optimizer}: it updates parameters during the backward pass, before the gradients of the workers "
            "are summed; choose another optimizer",
        ),
        (
            optimizer.startswith("schedule_free"),
            f"optim={optimizer}: for an evaluation it swaps parameters between two steps, which a fault would undo; "
            "choose another optimizer",
        ),
        (
            args.include_num_input_tokens_seen not in ("no", False),
            "include_num_input_tokens_seen: the tokens would be counted on one worker only; remove it",
        ),
        (
            args.train_sampling_strategy != "random",
            f"train_sampling_strategy={args.train_sampling_strategy}: Holdfast determines the order of samples; use "
            "the default, random",
        ),
        (
            schedule in ("reduce_lr_on_plateau", "greedy"),
            f"lr_scheduler_type={schedule}: it changes the learning rate between two steps, which a fault would undo; choose "
            "a schedule over steps",
        ),
        (
            isinstance(scheduler, ReduceLROnPlateau | GreedyLR),
            f"optimizers=(..., {type(scheduler).__name__}): it changes the learning rate between two steps, which a fault "
            "would undo; choose a schedule over steps",
        ),
        (
            args.parallelism_config is not None,
            "parallelism_config: with this Trainer a replica is one process; use holdfast.start(main) and run.mesh()",
        ),
    ]
