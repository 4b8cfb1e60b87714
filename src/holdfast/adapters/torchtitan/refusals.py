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
                f"--parallelism.tensor_parallel_degree {tensor} and context_parallel_degree {context}{stages} do not divide the "
                f"{workers_per_node} workers of a node; give --parallelism.data_parallel_shard_degree, too"
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
            "holdfast.titan: this configuration has a hook that runs before each update of its optimizers, and a commit may come "
            "after a fault, without it. Leave the model_spec's post_optimizer_build_fn out"
        )


def refuse_biased_stages(config: Any) -> None:
    """
    Raises:
        UsageError: experts with biases in the stages of a pipeline.
    """
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UsageError(
            "holdfast.titan: --parallelism.pipeline_parallel_degree with experts whose biases balance their load was not tried. "
            "Use shards and expert parallelism"
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
            f"{option} with tensor, context or expert parallelism was not tried. Stages go with FSDP2 "
            "(--parallelism.data_parallel_shard_degree); torchtitan's own trainer works at level 1",
        ),
        (
            stages
            and (
                parallelism.pipeline_parallel_schedule.lower() not in SCHEDULES
                or bool(parallelism.pipeline_parallel_schedule_csv)
            ),
            f"--parallelism.pipeline_parallel_schedule {parallelism.pipeline_parallel_schedule}: after a fault a schedule has to "
            "begin anew, which was tried with one stage on each worker. Give 1F1B or GPipe",
        ),
        (
            stages and config.validator.enable,
            f"--validator.enable with {option}: this torch has no way to give a schedule its parts one by one, as torchtitan's "
            "evaluation wants. Leave it out, or the stages",
        ),
    ]


def _of_checkpoints(checkpoint: Any) -> list[tuple[bool, str]]:
    if not checkpoint.enable:
        return []
    first = checkpoint.initial_load_path or checkpoint.initial_load_in_hf
    return [
        (
            type(checkpoint) is not Checkpoints.Config,
            f"its manager of checkpoints is {type(checkpoint).__qualname__} of {type(checkpoint).__module__}, and only torchtitan's "
            "own was tried. Leave --checkpoint.enable out: the job saves its state by itself",
        ),
        (
            getattr(checkpoint, "async_mode", "disabled") != "disabled",
            f"--checkpoint.async_mode {checkpoint.async_mode} makes a process group, which could lose no worker. Leave it out: the "
            "job's own snapshots are what is quick",
        ),
        (
            checkpoint.load_step != -1,
            f"--checkpoint.load_step {checkpoint.load_step}: a job goes on from its own state. To begin with the weights of that "
            "step, give --checkpoint.initial_load_path and its folder",
        ),
        (
            bool(first) and not checkpoint.initial_load_model_only,
            "--checkpoint.initial_load_model_only false: a job begins at its own first step, with a new optimizer. Leave it true",
        ),
        (
            checkpoint.create_seed_checkpoint,
            "--checkpoint.create_seed_checkpoint is for a training of its own, on one worker: make it with torchtitan",
        ),
        (
            "://" in checkpoint.folder,
            f"--checkpoint.folder {checkpoint.folder}: another place than a file system was not tried",
        ),
    ]


def _all(config: Any) -> list[tuple[bool, str]]:
    parallelism, training = config.parallelism, config.training
    return [
        *_of_stages(config),
        *_of_checkpoints(config.checkpoint),
        (
            parallelism.data_parallel_replicate_degree > 1,
            "--parallelism.data_parallel_replicate_degree: replicas are the job's, and their number may change. Leave it out, "
            "and give --nnodes",
        ),
        (
            not training.disable_cuda_graphs,
            "a captured graph of a step cannot be left in its middle. Give --training.disable_cuda_graphs",
        ),
        (
            config.comm.mode != "default",
            f"--comm.mode {config.comm.mode} simulates a world. Leave it out",
        ),
        (
            hasattr(config.loss, "num_chunks"),
            "the loss is computed in chunks, each with a backward pass of its own, which no step would know. Give "
            "the configuration its inner loss, as `-m holdfast.titan` does",
        ),
    ]
