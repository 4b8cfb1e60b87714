"""One process group, of gloo or NCCL: built, waited for and freed so that nobody waits for a lost peer without an end.

`ProcessGroupGloo.abort` does not free a call that waits for a silent peer, and gloo's own time-out is minutes
long. Shutting down this process's own sockets of the group does, within milliseconds, and needs no privilege.
They are told by their addresses: gloo's members tell each other where they listen through the store, as the kernel
writes addresses (`AddressStore`). Whatever else the process connects meanwhile (a store of objects, a tracker, a loader) has
others, and is left alone.

It does not free all of them: gloo tells a closed connection to the operations that are still queued, but not
to one whose bytes are half sent or half received (`Pair::signalException` in gloo/transport/tcp/pair.cc looks
at neither `rx_` nor the unbound buffers in `tx_`), and a connection that is still being made has no socket to
shut down. Nobody may wait for those, so the main thread waits for gloo in a way that an abort ends too, and
what gloo still holds then is left to it: see `wait` and `drain`.

NCCL takes gloo's place where every worker of a group has a GPU of its own. Written against ProcessGroupNCCL of PyTorch 2.13;
what differs from gloo:

- A collective is only queued when its Work is waited for, so an abort shows later: an aborted kernel ends and leaves
  garbage. Whoever is about to count a step asks `GlooGroup.intact` once the device has come to its end.
- A communicator that is still being made cannot be aborted: torch holds its lock while it waits for it. So it is made, and
  used once, on a thread of its own, and TORCH_NCCL_NONBLOCKING_TIMEOUT ends the wait for a peer that never came.
- An abort waits for the communicator's own threads, and must come once: torch joins its watchdog in it. All aborts of a
  worker run side by side, since one that frees memory waits for kernels that only another one ends.
- Torch's watchdog would end the process when a peer is gone (TORCH_NCCL_ASYNC_ERROR_HANDLING) or when it takes an abort
  for a hang (TORCH_NCCL_ENABLE_MONITORING), and holds up every call for a minute while it writes down what it saw
  (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC). Here the coordinator finds that out, so these are off, unless the environment says
  otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from holdfast.errors import CollectiveFault, UsageError
from holdfast.protocol.network.sockets import unpace

_log = logging.getLogger(__name__)

GPU_GROUPS = "HOLDFAST_GPU_GROUPS"
"""`gloo`: groups of workers on GPUs are gloo's in any case. `nccl`: they are NCCL's, also where workers share a GPU."""

Store = Any
"""A torch.distributed.Store."""


GLOO_TIMEOUT = timedelta(minutes=30)
"""Never waited for: the coordinator breaks a generation that stands still long before."""

CONNECT_TIMEOUT = timedelta(seconds=20)
"""How long gloo may connect. Not waited for after an abort."""

WAIT_SLICE = timedelta(milliseconds=50)
"""How late the main thread may notice an abort of which gloo did not tell it. Gloo has no wait that another
thread can end; a slice costs 0.1 to 0.2 ms of a core."""

SIGN_S = 0.5
"""How often somebody who connects shows that it lives."""

SUM_BLOCK = 1 << 16
"""Elements that are added up at a time, so that the sum so far stays in the cache."""

WARNS_ABOVE, MOST_MEMBERS = 64, 256
"""Members of one of gloo's groups. Each connects to every other one: with 8,000 that took 20 minutes (pull request 408 of
pytorch/gloo)."""

DRAIN = timedelta(milliseconds=200)
"""How long gloo may take to let go of a tensor once its sockets are shut down (its loop ticks every 10 ms)."""

T = TypeVar("T")


class GlooGroup:
    """The connections between the members of one group. Built in two parts, so that `abort` works during `connect`.

    Attributes:
        waits: called now and then while `connect` waits; may raise to end it.
    """

    def __init__(self, rank: int, size: int, host: str, device: torch.device | None = None) -> None:
        """device: where the tensors are."""
        self.rank = rank
        self.size = size
        self._host = host
        self._wanted = device
        self._device: torch.device | None = None  # the GPU, once the members have agreed on NCCL
        self._addresses_told: AddressStore | None = None
        self._before: set[int] = set()
        self._sockets: dict[int, int] | None = None  # once all are there: an address may be another's later
        self._group: Any = None
        self._stuck = False
        self._aborted = self._freed = False
        self._news = threading.Condition()
        self.waits: Callable[[], None] = lambda: None

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called: nothing more comes."""
        return self._aborted

    @property
    def queues(self) -> bool:
        """Whether a collective that was waited for may not have run yet, because it is only queued on a device: with NCCL."""
        return self._device is not None

    def connect(self, store: Any) -> None:
        """Connects to every member. Raises CollectiveFault when one is gone or `abort` is called."""
        # Sockets that exist now belong to somebody else: a tracker, a store of objects, a former group. Only
        # later ones can be this group's.
        self._before = set(sockets_here())
        self._addresses_told = AddressStore(store)
        self._group = self._build(self._addresses_told)
        # From here on inode and descriptor are remembered together. The script may close a socket whose
        # number is then given to another; the inode shows that, and `abort` leaves the stranger alone.
        self._sockets = self._group_sockets()
        # Gloo opens its sockets itself. Between workers on one machine BBR, which paces, halves the
        # bandwidth.
        for fd in self._connections():
            with_socket(fd, unpace)
        # `abort` may have come while the sockets were not known yet, and shut down nothing. So it is called
        # again, now that they are.
        if self._aborted:
            self.abort()
            raise CollectiveFault("the generation broke while its members connected")

    def _build(self, store: Any) -> Any:
        """The process group. A thread makes it, because nothing frees one that waits for a lost peer."""
        results: list[Any] = []

        def build() -> None:
            result: Any = CollectiveFault("the process group was not connected")
            try:
                if agreed(store, self.rank, self.size, self._wanted):
                    assert self._wanted is not None
                    self._device = self._wanted
                    result = nccl_group(
                        store, self.rank, self.size, self._wanted, GLOO_TIMEOUT, self._abortable
                    )
                else:
                    check_size(self.rank, self.size)
                    result = _gloo(store, self.rank, self.size, self._host)
            except Exception as error:  # noqa: BLE001 - gloo's or, through the store, the control channel's; raised below
                result = error
            finally:
                with self._news:
                    results.append(result)
                    self._news.notify_all()

        # A daemon that may never end: gloo's connect cannot be cancelled. It holds its own references and
        # touches nothing of this object but `results`, which nobody reads after an abort.
        threading.Thread(target=build, name="holdfast-connect", daemon=True).start()
        with self._news:
            # A sign of life now and then: on a slow network connecting takes longer than a stall is
            # tolerated, and this worker is not the one that holds the others up.
            while not self._news.wait_for(lambda: results or self._aborted, SIGN_S):
                self.waits()
        if not results:
            raise CollectiveFault("the generation broke while its members connected")
        if isinstance(results[0], UsageError):
            raise results[0]
        if isinstance(results[0], Exception):
            raise CollectiveFault(f"cannot connect: {first_line(results[0])}") from results[0]
        return results[0]

    def _abortable(self, group: Any) -> None:
        """From the thread that builds: NCCL's group is there, and its kernels may wait for a peer."""
        with self._news:
            self._group = group
            # Read under the lock under which `abort` sets it and reads `_group`. Either `abort` finds the
            # group and frees it, or this thread sees the flag. NCCL must be aborted once: a second abort
            # joins a watchdog that is gone.
            late = self._aborted
        if late:
            self._free(group)
            raise CollectiveFault("the generation broke while its members connected")

    def _free(self, group: Any) -> None:
        """Ends NCCL's kernels, once."""
        with self._news:
            already, self._freed = self._freed, True
        if not already:
            abort_nccl(group)

    def start(self, call: Callable[[Any], Any]) -> Any:
        """Starts a collective: `call` is given gloo's process group and returns its Work.

        Raises:
            CollectiveFault: a peer is gone, or `abort` was called.
        """
        # After an abort gloo would accept the collective and never finish it, because its sockets are shut.
        if self._aborted or self._group is None:
            raise CollectiveFault("the generation broke")
        try:
            work = call(self._group)
        except RuntimeError as error:
            raise CollectiveFault(first_line(error)) from error
        # NCCL returns nothing for a collective that the caller does not want to wait for later (asyncOp is False, as of
        # FSDP2's): it is queued on the current stream, where all that follows comes after it.
        return ended() if work is None else work

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Starts the sum of `tensor` over all members, in place; returns a Work for `wait`."""
        options = dist.AllreduceOptions()
        options.timeout = GLOO_TIMEOUT
        return self.start(lambda gloo: gloo.allreduce([tensor], options))

    def exchange(
        self, received: torch.Tensor, counts: list[int], sent: torch.Tensor, shares: list[int]
    ) -> Any:
        """Starts sending every member its part of `sent`, and receiving one from each; returns a Work for `wait`.

        Args:
            counts: elements that come from each member; the parts are one after the other in `received`.
            shares: elements that go to each member, in the same way.
        """
        options = dist.AllToAllOptions()
        options.timeout = GLOO_TIMEOUT
        return self.start(lambda gloo: gloo.alltoall_base(received, sent, counts, shares, options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Starts making `tensor` everywhere what it is at the root; returns a Work for `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = GLOO_TIMEOUT
        return self.start(lambda gloo: gloo.broadcast([tensor], options))

    def gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Brings every member's tensor here: `out`, contiguous, has them one after the other. Gloo's own all-gather goes
        through a copy in new memory and took four times as long.

        Raises:
            CollectiveFault: a peer is gone, or `abort` was called.
        """
        parts = out.view(self.size, -1)
        if parts[self.rank].data_ptr() != mine.data_ptr():
            parts[self.rank].copy_(mine.view(-1))
        self._all([partial(self.broadcast, part, root) for root, part in enumerate(parts)])

    def scatter_sum(self, out: torch.Tensor, mine: torch.Tensor, pool: BufferPool) -> None:
        """The sum over all members of this member's part of `mine`, contiguous. Added up in the order of the ranks, in single
        precision at least, rounded once. Gloo's own reduce-scatter is an all-reduce of everything. pool: for what
        the others send.

        Raises:
            CollectiveFault: a peer is gone, or `abort` was called.
        """
        parts = mine.view(self.size, -1)
        received = pool.take(mine.numel(), mine.dtype).view(self.size, -1)
        calls = []
        # In round d every member sends to rank + d and receives from rank - d. So at any time each link
        # carries one part in each direction; with a fixed order of targets all would send to rank 0 first.
        for distance in range(1, self.size):
            there, back = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            counts, shares = [0] * self.size, [0] * self.size
            counts[back] = shares[there] = out.numel()
            calls.append(partial(self.exchange, received[back], counts, parts[there], shares))
        self._all(calls)
        # Parts are added in the order of the ranks and not of arrival. Otherwise a repeated step would differ
        # in its last bits from the one before the fault.
        add_up(out.view(-1), [parts[r] if r == self.rank else received[r] for r in range(self.size)])

    def _all(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Starts collectives, all members the same in the same order, and waits for them."""
        works: list[Any] = []
        try:
            for call in calls:
                works.append(call())
            for work in works:
                self.wait(work)
        except CollectiveFault:
            for work in works:
                self.drain(work)
            raise

    def wait(self, work: Any) -> None:
        """Waits for what was started.

        Raises:
            CollectiveFault: a peer is gone, or `abort` was called.
        """
        if self._device is not None:  # queued: whether it came to its end shows in `intact`
            try:
                work.wait()
            except RuntimeError as error:
                raise CollectiveFault(first_line(error)) from error
            self.intact()
            return
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError as error:
                if not work.is_completed():
                    # A time slice that ran out says nothing about the peer. Only the flag does: the
                    # coordinator has decided that the generation is over.
                    if self._aborted:
                        raise CollectiveFault("the generation broke") from error
                    continue
            try:
                work.wait()  # it ended, perhaps well and just after the slice: now it says how
                return
            except RuntimeError as error:
                raise CollectiveFault(first_line(error)) from error

    def until(self, done: Callable[[], bool]) -> bool:
        """Waits until `done()`, which is asked again after each `tell`, from another thread. False: `abort` came first."""
        with self._news:
            self._news.wait_for(lambda: self._aborted or done())
            return done()

    def tell(self) -> None:
        """Has `until` ask again: what another thread waits for may have come."""
        with self._news:
            self._news.notify_all()

    def let_go(self, done: Callable[[], bool]) -> None:
        """After `abort`: as `drain`, for what another thread waits for."""
        with self._news:
            self._stuck |= not self._news.wait_for(done, DRAIN.total_seconds())

    def intact(self) -> None:
        """Raises CollectiveFault if results of NCCL may be garbage. Call it when the device has finished them."""
        if self._device is not None and self._aborted:
            raise CollectiveFault("the generation broke")

    def drain(self, work: Any) -> bool:
        """After `abort`: waits until gloo has let go of the tensor. False if it never will: the tensor is lost."""
        try:
            if self._device is not None:
                work.wait()  # the abort ends the kernel; what is queued from now on comes after it
                return True
            work.wait(DRAIN)
        except RuntimeError:
            if self._device is not None:
                return False
            if not work.is_completed():
                self._stuck = True
                return False
        return True

    def abort(self) -> None:
        """Frees every call that waits for a peer. Safe from any thread, more than once."""
        with self._news:
            self._aborted = True
            group = self._group
            self._news.notify_all()
        if self._device is not None:
            if group is not None:
                self._free(group)
            return
        for fd in self._connections():
            with_socket(fd, shut_down)

    def _connections(self) -> list[int]:
        """Descriptors of the group's connections, as far as they are there."""
        found = self._group_sockets() if self._sockets is None else self._sockets
        return [fd for inode, fd in list(found.items()) if is_socket(fd, inode)]

    def _group_sockets(self) -> dict[int, int]:
        store, now = self._addresses_told, sockets_here()
        if store is None:
            return {}
        return {i: fd for i, fd in now.items() if i not in self._before and with_socket(fd, store.has)}

    def close(self) -> None:
        """Frees everything, after `abort` or when no member needs the group any more."""
        with self._news:
            self._aborted = True
            group, self._group = self._group, None
        # Gloo still holds a tensor and waits for a peer that may never close its end. Its destructor would
        # wait too, in whichever thread drops the last reference. So the group is leaked on purpose: a few
        # kilobytes, once for such a fault.
        if self._stuck:
            abandon(group)
        elif group is not None and self._device is not None:
            self._free(group)
        elif group is not None:
            group.abort()


class AddressStore(dist.Store):  # type: ignore[misc, name-defined, unused-ignore]
    """A group's store, which remembers what its members told each other: where gloo listens, among other things.

    Gloo listens once in every process. So the connections that it accepted have the address that this member told, and
    those that it made lead to one that another member told.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._mine: set[bytes] = set()
        self._theirs: set[bytes] = set()

    def set(self, key: str, value: bytes | str) -> None:
        """As the store has it."""
        # Every value is searched for something that looks like an address. What gloo writes is not documented
        # and differs between versions; a false match costs nothing, because it must also be the address of a
        # socket that this process opened meanwhile.
        self._mine |= _addresses(value.encode() if isinstance(value, str) else bytes(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """As the store has it."""
        value = bytes(self._store.get(key))
        self._theirs |= _addresses(value) - self._mine
        return value

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        """As the store has it."""
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """As the store has it."""
        return bool(self._store.check(keys))

    def has(self, sock: socket.socket) -> bool:
        """Whether this is a connection of the group."""
        try:
            # A connection that gloo accepted has this process's listening port at its near end. One that it
            # made has a peer's at its far end. Nothing else identifies them: gloo gives no descriptors out.
            near, far = sock.getsockname(), sock.getpeername()
        except OSError:
            return False  # it is not connected
        return _key(sock.family, near) in self._mine or _key(sock.family, far) in self._theirs


HOSTS = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where in the kernel's form of an address, after family and port, the host begins, and its bytes."""


def _addresses(value: bytes) -> set[bytes]:
    """All that may be addresses in what gloo tells: family, port and host. More than there are does no harm."""
    found = set()
    for family, (begin, size) in HOSTS.items():
        mark = struct.pack("=H", family)
        at = value.find(mark)
        while at >= 0:
            found.add(value[at : at + 4] + value[at + begin : at + begin + size])
            at = value.find(mark, at + 1)
    return found


def _key(family: int, address: Any) -> bytes:
    if family not in HOSTS:
        return b""
    host = socket.inet_pton(family, address[0].partition("%")[0])
    return struct.pack("=H", family) + struct.pack(">H", address[1]) + host


def add_up(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """out = the sum of the parts, from the first to the last, in single precision at least, rounded once."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    # The running sum of a block stays in the cache while all parts are added. Whole tensors at a time would
    # go through memory once for every part.
    for low in range(0, out.numel(), SUM_BLOCK):
        total = parts[0][low : low + SUM_BLOCK].to(wide, copy=True)
        for part in parts[1:]:
            total += part[low : low + SUM_BLOCK]
        out[low : low + SUM_BLOCK].copy_(total)


def check_size(rank: int, size: int) -> None:
    """Whether gloo can connect so many members. One that is large, but not too large, is logged by rank 0.

    Raises:
        UsageError: there are too many.
    """
    if size <= WARNS_ABOVE:
        return
    what = (
        f"{size} workers of one group would be connected by gloo, each with every other one, after every change of the "
        "membership"
    )
    cure = (
        f"give each worker a GPU of its own, so that NCCL connects them (and unset {GPU_GROUPS} if it is gloo), or train with "
        "fewer replicas"
    )
    if size > MOST_MEMBERS:
        raise UsageError(f"{what}; {MOST_MEMBERS} are the most: {cure}")
    if rank == 0:
        _log.warning("%s: above %d that takes long; %s", what, WARNS_ABOVE, cure)


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname=host)]
    # Two limits: a short one while the members connect, and a long one afterwards. Gloo takes the one that it
    # was made with for both, so the second is set after it is built.
    options._timeout = CONNECT_TIMEOUT
    group = backend(store, rank, size, options)
    group._set_default_timeout(GLOO_TIMEOUT)
    return group


_duplicates = threading.RLock()
"""Held while a descriptor of `with_socket` is there. One that `sockets_here` found would be taken for the socket's own, and
the socket for closed as soon as it goes: then nobody would shut it down, and whoever waits on it would wait on."""


def sockets_here() -> dict[int, int]:
    """This process's sockets: inode to descriptor."""
    found = {}
    with _duplicates:
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - there may be thousands, and a generation waits for this
            try:
                status = os.fstat(int(name))
            except OSError:
                continue  # closed meanwhile, as the listing's own is
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def is_socket(fd: int, inode: int) -> bool:
    """Whether a descriptor still is that socket, which somebody else owns and may have closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def with_socket(fd: int, act: Callable[[socket.socket], T]) -> T | None:
    """Calls `act` with the socket of a descriptor that somebody else owns; None when it was closed."""
    with _duplicates:
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        with sock:
            return act(sock)


def shut_down(sock: socket.socket) -> None:
    """Ends a connected TCP socket under whoever waits on it; listening and Unix sockets are left alone."""
    with suppress(OSError):
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.getpeername()
            sock.shutdown(socket.SHUT_RDWR)


def ended() -> Any:
    """A Work that has come to its end."""
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return _create_work_from_future(done)


def abandon(group: object) -> None:
    """Keeps a process group alive for ever, even when Python ends: destroying it would wait for its operations."""
    # A list in this module would not do: at exit Python clears modules, and the destructor would run then and
    # wait.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def first_line(error: BaseException) -> str:
    """The first line of a torch error, which is the part that a person reads."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def agreed(store: Store, rank: int, size: int, device: torch.device | None) -> bool:
    """Whether a group uses NCCL: every member has it, and a GPU that no other one has. All members say the same.

    Two workers on one GPU, as on a laptop or with several nodes of the local engine, cannot: NCCL refuses that, unless it
    takes them for two machines (`CHOICE`).
    """
    if device is None or device.type != "cuda":
        return False
    # The UUID and not the index: every container and every node counts its GPUs from 0.
    store.set(f"gpu-{rank}", _gpu(device))
    gpus = {bytes(store.get(f"gpu-{other}")) for other in range(size)}
    # All members read the same values, so they decide alike without another round. One that chose differently
    # would wait in another library's connect.
    return len(gpus) == size and b"" not in gpus


def _gpu(device: torch.device) -> bytes:
    """Which GPU of all in the world this is; nothing where NCCL cannot be used."""
    if not dist.is_nccl_available() or os.environ.get(GPU_GROUPS) == "gloo":
        return b""
    gpu = str(torch.cuda.get_device_properties(device).uuid).encode()
    if os.environ.get(GPU_GROUPS) == "nccl":
        # NCCL tells GPUs apart by the machine first. With a name of its own for every process it connects them through
        # sockets, as it does machines without a faster network. Read once, before the first communicator.
        machine = os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{os.getpid()}")
        gpu += machine.encode()
    return gpu


def nccl_group(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta,
    made: Callable[[Any], None],
) -> Any:
    """A process group whose members are connected. made: given the group as soon as `abort` is of use to it.

    Raises:
        RuntimeError: torch cannot, or a peer never came.
    """
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    backend: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = backend.Options()
    options._timeout = timeout
    # A communicator that blocks cannot be aborted while it is being made. With this torch polls it, and
    # TORCH_NCCL_NONBLOCKING_TIMEOUT bounds the wait.
    options.config.blocking = 0
    group = backend(store, rank, size, options)
    # Before it connects: from here on `abort` has something to end, also when a peer never comes.
    made(group)
    group.eager_connect_single_device(device)
    # A stream of its own, so the first collective waits for no kernel of the model, and no kernel of the
    # model waits for a peer that may be lost.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # what is made for the first collective is made here, and waited for
        group.allreduce([torch.zeros(1, device=device)]).wait()
    stream.synchronize()
    return group


def abort_nccl(group: Any) -> None:
    """Ends everything that is queued or being made, and gives the group back. Once for every group."""
    # Not awaited. An abort waits for the communicator's kernels, which may wait for a kernel that another
    # group's abort ends; one after the other they would deadlock.
    threading.Thread(target=group.abort, name="holdfast-nccl-abort", daemon=True).start()


SMALL_BYTES = 1 << 20
"""Less than that comes from the allocator, which keeps it."""


KEPT_BLOCKS = 8


class BufferPool:
    """Blocks of memory that go back to it when the last tensor in them is gone. Safe from any thread.

    Memory that is needed for a moment in every step is used again in the next one, because the system has to clear new memory page
    by page.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor on the CPU, of whatever was there."""
        nbytes = count * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(count, dtype=dtype)
        block = self._block(nbytes)
        view = memoryview(block)[:nbytes]
        # The tensor keeps the view, and views of the tensor keep it too. So the block comes back when the
        # last of them is gone, whoever holds it. Not at exit: then the pool itself may be gone.
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype)  # which keeps the view

    def _block(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            # At most twice as large: a small request must not hold a large block that the next layer needs.
            fit = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
            if fit:
                block = min(fit, key=len)
                self._free.remove(block)
                return block
        return mmap.mmap(-1, nbytes)

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._free.append(block)
            # The oldest go first. A model's layers ask for the same few sizes in turn, so what is old is of a
            # size that nobody asks for any more.
            del self._free[:-KEPT_BLOCKS]
