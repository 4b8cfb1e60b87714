"""What every tier must do, and what an archive on top of it makes of a tier that is damaged."""

import errno
import os
import threading
import uuid

import pytest
from blobs_on_tiers import (
    blob_of,
    flip,
    in_buffers,
    loaded,
    newest_complete,
    replaced,
    save,
    save_rank,
    sealed,
)

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import MANIFEST, Sealed, folder_of
from holdfast.checkpoint.objects import SCHEMES, ObjectTier
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.tier import DiskTier, open_tier
from holdfast.errors import ChecksumError, StateError, TierError, UsageError

PART_BYTES = 64 << 10


@pytest.fixture(params=["disk", "memory"])
def tier(request, tmp_path):
    if request.param == "disk":
        return DiskTier(tmp_path / "tier")
    return ObjectTier(f"memory://{uuid.uuid4().hex}", part_bytes=PART_BYTES)


@pytest.fixture
def archive(tier):
    return Archive(tier)


# ---------------------------------------------------------------- a tier


def test_an_empty_one(tier):
    assert tier.folders() == []
    assert tier.size("step-1/a") is None
    tier.remove("step-1/a")
    tier.remove_folder("step-1")
    tier.check()
    assert tier.folders() == []


@pytest.mark.parametrize(
    "nbytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES, 400_003]
)
def test_what_is_written_is_read_back(tier, nbytes):
    data, seen = blob_of(3, 1, nbytes), []
    tier.write("step-3/a.bin", in_buffers(data), nbytes, seen.append)
    assert tier.read("step-3/a.bin") == data
    assert [tier.size("step-3/a.bin"), sum(seen)] == [nbytes, nbytes]
    assert tier.folders() == ["step-3"]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (0, 1), (7, 100), (PART_BYTES - 1, 3 * PART_BYTES), (0, 300_000)]
)
def test_any_range_is_read_in_place(tier, offset, nbytes):
    data = blob_of(3, 1, 300_000)
    tier.write("step-3/a.bin", in_buffers(data), len(data))
    into = bytearray(b"x" * (nbytes + 2))
    tier.read_into("step-3/a.bin", offset, memoryview(into)[1:-1])
    assert bytes(into) == b"x" + data[offset : offset + nbytes] + b"x"


@pytest.mark.parametrize(("offset", "nbytes"), [(300_000, 1), (299_999, 2), (0, 300_001), (900_000, 5)])
def test_a_range_beyond_the_end_is_refused(tier, offset, nbytes):
    tier.write("step-3/a.bin", in_buffers(blob_of(3, 1, 300_000)), 300_000)
    with pytest.raises(StateError, match=r"step-3/a\.bin is cut short"):
        tier.read_into("step-3/a.bin", offset, memoryview(bytearray(nbytes)))


@pytest.mark.parametrize("nbytes", [0, 1, 3 * PART_BYTES])
def test_what_is_not_there_cannot_be_read(tier, nbytes):
    with pytest.raises(StateError, match=r"step-3/a\.bin does not exist"):
        tier.read_into("step-3/a.bin", 0, memoryview(bytearray(nbytes)))
    with pytest.raises(StateError, match=r"step-3/a\.bin does not exist"):
        tier.read("step-3/a.bin")


@pytest.mark.parametrize("said", [299_999, 300_001, 1, 0])
def test_a_file_of_another_length_than_was_said_does_not_appear(tier, said):
    tier.write("step-3/a.bin", [memoryview(b"before")], 6)
    with pytest.raises(StateError, match=f"bytes instead of {said}|received more than {said} bytes"):
        tier.write("step-3/a.bin", in_buffers(blob_of(3, 1, 300_000)), said)
    assert tier.read("step-3/a.bin") == b"before"


def test_a_writer_that_fails_midway_leaves_what_was_there(tier):
    def pieces():
        yield memoryview(bytes(200_000))
        raise ValueError("the rank went away")

    tier.write("step-3/a.bin", [memoryview(b"before")], 6)
    for name in ("step-3/a.bin", "step-3/b.bin"):
        with pytest.raises(ValueError, match="the rank went away"):
            tier.write(name, pieces(), 300_000)
    assert tier.read("step-3/a.bin") == b"before"
    assert tier.size("step-3/b.bin") is None


