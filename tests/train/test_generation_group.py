"""Groups of real workers as threads of one process: each has its own control channel and its own gloo."""

import contextlib
import ctypes
import math
import random
import socket
import struct
import threading
import time

import pytest
import torch
from cluster import TOKEN, Cluster

from holdfast.errors import CollectiveFault
from holdfast.protocol.messages import Generation, Member
from holdfast.train import gloo_group as wires_module
from holdfast.train.reduction import GradientSum

SYN_SENT = 2


@pytest.fixture(params=[None, 1, 2], ids=["mesh", "chain", "tree"])
def cluster(request):
    made = Cluster(3, request.param)
    yield made
    made.close()


@pytest.fixture
def mesh():
    made = Cluster(3)
    yield made
    made.close()


def says(channel, message):
    """Says it to all, and what all have said, by rank."""
    return list(channel.exchange(5, message, True))


def test_words_arrive_in_the_order_of_the_ranks(cluster):
    groups = cluster.join(1)

    def talk(group):
        return says(group.channel, (float(group.rank), 1.0, 0.5))

    expected = [(float(r), 1.0, 0.5) for r in range(3)]
    assert cluster.each(talk, groups) == [expected] * 3
    for group in groups:
        group.close()


def test_a_rank_at_another_step_is_noticed(mesh):
    groups = mesh.join(1)

    def talk(group):
        step = 6 if group.rank == 1 else 5
        group.channel.send(step, (0.0, 0.0, 0.0))
        with pytest.raises(CollectiveFault, match="at step"):
            group.channel.receive(step, [(0.0, 0.0, 0.0)])
        return True

    assert all(mesh.each(talk, groups))
    for group in groups:
        group.close()


def test_gloo_sums_over_the_group(cluster):
    groups = cluster.join(1)

    def add(group):
        tensor = torch.full((1000,), float(group.rank + 1))
        group.wait(group.allreduce(tensor))
        return tensor[0].item()

    assert cluster.each(add, groups) == [6.0] * 3
    for group in groups:
        group.close()


def test_a_broken_mesh_frees_who_waits(mesh):
    groups = mesh.join(1)
    waiting = threading.Event()

    def wait(group):
        if group.rank == 2:
            waiting.wait()
            groups[0].channel.abort()
            return "silent"
        waiting.set()
        with pytest.raises(CollectiveFault):
            group.channel.receive(1, [(0.0, 0.0, 0.0)])
        return "free"

    assert mesh.each(wait, groups) == ["free", "free", "silent"]
    for group in groups:
        group.abort()
        group.close()


def test_a_sum_that_ends_just_after_a_slice_of_waiting_is_no_failure(cluster):
    """The slice raises, and by the time that anyone looks the work is complete."""
    (group, *_) = groups = cluster.join(1)

    class Work:
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if timeout is not None:
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return self.waits >= 3

    work = Work()
    group.wait(work)
    assert work.waits == 4
    for group in groups:
        group.close()


@pytest.mark.parametrize("seed", range(4))
def test_an_abort_at_any_moment_frees_every_all_reduce(seed, cluster):
    """Also the one whose bytes are half sent: gloo itself would leave it waiting for its time-out."""
    rng = random.Random(seed)
    for number in range(1, 13):
        groups = cluster.join(number)
        size = rng.choice([100, 30_000, 1_000_000])
        tensors = [torch.ones(size) for _ in groups]
        order = rng.sample(groups, 3)[: rng.choice([2, 3])]  # with two of three nobody can finish
        works = {group.rank: group.allreduce(tensors[group.rank]) for group in order}
        threading.Event().wait(
            rng.random() * rng.choice([0.0, 0.001, 0.01])
        )  # so that bytes are on their way
        for group in rng.sample(groups, 3):
            group.abort()

        def leave(group, works=works):
            began = time.monotonic()
            work = works.get(group.rank)
            if work is not None:
                with contextlib.suppress(CollectiveFault):
                    group.wait(work)
                group.drain(work)
            group.close()
            return time.monotonic() - began

        assert max(cluster.each(leave, groups)) < 5.0, f"seed {seed}, generation {number}"


