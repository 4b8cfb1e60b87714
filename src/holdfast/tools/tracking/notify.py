"""`holdfast notify`: tells people what they have to do, by a webhook or by a command that sends mail.

The decision which events are reported, and when, comes first and is pure. A matter is reported once and then not again
for hours. Messages keep a minimum distance, and all matters between two of them go into one message, so that no flood of
messages wakes anybody at night.

A webhook's URL is a secret. It comes from a file or from the environment, and is in no command line, ledger, log or message.
If a notifier is killed between a delivery and the note of it, it sends that message again: each matter has an id by which
a receiver can recognize duplicates.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from holdfast.coordinator.service.store import LedgerEntry
from holdfast.errors import UsageError
from holdfast.observe.event_text import event_line
from holdfast.observe.traces import event_id
from holdfast.protocol.units import plural
from holdfast.protocol.wire.decoding import decode
from holdfast.tools.tracking.base import FileTracker, Matter, Notes
from holdfast.tools.tracking.position import Batch

_log = logging.getLogger(__name__)
APART_S = 60.0
"""Minimum time between two messages, in seconds."""
AGAIN_S = 6 * 3600.0
"""The same matter is not reported again within this time, in seconds."""
MOST = 20
"""Limit on the matters in one message; for those beyond it, their number is given."""
REMEMBERED = 256
"""Number of matters that are remembered, to recognize repetitions."""
PATIENCE_S = 600.0
"""The longest time between two attempts to deliver, in seconds."""
TEXT_CHARS = 500
ANSWER_S = 10.0
LAST_ATTEMPTS = 3
LAST_APART_S = 2.0
"""Time between two attempts at the job's end, in seconds."""
OLD_S = 3600.0
"""Events that are older than this at a notifier's first start, in seconds, are history and are not reported."""
MAIL_VARIABLE = "HOLDFAST_MAIL_COMMAND"
MAIL_COMMAND = "sendmail -i -t"
HOW = "use slack:FILE, slack:env:NAME, webhook:FILE, webhook:env:NAME or mail:ADDRESS"
OF_INCIDENT = "#/incident/{incident}"
"""The end of a link that opens the page at an incident."""


# ---------------------------------------------------------------- matters


def matter_of(entry: LedgerEntry, ledger: str, job: str) -> Matter | None:
    """The matter in an event, if it needs a person; None: it does not."""
    fields = entry.fields
    incident = fields.get("incident")
    match entry.kind:
        case "asked":
            key, command = f"asked {fields.get('node')} {fields.get('rule')}", _why(job, incident)
        case "ended" if fields.get("outcome") == "failed":
            key, command = "ended", f"holdfast report --job {job}"
        case "ledger-failed":
            key, command = entry.kind, f"holdfast status --job {job}"
        case "tier-failed" | "tier-slow":
            command = f"holdfast events --kind {entry.kind} --tail 5 --job {job}"
            key = f"{entry.kind} {fields.get('url')}"
        case "storm" | "blast-limit":
            key, command = f"{entry.kind} {fields.get('rule')}", f"holdfast why --job {job}"
        case _:
            return None
    return Matter(
        key=key,
        id=event_id(ledger, entry.seq),
        text=event_line(msgspec.to_builtins(entry), everything=True, width=TEXT_CHARS),
        command=command,
        utc=entry.utc,
        incident=incident,
        node=fields.get("node"),
    )


def _why(job: str, incident: int | None) -> str:
    return f"holdfast why --job {job}" if incident is None else f"holdfast why {incident} --job {job}"


def take_in(notes: Notes, matters: list[Matter], now_s: float) -> Notes:
    """Adds the matters that are new. now_s: seconds since 1970."""
    # Forgotten after AGAIN_S: a matter that still exists then is reported once more.
    known = {key: at_s for key, at_s in notes.told.items() if now_s - at_s < AGAIN_S}
    new = []
    for matter in matters:
        if matter.key not in known:
            new.append(matter)
            known[matter.key] = now_s
    waiting = (*notes.waiting, *new)
    newest = dict(sorted(known.items(), key=lambda item: item[1])[-REMEMBERED:])
    # Matters beyond the limit are counted: the receiver has to know that there are more.
    more = notes.more + max(0, len(waiting) - MOST)
    return msgspec.structs.replace(notes, waiting=waiting[:MOST], more=more, told=newest)


