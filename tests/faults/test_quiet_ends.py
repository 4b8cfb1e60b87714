"""Warm processes whose launcher or agent is gone before they are ready: they end, and print nothing. And a
launcher whose reader is gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from harness import TINY, ended, start, wait_for

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


@pytest.mark.long
def test_a_launcher_whose_reader_went_away_obeys_a_stop(tmp_path):
    """As in `holdfast run ... | head`: what it writes then fails, and SIGTERM stops the job all the same."""
    process = start(tmp_path, "--nnodes", 1, TINY, 1_000_000)
    wait_for(process, "generation 1")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=100)
    ran = ended(process, tmp_path, "job", "")
    assert ran.report["outcome"] == "stopped"
    assert ran.report["reason"] == "interrupted"
    assert ran.code == 75
