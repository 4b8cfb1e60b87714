"""Decoding processes end with their worker, however it ends."""

import os
import select
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from holdfast.data.collate import Maker
from holdfast.data.decoding import Decoders

SCRIPT = """
import os, sys, threading
import torch
import holdfast as hf

class Numbers:
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return torch.tensor([float(i)])

def main(run):
    model = torch.nn.Linear(1, 1)
    run.protect(model=model)
    for step in run.steps(hf.data.shuffled(Numbers(), workers=2), global_batch=4, micro_batch=2, until=9):
        with step:
            for x in step:
                step.backward(model(x).sum())
            for greeting in step._batches._decoders._greetings:
                greeting.result()
            print("up", flush=True)
            threading.Event().wait()

hf.start(main)
"""


def children(pid):
    found = [int(c) for p in Path(f"/proc/{pid}/task").glob("*/children") for c in p.read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


class ComesLate:
    """Arrives in a decoding process when somebody writes into the pipe."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __setstate__(self, state):
        with open(state["pipe"]):
            pass


def test_processes_that_are_still_starting_are_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    decoders = Decoders(Maker(ComesLate(str(pipe)), None, seed=0), workers=2)
    processes = list(decoders._pool._processes.values())
    decoders.close()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def test_a_process_that_dies_fails_what_comes_after_a_cancelled_micro_batch(tmp_path):
    """Nobody waits for ever for what a dead process was to make."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    decoders = Decoders(Maker(ComesLate(str(pipe)), None, seed=0), workers=1)
    ids = np.array([0])
    futures = [decoders.make(0, micro, ids) for micro in range(4)]
    assert futures[2].cancel()
    for process in decoders._pool._processes.values():
        process.kill()
    assert isinstance(futures[3].exception(timeout=60), BrokenProcessPool)
    decoders.close()


def test_decoders_that_still_import_end_with_their_worker(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace(
            "        with step:\n",
            "        print('up', flush=True); threading.Event().wait()\n        with step:\n",
        )
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        assert process.stdout.readline() == "up\n"
        fds = [os.pidfd_open(pid) for pid in children(process.pid)]
        assert len(fds) >= 2
        process.kill()
        for fd in fds:
            assert select.select([fd], [], [], 30)[0], "a decoding process outlived its worker"
            os.close(fd)


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGINT, signal.SIGTERM))],
)
def test_decoders_end_with_their_worker(tmp_path, number):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # Torch makes a folder for what it compiles as soon as it is imported.
    env = os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )
    with process:
        assert process.stdout.readline() == "up\n"
        pids = children(process.pid)
        assert len(pids) >= 2
        fds = [os.pidfd_open(pid) for pid in pids]
        if number == signal.SIGINT:
            for pid in pids:
                os.kill(pid, number)  # as a terminal's Ctrl-C does
        process.send_signal(number)
        for fd in fds:
            assert select.select([fd], [], [], 30)[0], "a decoding process outlived its worker"
            os.close(fd)
    assert list(temporary.iterdir()) == []