def test_publish_replaces(tier):
    data = bytearray(b"one")
    tier.publish("step-3/manifest.json", data)
    data[:] = b"two"  # what was published does not follow
    assert tier.read("step-3/manifest.json") == b"one"
    tier.publish("step-3/manifest.json", b"")
    assert tier.read("step-3/manifest.json") == b""


def test_a_folder_goes_alone(tier):
    for name in ("step-1/a", "step-1/b", "step-10/a", "step-2/a"):
        tier.publish(name, b"x")
    tier.remove_folder("step-1")
    tier.remove("step-2/a")
    assert tier.size("step-2/a") is None
    assert [tier.size("step-1/a"), tier.size("step-10/a")] == [None, 1]
    assert "step-1" not in tier.folders()


def test_many_threads_at_once(tier):
    blobs = {f"step-3/{rank}.bin": blob_of(3, rank, 300_000) for rank in range(6)}
    right = []

    def both(name, data):
        tier.write(name, in_buffers(data), len(data))
        into = bytearray(len(data))
        tier.read_into(name, 0, memoryview(into))
        right.append(bytes(into) == data)

    threads = [threading.Thread(target=both, args=item) for item in blobs.items()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert right == [True] * 6


# ---------------------------------------------------------------- an archive on it


def test_saved_verified_loaded(archive):
    save(archive, 5)
    save(archive, 10, world=3, nbytes=300_000)
    seen = []
    assert archive.verify(10, seen.append).world == 3
    assert sum(seen) == 900_000
    assert loaded(archive, 10) == [blob_of(10, rank, 300_000) for rank in range(3)]
    assert [archive.steps(), newest_complete(archive)] == [[5, 10], 10]


def test_without_a_manifest_it_does_not_exist(archive):
    save(archive, 5)
    save_rank(archive, 10, 0)
    assert [archive.steps(), newest_complete(archive)] == [[5], 5]
    with pytest.raises(StateError, match="does not exist"):
        archive.manifest(10)
    with pytest.raises(StateError, match="do not make a complete checkpoint"):
        archive.commit(10, [save_rank(archive, 10, 1)])


def test_a_blob_that_is_there_is_not_written_again(archive):
    first = save_rank(archive, 5, 0)
    assert archive.save_shard(5, 0, Sealed(b"another head", b"", b"", 0), iter([])) != first

    def never():
        pytest.fail("sent again")
        yield memoryview(b"")

    assert archive.save_shard(5, 0, sealed(5, blob_of(5, 0)), never()) == first


@pytest.mark.parametrize("at", [0, 40_000, 99_999])
def test_a_flipped_bit_of_a_blob(archive, at):
    shard = save(archive, 5).shards[1]
    flip(archive.tier, shard.blob.name, at)
    with pytest.raises(
        ChecksumError,
        match=r"rank-1\..*\.safetensors: bytes \d+ to \d+ \(model\.[ab].*do not match their checksums",
    ):
        archive.verify(5)
    with pytest.raises(StateError, match="do not match their checksums"):
        loaded(archive, 5)


def test_a_flipped_bit_of_a_head(archive):
    name = save(archive, 5).shards[1].head.name
    for at in range(0, archive.tier.size(name), 7):
        flip(archive.tier, name, at)
        with pytest.raises(ChecksumError, match=r"rank-1\..*\.head\.safetensors is damaged"):
            archive.verify(5)
        flip(archive.tier, name, at)
    archive.verify(5)


def test_a_flipped_bit_of_a_manifest(archive):
    save(archive, 5)
    name = f"{folder_of(5)}/{MANIFEST}"
    for at in range(0, archive.tier.size(name), 7):
        flip(archive.tier, name, at)
        if archive.tier.read(name)[at] not in b" \n\t\r":  # blanks between its figures say nothing
            with pytest.raises(StateError, match=MANIFEST):
                archive.verify(5)
        flip(archive.tier, name, at)
    archive.verify(5)


@pytest.mark.parametrize("left", [0, 1, 32_768, 99_999])
def test_a_torn_blob(archive, left):
    shard = save(archive, 5).shards[0]
    left += shard.header_bytes
    replaced(archive.tier, shard.blob.name, archive.tier.read(shard.blob.name)[:left])
    with pytest.raises(StateError, match=f"cut short: {left} of {shard.header_bytes + 100_000} bytes"):
        archive.verify(5)
    with pytest.raises(StateError, match="cut short"):
        loaded(archive, 5)


@pytest.mark.parametrize("which", ["blob", "head", "manifest"])
def test_a_missing_file(archive, which):
    save(archive, 3)
    shard = save(archive, 5).shards[0]
    names = {"blob": shard.blob.name, "head": shard.head.name, "manifest": f"{folder_of(5)}/{MANIFEST}"}
    archive.tier.remove(names[which])
    with pytest.raises(StateError, match="does not exist"):
        archive.verify(5)
    assert newest_complete(archive) == 3


def test_the_newest_whole_one_is_taken_and_the_others_are_named(archive):
    for step in (5, 10, 20, 40):
        shard = save(archive, step).shards[0]
        if step == 20:
            archive.tier.remove(shard.blob.name)
        if step == 40:
            flip(archive.tier, shard.blob.name, 0)
    why = []
    assert newest_complete(archive, why.append) == 10
    assert ["step-40" in why[0], "step-20" in why[1], len(why)] == [True, True, 2]


def test_saving_a_step_again_repairs_it(archive):
    """What was saved before is trusted only if it is as it was."""
    shards = save(archive, 5).shards
    flip(archive.tier, shards[0].blob.name, 77_000)
    archive.tier.remove(shards[1].head.name)
    with pytest.raises(ChecksumError):
        archive.verify(5)
    written = []
    data = blob_of(5, 0)
    archive.save_shard(5, 0, sealed(5, data), in_buffers(data), written.append)
    assert sum(written) == len(data)
    save(archive, 5)
    assert [archive.verify(5).step, loaded(archive, 5)[0]] == [5, data]
    written.clear()
    archive.save_shard(5, 0, sealed(5, data), in_buffers(data), written.append)
    assert written == [], "a blob that is whole is not sent again"


def test_retention(archive):
    for step in (10, 20, 30, 40, 50):
        save(archive, step, world=1)
    save_rank(archive, 35, 0)  # begun and passed by
    save_rank(archive, 60, 0)  # begun, perhaps still under way
    assert archive.prune(Retention(keep=2, keep_every=20)) == [10, 30]
    assert archive.steps() == [20, 40, 50]
    assert sorted(archive.tier.folders()) == ["step-20", "step-35", "step-40", "step-50", "step-60"]
    assert archive.prune(Retention(keep=1), spare=20) == [40]  # training went back: 20 was saved just now
    assert sorted(archive.tier.folders()) == ["step-20", "step-50", "step-60"]  # 35 was there the second time
    assert archive.prune(Retention(keep=0)) == [20]
    assert newest_complete(archive) == 50


# ---------------------------------------------------------------- URLs, and each kind by itself


def test_a_memory_url_is_one_store():
    url = f"memory://{uuid.uuid4().hex}"
    ObjectTier(url).publish("step-1/a", b"x")
    assert ObjectTier(url + "/").read("step-1/a") == b"x"
    assert open_tier(url).folders() == ["step-1"]
    assert ObjectTier(url + "x").folders() == []


def test_urls(tmp_path):
    for text in (str(tmp_path), f"file://{tmp_path}"):
        assert open_tier(text).url == str(tmp_path)
    with pytest.raises(UsageError, match=f"ftp is not a known kind of tier.*{SCHEMES[0]}"):
        open_tier("ftp://there/x")


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "no permission")]
)
def test_a_disk_that_refuses_midway(tmp_path, monkeypatch, number, advice):
    tier = DiskTier(tmp_path)
    tier.publish("step-1/a", b"before")
    written = []

    def write(fd, data):
        if sum(written) > 100_000:
            raise OSError(number, os.strerror(number))
        written.append(len(data))
        return real(fd, data)

    real = os.write
    monkeypatch.setattr(os, "write", write)
    for name in ("step-1/a", "step-1/b"):
        with pytest.raises(TierError, match=advice):
            tier.write(name, in_buffers(blob_of(1, 0, 300_000)), 300_000)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "step-1").iterdir()] == ["a"]
    assert tier.read("step-1/a") == b"before"


def test_a_file_where_the_disk_tier_should_be(tmp_path):
    (tmp_path / "tier").write_text("")
    with pytest.raises(TierError, match="choose another folder"):
        DiskTier(tmp_path / "tier").check()
    with pytest.raises(TierError, match="choose another folder"):
        DiskTier(tmp_path / "tier" / "below").check()
