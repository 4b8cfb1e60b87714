"""Meshes of the script's own within a replica, without a second process: a model is built for one worker after the other."""

import gc
import itertools
from contextlib import closing

import pytest
import torch
from resharding import STEP, assert_same, box, gather, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.errors import CollectiveFault, StateError, UsageError
from holdfast.protocol.messages import Generation, Member
from holdfast.tensors.dtensor_shards import like, local_of, piece_of
from holdfast.train import restore, state_image
from holdfast.train.place import message_counts, share_of, weighs
from holdfast.train.placements import counted_here, is_spread, why_not
from holdfast.train.sharding import Sharding
from holdfast.train.state_guard import StateGuard

EXPERTS, WIDTH, OUT = 6, 10, 7


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, OUT)
        self.experts = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, OUT))})


def spread(model, mesh, *placements):
    """The experts lie on this mesh."""
    lies = distribute_tensor(model.experts["w"].detach(), mesh, placements, src_data_rank=None)
    model.experts["w"] = torch.nn.Parameter(lies)


def made(*shape, names):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)


def fsdp(model, mesh, without=()):
    fully_shard(model, mesh=mesh["shard"], ignored_params=set(without))


def experts(model, mesh):
    """Experts over all workers, the rest sharded."""
    spread(model, made(4, names=("ep",)), Shard(0))
    fsdp(model, mesh, model.experts.parameters())


def experts_sharded(model, mesh):
    """Expert parallel, and FSDP2 over what is left; the rest sharded over everybody."""
    own = made(2, 2, names=("efsdp", "ep"))
    spread(model, own["ep"], Shard(0))
    fully_shard(model.experts, mesh=own["efsdp"])
    fsdp(model, mesh)


def experts_in_parts(model, mesh):
    """Each expert is split over the workers of the tensor dimension, as the layers are."""
    own = made(2, 2, names=("ep", "etp"))
    spread(model, own, Shard(0), Shard(2))
    tensor_parallel(model, mesh["tensor"])
    fsdp(model, mesh, model.experts.parameters())


def replicas(model, mesh):
    """Two replicas within the replica: FSDP2's own HSDP."""
    fully_shard(model, mesh=made(2, 2, names=("dp_replicate", "dp_shard")))


def context(model, mesh):
    own = made(mesh["shard"].size() * 2, mesh.size() // mesh["shard"].size() // 2, names=("data", "tensor"))
    if own["tensor"].size() > 1:
        tensor_parallel(model, own["tensor"])
    fully_shard(model, mesh=own["data"], ignored_params=set(model.experts.parameters()))
    spread(model, own, Shard(0), Replicate())


def tensor_and_fsdp(model, mesh):
    tensor_parallel(model, mesh["tensor"])
    fsdp(model, mesh)


def nested(model, mesh):
    """One dimension of a tensor, split twice; the rest on all workers; and a mesh without names."""
    own = DeviceMesh("cpu", [[0, 1], [2, 3]])
    spread(model, own, Shard(1), Shard(1))
    for name in ("up", "down"):
        part = getattr(model, name)
        for key, p in list(part.named_parameters()):
            kinds = (Shard(0), Replicate()) if key == "weight" else (Replicate(), Replicate())
            lies = distribute_tensor(p.detach(), own, kinds, src_data_rank=None)
            setattr(part, key, torch.nn.Parameter(lies))


LAYOUTS = {
    "fsdp": ({"shard": 4}, fsdp),
    "experts": ({"shard": 4}, experts),
    "experts-fsdp": ({"shard": 4}, experts_sharded),
    "experts-tensor": ({"shard": 2, "tensor": 2}, experts_in_parts),
    "replicas": ({"shard": 4}, replicas),
    "context": ({"shard": 2, "context": 2}, context),
    "context-tensor": ({"context": 2, "tensor": 2}, context),
    "tensor-fsdp": ({"shard": 2, "tensor": 2}, tensor_and_fsdp),
    "tensor-nested": ({"tensor": 4}, nested),
    "alone": ({}, fsdp),
}


def place_of(layout, worker):
    degrees, _ = LAYOUTS[layout]
    return Sharding(
        shape=(degrees.get("shard", 1), degrees.get("tensor", 1)),
        context=degrees.get("context", 1),
        position=worker,
        device=torch.device("cpu"),
        host="127.0.0.1",
        target=12,
        called=lambda begins: None,
    )


@pytest.fixture(autouse=True)
def _no_groups_are_left():
    """The groups of a mesh lie in reference cycles, and a thousand of their descriptors are no reason to collect one."""
    yield
    gc.collect()


def workers(layout):
    """Every worker of a replica in turn, with its place and its model."""
    worker = size = 0
    while worker <= size:
        with closing(place_of(layout, worker)) as place:
            size = place.size - 1
            model = Model()
            LAYOUTS[layout][1](model, place.mesh)
            place.replicate(model)
            yield place, model
        worker += 1


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = like(local_of(p) * 3, p)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_counts_every_element_once(layout):
    counted: dict[str, torch.Tensor] = {}
    for _, model in workers(layout):
        for name, p in model.named_parameters():
            times = counted.setdefault(name, torch.zeros(p.shape))
            piece = piece_of(name, p)
            if counted_here(p):
                times[box(piece.start, tuple(piece.local.shape))] += 1
    for name, times in counted.items():
        assert torch.equal(times, torch.ones_like(times)), name


def resharded(before, after, url):
    content = save(url, (trained(model) for _, model in workers(before)))
    found: dict[str, torch.Tensor] = {}
    for worker, (place, model) in enumerate(workers(after)):
        with torch.no_grad():
            for p in model.parameters():
                local_of(p).zero_()
        objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}
        given = (worker, place.size)
        restore.restore(objects, url, STEP, shard=given, submesh=place.submesh)
        gather(objects, found)
    assert_same(found, content)


