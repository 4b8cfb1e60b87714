"""A door that cannot go on ends its process: nobody could reach it any more, and nothing would show that."""

import subprocess
import sys

BROKEN = """
import socket, threading
from holdfast.protocol.authentication import Door
server = socket.create_server(("127.0.0.1", 0))
door = Door(server, "the door", lambda said: 1, lambda sock, said: False)
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
    ran = run("door._hall = None")
    assert ran.returncode == 70
    assert "the thread the door cannot go on: this process ends" in ran.stderr
    assert "Traceback" in ran.stderr


def test_a_mistake_of_ours_costs_one_caller_and_is_said_once():
    ran = run(
        "door._missing = lambda said: 1 // 0\n"
        "for _ in range(20): assert socket.create_connection(server.getsockname()).recv(1) == b''\n"
        "raise SystemExit"
    )
    assert ran.returncode == 0
    assert (
        ran.stderr
        == "the door: a caller was sent away: ZeroDivisionError('integer division or modulo by zero')\n"
    )
