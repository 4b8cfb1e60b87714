"""Whole or not there: what is wrong with a checkpoint is said, wherever it is. See also `test_tiers`."""

import json
import tracemalloc
import uuid

import msgspec
import pytest
from blobs_on_tiers import blob_of, flip, in_buffers, loaded, newest_complete, replaced, save, sealed

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import (
    CHUNK_BYTES,
    FORMAT,
    MANIFEST,
    FileTensor,
    decode_head,
    digest,
    encode_head,
    encode_manifest,
    folder_of,
    header_of,
)
from holdfast.checkpoint.located import find_in_archive
from holdfast.checkpoint.policy import Retention
from holdfast.errors import ChecksumError, StateError, UnreadError, UsageError
from holdfast.protocol.snapshots import Part
from holdfast.tensors.index import MOST_DEPTH, StateIndex, TensorSpec, decode_index
from holdfast.tensors.tree import pack, unpack

NAME = f"{folder_of(3)}/{MANIFEST}"


@pytest.fixture
def archive():
    return Archive(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES - 1])
def test_a_whole_one(archive, nbytes):
    seen = []
    manifest = save(archive, 3, world=1, nbytes=nbytes)
    assert archive.verify(3, seen.append) == archive.manifest(3) == manifest
    assert [sum(seen), manifest.nbytes] == [nbytes, nbytes]
    assert loaded(archive, 3) == [blob_of(3, 0, nbytes)]


@pytest.mark.parametrize("at", range(0, 3 * CHUNK_BYTES + 5, 7001))
def test_every_flipped_bit_is_found_and_named(archive, at):
    shard = save(archive, 3, world=1, nbytes=3 * CHUNK_BYTES + 5).shards[0]
    flip(archive.tier, shard.blob.name, at)
    with pytest.raises(
        ChecksumError, match=r"bytes (\d+) to (\d+) \(model\.[ab].*do not match their checksums"
    ) as caught:
        archive.verify(3)
    begin, header = at // CHUNK_BYTES * CHUNK_BYTES, shard.header_bytes
    end = min(begin + CHUNK_BYTES, 3 * CHUNK_BYTES + 5)
    assert f"bytes {header + begin} to {header + end} " in str(caught.value)


def test_one_that_is_too_long(archive):
    shard = save(archive, 3).shards[1]
    replaced(archive.tier, shard.blob.name, archive.tier.read(shard.blob.name) + b"x")
    with pytest.raises(
        StateError, match=f"longer: {shard.header_bytes + 100_001} of {shard.header_bytes + 100_000}"
    ):
        archive.verify(3)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"manifest": 3}', '{"xxh3": "00", "manifest": {}}', "\x00\xff"]
)
def test_a_manifest_that_is_none(archive, text):
    save(archive, 3)
    archive.tier.publish(NAME, text.encode())
    with pytest.raises(StateError, match="is not the manifest"):
        archive.verify(3)


def test_a_manifest_that_somebody_edited(archive):
    save(archive, 3)
    said = json.loads(archive.tier.read(NAME))
    said["manifest"]["shards"] = said["manifest"]["shards"][:1]
    archive.tier.publish(NAME, json.dumps(said).encode())
    with pytest.raises(ChecksumError, match="is damaged"):
        archive.verify(3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"world": 3}, "does not name all 3 shards"),
        ({"format": FORMAT + 1}, "update Holdfast"),
        ({"step": 4}, "was the folder renamed"),
    ],
)
def test_a_manifest_whose_figures_do_not_fit(archive, change, why):
    manifest = save(archive, 3)
    archive.tier.publish(NAME, encode_manifest(msgspec.structs.replace(manifest, **change)))
    with pytest.raises(StateError, match=why):
        archive.verify(3)


def test_a_head_whose_figures_do_not_fit(archive):
    shard = save(archive, 3, world=1).shards[0]
    head = archive.head(shard)
    data = encode_head(head.index, head.sums[:-8])
    part = msgspec.structs.replace(shard.head, nbytes=len(data), xxh3=digest(data))
    with pytest.raises(StateError, match="3 checksums for 100000 bytes"):
        decode_head(data, part, "it")


