"""Collectives of a replica's own, by threads of one process, against what they must give."""

import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from holdfast.errors import CollectiveFault, UsageError
from holdfast.protocol.network.sockets import CONGESTION, unpace
from holdfast.train import gloo_group as wires_module
from holdfast.train.gloo_group import (
    BufferPool,
    GlooGroup,
    _addresses,
    _gloo,
    _key,
    check_size,
    sockets_here,
    with_socket,
)


def each(count, call):
    with ThreadPoolExecutor(count) as pool:
        return [job.result(timeout=60) for job in [pool.submit(call, rank) for rank in range(count)]]


@pytest.fixture(params=[2, 3, 5])
def gloo(request):
    store = HashStore()
    made = [GlooGroup(rank, request.param, "127.0.0.1") for rank in range(request.param)]
    each(request.param, lambda rank: made[rank].connect(store))
    yield made
    for one in made:
        one.abort()
        one.close()


def drawn(rank, count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("in_place", [False, True])
def test_everybody_gets_all_parts(gloo, dtype, in_place):
    size, count = len(gloo), 70_001

    def gather(rank):
        out = torch.zeros(size * count, dtype=dtype)
        mine = (drawn(rank, count, torch.float32) * 100).to(dtype)
        if in_place:  # as FSDP2 does
            out[rank * count : (rank + 1) * count] = mine
            mine = out[rank * count : (rank + 1) * count]
        gloo[rank].gather(out, mine)
        return out

    expected = torch.cat([(drawn(rank, count, torch.float32) * 100).to(dtype) for rank in range(size)])
    assert all(torch.equal(out, expected) for out in each(size, gather))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_added_in_the_order_of_the_ranks_and_rounded_once(gloo, dtype):
    size, count = len(gloo), 70_001
    inputs = [drawn(rank, size * count, dtype) for rank in range(size)]
    wide = torch.promote_types(dtype, torch.float32)
    expected = inputs[0].to(wide)
    for other in inputs[1:]:
        expected = expected + other.to(wide)

    def scatter(rank):
        before, out = inputs[rank].clone(), torch.empty(count, dtype=dtype)
        scratch = BufferPool()
        for _ in range(2):  # also out of memory that was used before
            gloo[rank].scatter_sum(out, inputs[rank], scratch)
        assert torch.equal(inputs[rank], before)
        return out

    for rank, out in enumerate(each(size, scatter)):
        assert torch.equal(out, expected[rank * count : (rank + 1) * count].to(dtype))


def test_an_abort_frees_who_waits_for_the_others(gloo):
    begun = threading.Event()

    def wait(rank):
        if rank == 0:
            begun.wait(30)
            for every in gloo:
                every.abort()
            return
        begun.set()
        with pytest.raises(CollectiveFault):
            gloo[rank].scatter_sum(torch.empty(1000), torch.ones(1000 * len(gloo)), BufferPool())

    each(len(gloo), wait)


@pytest.mark.skipif(CONGESTION is None, reason="this system's connections have no such choice")
def test_connections_within_the_machine_are_not_paced(gloo):
    def kind(sock):
        if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
            try:
                sock.getpeername()
            except OSError:
                return
            found.add(sock.getsockopt(socket.IPPROTO_TCP, CONGESTION, 16).rstrip(b"\0"))

    found: set[bytes] = set()
    for one in gloo:
        for fd in one._connections():
            with_socket(fd, kind)
    assert found == {b"reno"}


@pytest.fixture
def elsewhere():
    """Where something other than a member listens; connections stay open until the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []
        one_at_a_time = threading.Lock()  # else one thread may accept what another connected

        def connect():
            with one_at_a_time:
                ours = socket.create_connection(server.getsockname(), timeout=10)
                theirs, _ = server.accept()
                kept.extend([ours, theirs])
            return ours, theirs

        yield connect
        for sock in kept:
            sock.close()


def test_an_abort_leaves_alone_what_the_script_connected_meanwhile(elsewhere, monkeypatch):
    """Another thread of the process connects and accepts while the group is built."""
    foreign = []

    def slow_gloo(*given):
        made = _gloo(*given)
        foreign.append(elsewhere())
        return made

    monkeypatch.setattr(wires_module, "_gloo", slow_gloo)
    store = HashStore()
    made = [GlooGroup(rank, 2, "127.0.0.1") for rank in range(2)]
    each(2, lambda rank: made[rank].connect(store))
    assert [len(one._connections()) for one in made] == [1, 1]
    for one in made:
        one.abort()
    for ours, theirs in foreign:
        ours.sendall(b"a")
        assert theirs.recv(1) == b"a"
        theirs.sendall(b"b")
        assert ours.recv(1) == b"b"
    for one in made:
        one.close()


def connected(ours):
    """All connections of this process over TCP, by inode."""

    def is_connected(sock):
        try:
            return (
                sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM and bool(sock.getpeername())
            )
        except OSError:
            return False

    return {inode for inode, fd in sockets_here().items() if with_socket(fd, is_connected)} - ours


def test_a_socket_is_found_by_its_own_descriptor_while_others_look_at_it():
    """`with_socket` duplicates it for a moment, and a group's members look at the same process in threads of their own."""
    ours, theirs = socket.socketpair()
    ends = threading.Event()

    def look():
        while not ends.is_set():
            with_socket(ours.fileno(), socket.socket.getsockname)

    with ours, theirs, ThreadPoolExecutor() as threads:
        looking = [threads.submit(look) for _ in range(3)]
        inode = os.fstat(ours.fileno()).st_ino
        found = {sockets_here().get(inode) for _ in range(2000)}
        ends.set()
        assert found == {ours.fileno()}
        assert [one.result() for one in looking] == [None] * 3


@pytest.mark.parametrize("size", [2, 3, 6])
def test_all_that_gloo_connects_is_known_by_its_addresses(size):
    before, store = connected(set()), HashStore()
    made = [GlooGroup(rank, size, "127.0.0.1") for rank in range(size)]
    each(size, lambda rank: made[rank].connect(store))
    assert set().union(*(one._sockets for one in made)) == connected(before)
    assert len(connected(before)) == size * (size - 1)
    for one in made:
        one.abort()
        one.close()


@pytest.mark.parametrize(
    ("family", "address", "written"),
    [
        (socket.AF_INET, ("127.0.0.1", 0x943F), b"\x02\0\x94\x3f\x7f\0\0\x01"),
        (
            socket.AF_INET6,
            ("fe80::1%lo", 0x943F, 0, 1),
            b"\x0a\0\x94\x3f\0\0\0\0\xfe\x80" + bytes(13) + b"\x01",
        ),
    ],
)
def test_an_address_is_found_as_the_kernel_writes_it(family, address, written):
    assert _key(family, address) in _addresses(b"\x02\0" + b"before" + written + b"after\x0a\0")


def test_a_socket_that_is_not_connected_is_left_alone():
    one, other = socket.socketpair()
    with socket.socket() as alone, one, other:
        unpace(alone)
        unpace(one)


def test_a_group_that_is_too_large_for_gloo_is_refused_and_a_large_one_is_logged_once(caplog):
    for size, said in ((64, []), (65, [logging.WARNING]), (256, [logging.WARNING])):
        caplog.clear()
        for rank in range(3):
            check_size(rank, size)
        assert [record.levelno for record in caplog.records] == said
    with pytest.raises(
        UsageError, match=r"257 workers.*256 are the most: give each worker a GPU.*fewer replicas"
    ):
        check_size(0, 257)


def test_the_refusal_ends_the_job_and_is_no_fault_of_the_connections(monkeypatch):
    monkeypatch.setattr(wires_module, "MOST_MEMBERS", 1)
    monkeypatch.setattr(wires_module, "WARNS_ABOVE", 1)
    with pytest.raises(UsageError, match="are the most"):
        GlooGroup(0, 2, "127.0.0.1").connect(HashStore())
