"""Checkpoints for other programs, and theirs for us: bit-equal both ways, and nothing half-written."""

import json
import math
import os
import pickle
import resource
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blobs_on_tiers import flip
from ranks_on_tiers import Piece, flat_rank, save_flats, save_states
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import holdfast as hf
from holdfast.checkpoint.archive import Archive
from holdfast.errors import StateError, TierError, UsageError
from holdfast.tools.conversion import convert
from holdfast.tools.conversion.convert import (
    check_room,
    export_safetensors,
    export_torch,
    import_checkpoint,
    read_portable,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LARGE = 40_000
"""Elements of a tensor that does not go with the plain values, in several checksums' chunks."""


@pytest.fixture
def archive():
    return Archive(f"memory://{uuid.uuid4().hex}")


def large(seed, *shape):
    return torch.randn(*(shape or (LARGE,)), generator=torch.Generator().manual_seed(seed))


def one_state():
    """A bit of everything that a state can hold."""
    return {
        "model": {
            "0.weight": large(1, 200, 200),
            "0.bias": large(2, 200).bfloat16(),
            "scale": torch.tensor(1.5),
            "none": torch.empty(0, 7),
            "fp8": large(3, 9000).to(torch.float8_e4m3fn),
            "nan": torch.tensor([math.nan, -0.0, math.inf]),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": large(4, 200, 200)}, 1: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": [0, 1]}],
        },
        "rng": torch.arange(5000, dtype=torch.int64).to(torch.uint8),
        "loss": math.nan,
        "best": -math.inf,
        "epoch": 3,
        "done": False,
        "name": "größe",
        "seen": 2**63 - 1,
        "empty": [],
    }


def bits(value):
    """A state that compares bit by bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0)
        return (str(value.dtype), tuple(value.shape), bytes(raw.numpy()))
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(bits, value))
    return (type(value), repr(value))


def zeroed(value):
    """The same nesting, with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape).to(value.dtype)
    if isinstance(value, dict):
        return {k: zeroed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(zeroed, value))
    return None


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("file_bytes", [convert.FILE_BYTES, 170_000])
def test_there_and_back_is_the_same(archive, tmp_path, kind, file_bytes):
    def export(of, out):
        if kind == "torch":
            export_torch(of, 4, out)
        else:
            export_safetensors(of, 4, out, file_bytes=file_bytes)
        return files_of(out) if out.is_dir() else out.read_bytes()

    save_states(archive, 4, [one_state()])
    before = export(archive, tmp_path / "one")
    url = str(tmp_path / "tier")
    import_checkpoint(tmp_path / "one", Archive(url), 4)
    assert Archive(url).verify(4).world == 1
    assert export(Archive(url), tmp_path / "another") == before
    state = zeroed(one_state())
    assert hf.checkpoint.load(state, source=url) == 4
    assert bits(state) == bits(one_state())


def test_dcp_loads_what_was_imported(archive, tmp_path):
    save_states(archive, 4, [one_state()])
    export_safetensors(archive, 4, tmp_path / "out", only="model.")
    import_checkpoint(tmp_path / "out", Archive(str(tmp_path / "tier")), 9)
    state = {"model": zeroed(one_state()["model"])}
    dcp.load(state, storage_reader=hf.checkpoint.TieredReader(source=str(tmp_path / "tier")), no_dist=True)
    assert bits(state) == bits({"model": one_state()["model"]})


