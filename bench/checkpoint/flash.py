"""One rank of DLRover's Flash Checkpoint, under torchrun in an environment of its own: a sharded state into shared memory.

Its engine for FSDP is used, as every rank has a shard. What it needs beside the workers it starts itself. Only the
memory of the own node: its copy on other nodes comes with its own launcher and a master service.

Appends one JSON line for every repetition of this rank to `--output`-RANK. Imports nothing of this project.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.python.common.constants import CheckpointConstant
from dlrover.python.common.storage import get_checkpoint_storage
from dlrover.trainer.torch.flash_checkpoint.fsdp_engine import FsdpCheckpointEngine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

LARGE, SMALL = 306, 102
"""As in `stall`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--output", required=True)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    local = [torch.ones(given.mib * (1 << 20) // 4 // LARGE) for _ in range(LARGE)]
    local += [torch.ones(64) for _ in range(SMALL)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {f"t{i}": DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for i, t in enumerate(local)}
    engine = FsdpCheckpointEngine(given.folder, get_checkpoint_storage(None))
    paths = {CheckpointConstant.MODEL_STATES_NAME: given.folder}
    with Path(f"{given.output}-{rank}").open("a") as out:
        for repetition in range(-given.warm_up, given.repetitions):
            step = repetition + given.warm_up + 1
            dist.barrier()
            began_s = time.perf_counter()
            saved = engine.save_to_memory(step, {"model": state}, paths)
            stall_s = time.perf_counter() - began_s if saved else float("nan")
            line = {"method": "DLRover Flash Checkpoint", "rank": rank, "repetition": repetition}
            out.write(json.dumps(line | {"stall_s": stall_s, "complete_s": stall_s}) + "\n")
            out.flush()
    dist.barrier()


if __name__ == "__main__":
    main()
