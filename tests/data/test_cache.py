import json
import os
import pickle
import struct
import subprocess
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from s3server import S3Server

import holdfast as hf
from holdfast.data import cache as cache_module
from holdfast.data.cache import Cache, local, parse_cache
from holdfast.data.fetching import Remote
from holdfast.errors import DataError, UsageError
from holdfast.protocol.job import CACHE_VARIABLE

PART_BYTES = 64 << 10
SIZE = 5 * PART_BYTES + 17
KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
SOON = {"init_backoff": timedelta(seconds=0.005), "max_backoff": timedelta(seconds=0.05), "base": 2}
URL = "s3://bucket/corpus/tokens.npy"
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def nothing_held():
    """Lets go of what a test used, as the end of its process would."""
    yield
    release()


def release():
    while cache_module._held:
        os.close(cache_module._held.popitem()[1])


@pytest.fixture
def server():
    with S3Server() as server:
        server.objects["corpus/tokens.npy"] = bytes_of(1)
        yield server


def bytes_of(seed, nbytes=SIZE):
    return np.random.default_rng(seed).bytes(nbytes)


def remote(server, url=URL, patience_s=PATIENCE_S, pauses_s=(0.0, 0.0), **options):
    given = {"endpoint": server.endpoint, "part_bytes": PART_BYTES, **KEYS, **options}
    return Remote(url, patience_s=patience_s, pauses_s=pauses_s, retry_config={"backoff": SOON}, **given)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_fetched_once_and_kept_under_its_name(server, tmp_path):
    path = Cache(tmp_path).get(remote(server))
    assert path.name == "tokens.npy"
    assert path.read_bytes() == bytes_of(1)
    gets = server.count("get")
    assert gets == 6
    assert Cache(tmp_path).get(remote(server)) == path
    assert server.count("get") == gets
    assert names(tmp_path / "parts") == []


def test_a_pair_lies_side_by_side(server, tmp_path):
    server.objects["corpus/tokens.idx"] = b"index"
    cache = Cache(tmp_path)
    paths = [cache.get(remote(server)), cache.get(remote(server, URL.replace("npy", "idx")))]
    assert paths[0].parent == paths[1].parent


def test_a_file_that_changed_is_fetched_again_and_the_old_one_goes(server, tmp_path):
    cache = Cache(tmp_path)
    before = cache.get(remote(server)).open("rb")
    server.objects["corpus/tokens.npy"] = bytes_of(2)
    assert cache.get(remote(server)).read_bytes() == bytes_of(2)
    assert before.read() == bytes_of(1)  # who has it open keeps what it began with
    before.close()
    assert len(names(tmp_path / "content")) == 1


def test_the_same_content_under_two_urls_is_there_once(server, tmp_path):
    server.objects["copy/tokens.npy"] = bytes_of(1)
    cache = Cache(tmp_path)
    one, two = cache.get(remote(server)), cache.get(remote(server, "s3://bucket/copy/tokens.npy"))
    assert one != two
    assert one.samefile(two)
    server.objects["copy/tokens.npy"] = bytes_of(2)
    cache.get(remote(server, "s3://bucket/copy/tokens.npy"))
    assert cache.get(remote(server)).read_bytes() == bytes_of(1)


@pytest.mark.parametrize("how", ["cut", "drop", "lost", "status", "halt", "stall"])
def test_a_server_that_fails_now_and_then_costs_retries(server, tmp_path, how):
    server.fault("get head", how, times=3, when=lambda r: r.kind == "get" or how not in ("cut", "halt"))
    patience_s = 1.0 if how in ("halt", "stall") else PATIENCE_S
    path = Cache(tmp_path).get(remote(server, patience_s=patience_s, pauses_s=(0.0,) * 5))
    assert path.read_bytes() == bytes_of(1)


def test_what_arrived_before_a_failure_is_not_fetched_again(server, tmp_path):
    def late(request):
        return request.headers.get("Range", "").startswith(f"bytes={4 * PART_BYTES}-")

    server.fault("get", "status", times=10**6, status=403, code="AccessDenied", when=late)
    with pytest.raises(
        DataError, match=r"s3://bucket/corpus/tokens.npy could not be fetched: access is denied"
    ):
        Cache(tmp_path).get(remote(server))
    (part,) = (tmp_path / "parts").iterdir()
    assert part.stat().st_size == 4 * PART_BYTES
    server.faults.clear()
    before = server.count("get")
    assert Cache(tmp_path).get(remote(server)).read_bytes() == bytes_of(1)
    assert server.count("get") - before == 2


def test_what_arrived_of_another_version_is_thrown_away(server, tmp_path):
    server.fault(
        "get",
        "status",
        times=10**6,
        status=403,
        when=lambda r: f"{PART_BYTES}-" in r.headers.get("Range", ""),
    )
    with pytest.raises(DataError):
        Cache(tmp_path).get(remote(server))
    server.faults.clear()
    server.objects["corpus/tokens.npy"] = bytes_of(2)
    assert Cache(tmp_path).get(remote(server)).read_bytes() == bytes_of(2)