def test_what_dcp_saved(tmp_path):
    url, value = str(tmp_path / "tier"), large(1)
    saved = {"model": {"w": value, "b": torch.ones(2)}, "epoch": 3, "groups": [{"lr": 0.1, "betas": [1, 2]}]}
    dcp.save(saved, storage_writer=hf.checkpoint.TieredWriter(to=url, step=7), no_dist=True)
    export_torch(Archive(url), 7, tmp_path / "out.pt")
    flat = {
        "model.w": value,
        "model.b": torch.ones(2),
        "epoch": 3,
        "groups.0.lr": 0.1,
        "groups.0.betas": [1, 2],
    }
    assert bits(torch.load(tmp_path / "out.pt", weights_only=True)) == bits(flat)
    export_safetensors(Archive(url), 7, tmp_path / "out")
    again = str(tmp_path / "again")
    import_checkpoint(tmp_path / "out", Archive(again), 7)
    export_safetensors(Archive(again), 7, tmp_path / "out2")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "out2")
    state = {"model": {"w": torch.zeros(LARGE), "b": torch.zeros(2)}, "epoch": 0}
    dcp.load(state, storage_reader=hf.checkpoint.TieredReader(source=again), no_dist=True)
    assert bits(state) == bits({"model": saved["model"], "epoch": 3})


# ---------------------------------------------------------------- the files


def test_a_file_is_what_the_library_writes(archive, tmp_path):
    dtypes = [*convert.safetensors_io.DTYPES]
    tensors = {f"m.t{i}": (large(i, 50 + i) * 9).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"m.größe": large(1), "m.scalar": torch.tensor(2), "m.none": torch.empty(3, 0)}
    save_states(archive, 4, [{"m": {k[2:]: v for k, v in tensors.items()}}])
    export_safetensors(archive, 4, tmp_path / "out")
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert files_of(tmp_path / "out")["model.safetensors"] == (tmp_path / "theirs").read_bytes()


def test_an_index_names_the_files(archive, tmp_path):
    save_states(archive, 4, [{"m": {str(i): large(i) for i in range(5)} | {"s": large(9, 10)}}])
    exported = export_safetensors(archive, 4, tmp_path / "out", file_bytes=9 * LARGE)
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [p.name for p in exported.files] == [*names, "model.safetensors.index.json", "values.json"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * (5 * LARGE + 10)}
    assert [index["weight_map"][f"m.{i}"] for i in range(5)] == [
        names[0],
        names[0],
        names[1],
        names[1],
        names[2],
    ]
    for name in names:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert {k for k, f in index["weight_map"].items() if f == name} == set(file.keys())


def test_values_are_beside_the_tensors(archive, tmp_path):
    save_states(archive, 4, [one_state()])
    exported = export_safetensors(archive, 4, tmp_path / "out")
    values = json.loads((tmp_path / "out/values.json").read_text())["values"]
    assert values["optimizer.param_groups.0.betas.1"] == 0.999
    assert [values["epoch"], values["loss"], values["best"]] == [3, {"float": "nan"}, {"float": "-inf"}]
    assert exported.values == len(values)
    assert exported.tensors == len(load_file(tmp_path / "out/model.safetensors"))


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("model.", {"model.a", "model.list.0", "model.list.1"}),
        ("model.list.1", {"model.list.1"}),
        ("mod", {"model.a", "model.list.0", "model.list.1", "mode"}),
    ],
)
def test_only_some(archive, tmp_path, only, names):
    state = {
        "model": {"a": large(1), "list": [large(2), large(3)], "n": 1},
        "mode": torch.ones(1),
        "x": large(4),
    }
    save_states(archive, 4, [state])
    export_safetensors(archive, 4, tmp_path / "out", only=only)
    assert set(load_file(tmp_path / "out/model.safetensors")) == names
    import_checkpoint(tmp_path / "out", archive, 5)
    export_safetensors(archive, 5, tmp_path / "again")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_stripped_names_lose_what_only_says(archive, tmp_path):
    state = {"model": {"a": large(1), "list": [large(2), torch.ones(2)], "n": 1}, "x": large(4)}
    save_states(archive, 4, [state, state | {"model": state["model"] | {"a": large(5), "own": 2}}])
    export_safetensors(archive, 4, tmp_path / "out", only="model.", strip=True)
    assert set(load_file(tmp_path / "out/model.safetensors")) == {"a", "list.0", "list.1", "rank-1.model.a"}
    import_checkpoint(tmp_path / "out", archive, 5)
    again = {"model": zeroed(state["model"])}
    assert hf.checkpoint.load(again, source=archive.tier.url) == 5
    assert bits(again["model"]) == bits(state["model"])
    with pytest.raises(UsageError, match=r"the name 'model\.a' would become empty"):
        export_safetensors(archive, 4, tmp_path / "none", only="model.a", strip=True)
    assert not (tmp_path / "none").exists()


