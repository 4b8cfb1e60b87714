"""Meshes, pieces and resharding, without a second process: a model is built for one shard after the other."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from resharding import STEP, assert_same, gather, save
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.errors import StateError, UsageError
from holdfast.protocol.messages import Generation, JoinGeneration, Member
from holdfast.tensors.dtensor_shards import like, local_of, parsed, piece_of, placed
from holdfast.train import restore
from holdfast.train.buffer_rules import BufferRules
from holdfast.train.place import Place, message_counts, share_of, weighs
from holdfast.train.sharding import Sharding

WIDTH, OUT = 10, 7
SHAPES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]


@pytest.fixture
def sharding():
    made = []

    def make(shape=(2, 1), shard_index=0, target=12, stages=1):
        for one in made:
            one.close()
        made[:] = [
            Sharding(
                shape=shape,
                position=shard_index,
                device=torch.device("cpu"),
                host="127.0.0.1",
                target=target,
                called=lambda begins: None,
                stages=stages,
            )
        ]
        return made[0]

    yield make
    for one in made:
        one.close()


def build(place):
    """A model with moments, whose numbers tell where in the whole they are."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, OUT))
    if place.shape[1] > 1:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, place.mesh["tensor"], plan, src_data_rank=None)
    for part in (model[0], model):
        fully_shard(part, mesh=place.mesh["shard"])
    place.replicate(model)
    return model


def trained(place):
    model = build(place)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = like(local_of(p) * 3, p)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def saved(sharding, shape, url):
    """A checkpoint of a run of this shape; and what is in it."""
    return save(url, (trained(sharding(shape, index)) for index in range(shape[0] * shape[1])))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SHAPES, SHAPES)), ids=str)
def test_a_checkpoint_loads_into_any_sharding(sharding, tmp_path, before, after):
    content = saved(sharding, before, str(tmp_path))
    size = after[0] * after[1]
    found: dict[str, torch.Tensor] = {}
    for shard_index in range(size):
        place = sharding(after, shard_index)
        model = build(place)
        with torch.no_grad():
            for p in model.parameters():
                local_of(p).zero_()
        objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        given = (shard_index, size)
        restore.restore(objects, str(tmp_path), STEP, shard=given, submesh=place.submesh)
        gather(objects, found)
    assert_same(found, content)


def test_another_model_is_refused(sharding, tmp_path):
    saved(sharding, (2, 1), str(tmp_path))
    place = sharding((3, 1), 0)
    other = torch.nn.Linear(4, 4)
    fully_shard(other, mesh=place.mesh["shard"])
    with pytest.raises((StateError, UsageError)):
        restore.restore({"model": other}, str(tmp_path), 5, shard=(0, 3), submesh=place.submesh)


def test_the_mesh_has_one_replica_in_it(sharding):
    place = sharding((2, 2), 3)
    assert place.mesh.mesh_dim_names == ("replicate", "shard", "tensor")
    assert tuple(place.mesh.shape) == (1, 2, 2)
    assert place.mesh.get_coordinate() == (0, 1, 1)
    assert dist.get_rank() == 3


def test_a_shard_of_before_is_forgotten(sharding):
    starts = []
    for shard_index in (0, 1):
        place = sharding((2, 1), shard_index)
        model = torch.nn.Linear(3, 5)
        fully_shard(model, mesh=place.mesh["shard"])
        starts.append(piece_of("w", model.state_dict()["weight"]).start)
    assert starts == [(0, 0), (3, 0)]


def test_meshes_that_do_not_fit(sharding):
    with pytest.raises(UsageError, match="makes replicas of 3 workers, but the job has 4"):
        sharding((3, 1), target=4)
    with pytest.raises(UsageError, match="both must be at least 1"):
        sharding((0, 1))


def test_parameters_that_nobody_shards_are_named(sharding):
    place = sharding()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model[0], mesh=place.mesh["shard"])
    with pytest.raises(UsageError, match=r"1\.weight, 1\.bias are neither sharded nor replicated"):
        place.replicate(model)
    with pytest.raises(UsageError, match=r"does not belong to a model that was passed to run\.replicate"):
        place.check([model])


def test_offloading_to_the_processor_is_refused(sharding):
    place = sharding()
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=place.mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(UsageError, match="CPUOffloadPolicy is not supported"):
        place.replicate(model)


def test_a_torch_that_cannot_begin_a_step_anew_is_refused(sharding, monkeypatch):
    """PyTorch 2.11 trains, and then fails in the middle of the first recovery."""
    place = sharding()
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=place.mesh["shard"])
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    with pytest.raises(UsageError, match=r"which PyTorch .* cannot do: install PyTorch 2.13 or newer"):
        place.replicate(model)