def near(before, after):
    """Of the pairs so many that each layout comes three times on either side."""
    names = list(LAYOUTS)
    return (names.index(after) - names.index(before)) % len(names) in (1, 3, 7)


QUICK = [("experts-fsdp", "experts-tensor"), ("tensor-nested", "alone")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            *pair, marks=() if pair in QUICK else pytest.mark.long if near(*pair) else pytest.mark.nightly
        )
        for pair in itertools.product(LAYOUTS, LAYOUTS)
    ],
)
def test_a_state_loads_into_any_other_layout(tmp_path, before, after):
    resharded(before, after, str(tmp_path))


@pytest.mark.parametrize("layout", ["experts-fsdp", "tensor-nested"])
def test_a_newcomer_without_moments_gets_them_on_its_parameters_mesh(layout):
    for place, model in workers(layout):
        image = state_image.capture(trained(model), 3)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        state_image.load({"model": model, "optimizer": optimizer}, image, place.submesh)
        for p, state in optimizer.state.items():
            assert state["exp_avg"].device_mesh == p.device_mesh
            assert state["exp_avg"].placements == p.placements


def test_what_lies_on_a_mesh_that_two_parameters_name_alike_is_no_guess():
    with closing(place_of("fsdp", 0)) as place:
        pair = torch.nn.Module()
        for name, order in (("a", [0, 1, 2, 3]), ("b", [0, 2, 1, 3])):
            mesh = DeviceMesh("cpu", order, mesh_dim_names=("mine",))
            setattr(
                pair,
                name,
                torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)),
            )
        place.replicate(pair)
        with pytest.raises(StateError, match="mine, which several meshes have"):
            place.submesh(("mine",))
        with pytest.raises(StateError, match="nobody, which neither"):
            place.submesh(("nobody",))


# ---------------------------------------------------------------- what is refused, before anything is trained


def refused(ranks, placement, worker=0, layout="fsdp", names=("mine",)):
    with closing(place_of(layout, worker)) as place:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        model = torch.nn.Module()
        local = torch.ones(4)
        model.w = torch.nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))
        place.replicate(model)


def test_a_parameter_that_this_worker_has_nothing_of_is_refused():
    with pytest.raises(
        UsageError,
        match=r"w is on the workers 0, 1 .* not on this worker: .*in a pipeline each stage is its own model",
    ):
        refused([0, 1], Shard(0), worker=2)


def test_a_gradient_that_nobody_would_complete_is_refused():
    with pytest.raises(UsageError, match=r"w is only on the workers 0, 1 .* the gradients of worker 2, 3"):
        refused([0, 1], Shard(0))


