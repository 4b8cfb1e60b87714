"""Replication and recovery against plain sockets: one process holds a shard, this one brings it here, in turn.

Prints one JSON line for every measurement.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.memory import PAGE, SlotPool
from holdfast.checkpoint.replicate import Pull, replicate
from holdfast.checkpoint.snapshot_server import SnapshotServer
from holdfast.protocol.network.sockets import unpace
from holdfast.protocol.snapshots import Holder, Key
from holdfast.tensors.staging import copy_into
from holdfast.train import restore, state_image

TOKEN, KEY = "bench", Key(1, 1, 0, 1)
LARGE = 306
BLOCK = 4 << 20


class Tensors:
    """A state of so many bytes, as `run.protect` takes it."""

    def __init__(self, mib: int, value: float) -> None:
        self.tensors = {f"t{i}": torch.full((mib * (1 << 20) // 4 // LARGE,), value) for i in range(LARGE)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, given: dict[str, torch.Tensor]) -> None:
        for name, tensor in given.items():
            if tensor.data_ptr() != self.tensors[name].data_ptr():
                self.tensors[name].copy_(tensor)


def hold(mib: int, folder: Path) -> None:
    """The other process: a pool with one snapshot, its server, and plain sockets that send the same bytes."""
    pool = SlotPool(folder, 4 * mib << 20)
    image = state_image.capture({"state": Tensors(mib, 7.0)}, 1)
    slot = pool.begin(KEY, image.index.nbytes)
    copy_into(slot.blob, image.parts(0, image.index.nbytes), image.ready)
    pool.seal(slot, image.index)
    server = SnapshotServer(pool, "127.0.0.1", TOKEN)
    plain = socket.create_server(("127.0.0.1", 0))
    print(server.port, plain.getsockname()[1], slot.blob_bytes, server.name, flush=True)
    with slot.path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    row = memoryview(memory)[PAGE : PAGE + slot.blob_bytes]

    def send(connection: socket.socket) -> None:
        with connection:
            low, high, unpaced = (int.from_bytes(connection.recv(8), "big") for _ in range(3))
            if unpaced:
                unpace(connection)
            for at in range(low, high, BLOCK):
                connection.sendall(row[at : min(at + BLOCK, high)])

    while True:
        connection, _ = plain.accept()
        threading.Thread(target=send, args=(connection,), daemon=True).start()


def plain_sockets(port: int, target: memoryview, streams: int, unpaced: bool = False) -> None:
    """The same bytes with nothing around them. unpaced: as Holdfast sets its connections within a machine."""
    size = len(target) // streams

    def receive(number: int) -> None:
        low = number * size
        high = len(target) if number == streams - 1 else low + size
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"".join(n.to_bytes(8, "big") for n in (low, high, int(unpaced))))
            while low < high:
                low += connection.recv_into(target[low : min(low + BLOCK, high)])

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--hold", type=Path)
    given = parser.parse_args()
    if given.hold:
        hold(given.mib, given.hold)
    warnings.filterwarnings("ignore")
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm"))
    command = [sys.executable, "-m", "bench.checkpoint.streams", "--mib", str(given.mib)]
    holder = subprocess.Popen([*command, "--hold", str(root / "a" / "a")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        port, plain, nbytes, server = holder.stdout.readline().split(" ", 3)
        served = Holder("peer", "127.0.0.1", int(port), server.strip())
        measure(root, served, int(plain), int(nbytes), given.mib, given.repetitions)
    finally:
        holder.kill()
        holder.wait()
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        root.rmdir()


def measure(root: Path, served: Holder, plain: int, nbytes: int, mib: int, repetitions: int) -> None:
    pool = SlotPool(root / "b" / "b", 4 * mib << 20)
    holders = [served]
    target = memoryview(mmap.mmap(-1, nbytes))
    for at in range(0, nbytes, 4096):
        target[at] = 1
    mine = Tensors(mib, 0.0)
    saved = root / "dcp"
    dcp.save({"state": Tensors(mib, 7.0).state_dict()}, storage_writer=dcp.FileSystemWriter(saved))

    def replicated() -> None:
        slot = replicate(pool, Pull(key=KEY, holders=holders, token=TOKEN), None)
        pool.drop(slot)

    def recovered() -> None:
        pull = Pull(key=KEY, holders=holders, token=TOKEN)
        image = restore.pull_image({"state": mine}, pull, None, lambda *_: None)
        state_image.load({"state": mine}, image)

    def dcp_loaded() -> None:
        dcp.load({"state": mine.state_dict()}, storage_reader=dcp.FileSystemReader(saved))

    ways: dict[str, Callable[[], None]] = {
        f"sockets {n}": lambda n=n: plain_sockets(plain, target, n) for n in (1, 2, 4)
    }
    ways["sockets 2, not paced"] = lambda: plain_sockets(plain, target, 2, unpaced=True)
    ways |= {"replicate": replicated, "recover": recovered, "dcp.load": dcp_loaded}
    for repetition in range(-1, repetitions):
        for name, way in ways.items():
            began_s = time.perf_counter()
            way()
            took_s = time.perf_counter() - began_s
            if repetition >= 0:
                print(json.dumps({"way": name, "took_s": took_s, "nbytes": nbytes}), flush=True)
    assert all(bool((t == 7.0).all()) for t in mine.tensors.values())
    pool.close()


if __name__ == "__main__":
    main()
