import http.client
import threading

import pytest
import torch

from holdfast.errors import GenerationBroken, StateError
from holdfast.protocol.messages import Generation, Member
from holdfast.train import state, transfer
from holdfast.train.transfer import DonorServer, Fetch

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
    servers = [DonorServer("127.0.0.1", TOKEN) for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


def generation_of(donors, number=4):
    members = tuple(
        Member(rank, f"n{rank}", f"node{rank}", 0, "127.0.0.1", 0, d.port) for rank, d in enumerate(donors)
    )
    return Generation(number, members, start=7)


def fetch(generation, ranks, objects, seen=lambda nbytes, total: None, token=TOKEN):
    return Fetch(generation, ranks, token, seen).run(objects)


def test_stripes_from_several_donors_arrive_whole(donors):
    source, target = Big(0), Big(1)
    for donor in donors:
        donor.publish(4, state.capture({"big": source}, 7))
    beats = []
    image = fetch(generation_of(donors), (0, 1, 2), {"big": target}, lambda *how_far: beats.append(how_far))
    state.load({"big": target}, image)
    assert state.digest({"big": target}) == state.digest({"big": source})
    assert image.index.step == 7
    assert len(beats) >= image.index.nbytes // transfer.CHUNK_BYTES
    assert sum(nbytes for nbytes, _ in beats) == image.index.nbytes
    assert {total for _, total in beats} == {image.index.nbytes}


def test_a_dead_donor_is_replaced_by_the_next(donors):
    source, target = Big(0), Big(1)
    for donor in donors[1:]:
        donor.publish(4, state.capture({"big": source}, 7))
    generation = generation_of(donors)
    donors[0].close()
    state.load({"big": target}, fetch(generation, (0, 1, 2), {"big": target}))
    assert state.digest({"big": target}) == state.digest({"big": source})


def test_damaged_bytes_are_fetched_again_from_another_donor(donors, monkeypatch):
    source, target = Big(0), Big(1)
    good = state.capture({"big": source}, 7)
    for donor in donors[:2]:
        donor.publish(4, good)
    damaged = []
    real = transfer._read_chunk

    def flip(response, image, low, high, member):
        real(response, image, low, high, member)
        if member.rank == 0 and not damaged:
            damaged.append(low)
            raise transfer.ChecksumError("as if a bit had flipped on the way")

    monkeypatch.setattr(transfer, "_read_chunk", flip)
    state.load({"big": target}, fetch(generation_of(donors), (0, 1), {"big": target}))
    assert damaged
    assert state.digest({"big": target}) == state.digest({"big": source})


def test_nobody_left_says_who_was_asked(donors):
    generation = generation_of(donors)
    for donor in donors:
        donor.close()
    with pytest.raises(StateError, match=r"rank 0 on node0.*rank 1 on node1"):
        fetch(generation, (0, 1), {"big": Big(1)})


def test_without_the_token_nothing_is_served(donors):
    donors[0].publish(4, state.capture({"big": Big(0)}, 7))
    with pytest.raises(StateError, match="401"):
        fetch(generation_of(donors), (0,), {"big": Big(1)}, token="wrong")


def test_an_older_generation_is_gone(donors):
    donors[0].publish(5, state.capture({"big": Big(0)}, 7))
    with pytest.raises(StateError, match="410"):
        fetch(generation_of(donors, number=4), (0,), {"big": Big(1)})


def test_a_state_that_is_to_come_is_waited_for(donors, monkeypatch):
    """A donor that reads it itself says so; who waits is seen to live meanwhile."""
    monkeypatch.setattr(transfer, "PUBLISH_WAIT_S", 0.01)
    for donor in donors[:2]:
        donor.publish(3, None)
    rounds = []

    def seen(nbytes, total):
        rounds.append(nbytes)
        if len(rounds) == 3:
            donors[0].publish(4, state.capture({"big": Big(0)}, 7))

    mine = {"big": Big(1)}
    image = fetch(generation_of(donors), (0, 1), mine, seen)
    state.load(mine, image)
    assert all(torch.equal(a, b) for a, b in zip(mine["big"].tensors, Big(0).tensors, strict=True))
    assert rounds[:3] == [0, 0, 0]
    assert sum(rounds) == image.index.nbytes


def test_a_broken_generation_ends_the_transfer(donors):
    donors[0].publish(4, state.capture({"big": Big(0)}, 7))

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
    donors[0].publish(4, state.capture({"big": Big(0)}, 7))
    connection = http.client.HTTPConnection("127.0.0.1", donors[0].port, timeout=5)
    connection.request(
        "GET",
        "/state/bytes?generation=4",
        headers={"Authorization": f"Bearer {TOKEN}", "Range": "bytes=0-99999999999", "Connection": "close"},
    )
    assert connection.getresponse().status == 416
    connection.close()
