"""Snapshots over loopback: what arrives is what was sealed, from the next holder if need be, or nothing does."""

import http.client
import json
import threading
from contextlib import closing
from pathlib import Path

import pytest
from blobs_on_tiers import blob_of
from snapshots_in_memory import (
    BUDGET,
    copy_of,
    fill,
    flip,
    index_of,
    is_right,
    key_of,
    new_folder,
    part_of,
    save,
    steps_of,
)

from holdfast.checkpoint import snapshot_server
from holdfast.checkpoint.located import find_in_memory
from holdfast.checkpoint.memory import SlotPool
from holdfast.checkpoint.replicate import WINDOW_BYTES, Pull, replicate
from holdfast.checkpoint.snapshot_server import SnapshotPeer, SnapshotServer
from holdfast.errors import ChecksumError, StateError, TierError
from holdfast.protocol.network.sockets import shut
from holdfast.protocol.snapshots import Holder, Part

TOKEN = "the-token"
LARGE = 5 * WINDOW_BYTES + 12_345
KEY = key_of(10)


class Node:
    """A node's pool and its server."""

    def __init__(self, name):
        self.name = name
        self.pool = SlotPool(new_folder(), BUDGET * 2)
        self.server = SnapshotServer(self.pool, "127.0.0.1", TOKEN)
        self.holder = Holder(name, "127.0.0.1", self.server.port, self.server.name)

    def close(self):
        self.server.close()
        self.pool.close()


@pytest.fixture
def nodes():
    nodes = [Node(name) for name in ("a", "b", "c")]
    yield nodes
    for node in nodes:
        node.close()


def save_on(nodes, nbytes=LARGE, key=KEY):
    """The same snapshot on several nodes; returns its head's part."""
    slots = [save(node.pool, key, nbytes) for node in nodes]
    return part_of(slots[0])


def pull_from(nodes, key=KEY, token=TOKEN, **options):
    return Pull(key=key, holders=[n.holder for n in nodes], token=token, **options)


# ---------------------------------------------------------------- as it should be


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, WINDOW_BYTES, LARGE])
def test_a_copy_is_equal_bit_by_bit_and_counts(nodes, nbytes):
    a, b, _ = nodes
    part = save_on([a], nbytes)
    pull = pull_from([a])
    slot = replicate(b.pool, pull, part)
    assert [is_right(slot, nbytes), slot.key, pull.fetched_bytes] == [True, KEY, nbytes]
    assert copy_of(slot) == copy_of(a.pool.held()[0])
    assert pull._peers == set()


@pytest.mark.parametrize("streams", [1, 2, 7])
def test_several_streams_from_several_holders(nodes, streams):
    a, b, c = nodes
    part = save_on([a, b])
    slot = replicate(c.pool, pull_from([a, b], streams=streams), part)
    assert is_right(slot, LARGE)


def test_many_readers_at_once(nodes):
    part = save_on(nodes[:1], 1_000_000)
    right = []

    def read():
        peer = SnapshotPeer(nodes[0].holder, TOKEN, KEY)
        _, head = peer.head(part)
        into = bytearray(head.index.nbytes)
        peer.read_into(0, memoryview(into))
        peer.close()
        right.append(bytes(into) == blob_of(10, 0, 1_000_000))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert right == [True] * 8


def test_any_range_in_any_order_with_and_without_reading_ahead(nodes):
    part = save_on(nodes[:1], 300_000)
    peer = SnapshotPeer(nodes[0].holder, TOKEN, KEY)
    peer.head(part)
    right = blob_of(10, 0, 300_000)
    for ahead in (0, 200_000):
        peer.ahead = ahead
        for low, nbytes in (
            (0, 10),
            (10, 90_000),
            (100, 5),
            (299_999, 1),
            (150_000, 100),
            (150_100, 0),
            (5, 5),
        ):
            into = bytearray(nbytes)
            peer.read_into(low, memoryview(into))
            assert bytes(into) == right[low : low + nbytes]
    peer.close()


def test_a_connection_that_the_other_end_gave_up_is_made_again(nodes, monkeypatch):
    part = save_on(nodes[:1], 100_000)
    peer = SnapshotPeer(nodes[0].holder, TOKEN, KEY)
    peer.head(part)
    with nodes[0].server._lock:
        for connection in nodes[0].server._open:
            shut(connection)
    into = bytearray(100)
    peer.read_into(0, memoryview(into))
    assert bytes(into) == blob_of(10, 0)[:100]
    peer.close()


# ---------------------------------------------------------------- what a server says