def test_a_file_that_changes_while_it_is_fetched_is_fetched_from_its_begin(server, tmp_path):
    def change(request):
        if f"bytes={2 * PART_BYTES}-" in request.headers.get("Range", ""):
            server.objects["corpus/tokens.npy"] = bytes_of(2)
        return False

    server.fault("get", "status", when=change)
    assert Cache(tmp_path).get(remote(server)).read_bytes() == bytes_of(2)


def test_a_server_that_is_away_is_no_harm_when_there_is_a_copy(server, tmp_path, caplog):
    path = Cache(tmp_path).get(remote(server))
    server.fault("head", "status", times=10**6, status=403, code="AccessDenied")
    assert Cache(tmp_path).get(remote(server)) == path
    assert "using the cached copy" in caplog.text


def test_nobody_there_and_no_copy(server, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/none.npy does not exist"):
        Cache(tmp_path).get(remote(server, "s3://bucket/none.npy"))
    server.fault("head", "status", times=10**6, status=403, code="InvalidAccessKeyId")
    with pytest.raises(DataError, match="could not be asked for"):
        Cache(tmp_path).get(remote(server))


def test_content_that_somebody_changed_is_fetched_again(server, tmp_path, caplog):
    path = Cache(tmp_path).get(remote(server))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"xxxx")
    assert Cache(tmp_path).get(remote(server)).read_bytes() == bytes_of(1)
    assert "differs from what was fetched" in caplog.text


def test_content_that_was_only_touched_stays(server, tmp_path):
    os.utime(Cache(tmp_path).get(remote(server)))
    gets = server.count("get")
    Cache(tmp_path).get(remote(server))
    assert server.count("get") == gets


def test_verify_finds_a_bit_that_flipped_without_a_trace(server, tmp_path):
    server.objects["other.npy"] = bytes_of(3, 100)
    cache = Cache(tmp_path)
    cache.get(remote(server, "s3://bucket/other.npy"))
    path = cache.get(remote(server))
    assert [found.trouble for found in cache.verify()] == [None, None]
    changed_ns = path.stat().st_mtime_ns
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(bytes([bytes_of(1)[0] ^ 1]))
    os.utime(path, ns=(changed_ns, changed_ns))
    troubles = {found.url: found.trouble for found in cache.verify()}
    assert troubles == {"s3://bucket/other.npy": None, URL: "the cached file differs from what was fetched"}
    assert cache.get(remote(server)).read_bytes() == bytes_of(1)


# ---------------------------------------------------------------- room


def three(server):
    for number in range(3):
        server.objects[f"{number}.npy"] = bytes_of(number, 1000)
    return [remote(server, f"s3://bucket/{number}.npy") for number in range(3)]


def test_what_was_not_used_for_longest_goes(server, tmp_path):
    a, b, c = three(server)
    cache = Cache(tmp_path, 2000)
    pa, pb = cache.get(a), cache.get(b)
    release()
    for number, entry in enumerate(sorted((tmp_path / "entries").iterdir())):
        url = json.loads(entry.read_bytes())["url"]
        os.utime(entry, (100 - number if "0.npy" in url else 1, 1 if "1.npy" in url else 100))
    release()
    cache.get(c)
    assert pa.exists()
    assert not pb.exists()
    assert len(names(tmp_path / "content")) == 2


def test_what_is_in_use_never_goes(server, tmp_path):
    a, b, c = three(server)
    cache = Cache(tmp_path, 2000)
    used = cache.get(a), cache.get(b)
    with pytest.raises(
        DataError, match=r"2.npy has 1000 bytes, which is 1000 more .*files in use are kept.*size="
    ):
        cache.get(c)
    assert all(path.exists() for path in used)
    release()
    cache.get(c)


def test_a_file_larger_than_the_cache_is_refused(server, tmp_path):
    with pytest.raises(DataError, match="more than fits into the data cache"):
        Cache(tmp_path, 100).get(remote(server))


def test_an_unfinished_file_of_nobody_gives_way(server, tmp_path):
    a, b, _ = three(server)
    cache = Cache(tmp_path, 1500)
    server.fault("get", "status", times=10**6, status=403)
    with pytest.raises(DataError):
        cache.get(a)
    server.faults.clear()
    assert len(names(tmp_path / "parts")) == 1
    cache.get(b)
    assert names(tmp_path / "parts") == []


# ---------------------------------------------------------------- several processes

CHILD = """
import sys
from datetime import timedelta
from pathlib import Path
from holdfast.data.cache import Cache
from holdfast.data.fetching import Remote
endpoint, folder = sys.argv[1:]
remote = Remote("s3://bucket/corpus/tokens.npy", part_bytes=64 << 10, endpoint=endpoint,
                access_key_id="a", secret_access_key="b", region="us-east-1")
print(Cache(Path(folder)).get(remote), flush=True)
"""


