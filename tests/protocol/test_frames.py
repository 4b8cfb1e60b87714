"""What a frame may hold: whatever it is, a reader says that it cannot read it, and reads on."""

import random
import socket

import msgspec
import pytest

from holdfast.errors import ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.wire.frames import Codec, pack

CODEC: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
READY = msgspec.msgpack.encode(m.Ready(digest="digest", host="host", vote_port=1, data_port=2))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x82\xa4type\xa8attached\xa1x" + b"\x91" * 100_000 + b"\x90", id="nested too deep"),
        pytest.param(READY.replace(b"host", b"ho\xff\xfe", 2), id="text that is none"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_protocol(body):
    with pytest.raises(ProtocolError):
        CODEC.decode(body)


def test_changed_bytes_are_a_message_or_an_error_of_the_protocol():
    rng = random.Random(1)
    for _ in range(20_000):
        body = bytearray(READY)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            CODEC.decode(body)
        except ProtocolError:
            continue


@pytest.mark.parametrize("unread", [False, True])
def test_a_peer_that_has_ended_says_nothing_more_whatever_it_had_not_read(unread):
    """A warm process whose agent was killed before it read that the process is there: it ends without a traceback."""
    ours, theirs = socket.socketpair()
    with ours:
        if unread:
            ours.sendall(pack(m.Warm(1)))
        theirs.close()
        assert CODEC.read(ours) is None
