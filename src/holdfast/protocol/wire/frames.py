"""Frames on a stream socket: a 4-byte big-endian length, then one msgpack-encoded message.

msgspec decodes into the declared types and nothing else, so a frame can hold data but never code.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.wire.decoding import decode

MAX_FRAME_BYTES = 16 << 20
SEVERAL_BYTES = 1 << 20
"""Several messages in one frame have no more, so that no message waits for long behind the others of its frame."""
_HEADER = struct.Struct(">I")
_CANNOT = "cannot read a message; run the same version of Holdfast on all nodes"
# One for all: an encoder holds no state between calls, and making one costs more than encoding a heartbeat.
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """One message without its length prefix (a WebSocket keeps the borders by itself)."""
    return _encoder.encode(message)


def encode_all(messages: Sequence[bytes]) -> bytes:
    """Several messages, each encoded already, as the body of one frame; see `Codec.decode_all`."""
    return (
        messages[0] if len(messages) == 1 else _encoder.encode([msgspec.Raw(message) for message in messages])
    )


def frames_of(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Encoded messages in their order, for one frame each."""
    frame: list[bytes] = []
    size = 0
    for message in messages:
        if frame and size + len(message) > SEVERAL_BYTES:
            yield frame
            frame, size = [], 0
        frame.append(message)
        size += len(message)
    if frame:
        yield frame


def pack(message: Any) -> bytes:
    """One message as a frame."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class Codec(Generic[T]):
    """Decodes messages of one (union) type. Raises ProtocolError on anything else."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    @cached_property
    def _several(self) -> msgspec.msgpack.Decoder[T | list[T]]:
        kind: Any = self._kind
        return msgspec.msgpack.Decoder(kind | list[kind])

    def decode(self, body: bytes | bytearray | memoryview) -> T:
        """One message from its bytes."""
        # Everything that bytes of a stranger can bring about becomes one exception, so callers close one
        # connection instead of ending a thread.
        return decode(self._decoder.decode, body, _CANNOT, error=ProtocolError)

    def decode_all(self, body: bytes | bytearray | memoryview) -> list[T]:
        """The messages of a frame, of which each side of an agent's connection sends several in one."""
        found = decode(self._several.decode, body, _CANNOT, error=ProtocolError)
        return found if isinstance(found, list) else [found]

    def read(self, sock: socket.socket) -> T | None:
        """The next message of a blocking socket; None at its end."""
        try:
            header = read_exactly(sock, _HEADER.size)
            body = None if header is None else read_exactly(sock, _size(header))
        except ConnectionError:  # the other side has ended, and had not read all
            return None
        return None if body is None else self.decode(body)

    async def read_stream(self, reader: asyncio.StreamReader) -> T | None:
        """The next message of an asyncio stream; None at its end."""
        try:
            header = await reader.readexactly(_HEADER.size)
            return self.decode(await reader.readexactly(_size(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def missing(received: bytes | bytearray, most: int) -> int:
    """How many bytes may be read on to the end of the first frame; 0: it is whole.

    Raises:
        ProtocolError: its message is to have more than `most` bytes.
    """
    if len(received) < _HEADER.size:
        return _HEADER.size - len(received)
    size = _size(received[: _HEADER.size], most)
    return _HEADER.size + size - len(received)


def body_of(frame: bytes) -> bytes:
    """The message of a whole frame."""
    return frame[_HEADER.size :]


def read_exactly(sock: socket.socket, count: int, within_s: float | None = None) -> bytearray | None:
    """`count` bytes from a blocking socket; None when it ends before. within_s: for all of them; then TimeoutError."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    until_s = None if within_s is None else time.monotonic() + within_s
    while view:
        # The limit is for all bytes together. A limit per call would let a peer that sends one byte a second
        # hold the connection for ever.
        if until_s is not None:
            sock.settimeout(max(0.001, until_s - time.monotonic()))
        got = sock.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return buffer


def _size(header: bytes | bytearray, most: int = MAX_FRAME_BYTES) -> int:
    size: int = _HEADER.unpack(header)[0]
    # Checked before a buffer of that size is made: four bytes of a stranger could otherwise ask for four
    # gigabytes.
    if size > most:
        raise ProtocolError(f"a frame of {size} bytes is larger than the limit of {most}")
    return size
