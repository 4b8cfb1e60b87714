"""Tensors that are made of others, expanded and overlapping ones: what is saved comes back bit by bit, in a checkpoint and
from a peer, or is refused by name before anything is saved or changed."""

import copy
import threading
import uuid
from functools import partial
from typing import NamedTuple

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchao.optim
from blobs_on_tiers import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from wrapped import Block, MomentumIn8Bits, Opaque, Quantized, Rounding, bits, quantized

from holdfast.checkpoint import TieredWriter, api, backends
from holdfast.checkpoint.api import flush, load, save, wait_for_copy
from holdfast.checkpoint.archive import Archive
from holdfast.errors import StateError, UsageError
from holdfast.tensors.tree import pack, unpack
from holdfast.tools.conversion.convert import export_safetensors, export_torch, import_checkpoint
from holdfast.train import state_image

TORCHAO = (torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Every test has places of its own, in memory of its own."""
    root = backends.Path("/dev/shm") / f"holdfast-test-{uuid.uuid4().hex}"
    monkeypatch.setenv("HOLDFAST_MEMORY", str(root))
    monkeypatch.setattr(api, "_backends", {})
    yield
    wait_for_copy()
    for place in api._backends.values():
        place.close()
    if root.exists():
        root.rmdir()


@pytest.fixture
def eager():
    """Torchao compiles its updates, which takes minutes, and computes the same without."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def to(tmp_path):
    return str(tmp_path / "saved")


class Holder:
    """Any object with a state; it copies into what it has."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor.copy_(state["tensor"])


class Weights(torch.nn.Module):
    """A quantized weight, an expanded buffer, and one of three dimensions of which two are expanded."""

    def __init__(self, seed=0):
        super().__init__()
        self.weight = torch.nn.Parameter(quantized((40, 90), seed), requires_grad=False)
        self.plain = torch.nn.Linear(50, 50)
        torch.manual_seed(seed)
        self.register_buffer("row", torch.randn(1, 4).expand(3, 4))
        self.register_buffer("some", torch.randn(1, 500, 1).expand(2, 500, 3))


def bits_of(value):
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {k: bits_of(v) for k, v in value.items()}
    return list(map(bits_of, value)) if isinstance(value, list | tuple) else value


def trained(kind, seed=0, steps=3, dtype=torch.float32):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64)).to(dtype)
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 128).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def sent(old, new):
    """As a newcomer fetches it."""
    image = state_image.capture(old, 3)
    target = state_image.targets(new, image.index)
    data = b"".join(map(bytes, image.pieces(0, image.index.nbytes)))
    with target.filling(0, len(data)) as pieces:
        at = 0
        for piece in pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
    state_image.load(new, target)


def states(objects):
    return bits_of({name: thing.state_dict() for name, thing in objects.items()})


@pytest.mark.parametrize(
    ("kind", "begun", "dtype"),
    [
        *((kind, 0, torch.bfloat16) for kind in (*TORCHAO, MomentumIn8Bits)),
        *((kind, 2, torch.float32) for kind in (TORCHAO[0], MomentumIn8Bits)),
    ],
)
def test_moments_come_back(kind, begun, dtype, to, eager):
    old = trained(kind, dtype=dtype)
    save(old, 3, to=to)
    for way in ("saved", "sent"):
        new = trained(kind, 1, begun, dtype)
        if way == "sent":
            sent(old, new)
            assert state_image.digest(new) == state_image.digest(old)
        else:
            assert load(new, source=to) == 3
        assert states(new) == states(old)
        further = [copy.deepcopy(list(old["model"].parameters())), list(new["model"].parameters())]
        assert all(torch.equal(a, b) for a, b in zip(*further, strict=True))


def test_a_loaded_optimizer_goes_on_as_the_saved_one(to, eager):
    old, new = trained(torchao.optim.AdamW8bit), trained(torchao.optim.AdamW8bit, 1, 0)
    save(old, 3, to=to)
    load(new, source=to)
    for objects in (old, new):
        objects["model"](torch.ones(4, 128)).square().mean().backward()
        objects["optimizer"].step()
    assert states(new) == states(old)


def test_a_moment_keeps_its_precision():
    class Exact(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("sum", torch.zeros(p.shape, dtype=torch.float64)).add_(p.grad / 3)
                self.state[p].setdefault("factors", [torch.rand(3), {"own": (quantized((9,)), 2)}])

    old, new = (trained(Exact, seed, steps, torch.bfloat16) for seed, steps in ((0, 3), (1, 0)))
    sent(old, new)
    assert states(new) == states(old)


def microscaled():
    return MXTensor.to_mx(torch.randn(64, 64, dtype=torch.bfloat16), torch.float8_e4m3fn, 32)


def weight_of(config):
    layer = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
    quantize_(layer, config())
    return layer.weight.detach()


@pytest.mark.parametrize("way", ["saved", "sent"])
@pytest.mark.parametrize(
    "make",
    [microscaled, *(partial(weight_of, c) for c in (Int8WeightOnlyConfig, Float8WeightOnlyConfig))],
    ids=["mxfp8", "int8", "float8"],
)
def test_weights_of_torchao_come_back(make, way, to):
    def holding(weight):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        return {"module": module}

    old, new = holding(make()), holding(make())
    assert bits(new["module"].weight) != bits(old["module"].weight)
    state_image.check_restorable(old)
    if way == "sent":
        sent(old, new)
    else:
        save(old, 1, to=to)
        load(new, source=to)
    assert bits(new["module"].weight) == bits(old["module"].weight)


@pytest.mark.parametrize("way", ["saved", "sent"])
def test_a_module_is_written_to_bit_by_bit(way, to):
    old, new = {"module": Weights(0)}, {"module": Weights(1)}
    held = dict((*new["module"].named_parameters(), *new["module"].named_buffers()))
    state_image.check_restorable(old)
    if way == "sent":
        sent(old, new)
    else:
        save(old, 3, to=to)
        assert load(new, source=to) == 3
    assert states(new) == states(old)
    now = dict((*new["module"].named_parameters(), *new["module"].named_buffers()))
    assert all(now[name] is held[name] for name in held)
    assert new["module"].row.stride() == (0, 1)  # it is still one row


def test_an_object_that_quantizes_anew_has_the_bits_all_the_same(to):
    old, new = {"holder": Holder(quantized((3000,)))}, {"holder": Holder(quantized((3000,), 1))}
    save(old, 1, to=to)
    load(new, source=to)
    assert states(new) == states(old)
    again = {"holder": Holder(quantized((3000,), 2))}
    sent(old, again)
    assert states(again) == states(old)


class Ahead(Quantized):
    """With a scale that is computed ahead, at times."""

    @staticmethod
    def __new__(cls, codes, scale, shape, block=None, ahead=None):
        return Quantized.__new__(cls, codes, scale, shape, block)

    def __init__(self, *args, ahead=None):
        super().__init__(*args)
        self.ahead = ahead

    def __tensor_flatten__(self):
        names, context = super().__tensor_flatten__()
        return names + (["ahead"] if self.ahead is not None else []), context

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
        own = inner["codes"], inner["scale"], context["shape"], context["block"]
        return cls(*own, ahead=inner.get("ahead"))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.detach.default:
            made.ahead = args[0].ahead
        return made


@pytest.mark.parametrize("way", ["saved", "sent"])
@pytest.mark.parametrize("saved", [True, False])
def test_parts_come_and_go(saved, way, to):
    modules = [torch.nn.Module(), torch.nn.Module()]
    for number, (module, there) in enumerate(zip(modules, (saved, not saved), strict=True)):
        own = torch.full((9000,), number, dtype=torch.int8), torch.tensor(1.0), torch.Size((9000,))
        tensor = Ahead(*own, ahead=torch.ones(2) if there else None)
        module.weight = torch.nn.Parameter(tensor, requires_grad=False)
    old, new = {"m": modules[0]}, {"m": modules[1]}
    if way == "sent":
        sent(old, new)
    else:
        save(old, 1, to=to)
        load(new, source=to)
    assert bits(modules[1].weight) == bits(modules[0].weight)
    assert (modules[1].weight.ahead is not None) == saved


def test_two_tensors_in_one_and_those_within(to):
    nest = Quantized(quantized((5000,)), torch.tensor(0.5), torch.Size((5000,)))
    old = {"nest": nest, "two": [TwoTensor(torch.randn(4, 4), torch.randn(4, 4))]}
    new = {
        "nest": Quantized(quantized((5000,), 1), torch.tensor(0.1), torch.Size((5000,))),
        "two": [TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4))],
    }
    held = new["nest"], new["two"][0]
    save(old, 1, to=to)
    load(new, source=to)
    assert bits_of(new) == bits_of(old)
    assert new["nest"] is held[0]
    assert new["two"][0] is held[1]


class Strange:
    """No value that a context may have."""


def odd(kind):
    made = quantized((8,))
    if kind == "context":
        made.block = Strange()
    elif kind == "local class":
        made.block = NamedTuple("Local", [("size", int)])(3)
    return made


REFUSED = {
    "opaque": (lambda: Opaque(torch.ones(3)), "a Opaque cannot be saved: it does not have its own memory"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "mkldnn"),
    "qint8": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested",
    ),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "windows": (lambda: torch.arange(9.0).as_strided((3, 3), (1, 1)), "share memory"),
    "unfolded": (lambda: torch.arange(9.0).unfold(0, 4, 1), "share memory"),
    "context": (lambda: odd("context"), "a Strange in what __tensor_flatten__ returns"),
    "local class": (lambda: odd("local class"), "define it at the top level of a module"),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these experimental
@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_not_be_restored_is_refused_by_name(kind, to):
    make, why = REFUSED[kind]
    with pytest.raises(UsageError, match=r"^own\.part\.0: .*" + why):
        save({"own": {"part": [make()]}, "rest": torch.ones(3)}, 1, to=to)
    with pytest.raises(UsageError, match=r"^own\.tensor: .*" + why):
        state_image.check_restorable({"own": Holder(make())})
    flush()
    assert load({}, source=to) is None


def test_what_state_dict_gives_plain_is_refused():
    module = torch.nn.Module()
    module.register_buffer("scale", Opaque(torch.ones(3)))
    with pytest.raises(UsageError, match=r"^m\.scale: state_dict gives a Tensor of this Opaque"):
        state_image.check_restorable({"m": module})


def test_an_object_cannot_copy_into_an_expanded_tensor():
    with pytest.raises(UsageError, match=r"^own\.tensor is an expanded tensor .* Holder\.load_state_dict"):
        state_image.check_restorable({"own": Holder(torch.ones(1, 3).expand(4, 3))})


# ---------------------------------------------------------------- all or nothing


def test_a_load_that_cannot_be_done_changes_nothing(to, tmp_path):
    saved = {"a": torch.full((5000,), 1.0), "b": torch.arange(12.0).reshape(3, 4), "c": torch.ones(9)}
    save(saved, 1, to=to)
    flush()
    expanded = {"a": torch.zeros(5000), "b": torch.zeros(1, 4).expand(3, 4), "c": torch.zeros(9)}
    with pytest.raises(StateError, match=r"b is an expanded tensor here"):
        load(expanded, source=to)
    windows = {"a": torch.zeros(5000), "b": torch.zeros(6).as_strided((3, 4), (1, 1)), "c": torch.zeros(9)}
    with pytest.raises(UsageError, match="b: elements of this tensor share memory"):
        load(windows, source=to)
    assert not any(t.any() for state in (expanded, windows) for t in state.values())


def test_a_damaged_checkpoint_changes_nothing(to):
    many = {f"t{i}": torch.full((70_000,), 1.0) for i in range(9)}
    save(many, 1, to=to)
    flush()
    archive = Archive(to)
    (shard,) = archive.manifest(1).shards
    flip(archive.tier, shard.blob.name, shard.blob.nbytes - 5)
    state = {name: torch.zeros_like(t) for name, t in many.items()}
    with pytest.raises(StateError, match="no checkpoint could be loaded"):
        load(state, source=to)
    assert not any(t.any() for t in state.values())


def test_an_expanded_tensor_is_written_where_its_elements_lie(to):
    row = torch.arange(4.0)[None]
    save({"a": row.expand(3, 4), "b": torch.ones(1, 1, 3000).expand(2, 3, 3000)}, 1, to=to)
    state = {"a": torch.zeros(1, 4).expand(3, 4), "b": torch.zeros(1, 1, 3000).expand(2, 3, 3000)}
    held = dict(state)
    load(state, source=to)
    assert torch.equal(state["a"], row.expand(3, 4))
    assert bool((state["b"] == 1).all())
    assert all(state[name] is held[name] for name in state)


# ---------------------------------------------------------------- copied while training goes on


class Waiting:
    """Holds the copy back until it is let go."""

    def __init__(self, monkeypatch):
        self.go = threading.Event()
        whole = api.copy_into

        def copy(*args):
            assert self.go.wait(60)
            whole(*args)

        monkeypatch.setattr(api, "copy_into", copy)


def ema_of(model):
    return torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )


@pytest.mark.parametrize(
    "what", ["buffers", "ema list", "ema module", "other", "frozen", "unhooked", "quantized"]
)
def test_an_overlapped_save_has_the_state_of_its_moment(what, to, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 3000), torch.nn.BatchNorm1d(3000))
    kind = MomentumIn8Bits if what == "quantized" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    other = torch.nn.Linear(64, 3000).requires_grad_(what == "unhooked")
    state = {"model": model, "optimizer": optimizer, "other": other}
    state |= {
        "ema": [p.detach().clone() for p in model.parameters()],
        "average": ema_of(model),
        "own": torch.ones(9000),
    }
    before = copy.deepcopy(
        bits_of({k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()})
    )
    waiting = Waiting(monkeypatch)
    save(state, 1, to=to, overlap=True)
    with torch.no_grad():
        if what == "buffers":
            model(torch.randn(4, 64))
        if what == "ema list":
            for mean, p in zip(state["ema"], model.parameters(), strict=True):
                mean.lerp_(p.detach() + 1, 0.5)
        if what == "ema module":
            state["average"].module[0].weight.lerp_(torch.ones(()), 0.5)
        if what == "other":
            state["own"].add_(1)
        if what == "frozen":
            other.weight.add_(1)
        if what == "unhooked":
            other.weight.data.add_(1)  # as an optimizer that is none of torch's
    waiting.go.set()
    optimizer.step()
    flush()
    new = dict(state)
    load(new, source=to)
    assert bits_of({k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in new.items()}) == before


def test_a_trained_parameter_that_the_script_changes_is_not_saved_torn(to, monkeypatch, caplog):
    objects = trained(torch.optim.AdamW)
    save(objects, 1, to=to)
    flush()
    waiting = Waiting(monkeypatch)
    save(objects, 2, to=to, overlap=True)
    with torch.no_grad():
        objects["model"][0].weight.clamp_(-0.01, 0.01)
    waiting.go.set()
    flush()
    assert "no snapshot of step 2" in caplog.text
    assert "was changed while it was being copied" in caplog.text
    assert load(objects, source=to) == 1


# ---------------------------------------------------------------- drawn


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@st.composite
def tensors(draw, deep=2):
    kind = draw(
        st.sampled_from(["plain", "strided", "expanded", "windows", "conj", "wrapped", "two", "opaque"])
    )
    if kind in ("wrapped", "two") and not deep:
        kind = "plain"
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    many = draw(st.sampled_from([1, 1, 700]))
    seed = draw(st.integers(0, 99))
    values = torch.randn([many, *sizes], generator=torch.Generator().manual_seed(seed)) * 3
    plain = values.to(draw(st.sampled_from(DTYPES)))
    match kind:
        case "strided":
            return plain.transpose(0, -1)[..., :: draw(st.integers(1, 2))]
        case "expanded":
            return plain[:1].expand(draw(st.integers(1, 4)), *plain.shape[1:])
        case "windows":
            return plain.contiguous().reshape(-1).as_strided((2, max(0, plain.numel() - 1)), (1, 1))
        case "conj":
            return torch.complex(values, values + 1).conj()
        case "wrapped":
            block = Block(draw(st.integers(0, 1 << 40)), Rounding.NEAREST)
            inner = draw(tensors(deep - 1))
            return Quantized(inner, plain, inner.shape, draw(st.sampled_from([None, block])))
        case "two":
            return TwoTensor(plain.contiguous(), plain.contiguous().clone())
        case "opaque":
            return Opaque(values)
    return plain


def blank(tensor):
    """One of the same kind with other content."""
    if isinstance(tensor, Opaque):
        return Opaque(torch.zeros_like(tensor.inner))
    if isinstance(tensor, Quantized):
        return Quantized(blank(tensor.codes), blank(tensor.scale), tensor.shape, tensor.block)
    if isinstance(tensor, TwoTensor):
        return TwoTensor(torch.zeros_like(tensor.a), torch.zeros_like(tensor.b))
    made = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).view(tensor.dtype)
    made = made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return made.conj() if tensor.is_conj() else made


class Kept:
    """Keeps the tensors that it is given."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, state):
        self.tensors = state["tensors"]


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(tensors(), min_size=1, max_size=3))
def test_any_tensor_comes_back_or_is_refused_before_anything(drawn):
    to = f"memory://{uuid.uuid4().hex}"
    new = [blank(t) for t in drawn]
    before = bits_of(new)
    try:
        save({"drawn": drawn}, 1, to=to)
    except UsageError:
        flush()
        assert Archive(to).steps() == []
    else:
        state = {"drawn": new}
        load(state, source=to)
        assert bits_of(state["drawn"]) == bits_of(drawn)
    objects = {"kept": Kept(drawn)}
    try:
        state_image.check_restorable(objects)
    except UsageError:
        return
    fresh = {"kept": Kept([blank(t) for t in drawn])}
    assert bits_of(fresh["kept"].tensors) == before
    sent(objects, fresh)
    assert bits_of(fresh["kept"].tensors) == bits_of(drawn)


