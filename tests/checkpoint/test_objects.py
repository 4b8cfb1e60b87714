"""A store that fails: what was reported saved loads bit-equal, what fails says what to do, nothing older is lost."""

import subprocess
import sys
import tracemalloc
from datetime import timedelta

import pytest
from blobs_on_tiers import blob_of, in_buffers, loaded, newest_complete, save, save_rank
from s3server import S3Server

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.objects import PATIENCE_S, ObjectTier
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.tier import open_tier
from holdfast.errors import StateError, TierError, UsageError

PART_BYTES = 64 << 10
SOON = {"init_backoff": timedelta(seconds=0.005), "max_backoff": timedelta(seconds=0.05), "base": 2}
KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}


@pytest.fixture
def server():
    with S3Server() as server:
        yield server


def tier_of(server, url="s3://bucket/runs/one", patience_s=20.0, **options):
    retry = {"backoff": SOON, **options.pop("retry_config", {})}
    given = {"endpoint": server.endpoint, "part_bytes": PART_BYTES, **KEYS, **options}
    return ObjectTier(url, patience_s=patience_s, retry_config=retry, **given)


def hasty(server, how):
    """Gives up soon: by the clock only where nothing answers, or a busy machine would pass for a silent store."""
    if how in ("stall", "halt"):
        return tier_of(server, patience_s=0.6)
    return tier_of(server, retry_config={"max_retries": 3})


@pytest.fixture
def tier(server):
    return tier_of(server)


@pytest.fixture
def archive(tier):
    return Archive(tier)


# ---------------------------------------------------------------- as it should be


def test_check_leaves_nothing(server, tier):
    tier.check()
    assert server.objects == {}
    assert [server.count(k) for k in ("list", "put", "get")] == [1, 1, 1]


def test_a_checkpoint(server, archive):
    save(archive, 5)
    save(archive, 10, nbytes=600_000)
    assert archive.verify(10).nbytes == 1_200_000
    assert loaded(archive, 10) == [blob_of(10, rank, 600_000) for rank in range(2)]
    assert all(key.startswith("runs/one/step-") for key in server.objects)
    assert server.count("begin") == 4  # blobs of more than a part; heads and manifests go in one request
    assert server.uploads == {}
    archive.remove(5)
    assert [archive.steps(), {k.split("/")[2] for k in server.objects}] == [[10], {"step-10"}]


def test_listings_of_many_pages(server, archive):
    server.page = 3
    for step in range(1, 11):
        save(archive, step, world=1, nbytes=10)
    assert archive.steps() == list(range(1, 11))
    assert archive.prune(Retention(keep=2)) == list(range(1, 9))
    assert len(server.objects) == 2 * 3


def test_a_blob_that_is_there_is_not_sent_again(server, archive):
    first = save_rank(archive, 5, 0, nbytes=600_000)
    sent = server.count("part")
    assert save_rank(archive, 5, 0, nbytes=600_000) == first
    assert [sent, server.count("part")] == [10, 10]


def test_an_upload_keeps_few_parts_in_memory(server):
    tier = tier_of(server, part_bytes=1 << 20, parts_in_flight=2)
    piece = memoryview(bytes(1 << 20))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    peaks = []

    def pieces():
        for _ in range(40):
            peaks.append(tracemalloc.get_traced_memory()[0] - before - sum(map(len, held())))
            yield piece

    def held():  # what the server keeps is in this process too
        with server.lock:
            return [part for _, parts in server.uploads.values() for part in parts.values()]

    tier.write("step-1/a", pieces(), 40 << 20)
    tracemalloc.stop()
    assert max(peaks) < 9 << 20  # two under way, one being filled, one waiting; two or three being received
    assert len(server.objects["runs/one/step-1/a"]) == 40 << 20


def test_endpoint_and_keys_from_the_environment(server, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "eu-west-3",
    }.items():
        monkeypatch.setenv(name, value)
    open_tier("s3://bucket/x").check()
    assert "Credential=a/" in server.asked[-1].headers["Authorization"]
    assert "/eu-west-3/" in server.asked[-1].headers["Authorization"]


# ---------------------------------------------------------------- faults that pass


