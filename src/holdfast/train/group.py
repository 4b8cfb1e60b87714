"""The connections of one generation: the mesh for words, gloo for gradients, and how both are freed.

`ProcessGroupGloo.abort` does not free a call that waits for a silent peer, and gloo's own time-out is minutes
long. Shutting down this process's own sockets of the generation does, within milliseconds, and needs no
privilege. They are those that appeared while the group was built.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import CollectiveFailed
from holdfast.protocol.messages import Generation
from holdfast.train.mesh import Mesh, MeshListener, MeshStore

GLOO_TIMEOUT = timedelta(minutes=30)
"""Never waited for: the coordinator breaks a generation that stands still long before."""


class Group:
    """One generation's connections. Built in two parts, so that `abort` works while `connect` runs."""

    def __init__(self, generation: Generation, rank: int, host: str, listener: MeshListener) -> None:
        self.generation = generation.number
        self.rank = rank
        self.size = len(generation.members)
        self.mesh = Mesh(generation, rank)
        self._host = host
        self._listener = listener
        self._before: set[str] = set()
        self._after: set[str] | None = None
        self._gloo: Any = None
        self._aborted = False

    def connect(self, token: str) -> None:
        """Connects to every member. Raises CollectiveFailed when one is gone or the generation breaks."""
        if self.size == 1:
            return
        self.mesh.connect(self._listener, token)
        store = MeshStore(self.mesh)
        self._before = set(socket_inodes())
        try:
            self._gloo = _gloo(store, self.rank, self.size, self._host)
        except RuntimeError as error:
            raise CollectiveFailed(f"gloo cannot connect: {first_line(error)}") from error
        finally:
            self._after = set(socket_inodes())
        store.finish()
        if self._aborted:
            self.abort()
            raise CollectiveFailed("the generation broke while its members connected")

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Starts the sum of `tensor` over all members, in place; returns a Work to wait for."""
        return self._gloo.allreduce([tensor], dist.AllreduceOptions())

    def abort(self) -> None:
        """Frees every call that waits for a peer. Safe from any thread, more than once."""
        self._aborted = True
        self._listener.release(self.generation)
        self.mesh.abort()
        now = socket_inodes()
        ours = (set(now) if self._after is None else self._after) - self._before
        if self._before:
            for inode in ours & set(now):
                shut_down(now[inode])

    def close(self) -> None:
        """Gives everything back, after `abort` or when no member needs the group any more."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.abort()
        self.mesh.close()
        self._listener.release(self.generation)


def _gloo(store: MeshStore, rank: int, size: int, host: str) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname=host)]
    options._timeout = GLOO_TIMEOUT
    return backend(store, rank, size, options)


def socket_inodes() -> dict[str, int]:
    """This process's sockets: inode name to descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = str(entry.readlink())
        except OSError:
            continue
        if link.startswith("socket:"):
            found[link] = int(entry.name)
    return found


def shut_down(fd: int) -> None:
    """Ends a connected TCP socket under whoever waits on it; listening and Unix sockets are left alone."""
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        return
    with sock:
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def first_line(error: BaseException) -> str:
    """The part of a torch error that a person reads."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
