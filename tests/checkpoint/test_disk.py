"""Whole or not there: what is wrong with a checkpoint is said, and an older whole one is taken instead."""

import json
from pathlib import Path

import msgspec
import pytest
import xxhash

from holdfast.checkpoint import disk
from holdfast.checkpoint.layout import Manifest, Saved, TensorSpec
from holdfast.errors import ChecksumError, StateError

CHUNK = 64


def write(folder: Path, step: int, nbytes: int = 200) -> Path:
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    data = bytes((step + i) % 251 for i in range(nbytes))
    half = nbytes // 2
    tensors = (
        TensorSpec("model.a", "uint8", (half,), 0, half),
        TensorSpec("model.b", "uint8", (nbytes - half,), half, nbytes - half),
    )
    chunks = tuple(xxhash.xxh3_64_hexdigest(data[i : i + CHUNK]) for i in range(0, nbytes, CHUNK))
    (path / disk.DATA).write_bytes(data)
    (path / disk.MANIFEST).write_bytes(
        msgspec.json.encode(Saved(Manifest(step, [], tensors, nbytes), CHUNK, chunks))
    )
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, CHUNK + 1, 200])
def test_a_whole_one(tmp_path, nbytes):
    seen = []
    saved = disk.verify(write(tmp_path, 3, nbytes), seen.append)
    assert saved.manifest.step == 3
    assert sum(seen) == nbytes


@pytest.mark.parametrize("at", range(0, 200, 7))
def test_every_flipped_bit_is_found_and_named(tmp_path, at):
    path = write(tmp_path, 3)
    flip(path / disk.DATA, at)
    with pytest.raises(ChecksumError, match=r"model\.[ab].*were changed"):
        disk.verify(path)


@pytest.mark.parametrize("left", [0, 1, CHUNK, 199])
def test_a_torn_one(tmp_path, left):
    path = write(tmp_path, 3)
    (path / disk.DATA).write_bytes((path / disk.DATA).read_bytes()[:left])
    with pytest.raises(StateError, match="cut short"):
        disk.verify(path)


def test_one_that_is_too_long(tmp_path):
    path = write(tmp_path, 3)
    with (path / disk.DATA).open("ab") as data:
        data.write(b"x")
    with pytest.raises(StateError, match="longer"):
        disk.verify(path)


def test_a_missing_row_of_bytes(tmp_path):
    path = write(tmp_path, 3)
    (path / disk.DATA).unlink()
    with pytest.raises(StateError, match="cannot be read"):
        disk.verify(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"manifest": 3}'])
def test_a_manifest_that_is_none(tmp_path, text):
    path = write(tmp_path, 3)
    (path / disk.MANIFEST).write_text(text)
    with pytest.raises(StateError, match="no checkpoint"):
        disk.verify(path)


def test_a_manifest_whose_figures_do_not_fit(tmp_path):
    path = write(tmp_path, 3)
    said = json.loads((path / disk.MANIFEST).read_text())
    said["chunks"] = said["chunks"][:-1]
    (path / disk.MANIFEST).write_text(json.dumps(said))
    with pytest.raises(StateError, match="3 checksums for 200 bytes"):
        disk.verify(path)


def test_the_newest_whole_one_is_taken_and_the_others_are_named(tmp_path):
    for step in (5, 10, 20, 40):
        write(tmp_path, step)
    flip(tmp_path / "step-40" / disk.DATA, 0)
    (tmp_path / "step-20" / disk.DATA).write_bytes(b"")
    (tmp_path / "step-80").mkdir()  # no manifest: it does not exist
    why = []
    taken = disk.newest_whole(tmp_path, why.append)
    assert taken is not None
    assert taken.step == 10
    assert ["step-40" in why[0], "step-20" in why[1], len(why)] == [True, True, 2]
    assert disk.newest_whole(tmp_path / "nowhere") is None