def sent(notes: Notes, now_s: float) -> Notes:
    """The notes after all waiting matters were delivered."""
    return msgspec.structs.replace(notes, waiting=(), more=0, failures=0, next_s=now_s + APART_S)


def not_sent(notes: Notes, now_s: float) -> Notes:
    """The notes after a failed attempt: each waits twice as long as the one before."""
    wait_s = min(PATIENCE_S, APART_S * 2**notes.failures)
    return msgspec.structs.replace(notes, failures=notes.failures + 1, next_s=now_s + wait_s)


Send = Callable[["Notification"], None]
"""Delivers a message. Raises NotDelivered."""


class NotDelivered(Exception):
    """The reason why a message was not delivered, without the address, which is a secret."""


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """A message to people; also the body of a plain webhook, as JSON."""

    job: str
    text: str
    """The whole message as text."""
    matters: tuple[Matter, ...]
    more: int
    link: str | None


class Notifier(FileTracker):
    """Sends messages about matters that need a person, as `take_in` decides."""

    def __init__(self, target: str, folder: Path, link: str | None = None) -> None:
        """link: a link for the reader of the message, with the placeholders `{job}` and `{incident}`.

        Raises:
            UsageError: the target cannot be used, or another follower uses it.
        """
        self._send = sender(target)
        self._job, self._link = folder.name, link
        self._first_s = time.time()
        place = folder / "tracked"
        place.mkdir(mode=0o700, exist_ok=True)
        # A target contains characters that are not possible in a file name. With its hash as the name, two
        # targets never share a position.
        key = hashlib.sha256(target.encode()).hexdigest()[:16]
        super().__init__(place / f"notify-{key}.position")

    def _begin(self) -> None:
        self._is_new = not self.position.ledger

    @property
    def waits(self) -> bool:
        """Whether there are messages that are not due yet."""
        return bool(self._notes.waiting)

    @property
    def _notes(self) -> Notes:
        return self._kept.value.notes

    def write(self, batch: Batch) -> None:
        """See `Tracker`. Raises UsageError at the job's end if a message could not be delivered; it is kept."""
        events = [part for part in batch.parts if isinstance(part, LedgerEntry)]
        found = [m for x in events if (m := matter_of(x, batch.position.ledger, self._job))]
        if self._is_new:
            found = [m for m in found if _utc_s(m) > self._first_s - OLD_S]
        # Kept before it is sent. If it is killed in between, the next follower sends it; in the other order
        # it would be lost.
        self._keep(take_in(self._notes, found, time.time()), batch)
        ended = any(entry.kind == "ended" for entry in events)
        if ended:
            self._deliver_last(batch)
        elif self._notes.waiting and time.time() >= self._notes.next_s:
            self._deliver(batch)

    def _deliver_last(self, batch: Batch) -> None:
        """Sends the rest at once, without the usual delay, because nothing comes after this."""
        for attempt in range(LAST_ATTEMPTS):
            if not self._notes.waiting or self._deliver(batch):
                return
            if attempt + 1 < LAST_ATTEMPTS:
                time.sleep(LAST_APART_S)  # on the tracker's own thread
        count = plural(len(self._notes.waiting), "notification")
        raise UsageError(f"{count} could not be delivered: run `holdfast notify` again to continue from here")

    def _deliver(self, batch: Batch) -> bool:
        notes = self._notes
        message = self._message(notes)
        try:
            self._send(message)
        except NotDelivered as error:
            _log.warning("a notification could not be delivered: %s; it is tried again", error)
            self._keep(not_sent(notes, time.time()), batch)
            return False
        self._keep(sent(notes, time.time()), batch)
        return True

    def _keep(self, notes: Notes, batch: Batch) -> None:
        kept = self._kept.value
        new = msgspec.structs.replace(kept, notes=notes, position=batch.position)
        # Each replacement is a write to the disk, and most batches change nothing.
        if new != kept:
            self._kept.replace(new)

    def _message(self, notes: Notes) -> Notification:
        lines = [f"{self._job}: {plural(len(notes.waiting) + notes.more, 'matter')} for a person"]
        for matter in notes.waiting:
            lines.append(f"- {matter.text}\n  {matter.command}")
            if (link := self._link_of(matter)) is not None:
                lines.append(f"  {link}")
        lines += [f"and {notes.more} more: holdfast events --job {self._job}"] if notes.more else []
        return Notification(
            job=self._job,
            text="\n".join(lines),
            matters=notes.waiting,
            more=notes.more,
            link=self._link_of(notes.waiting[0]),
        )

    def _link_of(self, matter: Matter) -> str | None:
        if self._link is None:
            return None
        # Replaced and not formatted: a user's format string could read attributes.
        incident = "" if matter.incident is None else str(matter.incident)
        # A matter without an incident opens the whole page: there is no incident to which this part could
        # point.
        link = self._link if incident else self._link.removesuffix(OF_INCIDENT)
        return link.replace("{job}", self._job).replace("{incident}", incident)


