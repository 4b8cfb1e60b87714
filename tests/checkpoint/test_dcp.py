"""The tiers under torch.distributed.checkpoint: its planners, its formats of states, its ways to be asynchronous."""

import pickle
import subprocess
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blobs_on_tiers import flip
from ranks import together
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast as hf
from holdfast.checkpoint import TieredReader, TieredWriter, api
from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.dcp import step_of_id
from holdfast.checkpoint.layout import seal
from holdfast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about collectives that it does not need here


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    root = Path("/dev/shm") / f"holdfast-test-{uuid.uuid4().hex}"
    monkeypatch.setenv("HOLDFAST_MEMORY", str(root))
    monkeypatch.delenv("HOLDFAST_CHECKPOINT", raising=False)
    monkeypatch.setattr(api, "_backends", {})
    yield root
    for place in api._backends.values():
        place.close()
    assert not list(root.rglob("*.slot"))
    if root.exists():
        root.rmdir()


@pytest.fixture
def to(tmp_path):
    return str(tmp_path / "saved")


def state_of(value):
    torch.manual_seed(value)
    return {
        "weight": torch.randn(300, 40),
        "bfloat": torch.randn(50).bfloat16(),
        "zero-d": torch.tensor(float(value)),
        "nothing": torch.zeros(0, 3),
        "nested": {"deep": {"tensor": torch.randn(7), "number": value, "text": "x" * value}},
        "list": [torch.randn(5), {"a": torch.randn(2), "b": value}, value],
        "plain list": [value, 2.5, None],
        "tuple": (value, "y"),
        "none": None,
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


# ---------------------------------------------------------------- one process


def test_what_dcp_saves_dcp_loads(to):
    dcp.save(state_of(5), storage_writer=TieredWriter(to), checkpoint_id="step-5")
    assert Archive(to).verify(5).world == 1
    state = state_of(6)
    tensor = state["weight"]
    reader = TieredReader(to)
    dcp.load(state, storage_reader=reader)
    assert equal(state, state_of(5))
    assert state["weight"] is tensor
    assert reader.found.fetched_bytes >= 300 * 40 * 4


def test_a_model_and_its_optimizer(to):
    def begin(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.LayerNorm(60), torch.nn.Linear(60, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model, optimizer, seed):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()

    model, optimizer = begin(0)
    for i in range(3):
        step(model, optimizer, i)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, storage_writer=TieredWriter(to), checkpoint_id="step-3")

    fresh, other = begin(1)
    into = dict(zip(("model", "optimizer"), get_state_dict(fresh, other), strict=True))
    dcp.load(into, storage_reader=TieredReader(to))
    set_state_dict(fresh, other, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    for m, o in ((model, optimizer), (fresh, other)):
        step(m, o, 9)
    assert equal(dict(model.state_dict()), dict(fresh.state_dict()))
    assert equal(optimizer.state_dict()["state"], other.state_dict()["state"])


def test_steps_are_numbered_by_name_by_hand_or_one_by_one(to):
    writer = TieredWriter(f"{to},keep=99")
    for name in (None, None, "runs/step-40", None):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=name)
    writer.step = 0
    dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
    assert Archive(to).steps() == [0, 1, 2, 40, 41]
    for step, value in ((40, 1.0), (0, 0.0)):
        state = {"w": torch.full((3,), 9.0)}
        dcp.load(state, storage_reader=TieredReader(to, step=step))
        assert state["w"].tolist() == [value] * 3
    state = {"w": torch.full((3,), 9.0)}
    dcp.load(state, storage_reader=TieredReader(to), checkpoint_id="step-0")
    assert state["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("runs/7b/step-100/", 100),
        (Path("a/3"), 3),
        ("final", None),
        (None, None),
        ("7/x", None),
    ],
)
def test_the_step_that_a_name_says(name, step):
    assert step_of_id(name) == step
    assert TieredWriter.validate_checkpoint_id(name) == TieredReader.validate_checkpoint_id(name)
    assert TieredWriter.validate_checkpoint_id(name) is (step is not None)


