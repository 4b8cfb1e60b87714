"""Stripes over groups of two, with gloo between CPUs in NCCL's place."""

import http.client
import multiprocessing
import os
import signal
import threading

import pytest
import torch
from test_peer_transfer import TOKEN, Big, donors, fetch, generation_of  # noqa: F401 - donors is a fixture

from holdfast.errors import GenerationBroken, StateError
from holdfast.protocol.messages import Generation, Member
from holdfast.train import gpu_transfer, state_image
from holdfast.train.peer_transfer import DonorServer, Fetch


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv(gpu_transfer.CHOICE, "always")
    monkeypatch.setattr(gpu_transfer, "CHUNK_BYTES", 1 << 20)


@pytest.fixture
def over_http(monkeypatch):
    """The bytes that came over HTTP."""
    from holdfast.train import peer_transfer

    counted, real = [], peer_transfer._read_chunk

    def read(response, image, low, high, member):
        real(response, image, low, high, member)
        counted.append(high - low)

    monkeypatch.setattr(peer_transfer, "_read_chunk", read)
    return counted


def digest(thing) -> str:
    return state_image.digest({"big": thing})


def test_stripes_of_several_donors_come_over_groups_of_two(donors, over_http):  # noqa: F811
    source, target = Big(0), Big(1)
    for donor in donors:
        donor.publish(4, state_image.capture({"big": source}, 7))
    moved = []
    image = fetch(
        generation_of(donors), (0, 1, 2), {"big": target}, lambda nbytes, total: moved.append(nbytes)
    )
    state_image.load({"big": target}, image)
    assert digest(target) == digest(source)
    assert sum(moved) == image.index.nbytes
    assert not over_http


def test_nothing_is_lost_that_a_quick_donor_says_before_the_newcomer_listens(donors, over_http, monkeypatch):  # noqa: F811
    """A newcomer that reads the headers so late that all that the donor says unasked stands behind them."""
    source, target = Big(0), Big(1)
    donors[0].publish(4, state_image.capture({"big": source}, 7))
    said = threading.Event()
    send, wait = gpu_transfer.TransferStore._send, gpu_transfer.TransferStore.wait

    def sends(line, frame):
        send(line, frame)
        said.set()

    def waits(line, *given):
        said.set()
        wait(line, *given)

    monkeypatch.setattr(gpu_transfer.TransferStore, "_send", sends)
    monkeypatch.setattr(gpu_transfer.TransferStore, "wait", waits)

    class Late(http.client.HTTPConnection):
        def request(self, method, url, **more):
            self.url = url
            super().request(method, url, **more)

        def getresponse(self):
            assert "direct" not in self.url or said.wait(20)
            return super().getresponse()

    monkeypatch.setattr(http.client, "HTTPConnection", Late)
    monkeypatch.setattr(gpu_transfer, "CONNECT_S", 5.0)
    image = fetch(generation_of(donors), (0,), {"big": target})
    state_image.load({"big": target}, image)
    assert digest(target) == digest(source)
    assert not over_http


def test_a_damaged_chunk_is_refused_and_the_rest_comes_over_http(donors, over_http, monkeypatch, caplog):  # noqa: F811
    source, target = Big(0), Big(1)
    donors[0].publish(4, state_image.capture({"big": source}, 7))
    real, chunks = gpu_transfer._move, []

    def move(pair, row):
        real(pair, row)
        if pair.rank == gpu_transfer.NEWCOMER:
            chunks.append(row)
            if len(chunks) == 5:
                row[12345] ^= 1

    monkeypatch.setattr(gpu_transfer, "_move", move)
    image = fetch(generation_of(donors), (0,), {"big": target})
    state_image.load({"big": target}, image)
    assert digest(target) == digest(source)
    assert sum(over_http) == image.index.nbytes - 4 * gpu_transfer.CHUNK_BYTES
    assert "are damaged; bytes 4194304 to" in caplog.text


