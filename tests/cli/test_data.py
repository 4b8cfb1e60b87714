"""`holdfast data`: what it says and with which exit code; what it builds is tested in tests/data/test_build.py."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from holdfast.cli import data
from holdfast.observe import transfer_progress


@pytest.fixture
def corpus(home, tmp_path):
    lines = ['{"text": "first one"}', '{"text": "second"}', '{"text": "x"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    return "in.jsonl"


def test_build_show_verify(holdfast, corpus, tmp_path):
    said = holdfast("data", "build", corpus, "--out", "out", "--eod-id", "0", "--workers", "1")
    assert [said.code, said.out, said.err] == [
        0,
        "3 documents, 19 tokens of uint8: out.bin and out.idx\n",
        "",
    ]
    said = holdfast("data", "show", "out")
    assert said.code == 0
    lines = [line.split(None, 1) for line in said.out.splitlines()]
    fingerprint = lines.pop(3)
    assert fingerprint[0] == "fingerprint"
    assert len(fingerprint[1]) == 32
    assert lines == [
        ["file", "out.bin"],
        ["documents", "3"],
        ["tokens", "19 of uint8, 19 B"],
        ["begins", "102 105 114 115 116 32 111 110 101 0 115 101 99 111 110 100 ..."],
        ["tokenizer", "bytes, 256 tokens, documents end with 0"],
        ["built", f"from   1 file: {tmp_path}/in.jsonl"],
    ]
    said = holdfast("data", "verify", "out.bin")
    assert [said.code, said.out] == [0, "out.bin: complete, 19 tokens (compared: index, tokens and sums)\n"]


def test_as_json(holdfast, corpus):
    built = json.loads(holdfast("data", "build", corpus, "--out", "out", "--json").out)
    assert (built["documents"], built["tokens"], built["eod"]) == (3, 16, None)
    shown = json.loads(holdfast("data", "show", "out", "--json").out)
    assert shown["build"] == built
    assert shown["first"][:2] == [102, 105]


def test_skipped_lines_are_told(holdfast, corpus, tmp_path):
    (tmp_path / corpus).write_text('{"text": "a"}\n{}\n')
    said = holdfast("data", "build", corpus, "--out", "out")
    assert said.code == 1
    assert said.err.startswith(f"holdfast: {tmp_path}/in.jsonl, line 2: ")
    said = holdfast("data", "build", corpus, "--out", "out", "--skip-bad", "--format", "npy")
    assert said.out == "1 document, 1 tokens of uint8: out.npy\nskipped 1 line that could not be read\n"
    assert "skipped      1 line\n" in holdfast("data", "show", "out").out


def test_files_of_others(holdfast, home, tmp_path):
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    said = holdfast("data", "show", "raw.bin", "--dtype", "uint16")
    assert "documents    not known\n" in said.out
    assert "begins       0 1 2 3 4 5 6 7 8 9\n" in said.out
    said = holdfast("data", "verify", "raw.bin", "--dtype", "uint16")
    assert said.out == "raw.bin: complete, 10 tokens (compared: range of the tokens)\n"
    np.save(tmp_path / "negative.npy", np.array([1, -2], np.int32))
    said = holdfast("data", "verify", "negative.npy")
    assert [said.code, said.err] == [
        1,
        "holdfast: negative.npy: token 1 is -2, which is not a token; build it again\n",
    ]


def test_a_damaged_file(holdfast, corpus, tmp_path):
    holdfast("data", "build", corpus, "--out", "out")
    (tmp_path / "out.bin").write_bytes(b"z" * 16)
    said = holdfast("data", "verify", "out")
    assert said.code == 1
    assert "out.bin differs from what `holdfast data build` wrote" in said.err
    (tmp_path / "out.idx").write_bytes(b"MMIDIDX\x00\x00")
    said = holdfast("data", "verify", "out")
    assert [said.code, said.out] == [2, ""]
    assert said.err.startswith("holdfast: out.idx is cut short")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["build", "nowhere", "--out", "out"], "the input nowhere does not exist"),
        (["build", "in.jsonl", "--out", "out", "--tokenizer", "x.json"], "--tokenizer x.json cannot be read"),
        (
            ["build", "in.jsonl", "--out", "out", "--dtype", "float"],
            "--dtype float is not available for megatron files",
        ),
        (["show", "nowhere"], "token file nowhere does not exist"),
        (["verify", "in.jsonl"], "is a raw file; specify the type of its tokens"),
    ],
)
def test_bad_input(holdfast, corpus, words, says):
    said = holdfast("data", *words)
    assert [said.code, said.out] == [2, ""]
    assert says in said.err
    assert "Traceback" not in said.err


def test_ctrl_c_says_how_to_go_on(holdfast, corpus, monkeypatch):
    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.tools.corpora.build.build", interrupted)
    said = holdfast("data", "build", corpus, "--out", "out")
    assert [said.code, said.err] == [130, "holdfast: interrupted; run the same command again to continue\n"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress_begins_after_two_seconds(monkeypatch, stream):
    clock = [100.0]
    monkeypatch.setattr(data.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with data._Bar() as bar:
        bar.show("reading", 10**6, 10**7)
        clock[0] += transfer_progress.SILENT_S - 0.1
        bar.show("reading", 2 * 10**6, 10**7)
        assert stream.getvalue() == ""
        clock[0] += 0.2
        bar.show("reading", 5 * 10**6, 10**7)
    if stream.isatty():
        assert "reading" in stream.getvalue()
    else:
        assert stream.getvalue() == "reading: 5.00 MB of 10.0 MB, 50%\n"


def test_building_needs_no_torch(tmp_path, corpus):
    command = "import sys; from holdfast.cli.app import app; app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command, "data", "build", corpus, "--out", "out"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout.endswith("False\n")
