"""Lines of Holdfast's own logs: what they look like, where they go, and what is never in them."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast import logs
from holdfast.errors import UsageError

log = logging.getLogger("holdfast.agent.agent")


@pytest.fixture
def configured():
    """Configures, and undoes it at the end."""
    closing = []

    def configure(*args, **kwargs):
        closing.append(logs.configure(*args, **kwargs))
        return closing[-1]

    yield configure
    for close in closing:
        close()


def lines(path):
    return path.read_text().splitlines()


def test_a_line_has_the_fields_of_its_process_and_of_its_event(configured, tmp_path):
    close = configured("", {"job": "demo", "node": "n0", "term": ""}, file=tmp_path / "logs" / "n0.log")
    log.info("started %s", "a worker", extra={"rank": 3, "idle_s": 0.5, "reason": 'it said "no"\nand left'})
    log.debug("nobody asked for this")
    close()
    (line,) = lines(tmp_path / "logs" / "n0.log")
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info logger=agent.agent "
        r'msg="started a worker" job=demo node=n0 rank=3 idle_s=0.5 reason="it said \\"no\\"\\nand left"',
        line,
    )


def test_json_has_the_same_and_the_traceback(configured, tmp_path):
    close = configured("debug,json", {"job": "demo"}, file=tmp_path / "log")
    try:
        raise ValueError("no")
    except ValueError as error:
        log.debug("it broke", exc_info=error, extra={"rank": 1})
    close()
    (line,) = lines(tmp_path / "log")
    read = json.loads(line)
    assert "ValueError: no" in read.pop("traceback")
    assert read.pop("time")
    assert read == {"level": "debug", "logger": "agent.agent", "msg": "it broke", "job": "demo", "rank": 1}


def test_with_a_file_only_warnings_go_to_stderr(configured, tmp_path, capsys):
    close = configured("debug", {}, file=tmp_path / "log")
    log.info("quiet")
    log.warning("loud")
    close()
    assert "quiet" not in (shown := capsys.readouterr().err)
    assert "loud" in shown
    assert len(lines(tmp_path / "log")) == 2


def test_a_users_root_logger_is_left_alone(configured, capsys):
    root = logging.getLogger()
    before = [*root.handlers], root.level
    close = configured("", {}, others=False)
    assert ([*root.handlers], root.level) == before
    log.warning("once")
    close()
    assert capsys.readouterr().err.count("once") == 1
    assert logging.getLogger("holdfast").handlers == []


def test_secrets_are_not_written(configured, tmp_path):
    close = configured("", {}, file=tmp_path / "log", secrets=("s3cr3t", ""))
    log.warning("no answer from postgres://me:p@ss@db/x and s3://me@b", extra={"told": "Bearer s3cr3t"})
    try:
        raise OSError("https://u:p@host/ s3cr3t")
    except OSError:
        log.exception("it broke")
    close()
    text = (tmp_path / "log").read_text()
    assert "postgres://***@db/x" in text
    assert not re.search("s3cr3t|p@|ss@|u:p|me@", text)


def test_a_file_that_takes_nothing_holds_nobody_up(configured, tmp_path, monkeypatch):
    hangs, entered = threading.Event(), threading.Event()

    def handle(writer, record):
        entered.set()
        hangs.wait(30)

    monkeypatch.setattr(logs._Writer, "handle", handle)
    monkeypatch.setattr(logs, "PENDING_LINES", 10)
    monkeypatch.setattr(logs, "CLOSE_S", 0.0)
    close = configured("", {}, file=tmp_path / "log")
    for _ in range(100):
        log.info("x")
    assert entered.wait(30)
    close()
    hangs.set()


HANGS = """
import logging, sys
from pathlib import Path
from holdfast import logs

logs.CLOSE_S = 0.1
close = logs.configure("", {}, file=Path(sys.argv[1]))
for _ in range(2000):
    logging.getLogger("holdfast").info("x" * 100)
"""


@pytest.mark.parametrize("end", ["close()", "logs.exit_now(0)"])
def test_a_process_ends_though_its_file_hangs(tmp_path, end):
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    unread = os.open(pipe, os.O_RDWR)  # takes 64 KB, and then nothing more
    try:
        subprocess.run([sys.executable, "-c", HANGS + end, str(pipe)], check=True, timeout=60)
    finally:
        os.close(unread)


EXITS = """
import logging, sys, threading
from pathlib import Path
from holdfast import logs

ending = threading.Event()
write, wait = logs._Writer.handle, logs._Pending.wait_until_written
def write_late(writer, record):
    ending.wait()
    write(writer, record)
def wait_for_it(pending, most_s):
    ending.set()
    wait(pending, most_s)
logs._Writer.handle, logs._Pending.wait_until_written = write_late, wait_for_it
logs.configure("", {}, file=Path(sys.argv[1]))
sys.stdout = open("/dev/full", "w")
print("this cannot be flushed")
log = logging.getLogger("holdfast")
def end():
    log.critical("this process ends")
    logs.exit_now(70)
threading.Thread(target=end).start()
threading.Event().wait()
"""


def test_the_last_line_of_a_process_that_ends_at_once_is_written(tmp_path):
    ended = subprocess.run([sys.executable, "-c", EXITS, str(tmp_path / "log")], timeout=60)
    assert ended.returncode == 70
    (line,) = lines(tmp_path / "log")
    assert "this process ends" in line


def test_a_folder_that_cannot_be_made_costs_only_lines(configured, tmp_path):
    folder = tmp_path / "logs"
    folder.touch()  # a file where the folder should be
    configured("", {}, file=folder / "log")
    log.info("lost")
    (pending,) = [h.queue for h in logging.getLogger().handlers if isinstance(h, logs._Pending)]
    pending.join()
    folder.unlink()
    log.info("written")
    pending.join()
    assert ["written" in line for line in lines(folder / "log")] == [True]


def test_logs_that_are_put_away_go_on_in_a_new_file(configured, tmp_path):
    folder = tmp_path / "logs"
    close = configured("", {}, file=folder / "log")
    log.info("before")
    (pending,) = [h.queue for h in logging.getLogger().handlers if isinstance(h, logs._Pending)]
    pending.join()
    folder.rename(tmp_path / "old")
    log.info("after")
    close()
    assert "before" in (tmp_path / "old" / "log").read_text()
    assert "after" in (folder / "log").read_text()


@pytest.mark.parametrize("text", ["loud", "debug,info", "info,xml"])
def test_an_unknown_level_is_refused(text):
    with pytest.raises(
        UsageError,
        match=rf"--log-level must be one of debug, info, warning, error, .* \(got '{text}'\)",
    ):
        logs.parse_settings(text, "--log-level")


def test_a_full_file_moves_aside_and_takes_the_place_of_the_one_before(configured, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "FILE_BYTES", 2000)
    path = tmp_path / "coordinator.log"
    close = configured("", {}, file=path)
    for number in range(100):
        log.info("line", extra={"number": number})
    close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["coordinator.log", "coordinator.log.1"]
    numbers = [int(line.split("number=")[1]) for name in (f"{path}.1", path) for line in lines(Path(name))]
    assert numbers == list(range(numbers[0], 100))  # none of the newest is lost between the two
    assert max(Path(f"{path}.1").stat().st_size, path.stat().st_size) < 2100
