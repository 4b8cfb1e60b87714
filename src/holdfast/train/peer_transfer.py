"""State from peers: a newcomer reads stripes of it from several donors at once, each chunk with a checksum.

Donors serve plain HTTP, straight from their live tensors, to those who prove that they know the job's token; the donor
proves it too, see `protocol.network.proof`. `curl` can read it with the token itself:

    GET /state/index?generation=7            the index, msgpack; under /constant/ the same of what never changes
    GET /state/bytes?generation=7  Range: ...   chunks of at most CHUNK_BYTES, each followed by its xxh3_64
    GET /state/direct?generation=7  Range: ...  the same bytes from GPU to GPU, where both can (`gpu_transfer`)

Serving needs no pause: until the newcomer has its state it cannot vote, and no donor can change a parameter
before that vote.
"""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import msgspec
import xxhash

from holdfast.errors import ChecksumError, CollectiveFault, StateError
from holdfast.observe.transfer_progress import Seen
from holdfast.protocol.messages import Generation, Member
from holdfast.protocol.network.proof import ANSWER_HEADER, Question
from holdfast.protocol.network.range_server import RangeRequest, RangeServer
from holdfast.protocol.network.sockets import shut
from holdfast.tensors.index import StateIndex, decode_index
from holdfast.train import gpu_transfer
from holdfast.train.control_channel import ChannelListener
from holdfast.train.state_image import Image, Protected, targets

_log = logging.getLogger(__name__)
CHUNK_BYTES = 4 << 20
DIGEST_BYTES = 8
MIN_STRIPE_BYTES = 8 << 20
PUBLISH_WAIT_S = 2.0
"""A request for a state that a donor does not have yet is held for so long; then the reader asks again, which shows that
it lives. A donor may be reading it from a durable tier."""
CONNECT_S = 5.0


def _server_name(worker: str) -> str:
    """For the proof: a worker's name is that of one process."""
    return f"state {worker}"


