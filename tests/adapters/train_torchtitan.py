"""torchtitan's trainer at level 1, on a CPU: train_torchtitan.py FOLDER [DIE_AT]"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, str(value))

import torch  # noqa: E402
import torch._utils  # noqa: E402
import xxhash  # noqa: E402

# torchtitan knows accelerators only. What it asks one for is answered for the CPU here; its trainer is as it is.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *which: "cpu"
torch.cpu.get_device_properties = lambda *which: SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *which: None
torch.cpu.memory_stats = lambda *which: {}

import torchtitan.distributed.utils  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import holdfast  # noqa: E402
from holdfast.adapters.torchtitan.snapshots import Snapshots  # noqa: E402

FOLDER = Path(sys.argv[1])
DIE_AT = int(sys.argv[2]) if len(sys.argv) > 2 else 0
STEPS, WORDS = 10, 2048


def attend(q, k, v, scale=None, **more):
    """Flex attention has no backward pass on a CPU."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True), None


FlexAttention.compiled_flex_attn = staticmethod(attend)
torchtitan.distributed.utils.set_pg_timeouts = lambda **options: None


class Tokens(BaseDataLoader):
    """Where it is, it says in bytes, as torchtitan's own loaders do."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **more) -> None:
        self.at, self.rank, self.ranks = 0, dp_rank, dp_world_size
        self.shape = (local_batch_size, seq_len)

    def __iter__(self):
        rows, length = self.shape
        places = torch.arange(length).expand(rows, -1).contiguous()
        while True:
            number = self.at * self.ranks + self.rank
            self.at += 1
            steps = torch.arange(length + 1) * (1 + number % 5)
            tokens = (torch.arange(rows)[:, None] * 7 + steps + number) % 64
            yield {"input": tokens[:, :-1].contiguous(), "positions": places}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {f"dp_rank_{self.rank}": str(self.at).encode()}

    def load_state_dict(self, saved):
        self.at = int(saved[f"dp_rank_{self.rank}"])


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path) -> None:
        self.eos_id = 0

    def encode(self, *text):
        return []

    def decode(self, *tokens):
        return ""

    def get_vocab_size(self):
        return WORDS


class Dying(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, batches):
        if DIE_AT:
            holdfast.checkpoint.flush()  # a snapshot is skipped while others are on their way
        if self.step == DIE_AT + 1 > 1:
            os._exit(9)
        began.append(self.step)
        super().train_step(batches)


began: list[int] = []


def main() -> None:
    if "MASTER_PORT" not in os.environ:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:1]
    config = Dying.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        tokenizer=Words.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=32, steps=STEPS, disable_cuda_graphs=True),
        dataloader=Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=100),
        parallelism=ParallelismConfig(),
        checkpoint=Snapshots.Config(enable=True, every=1, interval=4, last_save_model_only=False),
        dump_folder=str(FOLDER / "own"),
    )
    config.debug.seed = 0
    trainer = config.build()
    trainer.train()
    digest = xxhash.xxh3_64()
    for part in trainer.model_parts:
        for tensor in part.state_dict().values():
            tensor = getattr(tensor, "to_local", lambda: tensor)()  # noqa: B023
            digest.update(tensor.detach().numpy().tobytes())
    end = {"state": digest.hexdigest(), "tokens": trainer.ntokens_seen, "steps": trainer.step}
    end |= {"began": began[0] - 1, "batches": trainer.dataloader.at}
    end["rate"] = trainer.lr_schedulers.schedulers[0].get_last_lr()[0]
    (FOLDER / f"end-{os.environ['RANK']}.json").write_text(json.dumps(end))
    trainer.close()


main()
