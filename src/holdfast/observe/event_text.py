"""Formats a ledger's entries as lines for a person. The sentences are next to each event's struct, in
`protocol.ledger`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.observe.printable import printable
from holdfast.protocol import ledger
from holdfast.protocol.ledger import LINE_WIDTH
from holdfast.protocol.units import clip_words

LONG_CAUSE = 60
"""From this length on, a cause is not repeated in full."""
_KIND = re.compile(r"[A-Z]\w+(?: in \w+)?")  # the kind of an error: `ValueError in forward`


def event_line(entry: Mapping[str, Any], everything: bool = False, width: int = LINE_WIDTH) -> str:
    """One line; '' if the entry is of no interest to a person. Its text takes at most `width` characters, but paths are
    never cut.

    everything: routine events, and events without a sentence of their own, get a line too.
    """
    kind, fields = entry["kind"], entry["fields"]
    event = ledger.read(kind, fields)
    if event is None:
        # A newer version wrote it, or an older one with other fields. Omitting it would hide an event of the
        # job.
        line = "" if _is_routine(kind) and not everything else _as_written(kind, fields)
    else:
        line = "" if event.ROUTINE and not everything else event.sentence()
    paths = event.paths() if event is not None else ()
    return printable(clip_words(line or (_as_written(kind, fields) if everything else ""), width, paths))


class EventLines:
    """Formats lines that are read one after the other: a long cause is given in full once, and after that by its
    beginning only. One fault is the cause of several events, and of one in each worker."""

    def __init__(self) -> None:
        self._causes: set[str] = set()

    def line(self, entry: Mapping[str, Any], width: int = LINE_WIDTH) -> str:
        """As `event_line`."""
        fields = dict(entry["fields"])
        for name in ("cause", "reason"):
            cause = fields.get(name)
            if not isinstance(cause, str) or len(cause) < LONG_CAUSE:
                continue
            kind = cause.partition(":")[0]
            if cause in self._causes and _KIND.fullmatch(kind):
                fields[name] = f"{kind}, as above"
            self._causes.add(cause)
        return event_line({**entry, "fields": fields}, width=width)


def _is_routine(kind: str) -> bool:
    return kind in ledger.EVENTS and ledger.EVENTS[kind].ROUTINE


def _as_written(kind: str, fields: Mapping[str, Any]) -> str:
    known = ", ".join(f"{k}={v}" for k, v in fields.items() if v not in (None, [], ""))
    return f"{kind}: {known}"