def test_a_manifest_with_a_header_of_less_than_nothing(archive):
    manifest = save(archive, 3, world=1)
    shard = msgspec.structs.replace(manifest.shards[0], header_bytes=-1)
    archive.tier.publish(NAME, encode_manifest(msgspec.structs.replace(manifest, shards=(shard,))))
    with pytest.raises(StateError, match=r"is not the manifest .*>= 0.*header_bytes"):
        archive.verify(3)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (["l", [["b", ["uint8", [8], [0, 8]]]]], "bytes 0 to 8 are of two tensors"),
        (["b", ["uint8", [1], [8, 9]]], "bytes 8 to 9 are outside of it"),
        (["b", ["uint8", [1], [-1, 0]]], "bytes -1 to 0 are outside of it"),
        (["float", "0" * 999], "0{60} is not inf, -inf or nan"),
        (["float", []], r"\[\] is not inf, -inf or nan"),
    ],
)
def test_a_head_with_values_that_nobody_wrote(tree, why):
    text = msgspec.json.encode(StateIndex(1, {"a": tree}, (), 0)).decode()
    sums = FileTensor("holdfast-xxh3", "uint8", (1, 8), 8)
    head = header_of([sums], **{"holdfast-index": text}) + b"12345678"
    with pytest.raises(StateError, match=f"x is not the head of a shard: {why}$"):
        decode_head(head, Part("x", len(head), digest(head)), "x")


def test_heads_of_equal_blobs_share_one(archive):
    data = blob_of(3, 0)
    first = archive.save_shard(3, 0, sealed(3, data), in_buffers(data))
    second = archive.save_head(msgspec.structs.replace(first, rank=1), sealed(3, data).head)
    manifest = archive.commit(3, [second, first])
    seen = []
    archive.verify(3, seen.append)
    assert [sum(seen), manifest.nbytes, manifest.world] == [len(data), len(data), 2]
    assert [t.path for s in manifest.shards for t in archive.head(s).index.tensors] == [
        "model.a",
        "model.b",
    ] * 2


def test_a_step_that_is_saved_again_leaves_the_older_files(archive):
    before = save(archive, 3, world=1)
    data = blob_of(99, 0)
    after = archive.save_shard(3, 0, sealed(3, data), in_buffers(data))
    assert archive.verify(3) == before  # until the new one is committed
    assert {after.blob.name, after.head.name}.isdisjoint(
        {before.shards[0].blob.name, before.shards[0].head.name}
    )
    archive.commit(3, [after])
    assert loaded(archive, 3) == [data]


def test_foreign_folders_are_left_alone(archive):
    for name in ("notes/a", "step-x/a", "step-/a", "a"):
        archive.tier.publish(name, b"x")
    save(archive, 3)
    save(archive, 7)
    archive.prune(Retention(keep=1))
    assert [archive.steps(), archive.tier.folders()] == [[7], ["notes", "step-", "step-7", "step-x"]]
    assert archive.tier.size("a") == 1


def test_readers_that_tell_each_other_fetch_the_heads_once(archive, monkeypatch):
    """Each its share, to see whether all is there, and then those that it needs."""
    save(archive, 5, world=4)
    fetched = []
    head = archive.head
    monkeypatch.setattr(archive, "head", lambda shard: fetched.append(shard.rank) or head(shard))
    found = find_in_archive(archive, 5, reader=1, readers=4)
    assert (fetched, found.world) == ([1], 4)
    assert found.own("model.a", 1) == found.heads[1].index.tensors[0]
    assert fetched == [1]
    assert [rank for rank, _ in found.pieces("model.a")] == [0]
    assert sorted(fetched) == [0, 1, 2, 3]
    assert [find_in_archive(archive, 5, reader=r, readers=2).step for r in (0, 1)] == [5, 5]
    archive.tier.remove(archive.manifest(5).shards[3].blob.name)
    assert find_in_archive(archive, 5, reader=0, readers=2).heads[2]
    with pytest.raises(UnreadError, match="does not exist"):
        find_in_archive(archive, 5, reader=1, readers=2)
    with pytest.raises(UnreadError, match="does not exist"):
        find_in_archive(archive, 5, reader=0, readers=2).pieces("model.a")


def test_nothing_there(archive):
    assert [archive.steps(), newest_complete(archive), archive.prune(Retention())] == [[], None, []]