def answer(node, path, token=TOKEN, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", node.holder.port, timeout=10)
    given = headers if token is None else {"Authorization": f"Bearer {token}", **headers}
    connection.request("GET", path, headers=given)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response, data


BLOB = "/snapshots/10/1/0/1/blob"


def test_curl_may_read_it_too(nodes):
    save_on(nodes[:1], 1000)
    response, data = answer(nodes[0], "/snapshots")
    said = json.loads(data)
    assert [response.status, said] == [200, [{"step": 10, "generation": 1, "rank": 0, "world": 1}]]
    response, data = answer(nodes[0], BLOB, Range="bytes=10-19")
    assert [response.status, response.headers["Content-Range"]] == [206, "bytes 10-19/1000"]
    assert data == blob_of(10, 0, 1000)[10:20]


@pytest.mark.parametrize("token", [None, "", "the-tokem", "the-token ", "thé-token"])
@pytest.mark.parametrize("path", ["/snapshots", BLOB, "/elsewhere"])
def test_without_the_token_nothing_is_said(nodes, token, path):
    save_on(nodes[:1], 1000)
    response, data = answer(nodes[0], path, token)
    assert response.status == 401
    assert blob_of(10, 0, 1000)[:50] not in data


@pytest.mark.parametrize(
    ("path", "range_", "status"),
    [
        ("/snapshots/10/1/0/1/tail", "", 404),
        ("/snapshots/../../etc/passwd", "", 404),
        ("/snapshots/11/1/0/1/blob", "", 410),
        ("/snapshots/10/2/0/1/blob", "", 410),
        (BLOB, "bytes=5-4", 416),
        (BLOB, "bytes=0-1000", 416),
        (BLOB, "bytes=1000-1000", 416),
    ],
)
def test_what_is_not_there(nodes, path, range_, status):
    save_on(nodes[:1], 1000)
    assert answer(nodes[0], path, Range=range_)[0].status == status


def test_a_slot_that_is_still_written_is_not_shown(nodes):
    fill(nodes[0].pool, KEY)
    assert answer(nodes[0], BLOB)[0].status == 410
    assert json.loads(answer(nodes[0], "/snapshots")[1]) == []


@pytest.mark.parametrize("token", ["", "other"])
def test_a_pull_with_a_wrong_token_says_so(nodes, token):
    part = save_on(nodes[:1])
    with pytest.raises(StateError, match="the memory of a answered 401"):
        replicate(nodes[1].pool, pull_from(nodes[:1], token=token), part)
    assert nodes[1].pool.nbytes == 0


# ---------------------------------------------------------------- holders that fail


def test_a_slot_that_is_gone_is_had_from_the_next_holder(nodes):
    a, b, c = nodes
    part = save_on([a, b])
    a.pool.drop(a.pool.held()[0])
    assert is_right(replicate(c.pool, pull_from([a, b]), part), LARGE)


def test_a_slot_that_goes_between_head_and_blob(nodes):
    a, b, _ = nodes
    part = save_on([a, b])
    why = []
    pull = pull_from([a, b], on_skip=why.append)
    _, head = pull.head(part)
    a.pool.drop(a.pool.held()[0])
    taken = {}
    pull.run(head, lambda blob, low, high: taken.update({low: bytes(blob.fetch(low, high))}))
    assert b"".join(taken[low] for low in sorted(taken)) == blob_of(10, 0, LARGE)
    assert all("answered 410" in w and "no snapshot of step 10, rank 0" in w for w in why)
    assert why


def test_nobody_there(nodes):
    a, b, _ = nodes
    part = save_on([a])
    a.server.close()
    with pytest.raises(StateError, match="memory of a does not answer"):
        replicate(b.pool, pull_from([a]), part)
    with pytest.raises(StateError, match="no node holds the snapshot of step 10"):
        replicate(b.pool, pull_from([]), part)
    assert [b.pool.held(), b.pool.nbytes] == [[], 0]


class Midway:
    """Does something once, when a transfer is in the middle: from where it sends, in the holder's thread."""

    def __init__(self, monkeypatch, node, do):
        real = snapshot_server._send
        sent = []
        port = node.holder.port

        def send(connection, blob, start, stop):
            if connection.getsockname()[1] != port:
                return real(connection, blob, start, stop)
            sent.append(start)
            if len(sent) == 3:
                do()
            return real(connection, blob, start, min(start + 100_000, stop))

        monkeypatch.setattr(snapshot_server, "_send", send)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_holder_that_dies_in_the_middle(nodes, monkeypatch, streams):
    a, b, c = nodes
    part = save_on([a, b])
    Midway(monkeypatch, a, a.server.close)
    pull = pull_from([a, b], streams=streams)
    slot = replicate(c.pool, pull, part)
    assert is_right(slot, LARGE)
    assert pull.fetched_bytes == LARGE


def test_the_last_holder_that_dies_in_the_middle(nodes, monkeypatch):
    a, b, _ = nodes
    part = save_on([a])
    Midway(monkeypatch, a, a.server.close)
    with pytest.raises(StateError, match="memory of a"):
        replicate(b.pool, pull_from([a]), part)
    assert [b.pool.held(), b.pool.writing()] == [[], []]
    assert save(b.pool, key_of(20), LARGE).capacity == LARGE  # in the same memory
    assert len(b.pool._slots) == 1


def test_a_connection_after_the_close_is_not_served(nodes):
    save_on(nodes[:1])
    nodes[0].server.close()
    with pytest.raises(TierError, match="does not answer"):
        SnapshotPeer(nodes[0].holder, TOKEN, KEY).head()


# ---------------------------------------------------------------- the own node


def read_from_own(node, part):
    """The blob as a worker of the node's reads it, and how often the node sent some of it."""
    pull = pull_from([node], own_node="a")
    _, head = pull.head(part)
    taken = {}
    pull.run(head, lambda blob, low, high: taken.update({low: bytes(blob.fetch(low, high))}))
    return b"".join(taken[low] for low in sorted(taken))


def test_the_own_nodes_memory_is_read_from_its_file(nodes, monkeypatch):
    part = save_on(nodes[:1])
    monkeypatch.setattr(snapshot_server, "_send", lambda *args: pytest.fail("was sent"))
    assert read_from_own(nodes[0], part) == blob_of(10, 0, LARGE)


def test_a_file_that_cannot_be_seen_is_sent(nodes, monkeypatch):
    part = save_on(nodes[:1])
    slot = nodes[0].pool.held()[0]
    monkeypatch.setattr(slot, "path", Path("/not/here"))
    assert read_from_own(nodes[0], part) == blob_of(10, 0, LARGE)


def test_the_own_nodes_memory_is_verified_too(nodes):
    part = save_on(nodes[:1])
    flip(nodes[0].pool.held()[0], 5)
    with pytest.raises(StateError, match="memory of a: bytes 0 to 32768 do not match their checksums"):
        read_from_own(nodes[0], part)


def test_a_slot_that_the_own_node_reads_is_not_overwritten(nodes):
    a = nodes[0]
    save_on([a])
    slot = a.pool.held()[0]
    peer = snapshot_server.peer_of(a.holder, TOKEN, KEY, "a")
    with closing(peer):
        peer.read_into(0, memoryview(bytearray(10)))
        a.pool.snapshot_complete(10)
        for step in (20, 30):
            save(a.pool, key_of(step), LARGE)
            a.pool.snapshot_complete(step)
        assert is_right(slot, LARGE)
        assert slot.users == 1
        a.server.close()  # does not wait for its readers
    assert slot.key == KEY


# ---------------------------------------------------------------- bytes that are not what was sealed


@pytest.mark.parametrize("at", [0, WINDOW_BYTES + 7, LARGE - 1])
def test_memory_that_went_bad_is_found_and_the_next_holder_read(nodes, at):
    a, b, c = nodes
    part = save_on([a, b])
    flip(a.pool.held()[0], at)
    why = []
    slot = replicate(c.pool, pull_from([a, b], on_skip=why.append), part)
    assert is_right(slot, LARGE)
    assert all("memory of a: bytes" in w and "do not match their checksums" in w for w in why)
    assert why or at  # half of the streams begin with the other holder


def test_memory_that_went_bad_everywhere_is_refused_and_the_slot_given_back(nodes):
    a, b, c = nodes
    part = save_on([a, b])
    flip(a.pool.held()[0], 5)
    flip(b.pool.held()[0], 9)
    with pytest.raises(
        StateError, match=r"memory of a: bytes 0 to 32768 do not match their checksums.*memory of b"
    ):
        replicate(c.pool, pull_from([a, b]), part)
    assert [c.pool.held(), c.pool.writing()] == [[], []]


def test_each_of_two_holders_is_bad_elsewhere(nodes):
    """Every stream finds a holder whose bytes are whole in its stripe."""
    a, b, c = nodes
    part = save_on([a, b])
    flip(a.pool.held()[0], 5)
    flip(b.pool.held()[0], LARGE - 1)
    assert is_right(replicate(c.pool, pull_from([a, b], streams=1), part), LARGE)


def test_bytes_that_change_on_the_wire(nodes, monkeypatch):
    a, b, c = nodes
    part = save_on([a, b])
    real = snapshot_server._send

    def send(connection, blob, start, stop):
        if connection.getsockname()[1] == a.holder.port and start < 3_000_000:
            return connection.send(b"\xff" * min(stop - start, 10_000))
        return real(connection, blob, start, stop)

    monkeypatch.setattr(snapshot_server, "_send", send)
    assert is_right(replicate(c.pool, pull_from([a, b]), part), LARGE)


def test_a_head_that_is_not_the_one_that_was_reported(nodes):
    a, b, _ = nodes
    part = save_on([a])
    other = Part(part.name, part.nbytes, "00" * 16)
    peer = SnapshotPeer(a.holder, TOKEN, KEY)
    with closing(peer), pytest.raises(ChecksumError, match="memory of a is damaged"):
        peer.head(other)
    with pytest.raises(StateError, match="is damaged"):
        replicate(b.pool, pull_from([a]), other)
    assert b.pool.nbytes == 0


# ---------------------------------------------------------------- ends


def test_abort_ends_a_transfer_that_waits(nodes, monkeypatch):
    """The holder stands still in the middle; without the abort this would take STALL_S."""
    a, b, c = nodes
    part = save_on([a, c])
    go, stands = threading.Event(), threading.Event()

    def stand():
        stands.set()
        assert go.wait(30)

    Midway(monkeypatch, a, stand)
    pull = pull_from([a, c], streams=1)
    ended = []

    def run():
        try:
            replicate(b.pool, pull, part)
        except StateError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert stands.wait(30)
    pull.abort()
    thread.join(10)
    go.set()
    assert not thread.is_alive()
    assert ended == ["the transfer was aborted"]  # and not what its shut connections say
    assert [b.pool.held(), b.pool.writing(), pull._peers] == [[], [], set()]


def test_an_aborted_pull_begins_nothing(nodes):
    part = save_on(nodes[:1])
    pull = pull_from(nodes[:1])
    _, head = pull.head(part)
    pull.abort()
    with pytest.raises(StateError, match="aborted"):
        pull.head(part)
    with pytest.raises(StateError, match="aborted"):
        pull.run(head, lambda blob, low, high: pytest.fail("was read"))


def test_a_peer_that_was_aborted_before_it_connected(nodes):
    part = save_on(nodes[:1])
    peer = SnapshotPeer(nodes[0].holder, TOKEN, KEY)
    peer.abort()
    with pytest.raises(TierError, match="was aborted"):
        peer.head(part)


def test_a_slot_that_is_sent_is_not_overwritten(nodes, monkeypatch):
    a, b, _ = nodes
    part = save_on([a])
    a.pool.snapshot_complete(10)

    def go_on():
        for step in (20, 30):
            save(a.pool, key_of(step), LARGE)
            a.pool.snapshot_complete(step)

    Midway(monkeypatch, a, go_on)
    assert is_right(replicate(b.pool, pull_from([a], streams=1), part), LARGE)
    assert steps_of(a.pool) == [10, 20, 30]


def test_a_taker_that_fails_ends_all_streams(nodes):
    part = save_on(nodes[:1])
    pull = pull_from(nodes[:1], streams=4)
    _, head = pull.head(part)

    def take(blob, low, high):
        raise ValueError("the script went away")

    with pytest.raises(ValueError, match="went away"):
        pull.run(head, take)
    assert pull._peers == set()


def test_no_memory_for_a_copy(nodes):
    a, b, _ = nodes
    part = save_on([a])
    b.pool.budget_bytes = LARGE
    with pytest.raises(TierError, match="does not fit"):
        replicate(b.pool, pull_from([a]), part)


# ---------------------------------------------------------------- a whole snapshot


def test_a_snapshot_of_several_ranks_is_found_and_read(nodes):
    a, b, c = nodes
    shards = []
    for rank, (first, second) in enumerate(((a, b), (b, c))):
        key = key_of(10, rank, world=2)
        slots = [save(n.pool, key, 300_000) for n in (first, second)]
        shards.append((copy_of(slots[0]), (first.holder, second.holder)))
    flip(a.pool.held()[0], 100)
    why = []
    found = find_in_memory(shards[::-1], TOKEN, why.append)
    assert [found.step, found.world, found.paths()] == [10, 2, ["model.a", "model.b"]]
    for rank in range(2):
        blob = found.open_blob(rank)
        assert bytes(blob.fetch(0, 300_000)) == blob_of(10, rank, 300_000)
        blob.close()
    assert len(why) == 1
    with pytest.raises(StateError, match="not complete in memory"):
        find_in_memory(shards[:1], TOKEN)


def test_a_snapshot_whose_index_is_not_its_own(nodes):
    slot = fill(nodes[0].pool, KEY)
    with pytest.raises(StateError, match="the index is of step 11"):
        nodes[0].pool.seal(slot, index_of(11, 100_000))