def child(server, folder):
    command = [sys.executable, "-c", CHILD, server.endpoint, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_ask_at_once_fetch_once(server, tmp_path):
    processes = [child(server, tmp_path) for _ in range(4)]
    said = {process.communicate()[0] for process in processes}
    assert len(said) == 1
    assert [p.returncode for p in processes] == [0] * 4
    assert server.count("get") == 6


def test_when_the_one_that_fetches_is_killed_the_next_one_goes_on(server, tmp_path):
    reached = threading.Event()

    def last(request):
        if request.headers.get("Range", "").startswith(f"bytes={5 * PART_BYTES}-"):
            reached.set()
            return True
        return False

    server.fault("get", "stall", times=1, when=last)
    first = child(server, tmp_path)
    assert reached.wait(60)
    second = child(server, tmp_path)
    for line in second.stderr:
        if "waiting for another process" in line:
            break
    first.kill()
    first.communicate()
    path = second.communicate()[0].strip()
    assert second.returncode == 0
    with open(path, "rb") as file:
        assert file.read() == bytes_of(1)


# ---------------------------------------------------------------- by name


@pytest.fixture
def from_environment(server, tmp_path, monkeypatch):
    given = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**given, "AWS_REGION": "us-east-1", CACHE_VARIABLE: f"{tmp_path},size=1G"}.items():
        monkeypatch.setenv(name, value)


def test_token_files_by_url(server, tmp_path, from_environment):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    server.objects["corpus/tokens.npy"] = (tmp_path / "tokens.npy").read_bytes()
    for url in (URL, "s3://bucket/corpus/tokens"):
        data = hf.data.TokenDataset(url, seq_len=10)
        data.read_ahead(np.arange(len(data)))
        assert data.batch([3])[0].tolist() == [list(range(30, 40))]
    again = pickle.loads(pickle.dumps(data))
    assert again.path == data.path


def test_a_megatron_pair_by_any_of_its_names(server, from_environment):
    data, index = megatron_pair()
    server.objects["corpus/pair.bin"], server.objects["corpus/pair.idx"] = data, index
    for name in ("pair", "pair.bin", "pair.idx"):
        dataset = hf.data.TokenDataset(f"s3://bucket/corpus/{name}", seq_len=4)
        assert dataset.files[0].index is not None
        assert dataset.batch([1])[0].tolist() == [[4, 5, 6, 7]]


def megatron_pair():
    """20 tokens, two documents."""
    lengths, pointers = np.array([12, 8], np.int32), np.array([0, 24], np.int64)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + lengths.tobytes() + pointers.tobytes()
    return np.arange(20, dtype=np.uint16).tobytes(), index + np.arange(3, dtype=np.int64).tobytes()


class Web(BaseHTTPRequestHandler):
    """A web server with ranges and without ETag."""

    body = bytes_of(7, 1000)

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        low, _, high = self.headers.get("Range", "bytes=0-999").removeprefix("bytes=").partition("-")
        data = self.body[int(low) : int(high) + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {low}-{high}/1000")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def test_a_web_server(tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv(CACHE_VARIABLE, f"{tmp_path},size=1M")
        path = hf.data.local(f"http://127.0.0.1:{http.server_port}/data/raw.bin")
        http.shutdown()
        thread.join()
    assert path.read_bytes() == Web.body
    assert path.name == "raw.bin"


def test_local_paths_are_left_alone(tmp_path):
    assert local("some/file.npy") == local(local("some/file.npy"))
    assert str(local("some/file.npy")) == "some/file.npy"
    assert local(f"file://{tmp_path}/with%20blank.npy") == tmp_path / "with blank.npy"


@pytest.mark.parametrize(
    ("url", "cache", "said"),
    [
        ("s3://bucket/x.npy", "", "is a remote file: specify a folder"),
        ("s3://bucket/x.npy", "/tmp,sise=1G", "unknown 'sise'"),
        ("s3://bucket/x.npy", "/tmp,size=big", "size must be a size .got 'big'."),
        ("s3://bucket/x.npy", ",size=1G", "must begin with a folder"),
        ("s3://bucket/x.npy", "/proc/none", "specify a folder that can be written"),
        ("s3://bucket", "CACHE", "not the URL of a remote file"),
        ("ftp://host/x.npy", "CACHE", "not the URL of a remote file"),
        ("https://me:secret@host/x.npy", "CACHE", "put credentials into the environment"),
        ("https://host/x.npy?sig=1", "CACHE", "put credentials into the environment"),
    ],
)
def test_what_cannot_work_is_refused(url, cache, said, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, cache.replace("CACHE", str(tmp_path / "cache")))
    with pytest.raises(UsageError, match=said) as caught:
        local(url)
    assert "secret" not in str(caught.value)


def test_sizes():
    assert parse_cache("/scratch/cache,size=50G")[1] == 50 << 30
    assert parse_cache("/scratch/cache")[1] is None
