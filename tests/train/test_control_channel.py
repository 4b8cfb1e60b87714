"""The mesh among strangers: who connects to a member's port, or listens in a dead one's place, and keeps nobody out."""

import contextlib
import os
import random
import resource
import select
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from cluster import TOKEN, Cluster

from holdfast.errors import CollectiveFault
from holdfast.protocol.messages import Generation, Member
from holdfast.train.control_channel import MeshChannel, MeshStore

SOON_S = 1.5
"""Joining takes milliseconds; a connection that is waited for would add seconds."""


@pytest.fixture
def cluster():
    made = Cluster(3)
    yield made
    made.close()


@contextlib.contextmanager
def joined(cluster, number):
    """The meshes of a generation, connected. Tells how long that took, too."""
    generation = cluster.generation(number)
    meshes = [MeshChannel(generation, rank) for rank in range(cluster.size)]
    began = time.monotonic()
    try:
        list(cluster.pool.map(lambda m: m.connect(cluster.listeners[m.rank], TOKEN), meshes))
        yield meshes, time.monotonic() - began
    finally:
        for mesh in meshes:
            mesh.abort()
            mesh.close()


def joins_soon(cluster, number):
    with joined(cluster, number) as (meshes, took_s):
        heard = cluster.each(
            lambda m: m.send(1, (float(m.rank), 0.0, 0.0)) or m.receive(1, [(9.0, 0.0, 0.0)]), meshes
        )
        assert [message[0] for message in heard[0]] == [9.0, 1.0, 2.0]
        assert took_s < SOON_S


def stranger(cluster, rank=0, says=b""):
    sock = socket.create_connection(("127.0.0.1", cluster.listeners[rank].port), timeout=10)
    with contextlib.suppress(OSError):  # its words may be refused before they are all said
        sock.sendall(says)
    return sock


def frame(body):
    return struct.pack(">I", len(body)) + body


def closed(sock):
    """Whether the other side has hung up, or does so now."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # with words of ours unread
        return True


def heard_out(sock):
    """Whether the other side hangs up once nothing more can come, and says nothing."""
    with contextlib.suppress(OSError):  # it has already
        sock.shutdown(socket.SHUT_WR)
    return closed(sock)


def hello(**fields):
    return frame(msgspec.msgpack.encode({"generation": 1, "digest": "d", "rank": 1, **fields}))


def deep(field):
    """A known field, then one that nobody knows, nested so deep that a reader that descends runs out of stack."""
    body = b"\x82" + msgspec.msgpack.encode(field) + msgspec.msgpack.encode("x")
    body += msgspec.msgpack.encode("unknown") + b"\x91" * 900 + b"\x90"
    return frame(body)


def garbage():
    rng = random.Random(1)
    yield from (rng.randbytes(rng.randrange(1, 200)) for _ in range(50))
    yield from (frame(rng.randbytes(rng.randrange(200))) for _ in range(50))
    yield b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    for field in ("token", "credential"):
        yield deep(field)
        for text in ("é", "é é", "\0", "\ud7ff \U0010ffff", " ", "a " + "é" * 64):
            yield hello(**{field: text})
            yield hello(credential="a b", digest=text)
        yield frame(b"\x81" + msgspec.msgpack.encode(field) + b"\xa2\xff\xfe")
    yield frame(b"\x91" * 1000)
    yield hello(credential="a b", generation=1 << 63)
    yield struct.pack(">I", 0xFFFFFFFF)


def test_a_member_of_another_generation_with_the_same_number_is_not_taken(cluster):
    """Two coordinators on both sides of a cut may each have formed one, of workers that reach each other."""
    ours = cluster.generation(1)
    theirs, made = msgspec.structs.replace(ours, start=9), []
    for generation, message in ((ours, 1.0), (theirs, 2.0)):
        meshes = [MeshChannel(generation, rank) for rank in (1, 2)]
        list(cluster.pool.map(lambda mesh: mesh.connect(cluster.listeners[mesh.rank], TOKEN), meshes))
        for mesh in meshes:
            mesh.send(1, (message, 0.0, 0.0))
        made += meshes
    made.append(MeshChannel(ours, 0))
    made[-1].connect(cluster.listeners[0], TOKEN)
    assert [message[0] for message in made[-1].receive(1, [(0.0, 0.0, 0.0)])] == [0.0, 1.0, 1.0]
    for mesh in made:
        mesh.abort()
        mesh.close()
    for listener in cluster.listeners:
        listener.release(1)


def test_silent_connections_hold_up_nobody(cluster):
    silent = [stranger(cluster, rank) for rank in range(3) for _ in range(20)]
    joins_soon(cluster, 1)
    for sock in silent:
        sock.close()


def test_whatever_is_said_to_the_port_the_next_member_is_let_in(cluster):
    for says in garbage():
        with stranger(cluster, says=says) as sock:
            assert heard_out(sock), says
    joins_soon(cluster, 1)


def test_who_trickles_has_two_seconds_for_all_of_it(cluster):
    """Every byte comes in good time, and the hello never."""
    with stranger(cluster, says=struct.pack(">I", 1000)) as sock:
        began = time.monotonic()
        while not select.select([sock], [], [], 0.05)[0]:
            assert time.monotonic() - began < 4.0, "still heard"
            with contextlib.suppress(OSError):
                sock.send(b"x")
        assert closed(sock)
    joins_soon(cluster, 1)


def test_a_hello_of_more_than_a_kibibyte_is_not_read(cluster):
    with stranger(cluster, says=struct.pack(">I", 1025)) as sock:
        began = time.monotonic()
        assert closed(sock)
        assert time.monotonic() - began < 1.0  # not at the end of its time


def test_of_too_many_who_say_nothing_the_oldest_go(cluster):
    most = cluster.listeners[0]._listener._most
    silent = [stranger(cluster) for _ in range(most + 30)]
    assert all(closed(sock) for sock in silent[:30])
    joins_soon(cluster, 1)
    for sock in silent:
        sock.close()


@pytest.fixture
def no_room():
    """Takes every descriptor that this process may have, until it is left."""

    @contextlib.contextmanager
    def taken():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            yield
        finally:
            for fd in held:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return taken


def test_a_process_without_room_for_descriptors_lets_in_who_waits_once_there_is_room(cluster, no_room):
    waiting = socket.socket()
    waiting.settimeout(0.5)
    with no_room():
        waiting.connect(("127.0.0.1", cluster.listeners[0].port))
        waiting.sendall(hello(token="wrong", credential="wrong"))
        began_s = time.process_time()
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        assert time.process_time() - began_s < 0.25  # it does not try again and again
    waiting.settimeout(10)
    assert closed(waiting)
    waiting.close()
    joins_soon(cluster, 1)


def impostor():
    """Listens in the place of a member, and says what it is told to say."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(10)
    return server


