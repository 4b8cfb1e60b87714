"""Collectives of a replica's own, by threads of one process, against what they must give."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from holdfast.errors import CollectiveFailed
from holdfast.protocol.sockets import CONGESTION, unpace
from holdfast.train.scratch import Scratch
from holdfast.train.wires import Wires, socket_inodes, with_socket


def each(count, call):
    with ThreadPoolExecutor(count) as pool:
        return [job.result(timeout=60) for job in [pool.submit(call, rank) for rank in range(count)]]


@pytest.fixture(params=[2, 3, 5])
def wires(request):
    store = HashStore()
    made = [Wires(rank, request.param, "127.0.0.1") for rank in range(request.param)]
    each(request.param, lambda rank: made[rank].connect(store))
    yield made
    for one in made:
        one.abort()
        one.close()


def drawn(rank, count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("in_place", [False, True])
def test_everybody_gets_all_parts(wires, dtype, in_place):
    size, count = len(wires), 70_001

    def gather(rank):
        out = torch.zeros(size * count, dtype=dtype)
        mine = (drawn(rank, count, torch.float32) * 100).to(dtype)
        if in_place:  # as FSDP2 does
            out[rank * count : (rank + 1) * count] = mine
            mine = out[rank * count : (rank + 1) * count]
        wires[rank].gather(out, mine)
        return out

    expected = torch.cat([(drawn(rank, count, torch.float32) * 100).to(dtype) for rank in range(size)])
    assert all(torch.equal(out, expected) for out in each(size, gather))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_added_in_the_order_of_the_ranks_and_rounded_once(wires, dtype):
    size, count = len(wires), 70_001
    inputs = [drawn(rank, size * count, dtype) for rank in range(size)]
    wide = torch.promote_types(dtype, torch.float32)
    expected = inputs[0].to(wide)
    for other in inputs[1:]:
        expected = expected + other.to(wide)

    def scatter(rank):
        before, out = inputs[rank].clone(), torch.empty(count, dtype=dtype)
        scratch = Scratch()
        for _ in range(2):  # also out of memory that was used before
            wires[rank].scatter_sum(out, inputs[rank], scratch)
        assert torch.equal(inputs[rank], before)
        return out

    for rank, out in enumerate(each(size, scatter)):
        assert torch.equal(out, expected[rank * count : (rank + 1) * count].to(dtype))


def test_an_abort_frees_who_waits_for_the_others(wires):
    begun = threading.Event()

    def wait(rank):
        if rank == 0:
            begun.wait(30)
            for every in wires:
                every.abort()
            return
        begun.set()
        with pytest.raises(CollectiveFailed):
            wires[rank].scatter_sum(torch.empty(1000), torch.ones(1000 * len(wires)), Scratch())

    each(len(wires), wait)


@pytest.mark.skipif(CONGESTION is None, reason="this system's connections have no such choice")
def test_connections_within_the_machine_are_not_paced(wires):
    def kind(sock):
        if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
            try:
                sock.getpeername()
            except OSError:
                return
            found.add(sock.getsockopt(socket.IPPROTO_TCP, CONGESTION, 16).rstrip(b"\0"))

    found: set[bytes] = set()
    for inode in set.union(*(one._after - one._before for one in wires)):
        with_socket(socket_inodes()[inode], kind)
    assert found == {b"reno"}


def test_a_socket_that_is_not_connected_is_left_alone():
    one, other = socket.socketpair()
    with socket.socket() as alone, one, other:
        unpace(alone)
        unpace(one)
