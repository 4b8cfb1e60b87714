"""State from GPU to GPU: a stripe goes out of a donor's live tensors into a newcomer's, past both hosts' memory.

The newcomer asks a donor for its stripe over HTTP as ever (`peer_transfer`), at another path. The answer turns the connection into
a *line* (`TransferStore`), over which the two build a process group of their own, and then say what each chunk's bytes add up to. Both copy on a
stream of their own, so the donor's next forward pass goes on. When the line closes, whoever closed it, the group is aborted:
a pair fails alone and at once, and what it had not brought comes over HTTP.

A chunk is a broadcast of two members. It moves the same bytes as send and recv; gloo closes all its connections when a recv
is waited for with a time-out, and NCCL's watchdog does not know of sends. With gloo all of it runs over CPU tensors.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import msgspec
import torch
import torch.distributed as dist

from holdfast.errors import ChecksumError, CollectiveFault, ProtocolError, StateError
from holdfast.protocol.wire.frames import Codec, pack
from holdfast.tensors.staging import Lane
from holdfast.train import gloo_group
from holdfast.train.gloo_group import GlooGroup
from holdfast.train.state_image import Image

CHOICE = "HOLDFAST_DIRECT"
"""`auto` (where NCCL can), `never`, or `always`: then over gloo between CPUs, too."""

WORTH_BYTES = 256 << 20
"""Less is quicker over HTTP than NCCL makes a communicator."""

CHUNK_BYTES = 32 << 20
AHEAD = 2
"""Chunks that are under way before one is looked at."""

CONNECT_S = 20.0
"""Then the stripe comes over HTTP."""

LISTENING = "listening"
"""The newcomer's first word. What the donor said before it could be lost: whoever reads the headers of its answer may read on."""

BLOCK_WORDS = 1 << 20
FACTOR = 6364136223846793005
"""Odd, so that no block's sum is lost in what the next ones add."""

DONOR, NEWCOMER = 0, 1

Moved = Callable[[int], None]
"""Told of bytes that are there, and of 0 now and then while it is waited for; may raise to end the transfer."""


class _Key(msgspec.Struct, frozen=True, tag="key"):
    """From which the two make their group."""

    name: str
    value: bytes


class _Sum(msgspec.Struct, frozen=True, tag="sum"):
    """What the bytes of one chunk up to a place add up to."""

    stop: int
    """That place: bytes from the state's begin, exclusive."""
    words: tuple[int, int]


_frames: Codec[_Key | _Sum] = Codec(_Key | _Sum)


def possible(image: Image) -> bool:
    """Whether this worker can transfer a state from GPU to GPU."""
    choice = os.environ.get(CHOICE, "auto")
    if choice != "auto":
        return choice == "always"
    on_gpu = not image.near and dist.is_nccl_available() and os.environ.get(gloo_group.GPU_GROUPS) != "gloo"
    return on_gpu and image.index.nbytes >= WORTH_BYTES


