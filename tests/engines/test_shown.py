"""What is shown when nobody reads it any more."""

import os
import sys
from pathlib import Path

from holdfast.engines.shown import TolerantView
from holdfast.observe.live import PlainView
from holdfast.protocol.job import JobSpec


def show_with(monkeypatch, tmp_path, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", (tmp_path / "err").open("w"))
    shown = TolerantView(PlainView(JobSpec(name="demo", script="train.py"), tmp_path))
    for _ in range(2):
        shown.output(b"step\n")
        shown.note("the job goes on")
    sys.stderr.close()
    return (tmp_path / "err").read_text().count("the job goes on")


def test_a_closed_stdout_takes_nothing_from_stderr(monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    stdout = os.fdopen(writer, "w")
    assert show_with(monkeypatch, tmp_path, stdout) == 2
    assert Path(f"/proc/self/fd/{writer}").readlink() == Path(os.devnull)
    stdout.close()


def test_a_pipe_that_is_full_for_a_while_is_kept(monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = os.write(writer, b"x" * (1 << 20))
    stdout = os.fdopen(writer, "w")
    assert show_with(monkeypatch, tmp_path, stdout) == 2
    os.read(reader, filled)
    stdout.buffer.write(b"last\n")
    stdout.close()
    with os.fdopen(reader, "rb") as rest:
        assert rest.read().endswith(b"last\n")
