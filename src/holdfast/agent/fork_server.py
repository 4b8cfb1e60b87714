"""The fork server: a process that has imported the heavy modules and forks agents, for engines whose nodes share a machine.

Importing takes two seconds of a processor, for every node; a fork takes milliseconds. An agent forked here forks its
zygote from itself, before it does anything else, so that workers descend from their agent as they do elsewhere.

One packet asks for one agent: its node and its arguments, one a line, with its output and its lifeline attached. The answer is a pidfd.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from holdfast import logs
from holdfast.agent import zygote
from holdfast.protocol.machine.processes import set_title

PACKET_BYTES = 65536


def main() -> int:
    """`python -m holdfast.agent.fork_server FD MODULE,...`: serves until the engine's end of FD closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    generators = zygote.import_modules(sys.argv[2].split(","))
    from holdfast.agent.__main__ import main as agent_main
    from holdfast.health.ruleset import catalogue

    catalogue()  # as with the modules: its agents need not read it
    set_title("holdfast.agent.fork_server")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
    # Children share these pages as long as nobody writes to them, and a collection writes to the header of
    # every object.
    gc.freeze()
    if not _say(channel, b"ready"):
        return 0
    while True:
        packet, fds = _hear(channel)
        if not packet:
            return 0
        arguments = packet.decode().split("\n")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # not reaped before it is held
        if pid := os.fork():
            # The engine gets a pidfd and not only the number: it can signal and wait for a process that is
            # not its child, and a number that is used again is never hit.
            held = os.pidfd_open(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            _say(channel, str(pid).encode(), held)
            # The lifeline above all: as long as this process held its copy, the agent would never see the
            # launcher's end.
            for fd in (held, *fds):
                os.close(fd)
        else:
            channel.close()
            _settle(*fds)
            code = 1
            try:
                set_title(f"holdfast.agent.zygote of {arguments[0]}")
                # Before anything else of the agent: here there is one thread and no event loop yet, so a fork
                # is safe.
                warm = zygote.fork_zygote(generators, fds[1])
                set_title(f"holdfast.agent {arguments[1]}")
                code = agent_main([*arguments[1:], f"--lifeline={fds[1]}"], warm)
            except Exception:  # noqa: BLE001 - into the output that the launcher reads, before the process ends
                sys.excepthook(*sys.exc_info())
            finally:
                # With torch imported Python's teardown takes a second. This process must not leave this branch in any
                # other way: it would serve the engine's channel beside its parent.
                logs.exit_now(code)


def _say(channel: socket.socket, word: bytes, *fds: int) -> bool:
    """Sends a word. False: the engine is gone, and its agents end with it."""
    try:
        socket.send_fds(channel, [word], fds)
    except OSError:
        return False
    return True


def _hear(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The next request; empty when the engine is gone."""
    try:
        packet, fds, _, _ = socket.recv_fds(channel, PACKET_BYTES, 2)
    except ConnectionError:  # it had not read all
        return b"", []
    return packet, list(fds)


def _reap() -> None:
    """Reaps agents that have ended. The engine that started them holds their pidfds."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _settle(output: int, lifeline: int) -> None:
    """In the new agent: does what `subprocess` does for a new process."""
    # A session of its own, so that Ctrl-C in the launcher's terminal does not reach it.
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, to in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, to)
    os.close(nothing)
    os.close(output)


if __name__ == "__main__":
    os._exit(main())
