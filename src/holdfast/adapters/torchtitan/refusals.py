"""What of torchtitan's options does not work in a job: a sentence for each, before anything is built."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.adapters.torchtitan.checkpoints import Checkpoints
from holdfast.errors import UsageError

SCHEDULES = ("1f1b", "gpipe")


class Row(NamedTuple):
    """The workers of a replica."""

    shard: int
    context: int
    tensor: int
    stage: int = 1

    @property
    def workers(self) -> int:
        """All of them."""
        return self.shard * self.context * self.tensor * self.stage


def row_of(parallelism: Any, workers_per_node: int) -> Row:
    """torchtitan's degrees as those of a replica. Where it is to find out the shards, they are what is left of a node.

    Raises:
        UsageError: degrees that do not divide a node's workers.
    """
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    shard, stage = parallelism.data_parallel_shard_degree, parallelism.pipeline_parallel_degree
    if shard < 1:
        if workers_per_node % (context * tensor * stage):
            stages = f" and pipeline_parallel_degree {stage}" if stage > 1 else ""
            raise UsageError(
                f"--parallelism.tensor_parallel_degree {tensor} and context_parallel_degree {context}{stages} do not "
                f"divide the {workers_per_node} workers of a node; set --parallelism.data_parallel_shard_degree, too"
            )
        shard = workers_per_node // (context * tensor * stage)
    return Row(shard, context, tensor, stage)


def refuse(config: Any) -> None:
    """
    Raises:
        UsageError: an option that does not work in a job, with what to do instead.
    """
    for wrong, sentence in _all(config):
        if wrong:
            raise UsageError(f"holdfast.titan: {sentence}")


def refuse_hooks(optimizers: Any) -> None:
    """
    Raises:
        UsageError: something is to happen before each update that is not torchtitan's own: a container's hooks do not run
            where its parts are stepped after a fault.
    """
    if optimizers._optimizer_step_pre_hooks:
        raise UsageError(
            "holdfast.titan: this configuration has a hook that runs before each update of its optimizers, but after "
            "a fault a step may be committed without it. Remove post_optimizer_build_fn from the model_spec"
        )


def refuse_biased_stages(config: Any) -> None:
    """
    Raises:
        UsageError: experts with biases in the stages of a pipeline.
    """
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UsageError(
            "holdfast.titan: --parallelism.pipeline_parallel_degree is not supported for experts whose biases "
            "balance their load. Use shards and expert parallelism"
        )


def _of_stages(config: Any) -> list[tuple[bool, str]]:
    parallelism = config.parallelism
    stages = parallelism.pipeline_parallel_degree > 1
    option = "--parallelism.pipeline_parallel_degree"
    degrees = (
        parallelism.context_parallel_degree,
        parallelism.tensor_parallel_degree,
        parallelism.expert_parallel_degree,
    )
    return [
        (
            stages and max(degrees) > 1,
            f"{option} is not supported together with tensor, context or expert parallelism. Combine stages with "
            "FSDP2 (--parallelism.data_parallel_shard_degree), or use torchtitan's own trainer, which works at level "
            "1",
        ),
        (
            stages
            and (
                parallelism.pipeline_parallel_schedule.lower() not in SCHEDULES
                or bool(parallelism.pipeline_parallel_schedule_csv)
            ),
            f"--parallelism.pipeline_parallel_schedule {parallelism.pipeline_parallel_schedule}: only schedules with "
            "one stage on each worker can be restarted after a fault. Use 1F1B or GPipe",
        ),
        (
            stages and config.validator.enable,
            f"--validator.enable with {option}: this version of torch cannot pass the parts of a batch to a schedule "
            "one by one, which torchtitan's evaluation needs. Remove either the validator or the stages",
        ),
    ]


def _of_checkpoints(checkpoint: Any) -> list[tuple[bool, str]]:
    if not checkpoint.enable:
        return []
    first = checkpoint.initial_load_path or checkpoint.initial_load_in_hf
    return [
        (
            type(checkpoint) is not Checkpoints.Config,
            f"its checkpoint manager is {type(checkpoint).__qualname__} of {type(checkpoint).__module__}, but only "
            "torchtitan's own is supported. Remove --checkpoint.enable: the job saves its state itself",
        ),
        (
            getattr(checkpoint, "async_mode", "disabled") != "disabled",
            f"--checkpoint.async_mode {checkpoint.async_mode} makes a process group, which would not survive the "
            "loss of a worker. Remove it: the job's own snapshots are already asynchronous",
        ),
        (
            checkpoint.load_step != -1,
            f"--checkpoint.load_step {checkpoint.load_step}: a job resumes from its own state. To start from the "
            "weights of that step, use --checkpoint.initial_load_path with its folder",
        ),
        (
            bool(first) and not checkpoint.initial_load_model_only,
            "--checkpoint.initial_load_model_only false: a job begins at its own first step, with a new optimizer. "
            "Leave the option true",
        ),
        (
            checkpoint.create_seed_checkpoint,
            "--checkpoint.create_seed_checkpoint needs a separate run on one worker: create the seed checkpoint with "
            "torchtitan",
        ),
        (
            "://" in checkpoint.folder,
            f"--checkpoint.folder {checkpoint.folder}: only file systems are supported",
        ),
    ]


def _all(config: Any) -> list[tuple[bool, str]]:
    parallelism, training = config.parallelism, config.training
    return [
        *_of_stages(config),
        *_of_checkpoints(config.checkpoint),
        (
            parallelism.data_parallel_replicate_degree > 1,
            "--parallelism.data_parallel_replicate_degree: Holdfast manages the replicas, and their number may "
            "change. Remove it, and use --nnodes",
        ),
        (
            not training.disable_cuda_graphs,
            "a captured graph of a step cannot be interrupted by a fault. Add --training.disable_cuda_graphs",
        ),
        (
            config.comm.mode != "default",
            f"--comm.mode {config.comm.mode} simulates a world of workers. Remove it",
        ),
        (
            hasattr(config.loss, "num_chunks"),
            "the loss is computed in chunks, each with its own backward pass, of which Holdfast would not know. Use "
            "the inner loss in the configuration, as `-m holdfast.titan` does",
        ),
    ]