def test_a_torch_with_other_stages_is_refused(sharding, monkeypatch):
    from torch.distributed.pipelining import _utils

    monkeypatch.delattr(_utils, "InferenceMode")
    with pytest.raises(UsageError, match=r"pipelines need PyTorch 2.13 or newer"):
        sharding(stages=2)


def test_a_default_group_of_the_scripts_own_is_refused(sharding):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"after torch.distributed.init_process_group"):
            sharding()
    finally:
        dist.destroy_process_group()


def test_communication_before_the_first_step_is_refused(sharding):
    sharding()
    with pytest.raises(UsageError, match="before the first step"):
        dist.barrier()


def test_who_counts_what_the_tensor_dimension_has_twice(sharding):
    for shard_index, counted in [(0, {"0.weight", "1.weight", "1.bias"}), (1, {"0.weight", "1.weight"})]:
        place = sharding((1, 2), shard_index)
        names = {name for name, p in build(place).named_parameters() if place.counts(p)}
        assert names - {"0.bias"} == counted


def test_placements_survive_a_file(sharding):
    place = sharding((2, 2), 1)
    for p in build(place).parameters():
        names, placements = parsed(placed(p))
        assert names == p.device_mesh.mesh_dim_names
        assert tuple(placements) == tuple(p.placements)


# ---------------------------------------------------------------- who computes what


def generation(shape, rows, beside=()):
    size = shape[0] * shape[1]
    members = [
        Member(rank=r, worker=f"w{r}", node="n", slot=0, replica=r // size, shard_index=r % size)
        for r in range(rows * size)
    ]
    for shard_index in beside:
        rank = len(members)
        members.append(
            Member(rank=rank, worker=f"w{rank}", node="n", slot=0, replica=-1, shard_index=shard_index)
        )
    return Generation(number=1, members=tuple(members), start=0, shape=shape, groups_connected_in=(1,) * rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_every_micro_batch_is_computed_and_weighed_once(shape, rows):
    form = generation(shape, rows, beside=[0])
    count = 12
    weighed = [
        m for r in range(len(form.members)) if weighs(form, r) for m in share_of(count, form, r).micro_batches
    ]
    assert sorted(weighed) == list(range(count))
    said = [len(share_of(count, form, r).micro_batches) * weighs(form, r) for r in range(len(form.members))]
    assert message_counts(count, form) == said
    for row in range(rows):  # the workers of a replica make the same number of passes
        size = form.shard_count
        shares = [share_of(count, form, r) for r in range(row * size, (row + 1) * size)]
        assert len({len(s.micro_batches) for s in shares}) == 1
        assert {(s.rank, s.world, s.leaves) for s in shares} == {(row, rows, count // shape[0])}
    idle = share_of(count, form, len(form.members) - 1)
    assert (len(idle.micro_batches), idle.rank, idle.idle) == (0, rows, 1)
    assert share_of(count, form, 0).idle == 1
    if form.shard_count > 1:
        assert share_of(count, form, 1).idle == 0


def test_the_size_of_the_world_is_that_of_those_that_compute():
    form = generation((2, 1), 2, beside=[1])
    assert (len(form.members), form.strength) == (5, 4)
    worker = Place()
    worker.form = JoinGeneration(generation=form, rank=4)
    assert (worker.world_size, worker.world.size) == (4, 4)
    assert (worker.world.rank, worker.world.replica) == (4, -1)


# ---------------------------------------------------------------- buffers


@pytest.mark.parametrize(
    ("dimension", "placement", "summed"),
    [
        ("shard", Shard(0), False),
        ("tensor", Partial(), False),
        ("shard", Replicate(), True),
        ("tensor", Shard(0), True),
    ],
)
def test_a_buffer_is_summed_where_workers_with_other_data_have_all_of_it(
    dimension, placement, summed, sharding
):
    model = torch.nn.Linear(WIDTH, OUT)
    mesh = sharding((2, 2)).mesh[dimension]
    model.register_buffer("loads", DTensor.from_local(torch.zeros(3), mesh, [placement], run_check=False))
    words = r'run.buffers\("sum", "model.loads"\): it is a DTensor.*run.buffers\("restore", "model.loads"\)'
    with nullcontext() if summed else pytest.raises(UsageError, match=words):
        BufferRules({"model": model}, [("sum", ("model.loads",))], sharded=True, exact=True, alike=2)
