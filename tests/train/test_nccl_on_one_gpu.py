"""NCCL itself: members that share a GPU, each of which NCCL takes for another machine. Needs a GPU; `test_nccl` has stand-ins."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_staging import Some
from torch.distributed import distributed_c10d

from holdfast.errors import CollectiveFault
from holdfast.train import gloo_group, gpu_transfer, state_image
from holdfast.train.gloo_group import GlooGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZE = 3
LIMIT_S = 60.0
NUMBERS = 1 << 20


class Members:
    """Processes that run one function each; what they return, or raise."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._said: Any = self._context.SimpleQueue()
        self._processes: list[Any] = []

    def start(self, act: Callable[..., object], *more: object) -> None:
        rank = len(self._processes)
        args = (self._said, act, rank, self.store.port, *more)
        process = self._context.Process(target=_member, args=args, daemon=True)
        process.start()
        self._processes.append(process)

    def await_end(self, rank: int) -> None:
        self._processes[rank].join()

    def results(self, count: int) -> dict[int, object]:
        """Of the first so many that come to their end."""
        found = {}
        for _ in range(count):
            rank, result = self._said.get()
            assert not isinstance(result, str), f"rank {rank}: {result}"
            found[rank] = result
        return found

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _member(said: Any, act: Callable[..., object], rank: int, port: int, *more: object) -> None:
    faulthandler.dump_traceback_later(LIMIT_S / 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        result = act(rank, store, *more)
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    said.put((rank, result))


@pytest.fixture
def members(monkeypatch):
    monkeypatch.setenv(gloo_group.GPU_GROUPS, "nccl")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    found = Members()
    yield found
    found.end()


def joined(rank: int, store: Any, size: int, generation: int) -> GlooGroup:
    torch.cuda.set_device(0)
    group = GlooGroup(rank, size, "127.0.0.1", torch.device("cuda", 0))
    group.connect(dist.PrefixStore(str(generation), store))
    assert group.queues, "gloo was chosen"
    return group


def row(rank: int) -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.float32, device="cuda") % 1000 + rank


def summed(group: GlooGroup, rank: int) -> float:
    """A sum over all members, checked; returns one number of it."""
    tensor = row(rank)
    group.wait(group.allreduce(tensor))
    torch.cuda.synchronize()
    group.intact()
    return float(tensor[7])


def all_collectives(rank: int, store: Any) -> dict[str, bool]:
    group = joined(rank, store, SIZE, 0)
    others, mine = [row(r) for r in range(SIZE)], row(rank)
    found = {"allreduce": summed(group, rank) == sum(float(o[7]) for o in others)}
    seen = row(rank)
    group.wait(group.broadcast(seen, 1))
    found["broadcast"] = torch.equal(seen, others[1])
    out = torch.empty(SIZE * NUMBERS, device="cuda")
    group.wait(group.start(lambda backend: backend._allgather_base(out, mine)))
    found["all-gather"] = torch.equal(out, torch.cat(others))
    out.zero_()
    at_once = distributed_c10d.AllgatherOptions()
    at_once.asyncOp = False  # as FSDP2 calls it
    group.wait(group.start(lambda backend: backend._allgather_base(out, mine, at_once)))
    found["all-gather on the stream"] = torch.equal(out, torch.cat(others))
    part = torch.empty(4, device="cuda")
    group.wait(group.start(lambda backend: backend._reduce_scatter_base(part, mine[: SIZE * 4].contiguous())))
    parts = [o[rank * 4 : rank * 4 + 4] for o in others]
    found["reduce-scatter"] = torch.equal(part, sum(parts[1:], parts[0]))
    got = torch.empty(SIZE * 4, device="cuda")
    group.wait(group.exchange(got, [4] * SIZE, mine[: SIZE * 4].contiguous(), [4] * SIZE))
    found["exchange"] = torch.equal(got, torch.cat(parts))
    group.close()
    return found


def test_every_collective_gives_what_it_should(members):
    for _ in range(SIZE):
        members.start(all_collectives)
    for rank, found in members.results(SIZE).items():
        assert all(found.values()), f"rank {rank}: {found}"