class DonorServer(RangeServer):
    """Serves this worker's state to newcomers of the generation for which it was published."""

    def __init__(self, host: str, token: str, worker: str) -> None:
        """worker: this one's name, by which the others know it."""
        self._news = threading.Condition()
        self._generation = 0
        self._image: Image | None = None
        self._constant: Image | None = None
        self._lines: set[gpu_transfer.TransferStore] = set()
        super().__init__(host, token, _server_name(worker), "holdfast-donor")

    def close(self) -> None:
        """Stops serving; requests that wait are answered with 'gone'."""
        self.publish(1 << 62, None)
        # Not the base's close, which cuts every connection: who waits for a state is to hear that it will not come here.
        # A transfer ends with the generation that it is for, which is over with this publish.
        self.refuse_new()

    def publish(self, generation: int, image: Image | None, constant: Image | None = None) -> None:
        """From now on requests for this generation are answered (None: with 'gone'); older ones fail. constant: the part
        of the state that never changes."""
        with self._news:
            self._generation, self._image, self._constant = generation, image, constant
            self._news.notify_all()
            # Whoever is sending from the live tensors must stop before this worker changes them. The new
            # number is set first, so a line that is opened now is refused in `opened`.
            for line in self._lines:
                line.close()

    def _is_to_come(self, generation: int) -> bool:
        return self._generation < generation

    def _wait(self, generation: int, constant: bool) -> Image | None:
        with self._news:
            # A newcomer is told of its generation at the same time as its donors, so it may call before they
            # have published. Holding the request costs one thread; refusing it would cost a round trip and a
            # poll.
            self._news.wait_for(lambda: self._generation >= generation, timeout=PUBLISH_WAIT_S)
            image = self._constant if constant else self._image
            return image if self._generation == generation else None

    def _current(self, generation: int) -> bool:
        return self._generation == generation

    @contextmanager
    def _open_line(self, generation: int) -> Iterator[Callable[[gpu_transfer.TransferStore], None]]:
        """While a stripe goes from GPU to GPU: the end of the generation ends it."""
        own: list[gpu_transfer.TransferStore] = []

        def opened(line: gpu_transfer.TransferStore) -> None:
            with self._news:
                # Checked under the lock that `publish` holds: a line is either in the set when it closes all
                # of them, or never opened.
                if self._generation != generation:
                    raise CollectiveFault("the generation ended")
                own.append(line)
                self._lines.add(line)

        try:
            yield opened
        finally:
            with self._news:
                self._lines.difference_update(own)

    def answer(self, request: RangeRequest) -> None:
        """The paths of the module's docstring."""
        # A generation fetches once. A kept connection would only hold a thread until the time limit.
        request.close_connection = True
        url = urlsplit(request.path)
        number = parse_qs(url.query).get("generation", [""])[0]
        constant = url.path.startswith("/constant/")
        image = self._wait(int(number), constant) if number.isdecimal() else None
        if image is None and number.isdecimal() and self._is_to_come(int(number)):
            request.send_error(503, "this generation is not served yet: try again")
        # 410 and 503 mean different things to the reader: at 410 it asks the next donor, at 503 it asks this
        # one again. A donor that reads the state from a tier for all answers 503 until it has it.
        elif image is None:
            request.send_error(410, "this generation is not served here")
        elif url.path in ("/state/index", "/constant/index"):
            request.send(msgspec.msgpack.encode(image.index))
        elif url.path in ("/state/bytes", "/constant/bytes"):
            self._send_range(request, image, int(number))
        elif url.path in ("/state/direct", "/constant/direct") and gpu_transfer.possible(image):
            self._send_directly(request, image, int(number))
        else:
            request.send_error(404)

    def _send_directly(self, request: RangeRequest, image: Image, generation: int) -> None:
        if (span := request.span(image.index.nbytes)) is None:
            return
        request.begin(HTTPStatus.SWITCHING_PROTOCOLS, {"Connection": "Upgrade", "Upgrade": "holdfast-direct"})
        with self._open_line(generation) as opened, suppress(CollectiveFault):  # it comes another way
            gpu_transfer.send(request.connection, image, *span, opened)

    def _send_range(self, request: RangeRequest, image: Image, generation: int) -> None:
        if (span := request.span(image.index.nbytes)) is None:
            return
        start, stop = span
        chunks = -(-(stop - start) // CHUNK_BYTES)
        request.begin(
            HTTPStatus.PARTIAL_CONTENT,
            {"Content-Length": stop - start + chunks * DIGEST_BYTES, "X-Holdfast-Chunk": CHUNK_BYTES},
        )
        for low in range(start, stop, CHUNK_BYTES):
            # The tensors are live. While the generation holds nobody updates them, because the newcomer has
            # not voted. Once it is over an update may be under way, so the bytes stop in the middle and the
            # reader sees a short answer, never a torn state.
            if not self._current(generation):
                return
            digest = xxhash.xxh3_64()
            for piece in image.pieces(low, min(low + CHUNK_BYTES, stop)):
                digest.update(piece)
                request.write(piece)
            request.write(memoryview(digest.digest()))


class _NotYetError(StateError):
    """A donor does not have the state yet."""


class Fetch:
    """The transfer of the state at a generation's start, in parallel stripes from its donors."""

    def __init__(
        self,
        generation: Generation,
        donors: tuple[int, ...],
        token: str,
        seen: Seen,
        waits: Callable[[int], None] = lambda rank: None,
        what: Literal["state", "constant"] = "state",
    ) -> None:
        """`seen` is told after every chunk, and of 0 bytes now and then while there are none yet; it may raise to end the
        transfer. `waits` is told the rank of a donor that was called and has not sent all; -1: all have.
        what: the state, or what of it never changes."""
        self._generation = generation.number
        self._members = [generation.members[rank] for rank in donors]
        self._token = token
        self._seen = seen
        self._waits = waits
        self._what = what
        self._called: list[int] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._aborted = False

    def abort(self) -> None:
        """Ends the transfer at once. Safe from any thread."""
        with self._lock:
            self._aborted = True
            for connection in self._open:
                if connection.sock is not None:
                    shut(connection.sock)

    def busy(self) -> bool:
        """Whether a connection to a donor is open."""
        with self._lock:
            return any(c.sock is not None for c in self._open)

    def run(self, objects: Protected) -> Image:
        """Receives the whole image, into the live tensors of `objects` where they fit.

        Raises:
            StateError: no donor could give it, with the last donor's reason.
        """
        return self.fill(objects, self.index())

    def fill(self, objects: Protected, index: StateIndex) -> Image:
        """As `run`, for an index that was fetched before."""
        image = targets(objects, index)
        # Each stripe begins at another donor and goes on to the next one where that fails. So the load is
        # spread while all are well, and one lost donor costs only its own stripe's rest.
        stripes = _stripes(index.nbytes, len(self._members))
        if not stripes:
            return image
        with ThreadPoolExecutor(len(stripes), thread_name_prefix="holdfast-fetch") as pool:
            jobs = [
                pool.submit(self._stripe, self._members[i:] + self._members[:i], image, stripe)
                for i, stripe in enumerate(stripes)
            ]
            for job in jobs:
                job.result()
        return image

    def index(self) -> StateIndex:
        """The donors' index.

        Raises:
            StateError: as `run`.
        """
        while True:
            reasons, to_come = [], False
            for member in self._members:
                try:
                    with self._get(member, "index") as response:
                        return decode_index(response.read())
                except _NotYetError:
                    to_come = True
                except (OSError, http.client.HTTPException, StateError) as error:
                    reasons.append(f"rank {member.rank} on {member.node}: {error}")
            if not to_come:
                raise StateError(f"no donor could send its state: {'; '.join(reasons)}")
            self._seen(0, 0)

    def _stripe(self, members: list[Member], image: Image, stripe: tuple[int, int]) -> None:
        """Reads one stripe, going on at the next donor where one fails."""
        low, stop = stripe
        reason: Exception | None = None
        # The fast way first, and what it has not brought comes over HTTP from the same offset. Bytes that it
        # reported were verified, so none is fetched twice.
        if gpu_transfer.possible(image):
            low = self._directly(members[0], image, low, stop)
        if low == stop:
            return
        for member in members:
            try:
                with self._get(member, "bytes", (low, stop)) as response:
                    while low < stop:
                        high = min(low + CHUNK_BYTES, stop)
                        _read_chunk(response, image, low, high, member)
                        # Only verified chunks move `low` on. A damaged one is fetched again from the next
                        # donor, over the same place in the tensor.
                        self._seen(high - low, image.index.nbytes)
                        low = high
                return
            except (OSError, http.client.HTTPException, StateError) as error:
                # The last reason is kept, not all: earlier donors failed in ways that the next one made up
                # for.
                reason = error
        raise StateError(f"bytes {low} to {stop} of the state: the last donor failed: {reason}")

    def _directly(self, member: Member, image: Image, low: int, stop: int) -> int:
        """From GPU to GPU; returns up to where that went well."""
        far = low

        def moved(nbytes: int) -> None:
            nonlocal far
            far += nbytes
            self._seen(nbytes, image.index.nbytes if nbytes else 0)

        try:
            with self._connected(member, "direct", (low, stop)) as (connection, response):
                if response.status == HTTPStatus.SWITCHING_PROTOCOLS:
                    gpu_transfer.receive(connection.sock, image, low, stop, moved)
        except (OSError, http.client.HTTPException, StateError) as error:
            if not self._aborted:
                who = f"rank {member.rank} on {member.node}"
                _log.warning("%s: %s; bytes %d to %d come over HTTP", who, error, far, stop)
        return far

    @contextmanager
    def _get(
        self, member: Member, path: str, span: tuple[int, int] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with self._connected(member, path, span) as (_, response):
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise _NotYetError("it does not have the state yet")
            if response.status not in (200, 206):
                raise StateError(f"it answered {response.status} {response.reason}")
            yield response

    @contextmanager
    def _waiting_for(self, rank: int) -> Iterator[None]:
        """Several threads call at a time."""
        with self._lock:
            self._called.append(rank)
            self._waits(rank)
        try:
            yield
        finally:
            with self._lock:
                self._called.remove(rank)
                self._waits(self._called[-1] if self._called else -1)

    @contextmanager
    def _connected(
        self, member: Member, path: str, span: tuple[int, int] | None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        connection = http.client.HTTPConnection(member.host, member.data_port, timeout=CONNECT_S)
        path = f"/{self._what}/{path}?generation={self._generation}"
        question = Question(self._token, _server_name(member.worker), "GET", path)
        headers = {"Authorization": question.authorization, "Connection": "close"}
        if span:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        with self._lock:
            # The connection is registered under the same lock. Otherwise `abort` could walk over the set just
            # before, and this request would wait for a donor that has left.
            if self._aborted:
                raise StateError("the generation broke")
            self._open.add(connection)
        try:
            with self._waiting_for(member.rank):
                connection.request("GET", path, headers=headers)
                with connection.getresponse() as response:
                    # Before one byte of the body is used: it goes straight into the live tensors. Another process
                    # on a reused port must not be able to write into the model.
                    if not question.proves(response.getheader(ANSWER_HEADER, "")):
                        who = f"{member.host} port {member.data_port}, where {member.worker} listened,"
                        raise StateError(
                            f"{who} answered {response.status} and did not prove that it is this worker"
                        )
                    yield connection, response
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _stripes(nbytes: int, donors: int) -> list[tuple[int, int]]:
    # A stripe needs a connection and a proof. Below 8 MiB these cost more than a second donor saves.
    count = max(1, min(donors, nbytes // MIN_STRIPE_BYTES))
    size = max(1, -(-nbytes // count))  # a state may have no tensors
    # Stripes begin at a multiple of a chunk: both sides cut chunks from the stripe's own beginning, and their
    # checksums must be over the same bytes.
    size = -(-size // CHUNK_BYTES) * CHUNK_BYTES
    return [(low, min(low + size, nbytes)) for low in range(0, nbytes, size)]


def _read_chunk(
    response: http.client.HTTPResponse, image: Image, low: int, high: int, member: Member
) -> None:
    hasher = xxhash.xxh3_64()
    with image.filling(low, high) as pieces:
        for piece in pieces:
            view = piece
            while view:
                got = response.readinto(view)
                if not got:
                    raise StateError(f"rank {member.rank} on {member.node} closed the connection")
                view = view[got:]
            hasher.update(piece)
    if response.read(DIGEST_BYTES) != hasher.digest():
        raise ChecksumError(f"bytes {low} to {high} from rank {member.rank} on {member.node} are damaged")


class PeerEndpoint:
    """The address at which other workers reach this process. It lasts as long as the process, also when `main` is run again."""

    def __init__(self, host: str, token: str, worker: str) -> None:
        self.listener = ChannelListener(host, token, worker)
        self.donor = DonorServer(host, token, worker)

    def close(self) -> None:
        """Stops serving other workers."""
        self.listener.close()
        self.donor.close()