def test_a_part_of_a_state(to):
    dcp.save(state_of(5), storage_writer=TieredWriter(to))
    state = {"weight": torch.zeros(300, 40), "nested": {"deep": {"number": 0}}}
    dcp.load(state, storage_reader=TieredReader(to))
    assert [state["nested"]["deep"]["number"], torch.equal(state["weight"], state_of(5)["weight"])] == [
        5,
        True,
    ]


def test_what_is_not_there_is_an_error_or_left_alone(to):
    dcp.save({"a": torch.ones(3)}, storage_writer=TieredWriter(to))
    state = {"a": torch.zeros(3), "new": torch.full((2,), 7.0)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(state, storage_reader=TieredReader(to))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=TieredReader(to), planner=planner)
    assert [state["a"].tolist(), state["new"].tolist()] == [[1.0] * 3, [7.0] * 2]


def test_another_shape_and_another_dtype(to):
    dcp.save({"a": torch.arange(6.0)}, storage_writer=TieredWriter(to))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=TieredReader(to))
    state = {"a": torch.zeros(6, dtype=torch.float64)}
    dcp.load(state, storage_reader=TieredReader(to))
    assert state["a"].tolist() == list(map(float, range(6)))


def test_nothing_there_and_nothing_whole(to):
    with pytest.raises(CheckpointException, match="no complete checkpoint was found"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=TieredReader(to))
    dcp.save({"a": torch.ones(30_000)}, storage_writer=TieredWriter(to), checkpoint_id="step-5")
    with pytest.raises(CheckpointException, match="no complete checkpoint of step 7"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=TieredReader(to, step=7))
    archive = Archive(to)
    flip(archive.tier, archive.manifest(5).shards[0].blob.name, 100)
    state = {"a": torch.zeros(30_000)}
    with pytest.raises(CheckpointException, match="do not match their checksums"):
        dcp.load(state, storage_reader=TieredReader(to))


def test_an_older_one_is_read_when_the_newest_is_not_whole(to, caplog):
    writer = TieredWriter(f"{to},keep=9")
    for step in (5, 6):
        dcp.save({"a": torch.full((3,), float(step))}, storage_writer=writer, checkpoint_id=f"step-{step}")
    archive = Archive(to)
    archive.tier.remove(archive.manifest(6).shards[0].blob.name)
    state = {"a": torch.zeros(3)}
    dcp.load(state, storage_reader=TieredReader(to))
    assert state["a"].tolist() == [5.0] * 3
    assert "skipped a checkpoint: " in caplog.text


def test_a_save_that_did_not_reach_its_tier_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointException, match=r"step 5 was not saved.*choose another folder"):
        dcp.save(
            {"a": torch.ones(3)}, storage_writer=TieredWriter(str(tmp_path / "file")), checkpoint_id="step-5"
        )


# ---------------------------------------------------------------- asynchronous


def test_async_save_keeps_what_was_there_when_it_was_called(to):
    state = state_of(5)
    writer = TieredWriter(f"{to},keep=9")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for step in (5, 6):
            waiting = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"step-{step}")
            state["weight"].zero_()
            getattr(waiting, "upload_completion", waiting).result()
        for step, right in ((5, state_of(5)["weight"]), (6, torch.zeros(300, 40))):
            loaded = state_of(7)
            dcp.load(loaded, storage_reader=TieredReader(to, step=step))
            assert torch.equal(loaded["weight"], right)
            assert equal(loaded["list"], state_of(5)["list"])
    finally:
        dist.destroy_process_group()