def test_small_tensors_are_read_in_batches(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "BATCH_BYTES", 100_000)
    state = {"m": {str(i): large(i, 9_000) for i in range(9)}}
    save_states(archive, 4, [state])
    export_safetensors(archive, 4, tmp_path / "out")
    assert bits(load_file(tmp_path / "out/model.safetensors")) == bits(
        {f"m.{i}": state["m"][str(i)] for i in range(9)}
    )


# ---------------------------------------------------------------- ranks


def four_ranks():
    """Sharded, replicated and own things of ranks; the blobs of no two are equal."""
    whole = large(1, 402, 50)
    cuts = [(0, 100), (100, 250), (250, 300), (300, 402)]
    return [
        {
            "model": {"sharded": Piece.of(whole, *cut), "same": large(2)},
            "data": {"position": 10 + rank // 2, "epoch": 1},
            "rng": torch.full((16,), rank % 2),
            **({"own": large(rank)} if rank else {}),
        }
        for rank, cut in enumerate(cuts)
    ]


def test_ranks_are_put_together(archive, tmp_path):
    save_states(archive, 4, four_ranks())
    exported = export_safetensors(archive, 4, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert bits(tensors["model.sharded"]) == bits(large(1, 402, 50))
    own = {"rank-1.rng", "rank-3.rng", "rank-2.own", "rank-3.own"}
    assert set(tensors) == own | {"model.sharded", "model.same", "rng", "own"}
    assert set(exported.of_ranks) == own | {"rank-2.data.position", "rank-3.data.position"}
    assert bits([tensors["own"], tensors["rank-3.own"]]) == bits([large(1), large(3)])


@pytest.mark.parametrize("kind", [export_safetensors, export_torch])
def test_ranks_come_back(archive, tmp_path, kind):
    save_states(archive, 4, four_ranks())
    kind(archive, 4, tmp_path / "out")
    states = read_portable(tmp_path / "out")
    for rank, (state, saved) in enumerate(zip(states, four_ranks(), strict=True)):
        saved["model"]["sharded"] = large(1, 402, 50)
        assert bits(state) == bits(saved), f"rank {rank}"
    assert import_checkpoint(tmp_path / "out", archive, 5)[0] == 4
    kind(archive, 5, tmp_path / "again")
    if kind is export_torch:
        assert (tmp_path / "out").read_bytes() == (tmp_path / "again").read_bytes()
        assert (tmp_path / "out").stat().st_size < 4 * (402 * 50 + 4 * LARGE) + 50_000  # shared ones once
    else:
        assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_ranks_that_differ_only_in_values_share_a_blob(archive, tmp_path):
    save_states(archive, 4, [{"m": {"w": large(1)}, "rank": rank} for rank in range(3)])
    export_safetensors(archive, 4, tmp_path / "out")
    assert import_checkpoint(tmp_path / "out", archive, 5) == (3, 4 * LARGE)
    assert archive.verify(5).nbytes == 4 * LARGE


def test_ranks_that_are_alike_are_one(archive, tmp_path):
    save_states(archive, 4, [one_state() for _ in range(3)])
    assert export_safetensors(archive, 4, tmp_path / "out").of_ranks == ()
    assert len(read_portable(tmp_path / "out")) == 1


def test_equal_tensors_at_other_places_are_found_by_reading(archive, tmp_path):
    read = []
    states = [{"pad": large(9, 3000 + rank), "w": large(1)} for rank in range(2)]
    save_states(archive, 4, states)
    exported = export_safetensors(
        archive, 4, tmp_path / "out", seen=lambda what, n, total: read.append((what, n))
    )
    assert exported.of_ranks == ("rank-1.pad",)
    assert ("comparing ranks", 2 * 4 * LARGE) in read


def test_ranks_of_dcp_have_one_state(archive, tmp_path):
    whole = large(1, 400, 50)
    ranks = [
        flat_rank(4, {"m.w": Piece.of(whole, 0, 150), "m.b": torch.ones(3)}),
        flat_rank(4, {"m.w": Piece.of(whole, 150, 400), "m.c": torch.zeros(3)}),
        flat_rank(4, {"m.w": Piece.of(whole, 400, 400)}),
        flat_rank(4, {}),
    ]
    save_flats(archive, 4, ranks)
    export_safetensors(archive, 4, tmp_path / "out")
    assert bits(load_file(tmp_path / "out/model.safetensors")) == bits(
        {"m.w": whole, "m.b": torch.ones(3), "m.c": torch.zeros(3)}
    )


# ---------------------------------------------------------------- what is refused


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_piece_that_is_missing(archive, tmp_path):
    save_states(archive, 4, [{"w": Piece.of(large(1, 100, 50), 0, 60)}])
    with pytest.raises(
        StateError, match="w: the pieces of the ranks have 3000 elements, but the whole tensor has 5000"
    ):
        export_safetensors(archive, 4, tmp_path / "out")
    assert left(tmp_path) == []


@pytest.mark.parametrize("export", [export_safetensors, export_torch])
def test_damage_is_found_on_the_way(archive, tmp_path, export):
    save_states(archive, 4, [{"a": large(1), "b": large(2)}])
    flip(archive.tier, archive.manifest(4).shards[0].blob.name, 5 * LARGE)
    with pytest.raises(StateError, match="do not match their checksums"):
        export(archive, 4, tmp_path / "out")
    assert left(tmp_path) == []


@pytest.mark.parametrize("export", [export_safetensors, export_torch])
def test_a_target_that_exists(archive, tmp_path, export):
    save_states(archive, 4, [{"a": large(1)}])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    with pytest.raises(UsageError, match="out exists: choose another"):
        export(archive, 4, tmp_path / "out")
    assert files_of(tmp_path / "out") == {"mine": b"kept"}
    with pytest.raises(UsageError, match="nowhere is not an existing folder: create it first"):
        export(archive, 4, tmp_path / "nowhere/out")


@pytest.mark.parametrize("export", [export_safetensors, export_torch])
def test_a_disk_that_takes_no_more(archive, tmp_path, export):
    """A limit on the size of files stands for it: it says no in the same way."""
    save_states(archive, 4, [{"a": large(1), "b": large(2)}])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * LARGE, hard))
    try:
        with pytest.raises(TierError, match="out could not be written: "):
            export(archive, 4, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == []


def test_torch_save_that_the_disk_refuses(archive, tmp_path):
    """The tensors fit, the file with what torch.save puts around them does not."""
    save_states(archive, 4, [{"a": large(1), "b": large(2)}])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * LARGE + 1, hard))
    try:
        with pytest.raises(TierError, match="out could not be written: "):
            export_torch(archive, 4, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == []


def test_room_is_asked_for_before(tmp_path):
    check_room(tmp_path, 10, 10)
    with pytest.raises(TierError, match=r"it needs 2.00 GB, but only 5 B are free"):
        check_room(tmp_path, 2 * 10**9, 5)


@pytest.mark.parametrize(
    ("state", "options", "why"),
    [
        ({"a": {"b": 1}, "a.b": 2}, {}, "two entries are named a.b"),
        ({"rank-3": {"a": 1}}, {}, "'rank-3' is reserved for the state of one rank"),
        (
            {"a": torch.ones(2, dtype=torch.complex128)},
            {},
            "does not support complex128; export with --format torch",
        ),
        (
            {"model": {"w": 1}, "epoch": 2},
            {"only": "modle."},
            "begins with 'modle.'; names begin with epoch, model",
        ),
    ],
)
def test_states_that_cannot_be_exported(archive, tmp_path, state, options, why):
    save_states(archive, 4, [state])
    with pytest.raises((UsageError, StateError), match=why):
        export_safetensors(archive, 4, tmp_path / "out", **options)
    assert left(tmp_path) == []


class Foreign:
    """Something that only unpickling could bring back."""


def test_an_object_that_dcp_saved(tmp_path):
    url = str(tmp_path / "tier")
    dcp.save(
        {"a": Foreign(), "w": large(1)},
        storage_writer=hf.checkpoint.TieredWriter(to=url, step=1),
        no_dist=True,
    )
    with pytest.raises(StateError, match="a is an object, not a plain value"):
        export_torch(Archive(url), 1, tmp_path / "out")
    assert left(tmp_path) == ["tier"]


def refused(source, tmp_path, why):
    archive = Archive(str(tmp_path / "some" / "tier"))
    with pytest.raises(UsageError, match=why):
        import_checkpoint(source, archive, 4)
    assert not (tmp_path / "some").exists()


@pytest.mark.parametrize("nbytes", [0, 5, 30, 300, -1])
def test_files_that_are_cut_short(tmp_path, nbytes):
    for name, write in (("a.safetensors", save_file), ("a.pt", torch.save)):
        write({"w": large(1), "b": large(2)}, tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:nbytes])
        refused(tmp_path / name, tmp_path, "cut short")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"a": Foreign()}, "contains objects that could run code"),
        ([1, 2], "contains a list: save a dict"),
        (torch.ones(2), "contains a Tensor: save a dict"),
        ({1: torch.ones(2)}, "keys that are not strings"),
        ({"a": {"b": {1, 2}}}, r"a\.b: a set is neither"),
        ({"a": torch.eye(3).to_sparse()}, "a: a torch.sparse_coo .* cannot be saved"),
        ({"rank-1": {"a": 1}, "a": 2}, "are not those of all ranks"),
    ],
)
def test_files_of_torch_that_hold_something_else(tmp_path, what, why):
    torch.save(what, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", tmp_path, why)


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "a").write_text("hello")
    refused(tmp_path / "a", tmp_path, "cannot be read|holds objects")
    (tmp_path / "b").write_bytes(pickle.dumps({"a": 1}))
    refused(tmp_path / "b", tmp_path, "cannot be read|holds objects")
    refused(tmp_path / "nowhere", tmp_path, "nowhere does not exist")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", tmp_path, "does not contain a .safetensors file")