def test_a_donor_that_does_not_take_part_serves_over_http(donors, over_http, monkeypatch):  # noqa: F811
    source, target = Big(0), Big(1)
    donors[0].publish(4, state_image.capture({"big": source}, 7))
    possible = gpu_transfer.possible
    monkeypatch.setattr(
        gpu_transfer,
        "possible",
        lambda image: possible(image) and "holdfast-fetch" in threading.current_thread().name,
    )
    image = fetch(generation_of(donors), (0,), {"big": target})
    state_image.load({"big": target}, image)
    assert digest(target) == digest(source)
    assert sum(over_http) == image.index.nbytes


def test_the_end_of_a_generation_ends_it_at_both_ends(donors, monkeypatch):  # noqa: F811
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))
    real, moves = gpu_transfer._move, []

    def move(pair, row):
        if pair.rank == gpu_transfer.DONOR:
            moves.append(row)
            if len(moves) == 4:
                donors[0].publish(5, None)
        real(pair, row)

    monkeypatch.setattr(gpu_transfer, "_move", move)
    with pytest.raises(StateError, match="410"):
        fetch(generation_of(donors), (0,), {"big": Big(1)})
    for thread in threading.enumerate():  # the donor's side ends after the newcomer's
        if thread.name == "holdfast-donor-request":
            thread.join(60)
    assert not donors[0]._lines


def test_a_newcomer_that_is_told_to_stop_leaves(donors):  # noqa: F811
    donors[0].publish(4, state_image.capture({"big": Big(0)}, 7))

    def broken(nbytes, total):
        if nbytes:
            raise GenerationBroken("meanwhile")

    with pytest.raises(GenerationBroken):
        fetch(generation_of(donors), (0,), {"big": Big(1)}, broken)


def _serve(pipe) -> None:
    """A donor in a process of its own."""
    gpu_transfer.CHUNK_BYTES = 1 << 20
    server = DonorServer("127.0.0.1", TOKEN, "n0")
    server.publish(4, state_image.capture({"big": Big(0)}, 7))
    pipe.send(server.port)
    pipe.recv()


def test_a_donor_that_is_killed_in_the_middle_is_replaced_by_another(donors, over_http, caplog):  # noqa: F811
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    donors[1].publish(4, state_image.capture({"big": Big(0)}, 7))
    try:
        ports = [ours.recv(), donors[1].port]
        members = tuple(
            Member(
                rank=r, worker=f"n{r}", node=f"node{r}", slot=0, host="127.0.0.1", vote_port=0, data_port=port
            )
            for r, port in enumerate(ports)
        )
        target, moved = Big(1), []

        def seen(nbytes, total):
            moved.append(nbytes)
            if sum(moved) > 3 << 20 and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()

        image = Fetch(Generation(number=4, members=members, start=7), (0, 1), TOKEN, seen).run(
            {"big": target}
        )
        state_image.load({"big": target}, image)
        assert digest(target) == digest(Big(0))
        assert sum(moved) == image.index.nbytes
        assert 0 < sum(over_http) < image.index.nbytes
        assert "rank 0 on node0: the direct transfer between GPUs failed" in caplog.text
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 8 * gpu_transfer.BLOCK_WORDS + 13])
def test_a_fingerprint_sees_every_change(size):
    row = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    right = gpu_transfer.fingerprint(row).tolist()
    assert gpu_transfer.fingerprint(torch.cat([torch.zeros(3, dtype=torch.uint8), row])[3:]).tolist() == right
    for place in {0, size // 2, size - 1} if size else ():
        for bit in (1, 128):
            row[place] ^= bit
            assert gpu_transfer.fingerprint(row).tolist() != right
            row[place] ^= bit
    if size >= 4096:
        row[7] ^= 128  # two signs
        row[4095] ^= 128
        assert gpu_transfer.fingerprint(row).tolist() != right
