"""One measurement in a process of its own, run by the Python of the loader that is measured.

    measure.py prepare LOADER FOLDER          write the data in the loader's own format
    measure.py resume LOADER FOLDER POSITION  seconds from "state and files are there" to the first batch
    measure.py speed LOADER FOLDER SECONDS    tokens per second

Prints one JSON object. Everything is imported before a clock starts.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

SEQ_LEN = 1024
BATCH = 8
WARM = 200
SEED = 1


class Memmap(Dataset):
    """What scripts write by hand: a map of the file and a slice for each sample."""

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.from_numpy(self.tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].astype(np.int64))
        return row[:-1], row[1:]


class Stream(IterableDataset):
    """The same in a shuffled order, as a stream without a state of its own."""

    def __init__(self, folder: Path) -> None:
        self.data = Memmap(folder)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for i in np.random.default_rng(SEED).permutation(len(self.data)).tolist():
            yield self.data[i]


class Numbers(Dataset):
    """As long as the real data, to bring a loader to a position without reading."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> int:
        return i


# ---------------------------------------------------------------- each returns an iterator of batches


def plain(folder: Path, position: int) -> Iterator[Any]:
    """The floor: a loop over a map, ids drawn before."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    ids = np.random.default_rng(SEED).integers(0, (len(tokens) - 1) // SEQ_LEN, 1 << 17)
    for first in itertools.cycle(range(0, len(ids), BATCH)):
        starts = (ids[first : first + BATCH] * SEQ_LEN).tolist()
        x = torch.stack([torch.from_numpy(tokens[s : s + SEQ_LEN].astype(np.int64)) for s in starts])
        y = torch.stack([torch.from_numpy(tokens[s + 1 : s + 1 + SEQ_LEN].astype(np.int64)) for s in starts])
        yield x, y


def tight(folder: Path, position: int) -> Iterator[Any]:
    """The same loop with one conversion for each batch, as fast as it gets in numpy."""
    tokens = np.asarray(np.load(folder / "tokens.npy", mmap_mode="r"))
    ids = np.random.default_rng(SEED).integers(0, (len(tokens) - 1) // SEQ_LEN, 1 << 17)
    for first in itertools.cycle(range(0, len(ids), BATCH)):
        starts = (ids[first : first + BATCH] * SEQ_LEN).tolist()
        rows = np.stack([tokens[s : s + SEQ_LEN + 1] for s in starts])
        yield torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def holdfast(folder: Path, position: int, workers: int = 0) -> Iterator[Any]:
    from holdfast.data import TokenDataset, shuffled
    from holdfast.data.batches import DatasetBatches

    data: Any = TokenDataset(folder / "tokens.npy", seq_len=SEQ_LEN)
    micros, step = 8, position // (8 * BATCH)
    batches = DatasetBatches(
        shuffled(data, workers=workers) if workers else data,
        global_batch=micros * BATCH,
        micro_batch=BATCH,
        until=1 << 40,
        seed=SEED,
        device=torch.device("cpu"),
    )
    while True:
        batches.aim(step, step * micros * BATCH, range(micros))
        for micro in range(micros):
            yield batches.load(step, micro)
        step += 1


def torchdata(folder: Path, position: int, workers: int = 0) -> Iterator[Any]:
    """A map-style dataset, shuffled; the state is loaded, made by a loader that was brought there."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Memmap(folder), BATCH, shuffle=True, num_workers=workers)
    if position:
        loader.load_state_dict(saved_state(folder, position))
    return iter(loader)


def saved_state(folder: Path, position: int) -> Any:
    """Made by `prepare`."""
    return torch.load(folder / f"torchdata-{position}.pt", weights_only=False)