def test_a_file_from_before_torch_1_6(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "a.pt", tmp_path, "from before torch 1.6")


def test_a_dtype_that_torch_has_not(tmp_path):
    header = b'{"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"123")
    refused(tmp_path / "a.safetensors", tmp_path, "this version of torch does not have the dtype F6_E2M3")
    other = header.replace(b"F6_E2M3", b"F7_XXXX")
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + other + b"123")
    refused(tmp_path / "a.safetensors", tmp_path, "F7_XXXX")


@pytest.fixture
def export(archive, tmp_path):
    """Three files, with index and values."""
    save_states(archive, 4, [{"m": {str(i): large(i) for i in range(3)}, "epoch": 1}])
    export_safetensors(archive, 4, tmp_path / "out", file_bytes=4 * LARGE)
    return tmp_path / "out"


INDEX = "model.safetensors.index.json"


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_an_export_that_is_not_whole(export, tmp_path):
    one = export / "model-00001-of-00003.safetensors"
    refused(one, tmp_path, "is one of 3 files: pass .*index.json, or the folder")
    data = one.read_bytes()
    one.unlink()
    refused(export, tmp_path, "names model-00001-of-00003.safetensors, which does not exist")
    save_file({"m.7": torch.ones(1)}, one)
    refused(export, tmp_path, r"only one of them contains m\.0, m\.7")
    one.write_bytes(data)
    assert len(read_portable(export / INDEX)) == 1
    edit(export / INDEX, lambda d: d["weight_map"].update({"m.0": "../x"}))
    refused(export, tmp_path, "outside its own folder")
    (export / INDEX).write_text("{}")
    refused(export, tmp_path, "is not an index")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.clear(), "values.json names 'format'"),
        (lambda d: d.update(format=2), "update Holdfast"),
        (lambda d: d["values"].clear(), "names 'epoch', which does not exist"),
        (lambda d: d["nesting"][0].pop("m"), r"does not name m\.0, m\.1, m\.2"),
        (lambda d: d["nesting"].clear(), "does not name"),
        (lambda d: d["nesting"][0].update(epoch=3), "was not written by an export"),
        (lambda d: d["nesting"][0].update(epoch=["?", 3]), "another version"),
        (lambda d: d.update(values=[]), "was not written by an export"),
    ],
)
def test_values_that_do_not_fit(export, tmp_path, change, why):
    edit(export / "values.json", change)
    refused(export, tmp_path, why)
    (export / "values.json").unlink()
    assert set(read_portable(export)[0]) == {"m.0", "m.1", "m.2"}


