"""What another user of the same machine can do to a job: nothing."""

import errno
import json
import os
import select
import signal
import socket

from harness import TINY, finish, start, wait_for
from stranger import as_stranger, needs_root


def bind(port):
    """The error number with which the port is refused; 0 when it is had."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError as error:
            return error.errno
    return 0


def coordinator_of(home):
    return json.loads((home / "jobs" / "job" / "coordinator.json").read_bytes())


@needs_root
def test_the_port_of_a_dead_coordinator_cannot_be_taken(tmp_path):
    """Whoever had it was shown the token, and could order the job's agents to start what he liked."""
    launcher = start(tmp_path, "--nnodes", 2, TINY, 1_000_000)
    wait_for(launcher, "generation 1")
    before = coordinator_of(tmp_path)
    dead = os.pidfd_open(before["pid"])
    launcher.send_signal(signal.SIGSTOP)  # nobody starts another meanwhile
    os.kill(before["pid"], signal.SIGKILL)
    assert select.select([dead], [], [], 10)[0]
    os.close(dead)
    refused = as_stranger(bind, before["port"])
    launcher.send_signal(signal.SIGCONT)
    wait_for(launcher, "starting it again", "training again")
    launcher.send_signal(signal.SIGINT)
    ran = finish(launcher, tmp_path)
    assert refused == errno.EADDRINUSE
    assert ran.report["outcome"] == "stopped", ran.output[-3000:]
    assert coordinator_of(tmp_path)["port"] == before["port"]
