"""`holdfast node` and `holdfast why`, on histories and ledgers that were written before."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.coordinator.kernel.history import RecordKind
from holdfast.coordinator.service.history_store import FILE_NAME, HistoryRecord, HistoryStore, now_s
from holdfast.coordinator.service.store import Store
from holdfast.errors import UsageError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def history(home):
    history = HistoryStore(str(home / FILE_NAME))
    for job in ("a", "a", "b"):
        history.add(
            HistoryRecord(
                utc_s=now_s(),
                machine="serial:X1",
                node="node2",
                job=job,
                kind=RecordKind.INCIDENT,
                rule="xid-79",
                text="xid-79: gone",
            )
        )
    history.add(
        HistoryRecord(
            utc_s=now_s(),
            machine="serial:X1",
            node="node2",
            job="b",
            kind=RecordKind.QUARANTINED,
            rule="xid-79",
            text="xid-79: gone",
        )
    )
    history.close()


def told(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_without_a_history(home):
    assert told("node", "ls") == "no machine has a history\n"
    assert list(home.iterdir()) == []


def test_ls_show_and_clear(home, history):
    assert "serial:X1" in told("node", "ls")
    [machine] = json.loads(told("node", "ls", "--json"))["machines"]
    assert (machine["quarantine"], machine["lemon"]) == (
        "xid-79: gone",
        "3 incidents in 2 jobs within 30 days",
    )
    assert "quarantined" in told("node", "show", "node2")
    assert told("node", "clear", "X1") == "serial:X1 is cleared\n"
    [machine] = json.loads(told("node", "ls", "--json"))["machines"]
    assert machine["standing"] == "may be used"


def test_a_rule_that_was_wrong_twice_is_on_trial_and_shown(home, history):
    assert "of xid-79" in told("node", "clear", "X1", "--false-positive", "xid-79")
    assert "the rule is on trial there" in told("node", "clear", "X1", "--false-positive", "xid-79")
    text = told("node", "ls")
    assert "on trial" in text
    assert "the rule xid-79 was reported as wrong 2 times" in text


def test_a_rule_that_was_never_found_there_is_refused(home, history):
    with pytest.raises(UsageError, match="this rule did not match on serial:X1; rules that did: xid-79"):
        told("node", "clear", "X1", "--false-positive", "xid-97")


def test_why_lists_and_tells(home):
    folder = home / "jobs" / "old"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text("{}")
    store = Store(folder / "job.sqlite")
    fields = {"id": 1, "node": "n1", "ranks": [1], "at_step": 3, "t_s": 1.0, "cause": "killed by signal 9 (SIGKILL)",
              "injected": False, "fault": None, "quiet": False, "stall_s": None}  # fmt: skip
    store.add_event(1.0, "2026-01-01T00:00:00", "incident-opened", fields)
    store.close()
    assert told("why").strip() == "1  n1: killed by signal 9 (SIGKILL)"
    assert told("why", "1", "--job", "old").startswith(
        "Incident 1 on n1, rank 1, at step 3: killed by signal 9"
    )
    assert json.loads(told("why", "1", "--json"))["incident"] == 1
    with pytest.raises(UsageError, match="it had incidents 1 to 1"):
        told("why", "7")