def torchdata_stream(folder: Path, position: int) -> Iterator[Any]:
    """A stream without a state of its own: the loader goes forward sample by sample."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Stream(folder), BATCH)
    fresh = StatefulDataLoader(Stream(folder), BATCH)
    state = fresh.state_dict()
    state["_num_yielded"] = position // BATCH
    state["_iterator_finished"] = False
    loader.load_state_dict(state)
    return iter(loader)


def datasets(folder: Path, position: int, workers: int = 0) -> Iterator[Any]:
    """Arrow, streamed: `shuffle` with a buffer, then `skip`."""
    from datasets import Dataset as Arrow

    data = Arrow.from_file(str(folder / "tokens.arrow")).with_format("torch")
    if not workers and position >= 0:
        stream = data.to_iterable_dataset().shuffle(seed=SEED, buffer_size=1000).skip(position)
        return iter(DataLoader(stream, BATCH))
    return iter(DataLoader(data, BATCH, shuffle=True, num_workers=max(0, workers)))


def streaming(folder: Path, position: int) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(local=str(folder / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=0)
    if position:
        state = data.state_dict(position, from_beginning=True)
        loader.load_state_dict(state)
    return iter(loader)


LOADERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    "plain": plain,
    "tight": tight,
    "holdfast": holdfast,
    "holdfast-2": lambda folder, position: holdfast(folder, position, 2),
    "torchdata": torchdata,
    "torchdata-2": lambda folder, position: torchdata(folder, position, 2),
    "torchdata-stream": torchdata_stream,
    "datasets": datasets,
    "datasets-map": lambda folder, position: datasets(folder, -1),
    "streaming": streaming,
}


# ---------------------------------------------------------------- data


def prepare(loader: str, folder: Path) -> None:
    count = len(Memmap(folder))
    if loader == "datasets":
        import pyarrow as pa

        row = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1000 * SEQ_LEN, np.uint16)), SEQ_LEN)
        batch = pa.record_batch([row], names=["tokens"])
        with (
            pa.OSFile(str(folder / "tokens.arrow"), "wb") as file,
            pa.ipc.new_stream(file, batch.schema) as out,
        ):
            for first in range(0, count, 1000):
                out.write_batch(batch.slice(0, count - first))
    elif loader == "streaming":
        from streaming import MDSWriter

        row = np.zeros(SEQ_LEN, np.uint16)
        with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}) as out:
            for _ in range(count):
                out.write({"tokens": row})
    elif loader == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        wanted = {position // BATCH: position for position in positions(count) if position}
        brought = StatefulDataLoader(Numbers(count), BATCH, shuffle=True)
        for number, _ in enumerate(brought, 1):
            if number in wanted:
                torch.save(brought.state_dict(), folder / f"torchdata-{wanted[number]}.pt")


def positions(count: int) -> list[int]:
    """The begin, the middle and almost the end of an epoch, in whole batches."""
    whole = 8 * BATCH
    return [0, count // 2 // whole * whole, count * 999 // 1000 // whole * whole]


# ---------------------------------------------------------------- clocks


def resume(loader: str, folder: Path, position: int) -> float:
    _import(loader)
    began = time.perf_counter()
    next(LOADERS[loader](folder, position))
    return time.perf_counter() - began


def speed(loader: str, folder: Path, seconds: float) -> float:
    _import(loader)
    batches = LOADERS[loader](folder, 0)
    for _ in range(WARM):
        next(batches)
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        for _ in range(20):
            next(batches)
        count += 20
    return count * BATCH * SEQ_LEN / (now - began)


def _import(loader: str) -> None:
    """Imports are not what is measured."""
    match loader.partition("-")[0]:
        case "holdfast":
            import holdfast.data.batches
            import holdfast.data.tokens  # noqa: F401
        case "torchdata":
            import torchdata.stateful_dataloader  # noqa: F401
        case "datasets":
            import datasets  # noqa: F401
        case "streaming":
            import streaming  # noqa: F401


def main() -> None:
    what, loader, folder, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    match what:
        case "prepare":
            prepare(loader, Path(folder))
            print("{}")
        case "resume":
            print(json.dumps({"seconds": resume(loader, Path(folder), int(rest[0]))}), flush=True)
        case "speed":
            print(json.dumps({"tokens_per_s": speed(loader, Path(folder), float(rest[0]))}), flush=True)


if __name__ == "__main__":
    main()
