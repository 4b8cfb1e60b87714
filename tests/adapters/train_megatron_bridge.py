"""A script with Megatron-Bridge at level 1: train_megatron_bridge.py FOLDER [DIE_AT]"""

import json
import os
import sys
from pathlib import Path

import gate
import megatron_on_cpu  # before Megatron-Bridge
import torch
import xxhash
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

import holdfast
from holdfast.adapters.megatron_bridge.snapshots import save_snapshots

FOLDER = Path(sys.argv[1])
DIE_AT = int(sys.argv[2]) if len(sys.argv) > 2 else 0
STEPS, SEQUENCE = 12, 16


class Watch(Callback):
    """What this rank trained, and where it ends itself."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.began = -1

    def on_train_start(self, context) -> None:
        self.began = context.state.train_state.step

    def on_train_step_start(self, context) -> None:
        done = context.state.train_state.step
        if DIE_AT:
            holdfast.checkpoint.flush()  # a snapshot is skipped while others are on their way
        if done == DIE_AT > 0:
            os._exit(9)
        gate.wait(done, int(os.environ["RANK"]))

    def on_train_step_end(self, context) -> None:
        self.losses.append(float(context.loss_dict["lm loss"]))

    def on_train_end(self, context) -> None:
        digest = xxhash.xxh3_64()
        for parameter in context.model[0].parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
        state = context.state.train_state
        end = {"state": digest.hexdigest(), "steps": state.step, "samples": state.consumed_train_samples}
        end |= {
            "losses": self.losses,
            "began": self.began,
            "rate": context.scheduler.get_lr(context.optimizer.param_groups[0]),
        }
        (FOLDER / f"end-{os.environ['RANK']}.json").write_text(json.dumps(end))


def main() -> None:
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    megatron_on_cpu.stand_for_a_gpu()
    config = ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            ffn_hidden_size=64,
            seq_length=SEQUENCE,
            vocab_size=64,
            transformer_layer_spec=local_layer_spec,
            attention_dropout=0.1,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            use_cpu_initialization=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
        ),
        train=TrainingConfig(
            micro_batch_size=2, global_batch_size=4, train_iters=STEPS, eval_iters=0, eval_interval=1000
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=STEPS,
        ),
        dataset=MockGPTDatasetConfig(
            seq_length=SEQUENCE,
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
            pin_memory=False,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=62),
        checkpoint=CheckpointConfig(save=str(FOLDER / "own"), load=str(FOLDER / "own"), save_interval=1000),
        rng=RNGConfig(seed=7),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )
    save_snapshots(config, every=1)
    pretrain(config, forward_step, callbacks=[Watch()])


if __name__ == "__main__":  # Bridge starts processes that import this
    main()
