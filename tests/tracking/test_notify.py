"""A person hears once of what is to be done, also where the notifier is killed or nobody takes its message."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from servers import Heard, listener

from holdfast.cli.notify import LINK
from holdfast.coordinator.service.store import LedgerEntry, News
from holdfast.errors import UsageError
from holdfast.tools.tracking import notify
from holdfast.tools.tracking.base import Notes
from holdfast.tools.tracking.notify import Notifier
from holdfast.tools.tracking.position import take_in

BEGAN = "2026-01-02T03:04:05.000+00:00"
LEDGER_S = 1767323045.0


class Clock:
    """Stands for the module `time`. It begins when the ledger does."""

    def __init__(self) -> None:
        self.now = LEDGER_S

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(notify, "time", clock)
    return clock


@pytest.fixture
def hook() -> Iterator[Heard]:
    with listener() as heard:
        yield heard


@pytest.fixture
def target(tmp_path: Path, hook: Heard) -> str:
    (tmp_path / "url").write_text(f"{hook.url}/T0/S3CRET\n")
    return f"webhook:{tmp_path / 'url'}"


def asked(seq: int, node: str = "n1", rule: str = "ecc", utc: str = BEGAN) -> LedgerEntry:
    fields = {"node": node, "rule": rule, "text": f"swap <{node}> & co", "incident": 3}
    return LedgerEntry(seq=seq, t_s=float(seq), utc=utc, kind="asked", fields=fields)


def ended(seq: int, outcome: str = "finished") -> LedgerEntry:
    fields = {"outcome": outcome, "reason": None, "step": 9}
    return LedgerEntry(seq=seq, t_s=float(seq), utc=BEGAN, kind="ended", fields=fields)


def tell(to: Notifier, *entries: LedgerEntry) -> None:
    news = News(ledger=BEGAN, began_utc_s=LEDGER_S, events=list(entries), steps=[], more=False)
    to.write(take_in(to.position, news))


def folder(tmp_path: Path) -> Path:
    (tmp_path / "pretrain").mkdir(exist_ok=True)
    return tmp_path / "pretrain"


def bodies(hook: Heard) -> list[dict[str, Any]]:
    return [json.loads(body) for body in hook.bodies]


def test_a_matter_is_told_once_with_its_reason_command_and_link(tmp_path, hook, target, clock):
    with closing(Notifier(target, folder(tmp_path), "http://page/#/incident/{incident}?job={job}")) as to:
        tell(to, asked(1))
        tell(to, asked(2), asked(3))
        clock.now += 5 * 3600
        tell(to, asked(4), asked(5, rule="xid"))
    first, second = bodies(hook)
    [matter] = first["matters"]
    assert matter["text"] == "please inspect n1: swap <n1> & co"
    assert (matter["command"], matter["incident"]) == ("holdfast why 3 --job pretrain", 3)
    assert first["link"] == "http://page/#/incident/3?job=pretrain"
    assert [m["key"] for m in second["matters"]] == ["asked n1 xid"]


def test_a_storm_is_one_message(tmp_path, hook, target, clock):
    with closing(Notifier(target, folder(tmp_path))) as to:
        tell(to, asked(1, "n0"))
        for i in range(1, 200):
            tell(to, asked(1 + i, f"n{i}"))
            clock.now += 0.1
        assert (len(hook.bodies), to.waits) == (1, True)
        clock.now += notify.APART_S
        tell(to)
        assert not to.waits
    _, storm = bodies(hook)
    assert (len(storm["matters"]), storm["more"]) == (notify.MOST, 199 - notify.MOST)
    assert storm["text"].startswith("pretrain: 199 matters for a person")


def test_killed_between_delivery_and_note_it_sends_the_same_again(tmp_path, hook, target, clock):
    with closing(Notifier(target, folder(tmp_path))) as to:
        replace = to._kept.replace
        # What comes after the delivery is lost.
        to._kept.replace = lambda value: None if hook.bodies else replace(value)
        tell(to, asked(1))
    with closing(Notifier(target, folder(tmp_path))) as to:
        tell(to)
        tell(to, asked(2))
    first, second = bodies(hook)
    assert first == second


def test_killed_before_delivery_nothing_is_lost(tmp_path, hook, target, clock):
    with closing(Notifier(target, folder(tmp_path))) as to:
        to._send = lambda message: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            tell(to, asked(1))
    clock.now += 12 * 3600  # of a notifier that began before, this is no history
    with closing(Notifier(target, folder(tmp_path))) as to:
        assert to.waits
        tell(to)
    assert [m["id"] for m in bodies(hook)[0]["matters"]] == [notify.matter_of(asked(1), BEGAN, "j").id]


def test_what_nobody_takes_is_tried_again_and_kept_at_the_end(tmp_path, hook, target, clock, caplog):
    hook.status = 500
    with closing(Notifier(target, folder(tmp_path))) as to, caplog.at_level(logging.WARNING):
        tell(to, asked(1))
        tell(to)  # not before its time
        assert len(hook.bodies) == 1
        clock.now += notify.APART_S
        tell(to)
        with pytest.raises(UsageError, match="1 notification could not be delivered"):
            tell(to, ended(2))
    assert len(hook.bodies) == 2 + notify.LAST_ATTEMPTS
    hook.status = 200
    with closing(Notifier(target, folder(tmp_path))) as to:
        clock.now += notify.PATIENCE_S
        tell(to)
        assert not to.waits
    kept = [path.read_bytes() for path in folder(tmp_path).rglob("*") if path.is_file()]
    assert "S3CRET" not in caplog.text
    assert not any(b"S3CRET" in content for content in kept)


def test_a_first_notifier_tells_no_history(tmp_path, hook, target, clock):
    clock.now += 7200
    with closing(Notifier(target, folder(tmp_path))) as to:
        tell(to, asked(1), ended(2, "failed"))
    assert not hook.bodies


def test_a_failed_end_is_told_at_once(tmp_path, hook, target, clock):
    with closing(Notifier(target, folder(tmp_path))) as to:
        tell(to, asked(1))
        tell(to, ended(2, "failed"))
    assert [m["command"] for m in bodies(hook)[1]["matters"]] == ["holdfast report --job pretrain"]


def test_slack_gets_text_without_marks_of_strangers(tmp_path, hook, clock, monkeypatch):
    monkeypatch.setenv("SLACK_URL", f"{hook.url}/hook")
    with closing(Notifier("slack:env:SLACK_URL", folder(tmp_path))) as to:
        tell(to, asked(1))
    assert list(bodies(hook)[0]) == ["text"]
    assert "swap &lt;n1&gt; &amp; co" in bodies(hook)[0]["text"]


def test_mail_goes_through_a_command(tmp_path, clock, monkeypatch):
    program = tmp_path / "mailer"
    program.write_text(f"#!/bin/sh\ncat >{tmp_path}/sent\n")
    program.chmod(0o755)
    monkeypatch.setenv(notify.MAIL_VARIABLE, str(program))
    with closing(Notifier("mail:me@example.org", folder(tmp_path))) as to:
        tell(to, asked(1))
    sent = (tmp_path / "sent").read_text()
    assert "To: me@example.org\nSubject: [holdfast] pretrain: 1 matter for a person\n" in sent
    assert "holdfast why 3 --job pretrain" in sent
    assert "http" not in sent


def test_a_mail_that_is_sent_again_has_the_same_id(tmp_path, clock, monkeypatch):
    program = tmp_path / "mailer"
    program.write_text(f"#!/bin/sh\ngrep Message-ID: >>{tmp_path}/sent\n")
    program.chmod(0o755)
    monkeypatch.setenv(notify.MAIL_VARIABLE, str(program))
    with closing(Notifier("mail:me@example.org", folder(tmp_path))) as to, monkeypatch.context() as killed:
        killed.setattr(notify, "sent", lambda notes, now_s: notes)
        tell(to, asked(1))
    with closing(Notifier("mail:me@example.org", folder(tmp_path))) as to:
        tell(to)
        clock.now += 3600
        tell(to, asked(2, "n2"))
    first, again, other = (tmp_path / "sent").read_text().splitlines()
    assert first == again != other


def test_without_a_link_of_its_own_a_matter_links_to_the_page(tmp_path, hook, target, clock):
    with closing(Notifier(target, folder(tmp_path), LINK)) as to:
        tell(to, asked(1))
        clock.now += 3600
        tell(to, ended(2, "failed"))
    assert [b["link"] for b in bodies(hook)] == [
        "http://127.0.0.1:8765/?job=pretrain#/incident/3",
        "http://127.0.0.1:8765/?job=pretrain",
    ]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("slack:https://hooks/T0/S3CRET", "every user of the machine"),
        ("https://hooks/T0/S3CRET", r"use slack:FILE"),
        ("slack:/nowhere", "cannot be read"),
        ("webhook:env:NOT_THERE", "NOT_THERE is not set"),
        ("webhook:env:NO_URL", "does not contain an http:// or https:// URL"),
        ("mail:nobody", "use slack:FILE"),
        ("mail:me@example.org", "the program '/nowhere' was not found"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, target, said):
    monkeypatch.setenv("NO_URL", "S3CRET")
    monkeypatch.setenv(notify.MAIL_VARIABLE, "/nowhere -t")
    with pytest.raises(UsageError, match=said) as refused:
        Notifier(target, folder(tmp_path))
    assert "S3CRET" not in str(refused.value)


def test_remembered_matters_are_bounded():
    notes = Notes()
    for i in range(1000):
        found = [m for m in [notify.matter_of(asked(i, f"n{i}"), BEGAN, "job")] if m]
        notes = notify.take_in(notes, found, float(i))
    assert (len(notes.told), len(notes.waiting)) == (notify.REMEMBERED, notify.MOST)
    assert notes.more == 1000 - notify.MOST