@pytest.mark.parametrize(
    "says", [b"", b"\0" * 64, b"a" * 64, b"\xff" * 64], ids=["nothing", "zeros", "a", "ones"]
)
def test_who_listens_in_a_members_place_is_shown_nothing_of_use(cluster, says):
    seen = []

    def listen(server):
        sock, _ = server.accept()
        with sock:
            sock.settimeout(10)
            seen.append(sock.recv(4096))
            sock.sendall(says)
            assert heard_out(sock)

    with impostor() as server, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen, server)
        first = Member(
            rank=0, worker="w0", node="n0", slot=0, host="127.0.0.1", vote_port=server.getsockname()[1]
        )
        mesh = MeshChannel(Generation(number=1, members=(first, *cluster.generation(1).members[1:])), 1)
        with pytest.raises(CollectiveFault, match=r"cannot reach rank 0 on n0.*where w0 listened"):
            mesh.connect(cluster.listeners[1], TOKEN)
        listening.result()
    assert TOKEN.encode() not in seen[0]
    for rank in (0, 1):  # neither another one of the job, nor the one that was meant in another generation
        with stranger(
            cluster, rank, seen[0] if rank else seen[0].replace(b"\xaageneration\x01", b"\xaageneration\x02")
        ) as sock:
            assert heard_out(sock)


def test_a_break_frees_who_waits_for_an_answer(cluster):
    with impostor() as server:
        first = Member(
            rank=0, worker="w0", node="n0", slot=0, host="127.0.0.1", vote_port=server.getsockname()[1]
        )
        mesh = MeshChannel(Generation(number=1, members=(first, *cluster.generation(1).members[1:])), 1)
        joining = cluster.pool.submit(mesh.connect, cluster.listeners[1], TOKEN)
        sock, _ = server.accept()
        with sock:
            assert sock.recv(4096)
            began = time.monotonic()
            mesh.abort()
            with pytest.raises(CollectiveFault):
                joining.result(timeout=10)
            assert time.monotonic() - began < 1.0


def test_a_member_that_comes_for_a_generation_that_broke_is_let_go(cluster):
    cluster.listeners[0].release(1)
    generation = cluster.generation(1, ranks=[0, 1])
    with pytest.raises(CollectiveFault):
        MeshChannel(generation, 1).connect(cluster.listeners[1], TOKEN)


@pytest.mark.parametrize("count", [2, 3])
def test_large_values_cross(count):
    """More than the connections hold on their way: who only writes waits for one that only writes."""
    cluster = Cluster(count)
    size = 24_000_000
    with joined(cluster, 1) as (meshes, _):

        def share(mesh):
            store = MeshStore(mesh)
            store.set(f"key-{mesh.rank}", bytes([mesh.rank]) * size)
            values = [store.get(f"key-{rank}") for rank in range(count)]
            store.finish()
            mesh.send(3, (float(mesh.rank), 0.0, 0.0))
            messages = mesh.receive(3, [(float(mesh.rank), 0.0, 0.0)])
            return values == [bytes([r]) * size for r in range(count)] and [w[0] for w in messages] == list(
                range(count)
            )

        stuck = threading.Timer(20.0, lambda: [mesh.abort() for mesh in meshes])
        stuck.start()
        try:
            assert cluster.each(share, meshes) == [True] * count
        finally:
            stuck.cancel()
    cluster.close()
