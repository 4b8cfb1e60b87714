"""A script with Ray Train at level 1: train_ray.py FOLDER [DIE_AT]. Ray starts its workers again."""

import json
import os
import sys
from pathlib import Path

import ray
import ray.train
import torch
import xxhash
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import holdfast
from holdfast.adapters.ray.snapshots import Snapshots

STEPS = 12


def train(options: dict) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    folder, die_at = Path(options["folder"]), options["die_at"]
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    snapshots = Snapshots({"model": model, "optimizer": optimizer, "scheduler": scheduler}, every=2)
    began = snapshots.newest() or 0
    for step in range(began, STEPS):
        x = torch.sin(torch.arange(32).reshape(4, 8) * (step * 2 + rank + 1.0))
        loss = (model(x).squeeze(-1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        snapshots.save(step + 1)
        if die_at and not began:
            holdfast.checkpoint.flush()  # a snapshot is skipped while others are on their way
        if step + 1 == die_at and not began and rank == 1:
            os._exit(9)
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    end = {"state": digest.hexdigest(), "began": began, "rate": scheduler.get_last_lr()[0]}
    (folder / f"end-{rank}.json").write_text(json.dumps(end))


def main() -> None:
    folder, die_at = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "die_at": die_at},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()


if __name__ == "__main__":
    main()
