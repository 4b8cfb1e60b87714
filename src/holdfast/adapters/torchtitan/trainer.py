"""torchtitan's trainer as a member of a job: its own model, meshes, loss and batches; the run decides what counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import metadata
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import parallel_dims as titan_dims
from torchtitan.distributed import pipeline_parallel as titan_pipelines
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols import module as titan_modules
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from holdfast.adapters.torchtitan.checkpoints import as_checkpoints
from holdfast.adapters.torchtitan.refusals import Row, refuse, refuse_biased_stages, refuse_hooks, row_of
from holdfast.adapters.versions import TORCHTITAN
from holdfast.errors import DataError
from holdfast.tensors.dtensor_shards import local_of
from holdfast.train.run import Run
from holdfast.train.step import Step

HOOK = "register_moe_load_balancing_hook"
"""The function of torchtitan's that registers it."""


class Loads(torch.nn.Module):
    """How many tokens each expert got since the last update of the biases. Protected beside the model.

    torchtitan updates the biases in a hook before each update, by collectives over all ranks. A commit may have none, and comes exactly
    once on every replica. So the counts are a buffer that the run sums over the global batch, and the biases follow from it in the
    commit, by torchtitan's rule.

    Attributes:
        tokens: [layers with biases, experts].
    """

    tokens: torch.Tensor

    def __init__(self, layers: list[Any]) -> None:
        """layers: torchtitan's mixtures that have biases."""
        super().__init__()
        # In a tuple: as an attribute they would be modules of this one, and protected twice.
        self._layers = (layers,)
        shape = (len(layers), layers[0].expert_bias_E.numel()) if layers else (0, 0)
        device = layers[0].expert_bias_E.device if layers else None
        self.register_buffer("tokens", torch.zeros(shape, dtype=torch.int64, device=device))
        for number, layer in enumerate(layers):
            layer.routed_experts.register_forward_pre_hook(
                lambda module, given, at=number: self._count(at, given[3])
            )

    def __bool__(self) -> bool:
        return bool(self._layers[0])

    def _count(self, layer: int, by_expert: torch.Tensor) -> None:
        # Activation checkpointing runs a block again inside of the backward pass: those are the same tokens.
        if torch._C._current_graph_task_id() != -1:
            return
        # Workers of a tensor dimension may have routed a part of the tokens each. Completed here, all of them have
        # the same count, and one of them says it.
        whole = by_expert.full_tensor() if isinstance(by_expert, DTensor) else by_expert
        self.tokens[layer] += whole.detach().to(self.tokens.dtype)

    @torch.no_grad()
    def update(self) -> None:
        """Part of a commit: each bias goes toward an even load, as torchtitan's hook has it; the counts begin anew."""
        for layer, tokens in zip(self._layers[0], self.tokens.float(), strict=True):
            toward = layer.load_balance_coeff * torch.sign(tokens.mean() - tokens)
            local_of(layer.expert_bias_E).add_(toward - toward.mean())
            # torchtitan's own count has no reader here, and would grow without end.
            local_of(layer.tokens_per_expert_E).zero_()
        self.tokens.zero_()


def with_biases(model_parts: Iterable[torch.nn.Module]) -> list[Any]:
    """The layers whose biases torchtitan's hook updates."""
    return [
        module
        for part in model_parts
        for module in part.modules()
        if getattr(module, "load_balance_coeff", None) is not None and hasattr(module, "routed_experts")
    ]


def take_hook_off(optimizers: Any) -> None:
    """torchtitan's hook for the biases does not run: `Loads` has its place."""
    hooks = optimizers._optimizer_step_pre_hooks
    for key, hook in list(hooks.items()):
        if str(getattr(hook, "__qualname__", "")).startswith(HOOK):
            del hooks[key]


FAR = 100
"""Batches; so many are read over without a word."""


class Streams:
    """The streams that this worker has read from. At most one batch of each is kept.

    torchtitan's loaders are streams, one for each rank, and a rank's place in its stream is known to that rank alone. Here a stream
    belongs to a micro-batch's number and not to a rank: whoever computes micro-batch 3 of a step reads stream 3. A worker that gets a
    number which it did not have reads that stream from its begin up to the step.
    """

    def __init__(self, open_stream: Callable[[int], Any], count: int) -> None:
        """open_stream: makes the loader of a number from 0 to count - 1."""
        self._open, self._count = open_stream, count
        self._read: dict[int, _Stream] = {}

    def batch(self, number: int, step: int) -> Any:
        """The batch of a stream for a step, from 0; a step that comes again gets the same one.

        Raises:
            DataError: the stream has ended.
        """
        stream = self._read.get(number)
        # A job that goes on from an older state needs what was before.
        if stream is None or stream.at > step + 1:
            stream = self._read[number] = _Stream(iter(self._open(number)))
        missing = step - stream.at
        if missing > FAR:
            logger.info(f"micro-batch {number}: skipping {missing} batches that other workers computed")
        while stream.at <= step:
            try:
                stream.last = next(stream.batches)
            except StopIteration:
                raise DataError(
                    f"stream {number} of {self._count} ended after {stream.at} batches, but step {step} needs one "
                    "more; use fewer --training.steps, or a data set that begins again at its end"
                ) from None
            stream.at += 1
        inputs, labels = stream.last
        # The trainer replaces tensors in the mapping by those on its device.
        return dict(inputs), labels


