"""One rank of several that write a sharded state to a folder and read it back: as safetensors, as *bare* files of the same
bytes without a header, and with torch.distributed.checkpoint.

Started by `torch.distributed.run`. Appends one JSON line for every repetition of this rank to `--output`-RANK. Every way ends
with fsync, and reads from the page cache what it has just written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import seal, sums_of_buffers
from holdfast.checkpoint.loading import FlatState, flatten, leaf_of, regions_of
from holdfast.checkpoint.located import find_in_archive
from holdfast.checkpoint.regions import read_regions
from holdfast.tensors.tree import buffer_of

LARGE, SMALL = 306, 102
"""As in `stall`."""
WRITE_BYTES = 4 << 20
State = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", required=True)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rows = (given.mib << 20) // 4 // LARGE // 1024 // world

    def made(value: float) -> State:
        local = [torch.full((rows, 1024), value + i) for i in range(LARGE)]
        state: State = {
            f"layers.{i}": DTensor.from_local(t, mesh, [Shard(0)], run_check=False)
            for i, t in enumerate(local)
        }
        return state | {f"norms.{i}": torch.full((64,), value) for i in range(SMALL)}

    state, into = made(1.0 + rank), made(-1.0)
    with Path(f"{given.output}-{rank}").open("a") as out:
        for repetition in range(-1, given.repetitions):
            # None is always the one after torch's files were removed.
            ways = list(WAYS)[repetition % len(WAYS) :] + list(WAYS)[: repetition % len(WAYS)]
            for way in ways:
                write, read = WAYS[way]
                folder = given.folder / way
                for tensor in into.values():
                    local(tensor).zero_()
                line: dict[str, Any] = {"way": way, "rank": rank, "world": world, "repetition": repetition}
                actions = {"write_s": partial(write, folder, state), "read_s": partial(read, folder, into)}
                for what, action in actions.items():
                    dist.barrier()
                    began_s, used_s = time.perf_counter(), time.process_time()
                    action()
                    dist.barrier()
                    line[what] = time.perf_counter() - began_s
                    line[f"{what[:-2]}_cpu_s"] = time.process_time() - used_s
                if not all(
                    torch.equal(local(into[name]), local(state[name])) for name in state if "layers" in name
                ):
                    raise AssertionError(f"{way}: what was read is not what was written")
                if rank == 0:
                    shutil.rmtree(folder)
                if repetition >= 0:
                    out.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buffers(flat: FlatState) -> Iterator[memoryview]:
    for tensor in flat.tensors:
        data = buffer_of(tensor)
        for low in range(0, len(data), WRITE_BYTES):
            yield data[low : low + WRITE_BYTES]


def _save(folder: Path, state: State, header: bool) -> None:
    flat = flatten(state, 1)
    sealed = seal(flat.index, sums_of_buffers(_buffers(flat)))
    if not header:
        sealed = sealed._replace(header=b"")
    archive = Archive(str(folder))
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, archive.save_shard(1, dist.get_rank(), sealed, _buffers(flat)))
    if dist.get_rank() == 0:
        archive.commit(1, shards)


def _load(folder: Path, state: State) -> None:
    found, rank = find_in_archive(Archive(str(folder)), 1), dist.get_rank()
    large = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
    read_regions(
        found, [r for name, t in large.items() for r in regions_of(found, leaf_of(name, t), rank, [])]
    )


def _save_with_dcp(folder: Path, state: State) -> None:
    dcp.save(state, checkpoint_id=folder)


def _load_with_dcp(folder: Path, state: State) -> None:
    dcp.load(state, checkpoint_id=folder)


WAYS: dict[str, tuple[Callable[[Path, State], None], Callable[[Path, State], None]]] = {
    "bare": (partial(_save, header=False), _load),
    "safetensors": (partial(_save, header=True), _load),
    "DCP": (_save_with_dcp, _load_with_dcp),
}


if __name__ == "__main__":
    main()
