"""What a worker left in the job's folder, as the page shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.coordinator.service import worker_output

DUMP = """Thread 0x00007f11 (most recent call first):
  File "/x/queue.py", line 9 in get

Thread 0x00007f12 (most recent call first):
  File "/home/a/train.py", line 33 in load
  File "/home/a/train.py", line 50 in main
"""


def log_of(folder: Path, worker: str, text: bytes) -> str:
    path = Path(worker_output.usual_log(folder, worker))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return str(path)


def test_a_log_is_shown_as_text(tmp_path: Path) -> None:
    text = b"one\n\x1b[31mred\x1b[0m\n10%\r90%\rdone\n\x1b]0;title\x07\xff\n<b>\n"
    found = worker_output.tail(tmp_path, log_of(tmp_path, "n.0#1", text))
    assert found["lines"] == ["one", "red", "done", "\\x1b]0;title\\x07\\xff", "<b>"]
    assert found["note"] == ""


def test_the_end_of_a_large_log_is_read_and_no_more(tmp_path: Path) -> None:
    path = log_of(tmp_path, "n.0#1", b"".join(b"line %d\n" % n for n in range(200_000)))
    found = worker_output.tail(tmp_path, path)["lines"]
    assert (len(found), found[-1]) == (worker_output.LINES, "line 199999")
    # What agents gave back of a log is a hole, which reads as zeros.
    with open(path, "r+b") as file:
        file.truncate(0)
        file.seek(10 << 20)
        file.write(b"after the hole\n")
    assert worker_output.tail(tmp_path, path)["lines"][-1].endswith("after the hole")
    assert len(worker_output.tail(tmp_path, path)["lines"][-1]) <= 4096


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ("", "where its output goes is not known"),
        ("/etc/hostname", "the log is on its node, under this path"),
        ("{job}/../token", "the log is on its node, under this path"),
        ("{job}/logs/n/gone.log", "the log is on its node, under this path"),
        ("{job}/logs/n/n.0-2.log", "it printed nothing"),
    ],
)
def test_where_there_is_no_log_the_page_says_why(tmp_path: Path, path: str, note: str) -> None:
    job = tmp_path / "job"
    log_of(job, "n.0#2", b"")
    (tmp_path / "token").write_text("secret")
    found = worker_output.tail(job, path.format(job=job))
    assert (found["lines"], found["note"]) == ([], note)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "n",
        "../../token",
        "../x.0#1",
        "/etc/x.0#1",
        "a/b.0#1",
        "n.0#x",
        "n.0#1\n",
        "n.0#1/..",
        "..0#1" * 200,
    ],
)
def test_a_word_that_is_no_workers_name_leads_nowhere(tmp_path: Path, name: str) -> None:
    assert worker_output.usual_log(tmp_path, name) == ""


def test_a_stack_is_that_of_the_incident(tmp_path: Path) -> None:
    log = log_of(tmp_path, "n.0#1", b"")
    stacks = Path(log.removesuffix(".log") + ".stacks")
    stacks.write_text(DUMP + "\n" + DUMP.replace("line 33", "line 34"))
    os.utime(stacks, (1000.0, 1000.0))
    found = worker_output.stack(tmp_path, log, [], 990.0)
    # Of the newest dump the main thread, which is written last.
    assert found["lines"] == [
        '  File "/home/a/train.py", line 34 in load',
        '  File "/home/a/train.py", line 50 in main',
    ]
    assert "stood still" in found["source"]
    # One that was written long before is of another incident, and without a time nobody can tell.
    assert worker_output.stack(tmp_path, log, [], 5000.0)["lines"] == []
    assert worker_output.stack(tmp_path, log, [], None)["lines"] == []


def test_of_a_stack_the_scripts_calls_and_the_innermost_one_are_shown(tmp_path: Path) -> None:
    ours = Path(worker_output.__file__).parents[3]
    frames = [
        "/v/lib/python3.12/site-packages/torch/distributed/c10d.py", "/v/lib/python3.12/site-packages/torch/nn.py",
        f"{ours}/holdfast/train/step.py", "/home/a/train.py", "/home/a/lib.py", "/usr/lib/python3.12/runpy.py", "<string>",
    ]  # fmt: skip
    log = log_of(tmp_path, "n.0#1", b"")
    text = "\n".join(f'  File "{path}", line {n} in f' for n, path in enumerate(frames))
    Path(log.removesuffix(".log") + ".stacks").write_text(f"Thread 0x1 (most recent call first):\n{text}\n")
    assert worker_output.stack(tmp_path, log, [], 0.0)["lines"] == [
        '  File "torch/distributed/c10d.py", line 0 in f',
        "  … 2 calls of libraries",
        '  File "/home/a/train.py", line 3 in f',
        '  File "/home/a/lib.py", line 4 in f',
        "  … 2 calls of libraries",
    ]


def test_the_last_traceback_of_a_log_is_its_stack() -> None:
    lines = [
        "Traceback (most recent call last):", "  an older one", "KeyError: 1",
        "step 3", "Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()", "ValueError: no", "bye",
    ]  # fmt: skip
    found = worker_output.stack(Path("/nowhere"), "", lines, None)
    assert found["lines"] == lines[4:8]
    assert "traceback" in found["source"]
    assert worker_output.stack(Path("/nowhere"), "", ["step 3"], None) == {"lines": [], "source": ""}


def test_what_cannot_be_read_costs_the_page_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be removed at any moment, or be of somebody who lets nobody read it."""
    log = log_of(tmp_path, "n.0#1", b"one\n")
    Path(log).with_suffix(".stacks").write_text(DUMP)

    def refused(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(worker_output, "_end_of", refused)
    assert worker_output.tail(tmp_path, log) == {
        "path": log,
        "lines": [],
        "note": "the log cannot be read: Permission denied",
    }
    assert worker_output.stack(tmp_path, log, [], 0.0) == {"lines": [], "source": ""}
