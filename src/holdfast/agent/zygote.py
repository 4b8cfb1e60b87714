"""The zygote: a process that has imported the heavy modules and forks warm workers on request.

A fork takes milliseconds where the imports take seconds. The zygote itself never runs a parallel kernel and
never touches an accelerator, so its children start clean. It has one thread and one job: read a request (one
byte with a socket attached), fork.
"""

from __future__ import annotations

import array
import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.messages import Warm
from holdfast.protocol.wire.frames import pack
from holdfast.train.random_state import ImportedGenerators

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch asks NVML whether there is a GPU."""


def main() -> int:
    """`python -m holdfast.agent.zygote FD MODULE,...`: serves until the agent's end of FD closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    generators = import_modules(sys.argv[2].split(","))
    gc.freeze()  # children share these pages; a collection that touches them would copy them
    return _serve(channel, generators)


def _import_module(name: str) -> None:
    """Of the user's own modules some may be in the folder that the job was started in. Only those that are nowhere else
    are looked for there: others could have put a `torch.py` into it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module is there, but something that it imports is not. To look in the current folder would hide
        # that.
        if error.name != name.partition(".")[0]:
            raise
        here = str(Path.cwd())
        sys.path.append(here)
        try:
            importlib.import_module(name)
        finally:
            sys.path.remove(here)


class Zygote(NamedTuple):
    """A zygote that was forked, and the agent's end of its channel."""

    pid: int
    channel: socket.socket


def fork_zygote(generators: ImportedGenerators, lifeline: int) -> Zygote:
    """A zygote out of this process, which has imported everything and has no other thread.

    generators: what `import_modules` returned. lifeline: the agent's, which is closed in the zygote.
    """
    from holdfast.train.worker import die_with_parent

    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if pid := os.fork():
        theirs.close()
        return Zygote(pid, ours)
    ours.close()
    os.close(lifeline)
    die_with_parent()
    # PR_SET_PDEATHSIG is armed only now. If the agent ended before, no signal will come.
    if os.getppid() != parent:
        os._exit(0)
    os._exit(_serve(theirs, generators))


def _serve(channel: socket.socket, generators: ImportedGenerators) -> int:
    """Forks a worker for every request; returns when the agent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; workers end in order
    # Whoever sends it to all processes of a node means the agent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        channel.sendall(b"r")
    except OSError:
        return 0  # the agent is gone meanwhile
    while True:
        request, fds = _receive(channel)
        if not request:
            return 0
        worker = socket.socket(fileno=fds[0])
        if _fork(worker, generators):
            worker.close()
            continue
        # The worker must not hold the zygote's channel: the zygote ends when the agent's end closes, and the
        # agent notices the zygote's end by this channel being closed everywhere.
        channel.close()
        worker.set_inheritable(False)  # not for a program that the script becomes by os.exec
        from holdfast.train.script import leave
        from holdfast.train.worker import become

        leave(become(worker))


def import_modules(modules: list[str]) -> ImportedGenerators:
    """Imports what workers will need; returns the random generators that every fork must seed anew."""
    generators = ImportedGenerators()
    # A module that asks whether there is a GPU would start CUDA here, and no fork of this process could use it then.
    ours = NVML not in os.environ
    os.environ.setdefault(NVML, "1")
    gc.disable()  # what is imported stays, and looking through it again and again takes long
    with generators.watching():
        for name in filter(None, modules):
            _import_module(name)
            if name == "torch":
                # The first optimizer imports these; together they cost as much as torch itself.
                importlib.import_module("torch._dynamo")
                importlib.import_module("torch.distributed")
                importlib.import_module("holdfast.train.run")
    gc.enable()
    if ours:
        del os.environ[NVML]
    return generators


def _receive(channel: socket.socket) -> tuple[bytes, array.array[int]]:
    fds = array.array("i")
    try:
        request, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
    except ConnectionError:  # the agent is gone, and had not read all
        return b"", fds
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return request, fds


def _fork(worker: socket.socket, generators: ImportedGenerators) -> bool:
    """Forks twice, so that the worker becomes a child of the agent. True in the zygote, False in the worker."""
    between = os.fork()
    if between:
        # The process in between lives for microseconds. It is reaped at once, since the zygote has no other
        # children.
        os.waitpid(between, 0)
        return True
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    from holdfast.train.worker import die_with_parent

    # Until the process in between has ended, this one is not yet a child of the agent, and the parent-death
    # signal would be that of the wrong parent.
    while os.getppid() == parent:
        os.sched_yield()
    die_with_parent()
    # As torchrun does. What the script leaves behind is found by its session, and a signal to its own group is not one to
    # the agent and the other workers.
    os.setsid()
    generators.renew()
    try:
        worker.sendall(pack(Warm(os.getpid())))
    except OSError:
        os._exit(0)  # the agent is gone already
    return False


if __name__ == "__main__":
    sys.exit(main())