@pytest.mark.parametrize(
    ("kinds", "how", "times"),
    [
        ("put part begin complete head get list bulk delete", "status", 4),
        ("part", "drop", 3),
        ("put", "drop", 2),
        ("put part", "lost", 3),
        ("complete", "lost", 1),
        ("get", "cut", 3),
        ("get list", "lost", 2),
    ],
)
def test_a_fault_that_passes_is_not_noticed(server, archive, kinds, how, times):
    save(archive, 5, nbytes=400_000)
    server.fault(kinds, how, times=times)
    save(archive, 10, nbytes=400_000)
    assert [newest_complete(archive), archive.steps()] == [10, [5, 10]]
    assert loaded(archive, 10) == [blob_of(10, rank, 400_000) for rank in range(2)]
    archive.prune(Retention(keep=1))
    assert {k.split("/")[2] for k in server.objects} == {"step-10"}
    assert server.faults[0].times == 0


def test_a_stall_that_passes(server):
    archive = Archive(tier_of(server, client_options={"timeout": timedelta(seconds=0.6)}))
    server.fault("part", "stall")
    server.fault("get", "halt")
    save(archive, 5, world=1, nbytes=400_000)
    assert loaded(archive, 5) == [blob_of(5, 0, 400_000)]
    assert [f.times for f in server.faults] == [0, 0]


# ---------------------------------------------------------------- faults that stay


@pytest.mark.parametrize(
    ("kinds", "how", "advice"),
    [
        ("part", "status", "overloaded or down"),
        ("part", "drop", "the connection broke"),
        ("part", "stall", "no answer in time"),
        ("complete", "status", "overloaded or down"),
        ("begin", "stall", "no answer in time"),
        ("put", "stall", "no answer in time"),
        ("put", "drop", "the connection broke"),
        ("head", "stall", "no answer in time"),
    ],
)
def test_a_save_that_fails_leaves_the_older_ones(server, archive, kinds, how, advice):
    save(archive, 5, nbytes=400_000)
    kept = dict(server.objects)
    server.fault(kinds, how, times=1000)
    with pytest.raises(TierError, match=advice):
        save(Archive(hasty(server, how)), 10, nbytes=400_000)
    assert kept.items() <= server.objects.items()
    assert server.uploads == {}  # aborted
    server.faults.clear()
    assert newest_complete(archive) == 5
    save(archive, 10, nbytes=400_000)
    assert loaded(archive, 10) == [blob_of(10, rank, 400_000) for rank in range(2)]


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ("cut", "the connection broke"),
        ("halt", "no answer in time|connection broke"),
        ("status", "overloaded or down"),
    ],
)
def test_a_load_that_fails(server, archive, how, advice):
    name = save(archive, 5, nbytes=400_000).shards[0].blob.name
    server.fault("get", how, times=1000)
    with pytest.raises(TierError, match=advice):
        hasty(server, how).read_into(name, 0, memoryview(bytearray(400_000)))
    with pytest.raises(TierError, match=advice):
        Archive(hasty(server, how)).verify(5)
    server.faults.clear()
    archive.verify(5)


def test_pieces_that_fail_midway_are_aborted(server, tier):
    def pieces():
        yield from in_buffers(blob_of(3, 0, 300_000))
        raise StateError("rank 0 went away")

    with pytest.raises(StateError, match="rank 0 went away"):
        tier.write("step-3/a", pieces(), 400_000)
    with pytest.raises(StateError, match="received 300000 bytes instead of 400000"):
        tier.write("step-3/a", in_buffers(blob_of(3, 0, 300_000)), 400_000)
    assert [server.objects, server.uploads, server.count("abort")] == [{}, {}, 2]


def test_an_upload_that_the_store_lost_is_no_success(server, tier):
    tier.write("step-3/a", in_buffers(blob_of(3, 0, 300_000)), 300_000)
    server.fault("complete", "status", times=1000, status=404, code="NoSuchUpload")
    for name in ("step-3/a", "step-3/b"):
        with pytest.raises(TierError, match="could not be written"):
            tier.write(name, in_buffers(blob_of(4, 0, 300_000)), 300_000)
    assert tier.read("step-3/a") == blob_of(3, 0, 300_000)


