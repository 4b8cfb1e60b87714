"""A script with DeepSpeed at level 1: train_deepspeed.py FOLDER [DIE_AT [STAGE]]"""

import json
import os
import sys
from pathlib import Path

import where

os.environ.setdefault("DS_ACCELERATOR", where.TYPE)
for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, str(value))

import deepspeed  # noqa: E402 - it asks the environment
import gate  # noqa: E402
import torch  # noqa: E402

import holdfast  # noqa: E402
from holdfast.adapters.deepspeed.snapshots import Snapshots  # noqa: E402

FOLDER = Path(sys.argv[1])
DIE_AT, STAGE = (int(sys.argv[i]) if len(sys.argv) > i else 0 for i in (2, 3))
STEPS, ACCUMULATE = 12, 2


def batch(number: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(32).reshape(4, 8) * (number * 2 + rank + 1.0))
    return x.to(dtype), x.sum(1).to(dtype)


def main() -> None:
    if "MASTER_PORT" not in os.environ:
        torch.distributed.init_process_group(
            "nccl" if where.GPU else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": ACCUMULATE,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 3, "total_num_steps": STEPS},
            },
            "zero_optimization": {"stage": STAGE},
            **({"bf16": {"enabled": True}} if STAGE else {}),
        },
    )
    where.check(engine.module)
    snapshots = Snapshots(engine, every=1)
    began = snapshots.newest() or 0
    losses = snapshots.client_state["losses"] if began else []
    dtype = torch.bfloat16 if STAGE else torch.float32
    for number in range(began * ACCUMULATE, STEPS * ACCUMULATE):
        x, y = (part.to(engine.device) for part in batch(number, engine.global_rank, dtype))
        loss = (engine(x).squeeze(-1) - y).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        snapshots.save({"losses": losses})
        if DIE_AT:
            holdfast.checkpoint.flush()  # a snapshot is skipped while others are on their way
        if engine.global_steps == DIE_AT > 0:
            os._exit(9)
        gate.wait(engine.global_steps, engine.global_rank)
    state = where.digest(parameter.float() for parameter in engine.module.parameters())
    end = {"state": state, "steps": engine.global_steps, "losses": losses, "began": began}
    end["rate"] = engine.get_lr()[0]
    (FOLDER / f"end-{engine.global_rank}.json").write_text(json.dumps(end))


main()