def save_in_a_process(to):
    state = state_of(5)
    waiting = dcp.async_save(
        state,
        storage_writer=TieredWriter(to),
        checkpoint_id="step-5",
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    getattr(waiting, "upload_completion", waiting).result()
    return Archive(to).steps()


@pytest.mark.long
def test_async_save_in_a_process_of_its_own(to):
    """Torch kills it in the end: whoever saves next gives its memory back."""
    assert together(save_in_a_process, 1, to) == [[5]]
    dcp.save({"w": torch.ones(3)}, storage_writer=TieredWriter(to), checkpoint_id="step-6")
    assert Archive(to).steps() == [5, 6]


def test_a_process_that_a_worker_started_is_told_to_use_a_thread(monkeypatch):
    monkeypatch.setenv("HOLDFAST_WORKER", "w0")
    with pytest.raises(UsageError, match=r"pass AsyncCheckpointerType\.THREAD to dcp\.async_save"):
        TieredWriter().finish(None, [])


# ---------------------------------------------------------------- what `save` wrote


def test_what_save_wrote_is_read_by_dcp(to):
    state = state_of(5) | {"model": torch.nn.Linear(40, 80)}
    hf.checkpoint.save(state, 5, to=to)
    hf.checkpoint.flush()
    into = state_of(6) | {"model": {k: torch.zeros_like(v) for k, v in state["model"].state_dict().items()}}
    dcp.load(into, storage_reader=TieredReader(to))
    assert equal(into, state_of(5) | {"model": dict(state["model"].state_dict())})


def test_what_dcp_saved_is_not_mistaken_by_load(to):
    dcp.save({"w": torch.ones(3)}, storage_writer=TieredWriter(to))
    with pytest.raises(UsageError, match=r"was saved by torch.distributed.checkpoint: load it with dcp.load"):
        hf.checkpoint.load({"w": torch.zeros(3)}, source=to)


# ---------------------------------------------------------------- objects that could run code

EXECUTED = []


class Bomb:
    def __reduce__(self):
        return (EXECUTED.append, (1,))


class Plain:
    """A class that torch does not know."""

    def __init__(self):
        self.a = 1


@pytest.mark.parametrize("thing", [Bomb(), Plain()], ids=["bomb", "class"])
def test_an_object_that_could_run_code_is_refused(to, thing):
    dcp.save({"w": torch.ones(3), "thing": thing}, storage_writer=TieredWriter(to))
    EXECUTED.clear()
    with pytest.raises(
        CheckpointException, match=r"thing is an object that could run code.*add_safe_globals"
    ):
        dcp.load({"w": torch.zeros(3), "thing": None}, storage_reader=TieredReader(to))
    assert EXECUTED == []
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=TieredReader(to))  # the rest is there
    assert state["w"].tolist() == [1.0] * 3


def test_a_class_that_was_allowed_is_loaded(to):
    dcp.save({"thing": Plain()}, storage_writer=TieredWriter(to))
    state = {"thing": None}
    with torch.serialization.safe_globals([Plain]):
        dcp.load(state, storage_reader=TieredReader(to))
    assert state["thing"].a == 1


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"PK\x03\x04nonsense", pickle.dumps(Bomb())])
def test_bytes_that_are_no_object_are_refused(to, data):
    """Somebody else's file, with checksums that fit."""
    from holdfast.checkpoint.layout import sums_of
    from holdfast.tensors.index import StateIndex, TensorSpec

    spec = TensorSpec(path="thing", dtype="bytes", shape=(len(data),), offset=0, nbytes=len(data))
    sums = sums_of(memoryview(data))
    archive = Archive(to)
    sealed = seal(StateIndex(5, {}, (spec,), len(data)), sums)
    archive.commit(5, [archive.save_shard(5, 0, sealed, [memoryview(data)])])
    EXECUTED.clear()
    if data.startswith(b"\x80\x04N"):
        return  # None, which is harmless
    with pytest.raises(CheckpointException, match="thing is an object that could run code"):
        dcp.load({"thing": None}, storage_reader=TieredReader(to))
    assert EXECUTED == []


# ---------------------------------------------------------------- several ranks


def whole_of(value):
    torch.manual_seed(value)
    return torch.randn(901, 12)


def sharded(value):
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "rows": distribute_tensor(whole_of(value), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole_of(value), mesh, [Shard(1)]),
        "replicas": distribute_tensor(whole_of(value), mesh, [Replicate()]),
        "few": distribute_tensor(whole_of(value)[:1], mesh, [Shard(0)]),
        "plain": whole_of(value)[:20],
        "number": value,
    }
    return state, rank