# ---------------------------------------------------------------- what check says


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "AccessDenied", "access is denied"),
        (403, "InvalidAccessKeyId", "not accepted: set AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "not accepted: set AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", "have expired: renew"),
        (403, "RequestTimeTooSkewed", "clock"),
        (301, "PermanentRedirect", "set AWS_REGION"),
        (507, "QuotaExceeded", "full: free some space"),
        (429, "TooManyRequests", "overloaded"),
        (404, "NoSuchBucket", "bucket does not exist: create it"),
        (418, "Teapot", "it failed"),
    ],
)
def test_a_refusal(server, status, code, advice):
    tier = tier_of(server, retry_config={"max_retries": 1})
    server.fault("list", "status", times=1000, status=status, code=code)
    with pytest.raises(TierError, match=rf"s3://bucket/runs/one could not be .*{advice}"):
        tier.check()


@pytest.mark.parametrize(("kind", "what"), [("put", "written"), ("get", "read"), ("bulk", "cleared")])
def test_leave_for_some_things_only(server, tier, kind, what):
    server.fault(kind, "status", times=1000, status=403, code="AccessDenied")
    with pytest.raises(
        TierError, match=rf"could not be {what} .*access is denied: .*list, read, write and delete"
    ):
        tier.check()


def test_no_bucket(server):
    tier = tier_of(server, "s3://missing/x")
    for do in (tier.check, tier.folders, lambda: tier.read("a"), lambda: tier.publish("a", b"")):
        with pytest.raises(
            TierError, match=r"s3://missing/x .* bucket does not exist: create it, or correct the URL"
        ):
            do()


def test_no_credentials(server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    # A machine without a role: its metadata service (here the test's server) has no keys to give.
    elsewhere = server.endpoint + "/169.254.169.254"
    tier = ObjectTier("s3://bucket/x", patience_s=0.9, endpoint=server.endpoint, metadata_endpoint=elsewhere)
    with pytest.raises(TierError, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        tier.check()


def test_no_server():
    with S3Server() as gone:
        tier = tier_of(gone, retry_config={"max_retries": 2})
    with pytest.raises(TierError, match="no connection: is the endpoint right"):
        tier.check()


def test_a_removal_that_is_denied_for_one_of_many(server, archive):
    save(archive, 5)
    server.denied.update(k for k in server.objects if "rank-1" in k)
    with pytest.raises(TierError, match=r"could not be cleared.*access is denied"):
        archive.remove(5)
    assert archive.steps() == []
    server.denied.clear()
    archive.remove(5)
    assert server.objects == {}


def test_a_cache_in_between(server, tier):
    server.fault("get", "status", status=404, code="NoSuchKey")
    with pytest.raises(TierError, match="does not return data that was just written"):
        tier.check()
    assert server.objects == {}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "the name of the bucket is missing; use for example s3://bucket/folder"),
        ("s3:///folder", "the name of the bucket is missing"),
        ("gs:", "the name of the bucket is missing"),
        ("ftp://x/y", "'ftp' is not a known object store; use one of s3, "),
        ("http://[x", "not a URL"),
        ("s3://key:hidden@bucket/x", "because it could contain credentials"),
        ("s3://bucket/x?token=hidden", "because it could contain credentials"),
        ("s3://bucket/a/../b", "must not contain empty names"),
        ("s3://bucket/a//b", "must not contain empty names"),
        ("az://container/x", "set AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_a_url_that_is_none(url, why, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match=why) as caught:
        ObjectTier(url)
    assert "hidden" not in str(caught.value)


def test_options_that_are_none(server):
    with pytest.raises(UsageError, match="regoin"):
        tier_of(server, regoin="x")
    with pytest.raises(UsageError, match="memory does not take options, but region"):
        ObjectTier("memory://x", region="x")


@pytest.mark.parametrize(
    "url", ["gs://bucket/x", "abfss://container@account.dfs.core.windows.net/x", "s3a://bucket", "memory://"]
)
def test_other_stores_open(url):
    assert ObjectTier(url).url == url


def test_it_is_bounded_and_needs_no_torch():
    assert 2 * PATIENCE_S <= 90  # one patience for the upload, one for its abortion
    code = "import sys, holdfast.checkpoint.objects as o; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
