"""A listener that cannot go on ends its process: nobody could reach it any more, and nothing would show that. Nor is a member
pushed out by a crowd."""

import contextlib
import queue
import socket
import subprocess
import sys

from holdfast.protocol.network import listener

BROKEN = """
import socket, threading
from holdfast.protocol.network.listener import AuthenticatingListener
server = socket.create_server(("127.0.0.1", 0))
accepting = AuthenticatingListener(server, "the listener", lambda said: 1, lambda sock, said: False)
{breaks}
socket.create_connection(server.getsockname()).recv(1)
threading.Event().wait()
"""


def run(breaks):
    return subprocess.run(
        [sys.executable, "-c", BROKEN.format(breaks=breaks)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_error_that_leaves_it_no_way_to_go_on_ends_the_process_and_says_so():
    ran = run("accepting._unproven = None")
    assert ran.returncode == 70
    assert "the thread the listener cannot go on: this process ends" in ran.stderr
    assert "Traceback" in ran.stderr


def test_a_mistake_of_ours_costs_one_caller_and_is_said_once():
    ran = run(
        "accepting._missing = lambda said: 1 // 0\n"
        "for _ in range(20): assert socket.create_connection(server.getsockname()).recv(1) == b''\n"
        "raise SystemExit"
    )
    assert ran.returncode == 0
    assert (
        ran.stderr
        == "the listener: a caller was sent away: ZeroDivisionError('integer division or modulo by zero')\n"
    )


MOST = 32
CROWD = 1500


@contextlib.contextmanager
def served(monkeypatch, **seconds: float):
    """A listener where at most MOST callers wait, and one byte is a whole message; its address, and the messages that came."""
    monkeypatch.setattr(listener, "most_unproven", lambda: MOST)
    for name, value in seconds.items():
        monkeypatch.setattr(listener, name, value)
    server = socket.create_server(("127.0.0.1", 0), backlog=listener.BACKLOG)
    address = server.getsockname()
    entered: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def enter(sock: socket.socket, said: bytes) -> bool:
        entered.put(said)
        return False

    accepting = listener.AuthenticatingListener(server, "the listener", lambda said: 1 - len(said), enter)
    try:
        yield address, entered
    finally:
        accepting.close()


def crowd(address, stack: contextlib.ExitStack) -> None:
    for _ in range(CROWD):
        stack.enter_context(socket.create_connection(address))


def test_a_crowd_does_not_push_out_who_has_not_had_the_time_to_speak(monkeypatch) -> None:
    with (
        served(monkeypatch, FIRST_BYTE_S=60.0, FIRST_READ_S=60.0) as (address, entered),
        contextlib.ExitStack() as strangers,
    ):
        # It loses its processor here. Who is let in is seen by the strangers before it.
        member = strangers.enter_context(socket.create_connection(address))
        crowd(address, strangers)
        member.sendall(b"m")
        assert entered.get(timeout=30) == b"m"


def test_a_crowd_delays_who_speaks_at_once_by_a_pause_or_two(monkeypatch) -> None:
    # With a pause each time the crowd fills the queue, the member's turn would come after 46 s.
    with (
        served(monkeypatch, FIRST_BYTE_S=1.0, FIRST_READ_S=60.0) as (address, entered),
        contextlib.ExitStack() as strangers,
    ):
        crowd(address, strangers)
        strangers.enter_context(socket.create_connection(address)).sendall(b"m")
        assert entered.get(timeout=30) == b"m"
