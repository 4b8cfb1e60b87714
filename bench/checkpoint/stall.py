"""One rank of the stall benchmark, under `holdfast run`: every way to save, in turn, in the same processes.

Appends one JSON line for every measurement of this rank to `--output`-RANK.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast as hf
from holdfast.checkpoint.api import wait_for_copy

LARGE, SMALL = 306, 102
"""Tensors of a rank, as in a transformer with its two moments: the large ones share the bytes."""
POLL_S = 0.01
WHOLE_S = 60.0
Timing = tuple[float, float | None]
"""Seconds that training stands still, and until the checkpoint is complete."""


def main() -> None:
    given = _options()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = [torch.ones(given.mib * (1 << 20) // 4 // LARGE) for _ in range(LARGE)]
    local += [torch.ones(64) for _ in range(SMALL)]
    mesh = init_device_mesh("cpu", (world,))
    state = {f"t{i}": DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for i, t in enumerate(local)}
    methods = _methods(state, local, given.folder, rank, given.compute_s)
    if given.only:
        methods = {name: methods[name] for name in given.only.split(",")}
    if given.load:
        hf.checkpoint.load(state)
    if given.before_s:
        _compute(given.before_s)
    with Path(f"{given.output}-{rank}").open("a") as out:
        for repetition in range(-given.warm_up, given.repetitions):
            for name, method in methods.items():
                shutil.rmtree(given.folder / name.replace(" ", "-"), ignore_errors=True)
                dist.barrier()
                stall_s, complete_s = method(repetition + given.warm_up + 1)
                dist.barrier()
                line = {"method": name, "rank": rank, "stall_s": stall_s, "complete_s": complete_s}
                out.write(json.dumps(line | {"repetition": repetition}) + "\n")
                out.flush()
                if rank == 0:
                    print(f"{repetition:3d}  {name:32s} {stall_s:.3f} s", flush=True)
    dist.barrier()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--compute-s", type=float, default=0.5)
    parser.add_argument(
        "--load", action="store_true", help="look for a checkpoint at the start, as scripts do"
    )
    parser.add_argument("--before-s", type=float, default=0.0, help="of computing before the first snapshot")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", default="")
    return parser.parse_args()


def _methods(
    state: dict[str, DTensor], local: list[torch.Tensor], folder: Path, rank: int, compute_s: float
) -> dict[str, Callable[[int], Timing]]:
    buffers = [torch.empty_like(t) for t in local]

    def memcpy(step: int) -> Timing:
        began_s = time.perf_counter()
        for buffer, tensor in zip(buffers, local, strict=True):
            buffer.copy_(tensor)
        return time.perf_counter() - began_s, None

    def holdfast(step: int) -> Timing:
        step += 1000 * next(_numbers)
        began_s, wall_s = time.perf_counter(), time.time()
        saved = hf.checkpoint.save(state, step)
        stall_s = time.perf_counter() - began_s
        return (stall_s, _whole_at(step) - wall_s) if _all(saved) else (float("nan"), None)

    def overlapped(step: int) -> Timing:
        step += 1000 * next(_numbers)
        began_s, wall_s = time.perf_counter(), time.time()
        hf.checkpoint.save(state, step, overlap=True)
        stall_s = time.perf_counter() - began_s
        _compute(compute_s)
        began_s = time.perf_counter()
        wait_for_copy()
        stall_s += time.perf_counter() - began_s
        return stall_s, _whole_at(step) - wall_s

    def torch_save(step: int) -> Timing:
        path = folder / "torch.save"
        path.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        torch.save(local, path / f"{rank}.pt")
        took_s = time.perf_counter() - began_s
        return took_s, took_s

    def dcp_save(step: int) -> Timing:
        began_s = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp.save", sync_files=False))
        took_s = time.perf_counter() - began_s
        return took_s, took_s

    methods: dict[str, Callable[[int], Timing]] = {
        "warm memcpy": memcpy,
        "holdfast": holdfast,
        "holdfast overlapped": overlapped,
        "torch.save": torch_save,
        "dcp.save": dcp_save,
    }
    group = dist.new_group(backend="gloo")
    for kind in ("thread", "process"):
        for stager in ("default", "persistent"):
            methods[f"dcp.async_save {kind} {stager}"] = _async_save(state, folder, kind, stager, group)
    return methods


_numbers = itertools.count(1)


def _async_save(
    state: dict[str, DTensor], folder: Path, kind: str, stager: str, group: dist.ProcessGroup
) -> Callable[[int], Timing]:
    kept: list[DefaultStager] = []
    path = folder / f"dcp.async_save-{kind}-{stager}"
    checkpointer = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD

    def save(step: int) -> Timing:
        if stager == "persistent" and not kept:
            shared = StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                use_non_blocking_copy=False,
            )  # fmt: skip
            kept.append(DefaultStager(shared))
        began_s = time.perf_counter()
        answer = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(path, sync_files=False),
            process_group=group,
            async_checkpointer_type=checkpointer,
            async_stager=kept[0] if kept else None,
        )
        if isinstance(answer, AsyncSaveResponse):
            answer.staging_completion.result()
            stall_s = time.perf_counter() - began_s
            answer.upload_completion.result()
        else:
            stall_s = time.perf_counter() - began_s
            answer.result()
        return stall_s, time.perf_counter() - began_s

    return save


def _all(saved: bool) -> bool:
    """Whether every rank saved its part."""
    word = torch.tensor([int(saved)])
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word.item())


def _whole_at(step: int) -> float:
    """When every shard of a snapshot was in two nodes' memory, in seconds since the epoch, from the job's ledger."""
    path = Path(os.environ["HOLDFAST_JOB_DIR"]) / "job.sqlite"
    deadline = time.monotonic() + WHOLE_S
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as ledger:
        while time.monotonic() < deadline:
            rows = ledger.execute(
                "select utc, fields from events where kind = 'snapshot' order by seq desc limit 4"
            )
            for utc, fields in rows.fetchall():
                if json.loads(fields)["step"] == step:
                    return datetime.fromisoformat(utc).timestamp()
            time.sleep(POLL_S)
    raise TimeoutError(f"the snapshot of step {step} was not whole after {WHOLE_S:g} s")


def _compute(seconds: float) -> float:
    """A fixed piece of work that took about so long the first time; how long it took now."""
    if not _work:
        a = torch.randn(384, 384)
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            torch.mm(a, a)
            count += 1
        _work.append((a, count))
    a, count = _work[0]
    began_s = time.perf_counter()
    for _ in range(count):
        torch.mm(a, a)
    return time.perf_counter() - began_s


_work: list[tuple[torch.Tensor, int]] = []

if __name__ == "__main__":
    main()
