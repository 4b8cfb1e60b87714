"""A checkpoint's files are opened by `safetensors` alone, and have what was saved, bit by bit."""

import json
import math
import re
import subprocess
import sys
import uuid

import pytest
import torch
from blobs_on_tiers import blob_at, blob_of, flip, in_buffers, loaded, replaced, save, sealed
from s3server import S3Server
from safetensors import safe_open
from safetensors.torch import load_file

from holdfast.checkpoint import flush, load
from holdfast.checkpoint import save as save_state
from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import ALIGNED_BYTES, FileTensor, header_of, seal, sums_of
from holdfast.checkpoint.loading import SMALL_BYTES
from holdfast.checkpoint.policy import Retention
from holdfast.errors import ChecksumError
from holdfast.tensors.index import StateIndex, TensorSpec
from holdfast.train import restore, state_image

READ = """
import sys
from safetensors.torch import load_file, save_file
tensors = {}
for path in sys.argv[2:]:
    tensors |= load_file(path)
assert "holdfast" not in sys.modules
save_file(tensors, sys.argv[1])
"""


def files(folder, step):
    return sorted((folder / f"step-{step}").glob("*.safetensors"))


def opened(folder, step):
    """All tensors of a checkpoint, as somebody has them who does not know Holdfast."""
    out = folder / "read.safetensors"
    subprocess.run([sys.executable, "-c", READ, out, *files(folder, step)], check=True)
    tensors = load_file(out)
    return {name: tensor for name, tensor in tensors.items() if name != "holdfast-xxh3"}


def by_path(value, path):
    if isinstance(value, torch.Tensor):
        return {path: value}
    if not isinstance(value, dict | list | tuple):
        return {}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: tensor for key, part in parts for name, tensor in by_path(part, f"{path}.{key}").items()}


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def as_saved(path):
    """The tensors of a file, those of a dtype that the format does not have by the rule that the documents give."""
    tensors, metadata = load_file(path), metadata_of(path)
    return {
        name: tensor.view(getattr(torch, metadata[f"dtype:{name}"])).squeeze(-1)
        if f"dtype:{name}" in metadata
        else tensor
        for name, tensor in tensors.items()
    }


def same_bits(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)


def bits(tensor):
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def trained():
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Embedding(257, 65), torch.nn.Flatten(), torch.nn.Linear(130, 99), torch.nn.BatchNorm1d(99)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(257, (5, 2))).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_script(folder, state, step):
    save_state(state, step, to=str(folder))
    flush()


def save_run(folder, state, step):
    restore.save(state_image.capture(state, step), str(folder), Retention())


@pytest.mark.parametrize("how", [save_script, save_run])
def test_every_tensor_of_a_training_has_the_name_that_one_expects(tmp_path, how):
    state = trained()
    how(tmp_path, state, 3)
    wanted = {path: t for name in state for path, t in by_path(state[name].state_dict(), name).items()}
    found = opened(tmp_path, 3)
    assert found.keys() == wanted.keys() > {"model.0.weight", "optimizer.state.0.exp_avg"}
    assert all(same_bits(found[path], wanted[path]) for path in wanted)
    for path in files(tmp_path, 3):
        assert metadata_of(path)["format"] == "pt"
    assert Archive(str(tmp_path)).verify(3).step == 3


def test_plain_values_are_json(tmp_path):
    state = {"lr": 0.1, "worst": math.inf, "large": 1 << 100, "names": ["a", None], "w": torch.ones(2)}
    save_script(tmp_path, state, 5)
    (head,) = [path for path in files(tmp_path, 5) if ".head." in path.name]
    index = json.loads(metadata_of(head)["holdfast-index"], parse_constant=lambda word: pytest.fail(word))
    assert [index["step"], index["tree"]["lr"]] == [5, ["x", 0.1]]
    assert index["tree"]["worst"] == ["float", "inf"]
    back = dict.fromkeys(state)
    back["w"] = torch.zeros(2)
    assert load(back, source=str(tmp_path)) == 5
    assert {k: v for k, v in back.items() if k != "w"} == {k: v for k, v in state.items() if k != "w"}


# Those whose elements are bits stand for others (quantized tensors are refused), or have no operation at all.
DTYPES = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and not re.search(r"\.q|bits|int[1-7]$", str(d))
    },
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [16, 2 * SMALL_BYTES])
def test_every_dtype(tmp_path, dtype, count):
    data = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    wanted = {"a.x": (data % 2 if dtype == torch.bool else data).view(dtype).reshape(4, -1)}
    save_script(tmp_path, {"a": {"x": wanted["a.x"]}}, 5)
    found = {name: t for path in files(tmp_path, 5) for name, t in as_saved(path).items() if name == "a.x"}
    assert same_bits(found["a.x"], wanted["a.x"])