def test_every_flipped_bit_of_the_newest_manifest_leads_to_the_one_before(archive):
    save(archive, 2)
    save(archive, 3)
    manifest, whole = archive.manifest(3), archive.tier.read(NAME)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        replaced(archive.tier, NAME, bytes(damaged))
        why = []
        if archive.candidates(why.append) == [2]:
            assert [f"{archive.where(3)}/{MANIFEST}" in reason for reason in why] == [True], (bit, why)
        else:  # a blank that became another one; nothing else may pass
            assert [archive.manifest(3), why] == [manifest, []], bit
            assert chr(damaged[bit // 8]) in " \t\n\r", bit


@pytest.mark.parametrize("world", [30_000_000, 2**63, 2**64 - 1, 2**64, -1])
def test_a_number_of_ranks_costs_no_memory(archive, world):
    manifest = msgspec.structs.replace(save(archive, 3), world=world)
    replaced(archive.tier, NAME, encode_manifest(manifest) if world < 2**64 else _with_world(manifest, world))
    tracemalloc.start()
    try:
        with pytest.raises(StateError):
            archive.manifest(3)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def _with_world(manifest, world):
    raw = msgspec.json.encode(msgspec.structs.replace(manifest, world=1)).replace(
        b'"world":1,', b'"world":%d,' % world
    )
    return b'{"xxh3":"%s","manifest":%s}' % (digest(raw).encode(), raw)


@pytest.mark.parametrize(
    "manifest",
    [
        b"[" * 10_000,
        b'{"xxh3":"',
        b"\xff",
        b'{"xxh3":"","manifest":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"",
        b" " * (33 << 20),
    ],
)
def test_what_is_no_manifest(archive, manifest):
    save(archive, 2)
    save(archive, 3)
    replaced(archive.tier, NAME, manifest)
    why = []
    assert archive.candidates(why.append) == [2]
    assert ["is not the manifest of a checkpoint" in reason for reason in why] == [True]


TENSORS = (TensorSpec(path="a", dtype="float32", shape=(1,), offset=0, nbytes=4),)
DEEP = ["x", 1]
for _ in range(2 * MOST_DEPTH):
    DEEP = ["l", [DEEP]]


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ([], "no names"),
        ({"a": DEEP}, "nested more than"),
        ({"a": ["T", 1]}, "there is no tensor 1"),
        ({"a": ["T", -1]}, "there is no tensor -1"),
        ({"a": ["T", "0"]}, "there is no tensor '0'"),
        ({"a": "d"}, r"is not \[kind, value\]"),
        ({"a": ["d", 5]}, "is not a list"),
        ({"a": ["d", [["k"]]]}, "is not a list of keys"),
        ({"a": ["d", [[["k"], ["x", 1]]]]}, "is not a list of keys"),
        ({"a": ["w", [1, 2]]}, "says nothing about itself"),
    ],
)
def test_a_tree_of_a_peer_or_head_that_nobody_could_load(tree, why):
    index = StateIndex(1, tree, TENSORS, 4)
    with pytest.raises(StateError, match=why):
        decode_index(msgspec.msgpack.encode(index))
    text = msgspec.json.encode(index).decode()
    sums = FileTensor("holdfast-xxh3", "uint8", (1, 8), 8)
    head = header_of([sums], **{"holdfast-index": text}) + b"12345678"
    with pytest.raises(StateError, match=why):
        decode_head(head, Part("x", len(head), digest(head)), "x")


@pytest.mark.parametrize(
    "change", [{"offset": 1}, {"offset": -4}, {"nbytes": -1}, {"shape": (-1,)}, {"start": (-1,)}]
)
def test_a_tensor_outside_of_the_bytes(change):
    index = StateIndex(1, {"a": ["T", 0]}, (msgspec.structs.replace(TENSORS[0], **change),), 4)
    with pytest.raises(StateError, match=r"a has a negative size|a ends after the last of 4 bytes"):
        decode_index(msgspec.msgpack.encode(index))


def test_what_can_be_saved_can_be_loaded_at_any_depth():
    state = 1
    for _ in range(MOST_DEPTH):
        state = [state]
    index = StateIndex(1, {"a": pack(state, "a", [])}, (), 0)
    assert unpack(decode_index(msgspec.msgpack.encode(index)).tree["a"], []) == state
    with pytest.raises(UsageError, match=f"nested more than {MOST_DEPTH} deep"):
        pack([state], "a", [])