def test_files_without_an_index(tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"a": large(1)}, tmp_path / "in/1.safetensors")
    save_file({"b": large(2)}, tmp_path / "in/2.safetensors")
    url = str(tmp_path / "tier")
    import_checkpoint(tmp_path / "in", Archive(url), 0)
    state = {"a": torch.zeros(LARGE), "b": torch.zeros(LARGE)}
    assert hf.checkpoint.load(state, source=url) == 0
    assert bits(state) == bits({"a": large(1), "b": large(2)})
    save_file({"b": large(2)}, tmp_path / "in/3.safetensors")
    refused(tmp_path / "in", tmp_path, "b is in two files")


def test_a_checkpoint_is_no_file_of_another_program(tmp_path, monkeypatch):
    save_states(Archive(str(tmp_path / "tier")), 4, [one_state()])
    folder = tmp_path / "tier/step-4"
    for source in (folder, *folder.iterdir()):
        refused(source, tmp_path, f"{source.name} is a checkpoint of Holdfast: it is loaded as it is")
    refused(tmp_path / "tier", tmp_path, "tier contains checkpoints of Holdfast: they are loaded from there")
    monkeypatch.chdir(folder.rename(tmp_path / "copied"))
    refused(Path(), tmp_path, r"\. is a checkpoint of Holdfast")


