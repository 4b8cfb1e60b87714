"""What torchrun's variables say while Holdfast has the process groups."""

import os

import pytest
import torch
import torch.distributed as dist

from holdfast.train import torchrun_world

LAUNCHED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "far-away",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """This process has the variables of one worker of eight."""
    monkeypatch.setattr(torchrun_world, "_hidden", [])  # whatever adapter another test has imported
    for name in torchrun_world.NAMES:  # also those that a test sets are put back behind it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


def ours():
    return {name: os.environ[name] for name in torchrun_world.NAMES if name in os.environ}


def test_a_library_that_makes_a_group_on_sight_gets_one_of_this_process():
    with torchrun_world.world_of_one(LAUNCHED):
        dist.init_process_group("gloo")
        try:
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            numbers = torch.arange(3.0)
            dist.all_reduce(numbers)
            assert numbers.tolist() == [0, 1, 2]
        finally:
            dist.destroy_process_group()
        assert os.environ["LOCAL_RANK"] == "1"  # the worker's device
        assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["GROUP_WORLD_SIZE"] == "1"
        assert not dist.is_torchelastic_launched()
    assert ours() == LAUNCHED


def test_behind_main_the_variables_are_as_before_whatever_main_did():
    def main():
        with torchrun_world.world_of_one(LAUNCHED):
            os.environ["MASTER_PORT"] = "1"
            torchrun_world.show(1, 2, LAUNCHED)
            del os.environ["RANK"]
            raise KeyError

    with pytest.raises(KeyError):
        main()
    assert ours() == LAUNCHED


@pytest.mark.parametrize(
    ("rank", "size", "node"),
    [(1, 2, ("2", "0", "1")), (5, 8, ("4", "1", "2"))],
    ids=["several replicas on a node", "a replica of two nodes"],
)
def test_the_world_of_a_replica(rank, size, node):
    torchrun_world.show(rank, size, LAUNCHED)
    seen = ours()
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == (str(rank), str(size), "1")
    assert (seen["LOCAL_WORLD_SIZE"], seen["GROUP_RANK"], seen["GROUP_WORLD_SIZE"]) == node


def test_an_adapters_framework_finds_no_launcher_whatever_follows():
    torchrun_world.hide()
    assert not ours()
    with torchrun_world.world_of_one(LAUNCHED):
        assert not ours()
        torchrun_world.show(0, 2, LAUNCHED)
    assert not ours()