def test_a_member_that_dies_while_gloo_connects_does_not_hold_the_others(cluster, monkeypatch):
    """The others wait for its connection, which nobody can shut down because it is not there."""
    connecting, real = threading.Barrier(3), wires_module._gloo

    def gloo(store, rank, size, host):
        connecting.wait()
        if rank == 0:
            raise RuntimeError("died here")
        return real(store, rank, size, host)

    monkeypatch.setattr(wires_module, "_gloo", gloo)
    groups = [cluster.group(cluster.generation(1), rank) for rank in range(3)]
    waiting = [cluster.pool.submit(group.join, TOKEN) for group in groups]
    with pytest.raises(CollectiveFault, match="died here"):
        waiting[0].result(timeout=10)
    began = time.monotonic()
    for group in groups:
        group.abort()
    for other in waiting[1:]:
        with pytest.raises(CollectiveFault):
            other.result(timeout=10)
    assert time.monotonic() - began < 5.0  # gloo would try for CONNECT_TIMEOUT
    for group in groups:
        group.close()


def test_a_member_that_never_connects_does_not_hold_the_others_after_a_break(cluster):
    generation = cluster.generation(3)
    group = cluster.group(generation, 0)

    def connect():
        with pytest.raises(CollectiveFault):
            group.join(TOKEN)
        return True

    waiting = cluster.pool.submit(connect)
    group.abort()
    assert waiting.result(timeout=10)


def test_a_break_that_comes_before_the_connecting_ends_it(cluster):
    group = cluster.group(cluster.generation(3), 0)
    group.abort()
    waiting = cluster.pool.submit(group.join, TOKEN)
    with pytest.raises(CollectiveFault):
        waiting.result(timeout=10)


def _tcp_state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def test_a_member_whose_machine_is_silent_does_not_hold_the_others_after_a_break(cluster):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        ignore_all = struct.pack(
            "HBBI", 0x06, 0, 0, 0
        )  # a packet filter that keeps nothing: no answer, no RST
        code = ctypes.create_string_buffer(ignore_all)
        program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
        deaf.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
        first = Member(
            rank=0, worker="w0", node="n0", slot=0, host="127.0.0.1", vote_port=deaf.getsockname()[1]
        )
        rest = cluster.generation(3).members[1:]
        group = cluster.group(Generation(number=3, members=(first, *rest), start=0), 1)
        waiting = cluster.pool.submit(group.join, TOKEN)
        while [_tcp_state(sock) for sock in group.channel.sockets()] != [SYN_SENT]:
            threading.Event().wait(0.001)  # the kernel tells nobody when it has sent it
        began = time.monotonic()
        group.abort()
        with pytest.raises(CollectiveFault):
            waiting.result(timeout=10)
        assert time.monotonic() - began < 3.0  # the connection's own time-out is 5 s
        group.close()


def test_a_stranger_without_the_token_is_not_let_in(cluster):
    generation = cluster.generation(1, ranks=[0, 1])
    host, guest = cluster.group(generation, 0), cluster.group(generation, 1)
    waiting = cluster.pool.submit(host.join, TOKEN)
    with pytest.raises(CollectiveFault):
        guest.join("wrong")
    host.abort()
    with pytest.raises(CollectiveFault):
        waiting.result(timeout=10)
    host.close()
    guest.close()


def test_gradients_are_those_of_one_big_batch(cluster):
    """The sum over replicas and micro-batches, divided once, is the gradient of the global batch."""
    groups = cluster.join(1)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 6, generator=rng)

    def model():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))

    nets = [model() for _ in groups]  # the seed is the process's: not in threads

    def work(group):
        net = nets[group.rank]
        sums = GradientSum(net.parameters(), lambda: None)
        sums.begin()
        mine = inputs[group.rank * 4 : group.rank * 4 + 4]
        net(mine[:2]).square().sum().backward()
        sums.last(group)
        net(mine[2:]).square().sum().backward()
        sums.flush(group)
        norm = math.sqrt(sums.finish(lambda: 1 / 12))
        return norm, [p.grad.clone() for p in net.parameters()]

    results = cluster.each(work, groups)
    whole = model()
    (whole(inputs).square().sum() / 12).backward()
    norms = {norm for norm, _ in results}
    assert len(norms) == 1
    for norm, grads in results:
        for ours, p in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad)
        assert norm == pytest.approx(
            torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
        )
    for group in groups:
        group.close()
