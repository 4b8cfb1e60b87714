"""A Trainer whose model transformers has sharded over the workers of a replica (`DistributedConfig`, FSDP2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.train.run import Run


def is_sharded(model: Any) -> bool:
    """Whether transformers has sharded it while it was loaded."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def join(run: Run, trainer: Any) -> None:
    """Connects the model to the sum over the replicas, if it is sharded. Before the optimizer is made.

    Raises:
        UsageError: with everything that cannot work, and what to write instead.
    """
    model = trainer.model
    if not is_sharded(model):
        if run.sharded:
            raise UsageError(
                "run.mesh() was called, but the Trainer's model is not sharded: load it with from_pretrained(folder, "
                "distributed_config=DistributedConfig(fsdp_size=N)), or do not call run.mesh()"
            )
        return
    if not run.sharded:
        raise UsageError(
            "the model is sharded over process groups that break in a fault: call run.mesh(shard=N) before "
            "from_pretrained, in the main of holdfast.start (docs/transformers.md)"
        )
    wrong = [text for found, text in _checks(trainer.args, model) if found]
    if wrong:
        raise UsageError(
            "holdfast.transformers.Trainer does not support this configuration of a sharded model:\n "
            " " + "\n  ".join(wrong)
        )
    config = model.config.distributed_config
    try:
        run.mesh(shard=config.fsdp_size, tensor=config.tp_size)  # the one that was made, or an error
    except UsageError as error:
        # With another one, workers that share every sample would be given samples of their own.
        raise UsageError(
            f"DistributedConfig(fsdp_size={config.fsdp_size}, tp_size={config.tp_size}) needs "
            f"run.mesh(shard={config.fsdp_size}, tensor={config.tp_size}): {error}"
        ) from error
    if config.fsdp_size == 1:
        # Here and not above: FSDP2 takes a while to import, and no other training needs it from here.
        from torch.distributed.fsdp import fully_shard

        # Under tensor parallelism alone transformers leaves norms as they are, whole on each worker. As shards of one they are
        # tensors of the replica like all others. On transformers' own mesh: FSDP2 wants its dimension and the tensor
        # dimension to be parts of the same one.
        fully_shard(model, mesh=model._mesh_manager.get_mesh("fsdp"), reshard_after_forward=False)
    run.replicate(model)


def alike(model: Any) -> int:
    """Workers that compute the same micro-batch, each a part of every layer."""
    return int(model.config.distributed_config.tp_size) if is_sharded(model) else 1


def refuse_saving(model: Any) -> None:
    """Raises UsageError for a model of which every worker has a part."""
    if is_sharded(model):
        raise UsageError(
            "save_model(): no worker has the whole model, and the process groups of the workers end with the "
            "training; `holdfast checkpoint export` writes files that from_pretrained reads"
        )


def _checks(args: Any, model: Any) -> list[tuple[bool, str]]:
    config = model.config.distributed_config
    replicas = getattr(config, "dp_replicate_size", 1)  # not in every version that is supported
    return [
        (
            config.pp_size > 1,
            f"DistributedConfig(pp_size={config.pp_size}): the Trainer does not have a schedule for pipeline stages; "
            "shard with fsdp_size, tp_size and ep_size, or write your own training loop (docs/sharded.md)",
        ),
        (
            config.tp_size > 1 and not hasattr(model, "_mesh_manager"),
            f"DistributedConfig(tp_size={config.tp_size}): this is not supported with this version of transformers; "
            "use 5.24",
        ),
        (
            replicas > 1,
            f"DistributedConfig(dp_replicate_size={replicas}): Holdfast itself manages the replicas; remove it",
        ),
        (
            config.fsdp_cpu_offload,
            "DistributedConfig(fsdp_cpu_offload=True): the process groups of a replica work on GPU memory only; "
            "shard over more workers instead",
        ),
        # A fault in a collective between two steps skips the rest of what follows the step, on some workers alone. Then they
        # would decide otherwise than the others.
        (
            IntervalStrategy(args.eval_strategy) is not IntervalStrategy.NO or args.eval_on_start,
            "eval_strategy: an evaluation of a sharded model cannot be repeated after a fault; set "
            'eval_strategy="no", and evaluate the model that `holdfast checkpoint export` writes',
        ),
        (
            SaveStrategy(args.save_strategy) is not SaveStrategy.NO,
            'save_strategy: no worker has the whole model; set save_strategy="no". The job saves its state itself, '
            "and `holdfast checkpoint export` writes files that from_pretrained reads",
        ),
        (args.fp16, "fp16=True: not tested with sharded models; use bf16=True"),
    ]