def sender(target: str) -> Send:
    """The sender for `slack:FILE`, `slack:env:NAME`, `webhook:...` or `mail:ADDRESS`.

    Raises:
        UsageError: there is no such target, or the file, variable or command that it needs cannot be used.
    """
    kind, _, where = target.partition(":")
    if kind in ("slack", "webhook") and where:
        url = _secret_url(kind, where)
        body = _slack if kind == "slack" else msgspec.to_builtins
        # A sender runs on the tracker's own thread, where no loop is running.
        return lambda message: asyncio.run(_post(url, body(message)))
    if kind == "mail" and "@" in where and not any(c.isspace() for c in where):
        command = shlex.split(os.environ.get(MAIL_VARIABLE, MAIL_COMMAND))
        if not command or shutil.which(command[0]) is None:
            raise UsageError(
                f"mail: the program {command[0] if command else ''!r} was not found: install a program that reads a "
                f"message from its standard input, or set {MAIL_VARIABLE}"
            )
        return lambda message: _mail(command, where, message)
    raise UsageError(f"--to {_harmless(target)!r}: {HOW}")


def _harmless(target: str) -> str:
    """The target without a part that may be a secret, written here by mistake."""
    return target.partition(":")[0] + ":..." if "//" in target else target


def _utc_s(matter: Matter) -> float:
    at: datetime = decode(datetime.fromisoformat, matter.utc, "a time in the ledger", error=UsageError)
    return at.timestamp()


def _secret_url(kind: str, where: str) -> str:
    if "//" in where:
        raise UsageError(
            f"{kind}: the URL is a secret, which every user of the machine could see in the command line: {HOW}, "
            "with the URL in that file or variable"
        )
    if where.startswith("env:"):
        url = os.environ.get(where.removeprefix("env:"), "").strip()
        if not url:
            raise UsageError(f"{kind}: the environment variable {where.removeprefix('env:')} is not set")
    else:
        try:
            url = Path(where).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{kind}: {where} cannot be read: {error}") from None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UsageError(f"{kind}: {where} does not contain an http:// or https:// URL")
    return url


def _slack(message: Notification) -> dict[str, str]:
    # Causes contain text of others, whose brackets would become links and mentions.
    text = message.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": text}


async def _post(url: str, body: Any) -> None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            # Redirects are not followed: the secret is in the path, and the redirect may lead anywhere.
            session.post(url, json=body, allow_redirects=False) as answer,
        ):
            if answer.status >= 300:
                raise NotDelivered(f"the webhook answers {answer.status}")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        # Only the type of the error: its text contains the URL, which is a secret.
        raise NotDelivered(f"the webhook does not answer ({type(error).__name__})") from None


def _mail(command: list[str], to: str, message: Notification) -> None:
    mail = EmailMessage()
    mail["To"] = to
    # Only the first line: a header with a line break is refused, or would begin another header.
    mail["Subject"] = f"[holdfast] {message.text.partition(chr(10))[0]}"
    # Equal for the same matters: a mail that is sent again after a kill is one mail for the reader.
    ids = "\n".join([message.job, *(matter.id for matter in message.matters)])
    mail["Message-ID"] = f"<{hashlib.sha256(ids.encode()).hexdigest()[:32]}@holdfast>"
    mail.set_content(message.text)
    try:
        done = subprocess.run(command, input=mail.as_bytes(), capture_output=True, timeout=6 * ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotDelivered(f"{command[0]}: {type(error).__name__}") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise NotDelivered(f"{command[0]} ended with {done.returncode}: {reason[:200]}")
