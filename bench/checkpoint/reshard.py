"""How many bytes a load into another world size reads: a sharded state, saved by some ranks and read by others.

No processes are needed: what each reader asks for follows from its place, and the bytes that it fetches are counted.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import torch

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import seal, sums_of
from holdfast.checkpoint.loading import Leaf, regions_of
from holdfast.checkpoint.located import Located, find_in_archive
from holdfast.checkpoint.regions import read_regions
from holdfast.tensors.index import StateIndex, TensorSpec

LARGE = 306


@dataclass(frozen=True)
class Resharded:
    """needed, fetched: bytes over all readers."""

    savers: int
    readers: int
    needed: int
    fetched: int


def measure(mib: int, savers: int, readers: int) -> Resharded:
    """A state of `mib` MiB for every saver, of tensors that are cut along their first dimension, through a folder."""
    columns = 1024
    rows = mib * (1 << 20) * savers // 4 // LARGE // columns
    whole = {f"t{i}": torch.arange(rows, dtype=torch.float32)[:, None] + i for i in range(LARGE)}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        archive = Archive(folder)
        shards = []
        for rank in range(savers):
            low, high = rows * rank // savers, rows * (rank + 1) // savers
            nbytes = (high - low) * columns * 4
            specs = tuple(
                TensorSpec(
                    path=name,
                    dtype="float32",
                    shape=(high - low, columns),
                    offset=i * nbytes,
                    nbytes=nbytes,
                    global_shape=(rows, columns),
                    start=(low, 0),
                )
                for i, name in enumerate(whole)
            )
            row = torch.cat([whole[s.path][low:high].expand(-1, columns).reshape(-1) for s in specs])
            data = memoryview(row.view(torch.uint8).numpy())
            sealed = seal(StateIndex(1, {}, specs, nbytes * LARGE), sums_of(data))
            shards.append(archive.save_shard(1, rank, sealed, [data]))
        archive.commit(1, shards)
        needed = fetched = 0
        for reader in range(readers):
            found = find_in_archive(archive, 1)
            needed += _read(found, whole, rows, columns, reader, readers)
            fetched += found.fetched_bytes
    return Resharded(savers, readers, needed, fetched)


def _read(
    found: Located, whole: dict[str, torch.Tensor], rows: int, columns: int, rank: int, world: int
) -> int:
    low, high = rows * rank // world, rows * (rank + 1) // world
    mine = {name: torch.empty(high - low, columns) for name in whole}
    regions = [
        region
        for name, tensor in mine.items()
        for region in regions_of(
            found, Leaf(path=name, local=tensor, global_shape=(rows, columns), start=(low, 0)), rank, []
        )
    ]
    read_regions(found, regions)
    for name, tensor in mine.items():
        if not torch.equal(tensor, whole[name][low:high].expand(-1, columns)):
            raise AssertionError(f"rank {rank} of {world}: {name} is not what was saved")
    return sum(t.nbytes for t in mine.values())
