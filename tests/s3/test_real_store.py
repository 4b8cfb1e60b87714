"""The object tier on a real S3 server: run with `make s3-test`."""

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from blobs_on_tiers import blob_of, flip, in_buffers, loaded, newest_complete, replaced, save, save_rank

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.objects import ObjectTier
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.tier import open_tier
from holdfast.errors import ChecksumError, StateError, TierError

pytestmark = pytest.mark.s3

MIB = 1 << 20
LARGE_BYTES = 37 * MIB + 12_345  # five parts


@pytest.fixture
def url():
    return f"s3://{os.environ['HOLDFAST_S3_BUCKET']}/{uuid.uuid4().hex}"


@pytest.fixture
def archive(url):
    archive = Archive(url)
    yield archive
    for step in archive.steps():
        archive.remove(step)


def test_check(url):
    tier = open_tier(url)
    tier.check()
    assert tier.folders() == []


def test_a_checkpoint_of_many_parts(archive):
    save(archive, 5, nbytes=1000)
    save(archive, 10, nbytes=LARGE_BYTES)
    assert archive.verify(10).nbytes == 2 * LARGE_BYTES
    assert loaded(archive, 10) == [blob_of(10, rank, LARGE_BYTES) for rank in range(2)]
    assert archive.steps() == [5, 10]


def test_ranks_save_at_once(archive):
    with ThreadPoolExecutor(4) as pool:
        shards = list(pool.map(lambda rank: save_rank(archive, 5, rank, LARGE_BYTES // 2), range(4)))
    archive.commit(5, shards)
    assert archive.verify(5).world == 4


def test_ranges(url):
    tier, data = open_tier(url), blob_of(1, 0, LARGE_BYTES)
    tier.write("step-1/a", in_buffers(data), len(data))
    for low, nbytes in [
        (0, 0),
        (0, 1),
        (8 * MIB - 1, 2),
        (5, 30 * MIB),
        (LARGE_BYTES - 1, 1),
        (0, LARGE_BYTES),
    ]:
        into = bytearray(nbytes)
        tier.read_into("step-1/a", low, memoryview(into))
        assert into == data[low : low + nbytes]
    for low, nbytes in [(LARGE_BYTES, 1), (LARGE_BYTES - 1, 2), (2 * LARGE_BYTES, 1)]:
        with pytest.raises(StateError, match="cut short"):
            tier.read_into("step-1/a", low, memoryview(bytearray(nbytes)))
    with pytest.raises(StateError, match="does not exist"):
        tier.read_into("step-1/b", 0, memoryview(bytearray(1)))
    tier.remove_folder("step-1")
    assert [tier.folders(), tier.size("step-1/a")] == [[], None]


def test_damage_is_found(archive):
    for step in (5, 10, 15, 20):
        shard = save(archive, step).shards[0]
        if step == 10:
            flip(archive.tier, shard.blob.name, 70_000)
            with pytest.raises(ChecksumError, match="do not match their checksums"):
                archive.verify(step)
        if step == 15:
            replaced(archive.tier, shard.blob.name, b"short")
        if step == 20:
            archive.tier.remove(shard.head.name)
    why = []
    assert newest_complete(archive, why.append) == 5
    assert len(why) == 3


def test_retention_and_a_listing_of_two_pages(archive):
    for step in (1, 2, 3):
        save(archive, step, world=1, nbytes=10)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: archive.tier.publish(f"step-1/{n}", b""), range(1100)))
    assert archive.prune(Retention(keep=1)) == [1, 2]
    assert archive.tier.folders() == ["step-3"]


def test_a_writer_that_is_killed_leaves_nothing_to_see(archive, url):
    save(archive, 5)
    code = f"""
import os, signal
from holdfast.checkpoint.tier import open_tier
def pieces():
    for n in range(8):
        yield memoryview(bytes({8 * MIB}))
    os.kill(os.getpid(), signal.SIGKILL)
open_tier({url!r}).write("step-10/row", pieces(), {80 * MIB})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert archive.tier.size("step-10/row") is None
    save(archive, 10, nbytes=LARGE_BYTES)
    assert newest_complete(archive) == 10


def test_a_server_that_stalls_midway(archive, url):
    gateway = int(os.environ["HOLDFAST_S3_GATEWAY_PID"])
    save(archive, 5, nbytes=LARGE_BYTES)

    def pieces():
        data = blob_of(10, 0, 8 * MIB)
        for n in range(10):
            if n == 4:
                os.kill(gateway, signal.SIGSTOP)
            yield memoryview(data)

    hasty = ObjectTier(url, patience_s=3)
    try:
        begun_s = time.monotonic()
        with pytest.raises(TierError, match="no answer in time"):
            hasty.write("step-10/row", pieces(), 80 * MIB)
        # The upload's own patience, and that of its abortion.
        assert time.monotonic() - begun_s < 8
        with pytest.raises(TierError, match=r"no answer in time|no connection"):
            hasty.check()
    finally:
        os.kill(gateway, signal.SIGCONT)
    assert archive.tier.size("step-10/row") is None
    save(archive, 10, nbytes=LARGE_BYTES)
    assert [newest_complete(archive), archive.verify(5).step] == [10, 5]


def test_refusals(url, monkeypatch):
    with pytest.raises(TierError, match="bucket does not exist: create it"):
        ObjectTier("s3://no-such-bucket/x").check()
    with pytest.raises(TierError, match="not accepted: set AWS_ACCESS_KEY_ID"):
        ObjectTier(url, secret_access_key="wrong").check()
    with pytest.raises(TierError, match="not accepted: set AWS_ACCESS_KEY_ID"):
        ObjectTier(url, access_key_id="nobody").check()