def test_a_parameter_that_is_a_sum_in_parts_is_refused():
    with pytest.raises(UsageError, match="a sum that is not complete"):
        refused([0, 1, 2, 3], Partial())


def test_over_the_tensor_dimension_one_of_each_is_enough():
    with closing(place_of("tensor-fsdp", 0)) as place:
        lies = distribute_tensor(torch.ones(4), place.mesh["shard"], [Shard(0)], src_data_rank=None)
        assert why_not(lies, workers=range(4), alike=2) is None
        assert "worker 1, 3" in (why_not(lies, workers=range(4), alike=1) or "")


def test_torch_refuses_a_mesh_that_leaves_the_replica():
    """The world of a script is its replica, so there is no other worker that it could name."""
    with closing(place_of("fsdp", 0)):
        with pytest.raises(ValueError, match="Rank 4 is out of range"):
            DeviceMesh("cpu", [0, 4])
        with pytest.raises(RuntimeError, match="bigger than default world size 4"):
            init_device_mesh("cpu", (8,))


def test_messages_between_two_workers_are_refused():
    """Unless the replica has stages: then the messages of each direction are counted."""
    with closing(place_of("fsdp", 0)), pytest.raises(UsageError, match=r"send: .*pipeline"):
        torch.distributed.send(torch.zeros(1), 1)
    with closing(place_of("fsdp", 0)), pytest.raises(UsageError, match=r"recv: .*pipeline"):
        torch.distributed.recv(torch.zeros(1), 1)


# ---------------------------------------------------------------- context parallel, gathered parameters, buffers


def test_workers_that_share_a_sample_each_weigh_their_part():
    """Of 2 x 2 x 2 workers (shard, context, tensor) those along the tensor dimension say nothing."""
    members = [Member(rank=r, worker=f"w{r}", node="n", slot=0, replica=0, shard_index=r) for r in range(8)]
    form = Generation(number=1, members=tuple(members), start=0, shape=(2, 4), groups_connected_in=(1,))
    assert [weighs(form, r, 2) for r in range(8)] == [True, False] * 4
    assert message_counts(6, form, 2) == [3, 0] * 4
    assert [list(share_of(6, form, r).micro_batches) for r in (0, 3, 4)] == [[0, 2, 4], [0, 2, 4], [1, 3, 5]]


def test_who_has_another_part_of_a_buffer():
    with closing(place_of("experts-tensor", 0)) as place:
        line = place.mesh["shard", "tensor"]

        def lies(*placements):
            return is_spread(DTensor.from_local(torch.zeros(4), line, placements, run_check=False), 2)

        assert not lies(Replicate(), Replicate())
        assert not lies(Replicate(), Shard(0))
        assert lies(Shard(0), Replicate())
        assert lies(Replicate(), Partial())
        assert not is_spread(torch.zeros(2), 1)


def test_the_guard_knows_a_gathered_parameter_from_a_replaced_one():
    """FSDP2 leaves a DTensor of expert or tensor parallelism where it has gathered its shards."""
    every = workers("experts-fsdp")
    _, model = next(every)
    guard = StateGuard({"model": model})
    guard.note(1)
    held = model.experts.w
    part = held.device_mesh["ep"]
    model.experts._parameters["w"] = torch.nn.Parameter(
        DTensor.from_local(torch.zeros(3, WIDTH, OUT), part, [Shard(0)], run_check=False)
    )
    guard.before_update(1)
    model.experts._parameters["w"] = torch.nn.Parameter(held.detach().clone())
    with pytest.raises(Exception, match=r"model\.experts\.w changed"):
        guard.before_update(1)


def test_degrees_that_cannot_be():
    with pytest.raises(
        UsageError, match=r"run\.mesh\(shard=1, tensor=1, context=0\): all must be at least 1"
    ):
        Sharding((1, 1), 0, torch.device("cpu"), "127.0.0.1", 4, lambda begins: None, context=0)
    with pytest.raises(UsageError, match=r"run\.mesh\(shard=1, context=3\) makes replicas of 3 workers"):
        Sharding((1, 1), 0, torch.device("cpu"), "127.0.0.1", 4, lambda begins: None, context=3)


def test_an_aborted_group_does_not_blame_the_script():
    with closing(place_of("fsdp", 0)) as place:
        place.groups.abort()
        with pytest.raises(CollectiveFault):
            torch.distributed.barrier()
