import contextlib
import http.client
import http.server
import multiprocessing
import os
import resource
import select
import socket
import threading
import time

import pytest
import torch

from holdfast.errors import GenerationBroken, StateError
from holdfast.protocol.messages import Generation, Member
from holdfast.train import peer_transfer, state_image
from holdfast.train.peer_transfer import DonorServer, Fetch

TOKEN = "secret"


class Big:
    """A state of several chunks."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.tensors = [torch.randn(n, generator=rng) for n in (3, 5_000_000, 0, 1, 700_000)]

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, tree):
        self.tensors = tree["tensors"]


@pytest.fixture
def donors():
    servers = [DonorServer("127.0.0.1", TOKEN, f"n{rank}") for rank in range(3)]
    yield servers
    for server in servers:
        server.close()


def generation_of(donors, number=4):
    members = tuple(
        Member(
            rank=rank,
            worker=f"n{rank}",
            node=f"node{rank}",
            slot=0,
            host="127.0.0.1",
            vote_port=0,
            data_port=d.port,
        )
        for rank, d in enumerate(donors)
    )
    return Generation(number=number, members=members, start=7)


def fetch(generation, ranks, objects, seen=lambda nbytes, total: None, token=TOKEN):
    return Fetch(generation, ranks, token, seen).run(objects)


def test_stripes_from_several_donors_arrive_whole(donors):
    source, target = Big(0), Big(1)
    for donor in donors:
        donor.publish(4, state_image.capture({"big": source}, 7))
    beats = []
    image = fetch(generation_of(donors), (0, 1, 2), {"big": target}, lambda *how_far: beats.append(how_far))
    state_image.load({"big": target}, image)
    assert state_image.digest({"big": target}) == state_image.digest({"big": source})
    assert image.index.step == 7
    assert len(beats) >= image.index.nbytes // peer_transfer.CHUNK_BYTES
    assert sum(nbytes for nbytes, _ in beats) == image.index.nbytes
    assert {total for _, total in beats} == {image.index.nbytes}


def test_a_dead_donor_is_replaced_by_the_next(donors):
    source, target = Big(0), Big(1)
    for donor in donors[1:]:
        donor.publish(4, state_image.capture({"big": source}, 7))
    generation = generation_of(donors)
    donors[0].close()
    state_image.load({"big": target}, fetch(generation, (0, 1, 2), {"big": target}))
    assert state_image.digest({"big": target}) == state_image.digest({"big": source})


def test_damaged_bytes_are_fetched_again_from_another_donor(donors, monkeypatch):
    source, target = Big(0), Big(1)
    good = state_image.capture({"big": source}, 7)
    for donor in donors[:2]:
        donor.publish(4, good)
    damaged = []
    real = peer_transfer._read_chunk

    def flip(response, image, low, high, member):
        real(response, image, low, high, member)
        if member.rank == 0 and not damaged:
            damaged.append(low)
            raise peer_transfer.ChecksumError("as if a bit had flipped on the way")

    monkeypatch.setattr(peer_transfer, "_read_chunk", flip)
    state_image.load({"big": target}, fetch(generation_of(donors), (0, 1), {"big": target}))
    assert damaged
    assert state_image.digest({"big": target}) == state_image.digest({"big": source})


def test_a_donor_is_waited_for_until_it_has_sent_all(donors, monkeypatch):
    """Its bytes may be late, and it is not the reader then that stands still."""
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))
    waits, during = [-1], []
    monkeypatch.setattr(
        peer_transfer,
        "_read_chunk",
        lambda *chunk, real=peer_transfer._read_chunk: (during.append(waits[-1]), real(*chunk)),
    )
    reading = Fetch(generation_of(donors), (0,), TOKEN, lambda *_: None, waits.append)
    reading.run({"big": Big(1)})
    assert during
    assert set(during) == {0}
    assert waits[-1] == -1


def test_nobody_left_says_who_was_asked(donors):
    generation = generation_of(donors)
    for donor in donors:
        donor.close()
    with pytest.raises(StateError, match=r"rank 0 on node0.*rank 1 on node1"):
        fetch(generation, (0, 1), {"big": Big(1)})


def test_without_the_token_nothing_is_served(donors):
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))
    with pytest.raises(StateError, match="401"):
        fetch(generation_of(donors), (0,), {"big": Big(1)}, token="wrong")


def test_an_older_generation_is_gone(donors):
    donors[0].publish(5, state_image.capture({"big": Big(0)}, 7))
    with pytest.raises(StateError, match="410"):
        fetch(generation_of(donors, number=4), (0,), {"big": Big(1)})


def test_a_state_that_is_to_come_is_waited_for(donors, monkeypatch):
    """A donor that reads it itself says so; who waits is seen to live meanwhile."""
    monkeypatch.setattr(peer_transfer, "PUBLISH_WAIT_S", 0.01)
    for donor in donors[:2]:
        donor.publish(3, None)
    rounds = []

    def seen(nbytes, total):
        rounds.append(nbytes)
        if len(rounds) == 3:
            donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))

    mine = {"big": Big(1)}
    image = fetch(generation_of(donors), (0, 1), mine, seen)
    state_image.load(mine, image)
    assert all(torch.equal(a, b) for a, b in zip(mine["big"].tensors, Big(0).tensors, strict=True))
    assert rounds[:3] == [0, 0, 0]
    assert sum(rounds) == image.index.nbytes


def test_a_broken_generation_ends_the_transfer(donors):
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))

    def broken(nbytes, total):
        raise GenerationBroken("meanwhile")

    with pytest.raises(GenerationBroken):
        fetch(generation_of(donors), (0,), {"big": Big(1)}, broken)


def test_abort_frees_a_reader_whose_donor_is_silent(donors):
    # the donor waits for a generation that is never published: the reader hangs until it is aborted
    reading = Fetch(generation_of(donors, number=9), (0,), TOKEN, lambda *_: None)
    failed = []

    def read():
        try:
            reading.run({"big": Big(1)})
        except StateError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not reading.busy():
        threading.Event().wait(0.001)
    reading.abort()
    thread.join(4.0)
    assert not thread.is_alive()
    assert failed


def test_a_range_beyond_the_state_is_refused(donors):
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))
    connection = http.client.HTTPConnection("127.0.0.1", donors[0].port, timeout=5)
    connection.request(
        "GET",
        "/state/bytes?generation=4",
        headers={"Authorization": f"Bearer {TOKEN}", "Range": "bytes=0-99999999999", "Connection": "close"},
    )
    assert connection.getresponse().status == 416
    connection.close()


@pytest.fixture
def impostor():
    """Answers every request as a donor would, of whom it only has the port. Yields it, and what it was shown."""
    shown = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            shown.append(str(self.headers))
            self.send_response(200)
            self.send_header("Holdfast-Proof", "0" * 64)
            self.send_header("Content-Length", "2")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.port = server.server_address[1]
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server, shown
    server.shutdown()
    serving.join()
    server.server_close()


def test_who_listens_in_a_donors_place_is_shown_nothing_of_use_and_not_believed(donors, impostor):
    server, shown = impostor
    with pytest.raises(
        StateError, match="where n0 listened, answered 200 and did not prove that it is this worker"
    ):
        fetch(generation_of([server]), (0,), {"big": Big(1)})
    assert len(shown) == 1
    assert TOKEN not in shown[0]
    donors[1].publish(4, state_image.capture({"big": Big(0)}, 7))
    connection = http.client.HTTPConnection("127.0.0.1", donors[1].port, timeout=5)
    credential = next(line for line in shown[0].splitlines() if "Authorization" in line).partition(": ")[2]
    connection.request("GET", "/state/index?generation=4", headers={"Authorization": credential})
    assert connection.getresponse().status == 401  # to another donor it is of no use either
    connection.close()


def test_a_person_with_curl_shows_the_token_itself(donors):
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))
    connection = http.client.HTTPConnection("127.0.0.1", donors[0].port, timeout=5)
    connection.request("GET", "/state/index?generation=4", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    "says",
    [
        b"\0" * 9000,
        b"GET /" + b"a" * 9000,
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /state/index HTTP/9.9\r\n\r\n",
        b"POST /state/index HTTP/1.1\r\n\r\n",
        b"GET /state/index?generation=4 HTTP/1.1\r\nAuthorization: Bearer \xc3\xa9\r\n\r\n",
        b"GET /state/index?generation=4 HTTP/1.1\r\nAuthorization: Holdfast \xff \xc3\xa9\r\n\r\n",
        b"GET /state/index?generation=4 HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
    ids=str,
)
def test_whatever_is_said_to_a_donor_it_hangs_up_and_serves_the_next(donors, says, capfd):
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))
    with socket.create_connection(("127.0.0.1", donors[0].port), timeout=10) as sock:
        sock.sendall(says)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
    state_image.load({"big": Big(1)}, fetch(generation_of(donors), (0,), {"big": Big(1)}))
    assert capfd.readouterr().err == ""


def test_who_trickles_to_a_donor_has_two_seconds_for_all_of_it(donors):
    with socket.create_connection(("127.0.0.1", donors[0].port), timeout=10) as sock:
        began = time.monotonic()
        while not select.select([sock], [], [], 0.05)[0]:
            assert time.monotonic() - began < 4.0, "still heard"
            with contextlib.suppress(OSError):
                sock.send(b"x")


LIMIT = 1024


def _serve_with_few_descriptors(pipe) -> None:
    """A donor in a process of its own; tells whether the process can open what it needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    server = DonorServer("127.0.0.1", TOKEN, "n0")
    server.publish(4, state_image.capture({"big": Big(0)}, 7))
    pipe.send(server.port)
    while pipe.recv():
        try:
            held = [os.open("/dev/null", os.O_RDONLY) for _ in range(LIMIT // 2)]
        except OSError as error:
            pipe.send(str(error))
        else:
            pipe.send("room")
            for fd in held:
                os.close(fd)


def test_a_flood_of_silent_connections_leaves_a_process_room_and_readers_a_way_in():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_with_few_descriptors, args=(theirs,), daemon=True)
    process.start()
    flood = []
    try:
        port = ours.recv()
        for _ in range(LIMIT + 200):
            flood.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        ours.send(True)
        assert ours.recv() == "room"
        members = (
            Member(rank=0, worker="n0", node="node0", slot=0, host="127.0.0.1", vote_port=0, data_port=port),
        )
        image = Fetch(Generation(number=4, members=members, start=7), (0,), TOKEN, lambda *_: None).run(
            {"big": Big(1)}
        )
        assert image.index.step == 7
    finally:
        process.kill()
        process.join()
        process.close()
        for sock in (*flood, ours, theirs):
            sock.close()


def test_plain_values_arrive_as_they_are(donors):
    """A scheduler that waits for a plateau begins with an infinite best figure."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    source, target = (torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=n) for n in (3, 5))
    source.threshold = float("nan")
    donors[0].publish(4, state_image.capture({"scheduler": source}, 7))
    image = fetch(generation_of(donors), (0,), {"scheduler": target})
    state_image.load({"scheduler": target}, image)
    assert target.best == float("inf")
    assert target.threshold != target.threshold
    assert target.patience == 3