def lost_in_the_middle(rank: int, store: Any) -> dict[str, float]:
    """Rank 1 is killed between two collectives; the others abort, and go on as a group of two in the same process."""
    group = joined(rank, store, SIZE, 0)
    before = summed(group, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def abort() -> None:
        """As the link's thread does, while the main thread may wait for the device."""
        told = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        told.set(f"waiting-{rank}", b"1")
        told.wait(["aborts"])
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    began_s = time.monotonic()
    tensor = row(rank)
    with suppress(CollectiveFault):
        group.wait(group.allreduce(tensor))  # its kernel waits for one that is gone
    product = torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    thread.join()
    refused = False
    try:
        group.intact()
    except CollectiveFault:
        refused = True
    group.close()
    after_s = time.monotonic()
    smaller = joined(rank // 2, store, 2, 1)
    connected_s = time.monotonic() - after_s
    after = summed(smaller, rank)
    smaller.close()
    return {
        "before": before,
        "after": after,
        "refused": refused,
        "computed": float(product[0, 0]),
        "abort_s": took_s,
        "connect_s": connected_s,
    }


def test_who_is_left_goes_on_in_the_same_process(members):
    for _ in range(SIZE):
        members.start(lost_in_the_middle)
    members.store.wait(["waiting-0", "waiting-2"])
    members.await_end(1)
    members.store.set("aborts", b"1")
    found = members.results(2)
    print(found)
    for each in found.values():
        assert (each["before"], each["after"]) == (3 * 7 + 3, 2 * 7 + 2)
        assert each["refused"]
        assert each["computed"] == 512


def waits_for_nobody(rank: int, store: Any) -> float:
    """The other member never comes: `abort` frees who connects."""
    torch.cuda.set_device(0)
    group = GlooGroup(rank, 2, "127.0.0.1", torch.device("cuda", 0))
    store.set("gpu-1", b"another machine's")
    called = []

    def abort() -> None:
        called.append(time.monotonic())
        if len(called) == 2:  # it has waited for a while: the coordinator has noticed
            group.abort()

    group.waits = abort
    with suppress(CollectiveFault):
        group.connect(store)
        raise AssertionError("it connected to nobody")
    group.close()
    return float((torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum())


def test_who_never_comes_is_not_waited_for(members):
    members.start(waits_for_nobody)
    assert members.results(1) == {0: 64.0**3}


class Large(Some):
    """Tensors of which some go through memory of their own, and some straight into their place."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        sizes = (5, 9 << 20, 3, 24 << 20, 1 << 10)
        self.tensors = [torch.randn(size, generator=drawn).cuda() for size in sizes]


def gives(rank: int, store: Any, seed: int) -> bool:
    torch.cuda.set_device(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set("donor", str(listener.getsockname()[1]))
        sock, _ = listener.accept()
    image = state_image.capture({"some": Large(seed)}, 1)
    gpu_transfer.send(sock, image, 0, image.index.nbytes, lambda line: None)
    return True


def takes(rank: int, store: Any, seed: int) -> dict[str, object]:
    torch.cuda.set_device(0)
    state = Large(seed + 1)
    image = state_image.capture({"some": state}, 1)
    sock = socket.create_connection(("127.0.0.1", int(store.get("donor"))))
    arrived = []
    began_s = time.monotonic()
    gpu_transfer.receive(sock, image, 0, image.index.nbytes, arrived.append)
    took_s = time.monotonic() - began_s
    torch.cuda.synchronize()
    wanted = Large(seed)
    equal = all(torch.equal(a, b) for a, b in zip(state.tensors, wanted.tensors, strict=True))
    return {"equal": equal, "bytes": sum(arrived) == image.index.nbytes, "took_s": took_s}


def test_a_state_goes_from_gpu_memory_to_gpu_memory(members):
    members.start(gives, 3)
    members.start(takes, 3)
    found = members.results(2)
    print(found)
    assert found[1]["equal"]
    assert found[1]["bytes"]
