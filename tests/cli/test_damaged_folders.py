"""Folders and files that are damaged, or no folders and files at all: every command says what and where, in a sentence."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_finished_job import write_job

from holdfast.coordinator.service.store import SNAPSHOT

COMMANDS = (
    "status",
    "status --json",
    "ls",
    "events",
    "logs",
    "report",
    "report --json",
    "metrics",
    "why",
    "why 1",
    "stop",
    "resize 2",
    "drain node0",
    "fault kill-worker:rank=0",
    "check --job done",
    "check --json nowhere/report.json",
    "checkpoint ls --job done",
    "checkpoint verify --job done",
    "checkpoint prune --job done --keep 1",
    "node ls",
    "node show node0",
    "health ls",
    "plan calibrate done",
    "plan simulate --replay 1",
    "memory",
)

SELDOM_USED = (
    "ui --job done --html page.html",
    "track --job done --to jsonl:out.jsonl",
    "attach --job done",
    "metrics config",
    "data samples --job done",
    "checkpoint show --job done",
    "checkpoint free --job done",
    "checkpoint export --job done out",
    "node clear node0",
    "node replace node0 --job done",
    "node reboot node0 --job done",
    "report --csv",
    "report --trace trace.json",
    "report --curve loss.png",
    "notify --job done --to webhook:hook",
    "rm done",
)
"""`rm` last: nothing is left after it."""


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffgarbage" * 500)


def valid_json_of_something_else(path: Path) -> None:
    path.write_text('{"name": 5, "outcome": [], "engine": {}, "host": null}')


def spoil_state(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute("update kept set value = ? where name = ?", (b"\xc1", SNAPSHOT)).rowcount == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


DAMAGES = [
    ("jobs/done/spec.json", garbage),
    ("jobs/done/spec.json", valid_json_of_something_else),
    ("jobs/done/spec.json", folder),
    ("jobs/done/job.sqlite", garbage),
    ("jobs/done/job.sqlite", cut),
    ("jobs/done/job.sqlite", folder),
    ("jobs/done/report.json", garbage),
    ("jobs/done/report.json", valid_json_of_something_else),
    ("jobs/done/report.json", folder),
    ("jobs/done/coordinator.json", garbage),
    ("jobs/done/allocation.json", garbage),
    ("jobs/done/allocation.json", valid_json_of_something_else),
    ("jobs/done/identity", folder),
    ("jobs/done/token", folder),
    ("jobs/done/token", garbage),
    ("jobs/done/logs/node1.0-2.log", garbage),
    ("jobs/done/lock", folder),
    ("health.sqlite", garbage),
    ("health.sqlite", folder),
]

OF_THE_JOB_ITSELF = [
    ("jobs/done/spec.json", garbage),
    ("jobs/done/spec.json", valid_json_of_something_else),
    ("jobs/done/spec.json", folder),
    ("jobs/done/job.sqlite", garbage),
    ("jobs/done/job.sqlite", cut),
    ("jobs/done/job.sqlite", folder),
    ("jobs/done/allocation.json", garbage),
    ("jobs/done/allocation.json", valid_json_of_something_else),
]

BY_DEFAULT = {
    ("jobs/done/spec.json", garbage),
    ("jobs/done/job.sqlite", garbage),
    ("jobs/done/token", folder),
}
"""The others take as long each: every command is run."""
CASES = [d if d in BY_DEFAULT else pytest.param(*d, marks=pytest.mark.long) for d in DAMAGES]


@pytest.mark.parametrize(("what", "damage"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_what_is_damaged_is_named_and_nothing_is_a_traceback(holdfast, home, what, damage):
    write_job("done")
    damage(home / what)
    assert complaints(holdfast) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "damage"), OF_THE_JOB_ITSELF, ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_what_is_damaged_is_named_by_commands_that_are_seldom_used(holdfast, home, what, damage):
    write_job("done")
    damage(home / what)
    assert complaints(holdfast, *SELDOM_USED, commands=()) == []


STATE_READERS = "status", "metrics", "why 1", "report --csv", "ui --job done --html page.html", "ls"


def test_a_damaged_state_in_a_whole_ledger(holdfast, home):
    folder = write_job("done")
    (folder / "report.json").unlink()
    spoil_state(folder / "job.sqlite")
    assert complaints(holdfast, *STATE_READERS, commands=()) == []
    assert "job.sqlite cannot be read: the state in it is damaged" in holdfast("metrics").err


@pytest.mark.parametrize(
    "what", ["jobs", *(pytest.param(w, marks=pytest.mark.long) for w in ("", "jobs/done"))]
)
def test_what_is_no_folder_is_named_and_nothing_is_a_traceback(holdfast, home, what):
    (home / what).parent.mkdir(parents=True, exist_ok=True)
    (home / what).write_text("no folder")
    assert complaints(holdfast, "run train.py", "run --job done train.py") == []


def complaints(holdfast, *more: str, commands: tuple[str, ...] = COMMANDS) -> list[str]:
    """Commands that broke: with another error than one sentence of ours."""
    found = []
    for command in (*commands, *more):
        try:
            said = holdfast(*command.split())
        except Exception as error:
            found.append(f"{command}: {type(error).__name__}: {error}")
            continue
        told = said.err.strip().splitlines()
        if said.code and not any(
            line.startswith(("holdfast: ", "Error: ", "[holdfast]", "Usage")) for line in told
        ):
            found.append(f"{command}: exit code {said.code}, {said.err!r}")
    return found
