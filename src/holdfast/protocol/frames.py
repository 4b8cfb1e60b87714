"""Frames on a stream socket: a 4-byte big-endian length, then one msgpack-encoded message.

msgspec decodes into the declared types and nothing else, so a frame can hold data but never code.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from holdfast.errors import ProtocolError

MAX_FRAME_BYTES = 16 << 20
_HEADER = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """One message without its length prefix (a WebSocket keeps the borders by itself)."""
    return _encoder.encode(message)


def pack(message: Any) -> bytes:
    """One message as a frame."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class Codec(Generic[T]):
    """Decodes messages of one (union) type. Raises ProtocolError on anything else."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, body: bytes | bytearray | memoryview) -> T:
        """One message from its bytes."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"cannot read a message ({error}); run one version on all nodes") from error

    def read(self, sock: socket.socket) -> T | None:
        """The next message of a blocking socket; None at its end."""
        header = read_exactly(sock, _HEADER.size)
        if header is None:
            return None
        body = read_exactly(sock, _size(header))
        return None if body is None else self.decode(body)

    async def read_stream(self, reader: asyncio.StreamReader) -> T | None:
        """The next message of an asyncio stream; None at its end."""
        try:
            header = await reader.readexactly(_HEADER.size)
            return self.decode(await reader.readexactly(_size(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def read_exactly(sock: socket.socket, count: int) -> bytearray | None:
    """`count` bytes from a blocking socket; None when it ends before."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return buffer


def _size(header: bytes | bytearray) -> int:
    size: int = _HEADER.unpack(header)[0]
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    return size