def test_views_and_tied_tensors_of_torch(archive, tmp_path):
    base = large(1, 100, 100)
    torch.save({"t": base.T, "tied": base, "view": base[3], "conj": torch.ones(3) * 1j}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", archive, 4)
    export_torch(archive, 4, tmp_path / "b.pt")
    assert bits(torch.load(tmp_path / "b.pt")) == bits(
        {"t": base.T.contiguous(), "tied": base, "view": base[3], "conj": torch.ones(3) * 1j}
    )


def test_a_step_that_exists(export, archive, tmp_path):
    before = archive.manifest(4)
    with pytest.raises(UsageError, match="step-4 already exists: choose another --step"):
        import_checkpoint(export, archive, 4)
    assert archive.verify(4) == before
    with pytest.raises(UsageError, match="is a single checkpoint: pass the folder that contains it"):
        import_checkpoint(export, Archive(str(tmp_path / "tier/step-4")), 5)


def test_a_tier_that_takes_no_more(export, tmp_path):
    tier = Archive(str(tmp_path / "some/tier"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9 * LARGE, hard))
    try:
        with pytest.raises(TierError, match="could not be written"):
            import_checkpoint(export, tier, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "some").exists()


def test_files_of_an_export_are_as_others_of_the_user(archive, tmp_path):
    save_states(archive, 4, [{"a": large(1)}])
    before = os.umask(0o027)
    try:
        export_safetensors(archive, 4, tmp_path / "out")
        export_torch(archive, 4, tmp_path / "out.pt")
    finally:
        os.umask(before)
    modes = [(tmp_path / n).stat().st_mode & 0o777 for n in ("out", "out/model.safetensors", "out.pt")]
    assert modes == [0o750, 0o640, 0o640]
