"""What holds NCCL's groups together, with a stand-in for the group: which are NCCL's, and that each is aborted once."""

import threading

import pytest
import torch
from cluster import Cluster
from torch.distributed import HashStore

from holdfast.errors import CollectiveFault
from holdfast.train import gloo_group
from holdfast.train.control_channel import MeshStore
from holdfast.train.gloo_group import GlooGroup

GPU = torch.device("cuda", 0)


class Standin:
    """In the place of ProcessGroupNCCL."""

    def __init__(self) -> None:
        self.aborts = 0
        self.ended = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.ended.set()


@pytest.mark.parametrize(
    ("gpus", "expected"), [([b"a", b"b"], True), ([b"a", b"a"], False), ([b"a", b""], False)]
)
def test_nccl_needs_a_gpu_for_every_member(monkeypatch, gpus, expected):
    store = HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"gpu-{rank}", gpu)
    for rank, gpu in enumerate(gpus):
        monkeypatch.setattr(gloo_group, "_gpu", lambda device, gpu=gpu: gpu)
        assert gloo_group.agreed(store, rank, 2, GPU) is expected


def test_without_a_gpu_nobody_is_asked():
    assert not gloo_group.agreed(None, 0, 2, None)
    assert not gloo_group.agreed(None, 0, 2, torch.device("cpu"))


@pytest.fixture
def gloo(monkeypatch):
    monkeypatch.setattr(gloo_group, "agreed", lambda *_: True)
    return GlooGroup(0, 2, "127.0.0.1", GPU)


def test_an_abort_reaches_a_group_that_is_being_made(gloo, monkeypatch):
    """Its first kernel waits for a peer that never comes."""
    group, waiting = Standin(), threading.Event()

    def nccl_group(store, rank, size, device, timeout, made):
        made(group)
        waiting.set()
        group.ended.wait()
        raise RuntimeError("aborted")

    monkeypatch.setattr(gloo_group, "nccl_group", nccl_group)
    failed = []

    def connect():
        with pytest.raises(CollectiveFault):
            gloo.connect(None)
        failed.append(True)

    thread = threading.Thread(target=connect)
    thread.start()
    waiting.wait()
    gloo.abort()
    thread.join()
    assert failed
    group.ended.wait()
    gloo.abort()
    gloo.close()
    assert group.aborts == 1


def test_a_group_that_came_after_the_abort_is_aborted_too(gloo, monkeypatch):
    group = Standin()

    def nccl_group(store, rank, size, device, timeout, made):
        gloo.abort()
        made(group)

    monkeypatch.setattr(gloo_group, "nccl_group", nccl_group)
    with pytest.raises(CollectiveFault):
        gloo.connect(None)
    group.ended.wait()
    gloo.close()
    assert group.aborts == 1


def test_garbage_does_not_count(gloo, monkeypatch):
    """A queued collective is waited for at once, and after an abort it is not believed."""
    group = Standin()

    def nccl_group(store, rank, size, device, timeout, made):
        made(group)
        return group

    class Work:
        waits = 0

        def wait(self):
            self.waits += 1

    monkeypatch.setattr(gloo_group, "nccl_group", nccl_group)
    gloo.connect(None)
    work = Work()
    gloo.wait(work)
    gloo.abort()
    with pytest.raises(CollectiveFault):
        gloo.wait(work)
    with pytest.raises(CollectiveFault):
        gloo.intact()
    assert gloo.drain(work)  # what comes next on the device comes after it
    assert work.waits == 3
    gloo.close()
    group.ended.wait()
    assert group.aborts == 1


def test_a_key_that_a_group_sets_later_does_not_disturb_the_mesh():
    """NCCL's watchdog writes into the store when a peer is gone; the mesh carries words by then."""
    cluster = Cluster(2)
    generation = cluster.generation(1)
    groups = [cluster.group(generation, rank) for rank in range(2)]

    def talk(group):
        group.channel.connect(group._listener, "secret")
        store = MeshStore(group.channel)
        store.set(f"before-{group.rank}", "x")
        store.finish()
        store.set("exception_dump", "y")
        assert store.check([f"before-{1 - group.rank}", "exception_dump"])
        with pytest.raises(CollectiveFault):
            store.get("nobody's")
        group.channel.send(3, (1.0, 2.0, 3.0))
        return group.channel.receive(3, [(1.0, 2.0, 3.0)])

    assert cluster.each(talk, groups) == [[(1.0, 2.0, 3.0)] * 2] * 2
    for group in groups:
        group.close()
    cluster.close()


def test_a_collective_that_nobody_wants_to_wait_for_is_queued(gloo, monkeypatch):
    """NCCL returns no Work then: as FSDP2's all-gathers and reduce-scatters are called."""
    monkeypatch.setattr(gloo_group, "nccl_group", lambda *_: Standin())
    gloo.connect(HashStore())
    work = gloo.start(lambda group: None)
    gloo.wait(work)
    work.wait()
    gloo.abort()
    with pytest.raises(CollectiveFault):
        gloo.wait(work)
    assert gloo.drain(work)
    gloo.close()