class _Stream:
    """Attributes:
    at: how many batches were read.
    last: the one that was read last.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.at = batches, 0
        self.last: Any = None


class Numbers:
    """Stands for the data where the run deals micro-batches: their numbers say all."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, ids: Any) -> Any:
        """Nothing but the numbers of the samples."""
        return ids


IGNORED = -100
"""torchtitan's IGNORE_INDEX: a label that is not learned."""

_run: list[Run] = []
"""The run that `holdfast.start` gave this process: torchtitan makes its trainer of a configuration alone."""


@dataclass(kw_only=True, slots=True)
class HoldfastConfig:
    """What only a job has."""

    reduction: Literal["fast", "exact"] = "fast"
    """exact: losses and parameters are the same, bit by bit, through every fault."""


class HoldfastTrainer(Trainer):  # type: ignore[misc] # it has no types here
    """Only the loop over steps and what is summed over replicas are ours."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's, with a table of ours."""

        holdfast: HoldfastConfig = field(default_factory=HoldfastConfig)

    def __init__(self, config: Config) -> None:
        """
        Raises:
            UsageError: a version or an option that is not supported; see docs/torchtitan.md.
        """
        TORCHTITAN.check(metadata.version("torchtitan"), "holdfast.titan")
        # Before torchtitan builds anything: a large model takes minutes, and the refusal
        # would come after them.
        refuse(config)
        self.holdfast_run = _run[0]
        self.holdfast_step: Step | None = None
        with built_alone(), stages_that_say_their_shapes(config):
            super().__init__(config)
        # Before the weights are read: what a person has to mend is told first.
        self.checkpointer.claim(self.holdfast_run.job)
        self.loads = Loads(with_biases(self.model_parts))
        if self.loads:
            refuse_biased_stages(config)
        take_hook_off(self.optimizers)
        refuse_hooks(self.optimizers)
        self.checkpointer.load_first()
        for part in self.model_parts:
            self.holdfast_run.replicate(part)

    def init_distributed(self) -> Any:
        """torch's world is the replica. torchtitan builds all its meshes on it, and never sees how many replicas there are."""
        row = row_of(self.config.parallelism, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        # Before torchtitan looks for a process group: it finds one and makes none. One over all workers
        # could not lose any of them.
        self.holdfast_run.mesh(shard=row.shard, tensor=row.tensor, context=row.context, stage=row.stage)
        dist_utils.init_distributed(self.config.comm)  # returns at once: torch is initialised
        # What torchtitan switches off before it initialises torch, for its own meshes.
        torch.autograd.set_multithreading_enabled(False)
        dims = ParallelDims.from_config(self.config.parallelism, row.workers)
        with numbered_by_shards(row):
            dims.build_mesh()  # which torchtitan else does when the first mesh is asked for
        return dims

    def _forward_backward_body(
        self, inputs: Any, labels: Any, global_valid_tokens: Any, extra_kwargs: dict[str, Any]
    ) -> Any:
        """torchtitan's, but for the backward pass: the run has to know which micro-batch it is, and its weight."""
        step = self.holdfast_step
        assert step is not None
        with self.train_context():
            pred = self.model_parts[0](inputs, **extra_kwargs)
            more = {"positions": extra_kwargs["positions"]} if "positions" in extra_kwargs else {}
            # Divided by one: a sum over tokens. The mean is taken once, over the tokens of the global batch.
            loss, _ = self.loss_fn(pred, labels, torch.ones_like(global_valid_tokens), **more)
            del pred
            # Of this worker's part of each sample: under context parallelism the others weigh theirs.
            step.backward(loss, weight=float((local_of(labels) != IGNORED).sum()))
        return loss

    def pp_forward_backward_step(
        self, *, input_dict_mbs: Any, label_mbs: Any, global_valid_tokens: Any
    ) -> None:
        """One micro-batch of the run, which the schedule divides into its parts."""
        step = self.holdfast_step
        assert step is not None
        weight = float((label_mbs != IGNORED).sum())
        inputs, labels, more = self.post_dataloading_process(input_dict_mbs, label_mbs)
        # As above: a sum over tokens.
        divided_by = {"global_valid_tokens": torch.ones_like(global_valid_tokens)}
        with self.train_context():
            step.pipeline(
                self.pp_schedule, inputs, target=labels, weight=weight, loss_kwargs=divided_by, **more
            )

    def train_step(self, data_iterator: Any) -> None:
        """One attempt. A fault in it is swallowed by `with step`, and the step comes again.

        Args:
            data_iterator: the `Streams` of the run; `train` gives them.
        """
        step, run = self.holdfast_step, self.holdfast_run
        assert step is not None
        # At the begin of an attempt: the one before may have been cut off by a fault, and left gradients.
        self.optimizers.zero_grad()
        with step:
            for at, _ in enumerate(step):
                # Asked only now: the step waits for its generation before it gives out the first micro-batch.
                number = run.world.micro_batches[at]
                began = time.perf_counter()
                inputs, labels = data_iterator.batch(number, step.index)
                # What torchtitan's own generator of batches tells its metrics.
                self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
                self.metrics_processor.ntokens_since_last_log += labels.numel()
                here = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
                labels = labels.to(self.device)
                tokens = (labels != IGNORED).sum()
                if self.parallel_dims.pp_enabled:
                    self.pp_forward_backward_step(
                        input_dict_mbs=here, label_mbs=labels, global_valid_tokens=tokens
                    )
                else:
                    self.forward_backward_step(input_dict=here, labels=labels, global_valid_tokens=tokens)
            also = self.loads.update if self.loads else ()
            step.apply(self.optimizers, self.config.training.max_norm, self.lr_schedulers, also=also)

    def train(self) -> None:
        """torchtitan's loop, around the steps of the run."""
        run, config = self.holdfast_run, self.config
        run.protect(**self._holdfast_state())
        if self.loads:
            run.protect(loads=self.loads)
            run.buffers("sum", "loads.tokens")
        streams = Streams(self._loader_of, self._micro_batches())
        with config.profiler.build(global_step=0, base_folder=config.dump_folder) as profiler:
            for step in self._steps():
                self.holdfast_step = step
                self.step = step.index + 1
                self.gc_handler.run(self.step)
                rates = self.lr_schedulers.get_metrics()
                self.train_step(streams)
                # An attempt that failed is no step. Logged, it would be in the curves twice.
                if not step.committed:
                    continue
                # What torchtitan counts up follows from the step, so it is no state: a step that comes again, or a
                # worker that came late, has the same.
                self.ntokens_seen = self.step * self._tokens_of_a_step()
                self._log(step, rates)
                self._write_checkpoint(self.step == config.training.steps)
                if config.validator.enable and self.validator.should_validate(self.step):
                    # An evaluation takes longer than a step, and would look like a stall.
                    with run.relaxed_watchdog():
                        self.validator.validate(self.model_parts, self.step)
                profiler.step()
        logger.info("Training completed")

    def _steps(self) -> Iterator[Step]:
        training, batch = self.config.training, self._micro_batches() * self.config.training.local_batch_size
        return self.holdfast_run.steps(
            Numbers(batch * training.steps),
            global_batch=batch,
            micro_batch=training.local_batch_size,
            until=training.steps,
            seed=self.config.debug.seed or 0,
            reduction=self.config.holdfast.reduction,
        )

    def _holdfast_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        # torchtitan's containers write their state by names of parameters, with a pretended step to make it. Their parts
        # are torch's own, of which a newcomer gets exactly what the others have.
        parts = {
            "model": self.model_parts,
            "optimizer": self.optimizers,
            "scheduler": self.lr_schedulers.schedulers,
        }
        for name, several in parts.items():
            state |= {f"{name}{number or ''}": one for number, one in enumerate(several)}
        return state

    def _micro_batches(self) -> int:
        """Of a global batch, over all replicas at full strength."""
        training = self.config.training
        if training.global_batch_size > 0:
            return int(training.global_batch_size // training.local_batch_size)
        # As torchtitan has it: one micro-batch for each worker that has samples of its own.
        own = int(self.parallel_dims.tp * self.parallel_dims.cp * self.parallel_dims.pp)
        return max(1, self.holdfast_run.full_world_size // own)

    def _tokens_of_a_step(self) -> int:
        training = self.config.training
        return int(self._micro_batches() * training.local_batch_size * training.seq_len)

    def _loader_of(self, number: int) -> Any:
        """torchtitan's own loader for one of so many ranks as there are micro-batches in a global batch."""
        return self.config.dataloader.build(
            dp_world_size=self._micro_batches(),
            dp_rank=number,
            tokenizer=self.tokenizer,
            seq_len=self.config.training.seq_len,
            local_batch_size=self.config.training.local_batch_size,
            snapshot_every_n_steps=None,
        )

    def _write_checkpoint(self, last: bool) -> None:
        run = self.holdfast_run
        # One replica has all of the state. The others wait for it in the next step.
        if run.world.replica != 0 or not self.checkpointer.due(self.step, last):
            return
        # Writing takes longer than a step. If a worker of this replica is lost in it, that checkpoint stays without the file that
        # makes it one, and training goes on.
        with run.relaxed_watchdog():
            self.checkpointer.write(self.step, last)

    def _log(self, step: Step, rates: dict[str, float]) -> None:
        run = self.holdfast_run
        run.log(loss=step.loss, grad_norm=step.grad_norm, **_plain(rates))
        # Every replica has the same numbers; torchtitan's own logger is that of one.
        if run.world.replica != 0 or not self.metrics_processor.should_log(self.step):
            return
        more = {"n_tokens_seen": self.ntokens_seen, **rates}
        norm = step.grad_norm if step.grad_norm is not None else float("nan")
        self.metrics_processor.log(self.step, step.loss, step.loss, norm, extra_metrics=more)


@contextmanager
def built_alone() -> Iterator[None]:
    """torchtitan places tensors on its meshes without a word to others.

    It would send each from the first worker, and nobody is connected before the first step. All make them from the same
    seed or of the configuration, so all have the same.
    """
    # The name that torchtitan's modules call. A test holds that it is there.
    before = titan_modules.distribute_tensor
    titan_modules.distribute_tensor = partial(before, src_data_rank=None)
    try:
        yield
    finally:
        titan_modules.distribute_tensor = before


@contextmanager
def numbered_by_shards(row: Row) -> Iterator[None]:
    """torchtitan's meshes take the workers of a replica in its order: by stages, and then by shards. The run's order is by shards,
    and then by stages."""
    before = titan_dims.init_device_mesh
    order = torch.arange(row.workers).view(row.shard, row.stage, -1).transpose(0, 1).flatten()

    def init(device_type: str, *given: Any, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        return DeviceMesh(device_type, order, mesh_dim_names=mesh_dim_names)

    if row.stage > 1:
        titan_dims.init_device_mesh = init
    try:
        yield
    finally:
        titan_dims.init_device_mesh = before


@contextmanager
def stages_that_say_their_shapes(config: Any) -> Iterator[None]:
    """torchtitan's stages ask each other for the shapes of what they exchange at their first step. A worker that comes after a
    fault would wait for the answer of those who have trained before. So each is told here what it will get, and will give."""
    before, parallelism, training = titan_pipelines.PipelineStage, config.parallelism, config.training

    def part(width: int | None) -> torch.Tensor:
        """Of one part of a micro-batch. Nothing is computed with it. width: of a token; None: tokens themselves."""
        shape = (parallelism.pipeline_parallel_microbatch_size, training.seq_len)
        if width is None:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        # torchtitan has FSDP2 around every part of a model, whose policy this is.
        dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
        return torch.empty(*shape, width, dtype=dtype, device="meta", requires_grad=True)

    def stage(module: Any, index: int, count: int, device: Any, **more: Any) -> Any:
        model = config.model_spec.model
        given = part(None if index == 0 else model.dim)
        gives = part(model.vocab_size if index == count - 1 else model.dim)
        return before(module, index, count, device, input_args=(given,), output_args=(gives,), **more)

    titan_pipelines.PipelineStage = stage
    try:
        yield
    finally:
        titan_pipelines.PipelineStage = before


def _plain(rates: dict[str, float]) -> dict[str, float]:
    """Names that the ledger takes."""
    return {name.replace("/", "_"): value for name, value in rates.items()}


def as_holdfast(config: Any) -> Any:
    """torchtitan's configuration as ours: the same fields, so that `build` makes our trainer."""
    given = {f.name: getattr(config, f.name) for f in fields(config)}
    given["checkpoint"] = as_checkpoints(config.checkpoint)
    return HoldfastTrainer.Config(**given)


def main(make: Callable[[], Any]) -> Callable[[Run], None]:
    """What `holdfast.start` gets. make: the configuration, anew for each trainer, since one changes it."""

    def train(run: Run) -> None:
        _run[:] = [run]
        # torchtitan asks for them in the words of torchrun, which a job of one has not.
        os.environ.setdefault("LOCAL_RANK", "0")
        trainer = make().build()
        try:
            trainer.train()
        finally:
            trainer.close()

    return train