# ---------------------------------------------------------------- shards


def momentum_of(mesh, seed):
    whole = torch.Size((mesh.size() * 30, 40))
    local = quantized((30, 40), seed + mesh.get_local_rank())
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole, stride=(40, 1))


def shards(to):
    """On two ranks: a DTensor of which each has a quantized shard."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    old, new = {"own": momentum_of(mesh, 0)}, {"own": momentum_of(mesh, 7)}
    save(old, 1, to=to)
    flush()
    load(new, source=to)
    same = bits(new["own"]) == bits(old["own"])
    # Cut anew: the second rank of two meshes of one each has the first one's place.
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))["b"]
    try:
        load({"own": momentum_of(alone, 7)}, source=to)
    except StateError as error:
        return same, str(error)
    return same, ""


@pytest.mark.long
def test_a_shard_that_is_made_of_others_is_restored_as_it_lies(to):
    for same, refused in together(shards, 2, to):
        assert same
        assert "own: a shard at" in refused
        assert "this script shards it differently" in refused


# ---------------------------------------------------------------- other programs


def test_an_export_has_what_a_tensor_is_made_of(to, tmp_path):
    state = {
        "m": {"moment": quantized((100, 100)), "two": TwoTensor(torch.ones(2), torch.zeros(2))},
        "epoch": 3,
    }
    save(state, 4, to=to)
    flush()
    archive = Archive(to)
    export_safetensors(archive, 4, tmp_path / "out")
    export_torch(archive, 4, tmp_path / "out.pt")
    from safetensors.torch import load_file

    there = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(there["m.moment.codes"], state["m"]["moment"].codes)
    plain = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(plain["m"]["moment"]["codes"], state["m"]["moment"].codes)
    for step, source in enumerate((tmp_path / "out", tmp_path / "out.pt"), start=5):
        again = str(tmp_path / f"again{step}")
        import_checkpoint(source, Archive(again), step)
        new = {
            "m": {"moment": quantized((100, 100), 1), "two": TwoTensor(torch.zeros(2), torch.ones(2))},
            "epoch": 0,
        }
        assert load(new, source=again) == step
        assert bits_of(new) == bits_of(state)


@pytest.mark.filterwarnings("ignore")
def test_dcp_refuses_what_it_has_one_entry_for(tmp_path):
    with pytest.raises(CheckpointException) as refused:
        dcp.save(
            {"own": quantized((9,))},
            checkpoint_id="step-1",
            storage_writer=TieredWriter(to=str(tmp_path)),
            no_dist=True,
        )
    assert "own: a Quantized consists of several tensors" in str(refused.value)


def test_the_form_in_which_it_is_saved():
    found = []
    tree = pack({"m": quantized((2, 3))}, "own", found)
    about = {
        "class": "wrapped:Quantized",
        "shape": [2, 3],
        "stride": [3, 1],
        "context": [
            "d",
            [
                [["x", "shape"], ["size", [2, 3]]],
                [
                    ["x", "block"],
                    ["named", ["wrapped:Block", [["x", 6], ["enum", ["wrapped:Rounding", "NEAREST"]]]]],
                ],
                [["x", "dtype"], ["dtype", "float32"]],
            ],
        ],
    }
    assert tree == ["d", [["m", ["w", [about, [["codes", ["T", 0]], ["scale", ["T", 1]]]]]]]]
    assert [path for path, _ in found] == ["own.m.codes", "own.m.scale"]
    assert msgspec.json.decode(msgspec.json.encode(tree)) == msgspec.msgpack.decode(
        msgspec.msgpack.encode(tree)
    )
    assert bits(unpack(tree, [t for _, t in found])["m"]) == bits(quantized((2, 3)))


def test_a_class_that_nobody_has_imported_is_named(to):
    save({"own": quantized((9,))}, 1, to=to)
    flush()
    archive = Archive(to)
    tree = archive.head(archive.manifest(1).shards[0]).index.tree["own"]
    tree[1][0]["class"] = "unheard.of:Tensor"
    with pytest.raises(StateError, match=r"a Tensor of unheard\.of, .* import unheard\.of before"):
        unpack(["w", [tree[1][0], []]], [])
