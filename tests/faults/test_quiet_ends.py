"""Warm processes whose launcher or agent is gone before they are ready: they end, and print nothing."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

KINDS = {"fork_server": socket.SOCK_SEQPACKET, "zygote": socket.SOCK_STREAM}


def begin(module: str, theirs: socket.socket) -> subprocess.Popen[str]:
    """One that imports nothing heavy."""
    command = [sys.executable, "-m", f"holdfast.agent.{module}", str(theirs.fileno()), ""]
    return subprocess.Popen(
        command, pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("module", KINDS)
def test_nobody_is_there_when_it_is_ready(module):
    ours, theirs = socket.socketpair(socket.AF_UNIX, KINDS[module])
    ours.close()
    with begin(module, theirs) as process:
        theirs.close()
        assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)


@pytest.mark.parametrize("module", KINDS)
def test_nobody_read_that_it_is_ready(module):
    ours, theirs = socket.socketpair(socket.AF_UNIX, KINDS[module])
    with begin(module, theirs) as process:
        theirs.close()
        assert ours.recv(1, socket.MSG_PEEK)
        ours.close()  # with what was not read: its next call fails
        assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)