def test_odd_sizes_leave_every_tensor_where_it_can_be_read(tmp_path):
    """A reader that maps the file takes a tensor only at a multiple of its element's size."""
    kinds = (torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.complex128, torch.float32)
    state = {f"t{n}": torch.ones(SMALL_BYTES + 1 + n, dtype=kind) for n, kind in enumerate(kinds)}
    state |= {f"s{n}": torch.ones(n + 1, dtype=kind) for n, kind in enumerate(kinds)}
    save_script(tmp_path, {"a": state}, 5)
    for path in files(tmp_path, 5):
        data = path.read_bytes()
        assert blob_at(data) % ALIGNED_BYTES == 0
        header = json.loads(data[8 : blob_at(data)])
        widths = {"F64": 8, "F32": 4, "BF16": 2}
        places = [e for name, e in header.items() if name != "__metadata__"]
        assert all(e["data_offsets"][0] % widths.get(e["dtype"], 1) == 0 for e in places)
        for name, tensor in as_saved(path).items():
            assert name == "holdfast-xxh3" or same_bits(tensor, state[name.removeprefix("a.")])


@pytest.mark.parametrize("how", [save_script, save_run])
def test_empty_tensors_and_numbers(tmp_path, how):
    module = torch.nn.Module()
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("number", torch.tensor(4.5))
    module.register_buffer("none", torch.empty(2, 0, dtype=torch.complex64))
    how(tmp_path, {"m": module}, 5)
    found = {name: t for path in files(tmp_path, 5) for name, t in load_file(path).items()}
    assert [found["m.empty"].shape, found["m.number"].item(), found["m.none"].shape] == [
        (0, 3),
        4.5,
        (2, 0, 8),
    ]


@pytest.mark.parametrize("state", [{}, {"epoch": 4}])
def test_a_state_without_tensors(tmp_path, state):
    save_script(tmp_path, state, 5)
    assert opened(tmp_path, 5) == {}
    assert len(files(tmp_path, 5)) == 2
    back = dict.fromkeys(state)
    assert (load(back, source=str(tmp_path)), back) == (5, state)


def test_names_are_unique():
    tensors = [FileTensor(name, "uint8", (1,), 1) for name in ("a", "a", "__metadata__", "a")]
    entries = json.loads(header_of(tensors, step="5")[8:])
    assert list(entries) == ["__metadata__", "a", "a#2", "__metadata__#2", "a#3"]
    assert entries["__metadata__"] == {"format": "pt", "step": "5"}


def test_equal_bytes_of_other_names_are_another_file(tmp_path):
    archive, data = Archive(str(tmp_path)), bytes(100_000)
    shards = []
    for rank, name in enumerate("aab"):
        spec = TensorSpec(path=name, dtype="uint8", shape=(len(data),), offset=0, nbytes=len(data))
        described = seal(StateIndex(5, {}, (spec,), len(data)), sums_of(memoryview(data)))
        shards.append(archive.save_shard(5, rank, described, [memoryview(data)]))
    first, second, third = (shard.blob.xxh3 for shard in shards)
    assert (first == second, first == third) == (True, False)


# ---------------------------------------------------------------- damage


def test_a_damaged_header_is_refused_and_the_bytes_behind_it_still_load(tmp_path):
    archive = Archive(str(tmp_path))
    shard = save(archive, 5).shards[1]
    good = archive.tier.read(shard.blob.name)
    for at in range(0, blob_at(good), 7):
        replaced(archive.tier, shard.blob.name, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(
            ChecksumError,
            match=rf"rank-1\.\w+\.safetensors: its header, bytes 0 to {blob_at(good)}, does not match .*Its tensors are "
            "intact: a job can resume from them, and `holdfast checkpoint export` writes them to new files",
        ):
            archive.verify(5)
        assert loaded(archive, 5)[1] == blob_of(5, 1)
    archive.save_shard(5, 1, sealed(5, blob_of(5, 1)), in_buffers(blob_of(5, 1)))
    assert archive.verify(5).step == 5


def test_ranges_of_an_object_begin_behind_the_header(tmp_path, monkeypatch):
    with S3Server() as server:
        for name, value in {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "a"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        archive = Archive(f"s3://bucket/{uuid.uuid4().hex}")
        shard = save(archive, 5, world=1, nbytes=100_000).shards[0]
        before = len(server.asked)
        blob = archive.blob(shard, archive.head(shard))
        assert bytes(blob.fetch(40_000, 40_010)) == blob_of(5, 0)[40_000:40_010]
        (asked,) = [r for r in server.asked[before:] if "Range" in r.headers]
        header = shard.header_bytes
        assert asked.headers["Range"] == f"bytes={header + 32_768}-{header + 65_535}"
        flip(archive.tier, shard.blob.name, 40_005)
        with pytest.raises(ChecksumError, match=f"bytes {header + 32_768} to {header + 65_536} "):
            archive.verify(5)