class TransferStore(dist.Store):  # type: ignore[misc, name-defined, unused-ignore]
    """The line between a donor and a newcomer: the store of their group, then the sums of what moved."""

    def __init__(self, sock: socket.socket, closed: Callable[[], None]) -> None:
        """closed: called when there is nobody at the other end any more."""
        super().__init__()
        # The HTTP client set a limit for its answer. On the line nobody speaks while a chunk is under way, so
        # it would end a healthy transfer.
        sock.settimeout(None)
        self._sock = sock
        self._values: dict[str, bytes] = {}
        self._sums: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._over = False
        self._closed = closed
        self._reader = threading.Thread(target=self._read, name="holdfast-line", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while (frame := _frames.read(self._sock)) is not None:
                if isinstance(frame, _Sum):
                    self._sums.put(frame)
                    continue
                with self._news:
                    self._values[frame.name] = frame.value
                    self._news.notify_all()
        except (OSError, ProtocolError):
            pass  # as good as closed
        with self._news:
            self._over = True
            self._news.notify_all()
        # Wakes a newcomer that waits for a sum which never comes. The flag above does the same for keys.
        self._sums.put(None)
        self._closed()

    def set(self, key: str, value: bytes | str) -> None:
        """Sends the value to the other end."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        # The value is kept here too: gloo reads its own keys back.
        with self._news:
            self._values[key] = data
        self._send(pack(_Key(key, data)))

    def get(self, key: str) -> bytes:
        """Waits for the value."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for the keys, or for the end of the line."""
        with self._news:
            self._news.wait_for(lambda: self._over or all(k in self._values for k in keys))
            if not all(k in self._values for k in keys):
                raise CollectiveFault("the other rank closed the connection")

    def check(self, keys: list[str]) -> bool:
        """Whether the keys have arrived."""
        return all(k in self._values for k in keys)

    def say(self, stop: int, words: list[int]) -> None:
        """For the donor: sends the checksum of the chunk that ends here."""
        self._send(pack(_Sum(stop, (words[0], words[1]))))

    def hear(self) -> _Sum:
        """For the newcomer: the donor's checksum of the next chunk."""
        checksum = self._sums.get()
        if checksum is None:
            raise CollectiveFault("the donor closed the connection")
        return checksum

    def _send(self, frame: bytes) -> None:
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise CollectiveFault(f"the other rank closed the connection: {error}") from error

    def join(self) -> None:
        """Waits until the other end has closed the line."""
        self._reader.join()

    def close(self) -> None:
        """Ends every wait, at both ends. Safe from any thread, more than once."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def send(
    sock: socket.socket, image: Image, low: int, stop: int, opened: Callable[[TransferStore], None]
) -> None:
    """The donor's part of one stripe; returns when the newcomer has closed the line. opened: given the line, whose `close`
    ends this.

    Raises:
        CollectiveFault: the newcomer is gone, or they cannot be connected.
    """
    device = image.device
    pair = GlooGroup(DONOR, 2, sock.getsockname()[0], device)
    line = TransferStore(sock, pair.abort)
    sums: deque[tuple[int, torch.Tensor, object]] = deque()

    def say() -> None:
        end, words, mark = sums.popleft()
        Lane.wait(mark)
        line.say(end, words.tolist())

    try:
        # Before the first wait: from here on the end of the generation closes the line, and with it every
        # wait below.
        opened(line)
        # The newcomer's HTTP client may have read beyond the answer's head. Anything that the donor sent
        # before this word would be in that buffer, and lost.
        line.wait([LISTENING])
        pair.connect(line)
        with _lane(image, pair) as lane:
            for begin in range(low, stop, CHUNK_BYTES):
                end = min(begin + CHUNK_BYTES, stop)
                parts = [p.to(device) for p in image.parts(begin, end)]
                chunk = parts[0] if len(parts) == 1 else torch.cat(parts)
                # The sum is queued before the chunk is sent, on the same stream, so both read the same bytes.
                # It is fetched two chunks later: waiting for it now would leave the link idle.
                sums.append((end, *_on_host(lane, fingerprint(chunk))))
                _move(pair, chunk)
                if len(sums) > AHEAD:
                    say()
            while sums:
                say()
        # The donor must not free or change its tensors while the last broadcast still reads them; that it was
        # queued does not mean that it has ended.
        line.join()  # what it has not received yet may still be on its way
    finally:
        line.close()
        line.join()
        pair.close()


def receive(sock: socket.socket, image: Image, low: int, stop: int, moved: Moved) -> None:
    """The newcomer's part of one stripe. Of what `moved` was told every byte is as the donor has it.

    Raises:
        StateError: the rest has to come another way; the message says why.
    """
    device = image.device
    pair = GlooGroup(NEWCOMER, 2, sock.getsockname()[0], device)
    line = TransferStore(sock, pair.abort)
    coming: deque[tuple[int, int, torch.Tensor, object]] = deque()
    late_s = time.monotonic() + CONNECT_S

    def waits() -> None:
        moved(0)
        if time.monotonic() > late_s:
            raise CollectiveFault(f"no connection within {CONNECT_S:g} s")

    def confirm() -> None:
        begin, end, words, mark = coming.popleft()
        Lane.wait(mark)
        checksum = line.hear()
        # With NCCL an aborted kernel ends and leaves garbage behind. It is asked after the device has come to
        # its end and before the sum is believed: a stale sum could match.
        pair.intact()
        if (checksum.stop, checksum.words) != (end, tuple(words.tolist())):
            raise ChecksumError(f"bytes {begin} to {end} are damaged")
        moved(end - begin)

    pair.waits = waits
    try:
        line.set(LISTENING, b"")
        pair.connect(line)
        with _lane(image, pair) as lane:
            for begin in range(low, stop, CHUNK_BYTES):
                end = min(begin + CHUNK_BYTES, stop)
                parts = list(image.parts(begin, end))
                # Gloo may write into what it was given after an abort; what NCCL does has an end that is waited for.
                # The live tensor may receive directly only where no one writes into it afterwards. Elsewhere
                # the chunk comes into memory of its own, which can be given up.
                whole = len(parts) == 1 and parts[0].device == device and pair.queues
                chunk = parts[0] if whole else torch.empty(end - begin, dtype=torch.uint8, device=device)
                _move(pair, chunk)
                coming.append((begin, end, *_on_host(lane, fingerprint(chunk))))
                if not whole:
                    for part, got in zip(parts, torch.split(chunk, [p.numel() for p in parts]), strict=True):
                        part.copy_(got)
                if len(coming) > AHEAD:
                    confirm()
            while coming:
                confirm()
    except (CollectiveFault, RuntimeError) as error:
        raise StateError(f"the direct transfer between GPUs failed: {error}") from error
    finally:
        line.close()
        line.join()
        pair.close()


@contextmanager
def _lane(image: Image, pair: GlooGroup) -> Iterator[Lane]:
    """For one stripe: on a stream that no other one uses meanwhile, or they would wait for each other. On leaving nothing of
    it is read or written any more."""
    try:
        number = _idle.pop()
    except IndexError:
        number = next(_numbers)
    lane = Lane(image.device, image.ready, f"direct {number}")
    try:
        with lane.on():
            yield lane
    except BaseException:
        pair.abort()
        raise
    finally:
        # Also on an error: the caller goes on to fill the same tensors over HTTP, and a late kernel of this
        # stripe would overwrite what that brought.
        Lane.wait(lane.mark())
        _idle.append(number)


_numbers = itertools.count()
_idle: list[int] = []


def _move(pair: GlooGroup, chunk: torch.Tensor) -> None:
    """One chunk, from the donor to the newcomer. With NCCL it is queued."""
    work = pair.broadcast(chunk, DONOR)
    try:
        pair.wait(work)
    except CollectiveFault:
        pair.drain(work)
        raise


def _on_host(lane: Lane, words: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Two numbers on their way to the host, and the mark after which they are there."""
    into = lane.buffer(words.numel() * words.element_size()).view(torch.int64)
    return into, lane.copy(into, words)


def fingerprint(chunk: torch.Tensor) -> torch.Tensor:
    """Two sums over the bytes of a chunk, modulo 2^64, computed where it is. Every changed word changes them: the weights are odd.
    The second one, of the upper halves, sees two flipped signs, which the first may not. Additions of whole numbers have no
    order, so every device finds the same."""
    if chunk.data_ptr() % 8 or chunk.storage_offset() % 8:
        chunk = chunk.clone()
    count = chunk.numel() // 8
    rest = torch.zeros(8, dtype=torch.uint8, device=chunk.device)
    rest[: chunk.numel() - 8 * count] = chunk[8 * count :]
    total = torch.zeros(2, dtype=torch.int64, device=chunk.device)
    for words in (*torch.split(chunk[: 8 * count].view(torch.int64), BLOCK_WORDS), rest.view(torch.int64)):
        weights = _weights(chunk.device)[: words.numel()]
        sums = torch.stack([(words * weights).sum(), ((words >> 32) * weights).sum()])
        # A polynomial over the blocks, modulo 2^64. With a plain sum two blocks that changed places would not
        # be seen.
        total = total * FACTOR + sums
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * BLOCK_WORDS, 2, dtype=torch.int64, device=device)