def right(state, value):
    return [
        torch.equal(state["rows"].full_tensor(), whole_of(value)),
        torch.equal(state["columns"].full_tensor(), whole_of(value)),
        torch.equal(state["replicas"].full_tensor(), whole_of(value)),
        torch.equal(state["few"].full_tensor(), whole_of(value)[:1]),
        torch.equal(state["plain"], whole_of(value)[:20]),
        state["number"] == value,
    ]


def save_two(to):
    writer = TieredWriter(f"{to},keep=9")
    for value in (5, 6):
        dcp.save(sharded(value)[0], storage_writer=writer, checkpoint_id=f"step-{value}")
    waiting = dcp.async_save(sharded(7)[0], storage_writer=writer, checkpoint_id="step-7")
    getattr(waiting, "upload_completion", waiting).result()
    return Archive(to).steps()


def load_any(to):
    state, _ = sharded(9)
    dcp.load(state, storage_reader=TieredReader(to))
    one, _ = sharded(9)
    dcp.load(one, storage_reader=TieredReader(to, step=5))
    return [right(state, 7), right(one, 5)]


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    to = str(tmp_path_factory.mktemp("two") / "saved")
    assert together(save_two, 2, to) == [[5, 6, 7]] * 2
    return to


@pytest.mark.long
@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2)), 3])
def test_what_two_ranks_saved_loads_on_any_number(saved_by_two, world):
    assert together(load_any, world, saved_by_two) == [[[True] * 6] * 2] * world


def fsdp(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 61), torch.nn.Linear(61, 30), torch.nn.Linear(30, 3))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp_step(model, optimizer, seed):
    optimizer.zero_grad()
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()


def parts_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def full_of(model, optimizer):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank():
        return ""
    tensors = {
        **model_state,
        **{f"{k}/{n}": v for k, s in optimizer_state["state"].items() for n, v in s.items()},
    }
    return {k: v.double().sum().item() for k, v in tensors.items() if isinstance(v, torch.Tensor)}


def fsdp_save(to):
    model, optimizer = fsdp(0)
    for i in range(3):
        fsdp_step(model, optimizer, i)
    dcp.save(parts_of(model, optimizer), storage_writer=TieredWriter(to), checkpoint_id="step-3")
    hf.checkpoint.save({"model": model, "optimizer": optimizer, "n": 3}, 3, to=f"{to}-own")
    hf.checkpoint.flush()
    return {"full": full_of(model, optimizer)}


def fsdp_load(to):
    model, optimizer = fsdp(1)
    into = parts_of(model, optimizer)
    dcp.load(into, storage_reader=TieredReader(to))
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    by_dcp = full_of(model, optimizer)
    model, optimizer = fsdp(2)
    parts_of(model, optimizer)  # which makes the optimizer's state
    got = hf.checkpoint.load({"model": model, "optimizer": optimizer, "n": 0}, source=f"{to}-own")
    return {"dcp": by_dcp, "own": full_of(model, optimizer), "step": got}


@pytest.mark.long
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_fsdp_models_and_their_optimizers_on_another_number_of_ranks(tmp_path_factory, world):
    to = str(tmp_path_factory.getbasetemp() / "fsdp")
    if not Path(to).exists():
        Path(f"{to}.full").write_text(repr(together(fsdp_save, 2, to)[0]["full"]))
    import ast

    full = ast.literal_eval(Path(f"{to}.full").read_text())
    got = together(fsdp_load, world, to)[0]
    assert [got["step"], len(full)] == [3, 6 + 18]
    assert got["dcp"] == pytest.approx(full, rel=1e-12)
    assert got["own"] == pytest.approx(full, rel=1e-12)


def load_what_differs(to, other):
    """The ranks do not see the same checkpoints."""
    state, rank = sharded(9)
    try:
        dcp.load(state, storage_reader=TieredReader(other if rank else to))
    except CheckpointException as error:
        return {"why": str(error)}
    return {"why": ""}


def test_ranks_that_find_different_checkpoints_load_none(saved_by_two, tmp_path):
    other = str(tmp_path / "other")
    subprocess.run(["cp", "-r", saved_by_two, other], check=True)
    Archive(other).remove(7)
    for got in together(load_what_differs, 2, saved_by_two, other):
        assert "the ranks found different checkpoints" in got["why"]
