"""What the page is made from: a job, wherever it is. The coordinator has one source, `holdfast ui` one for each job."""

from __future__ import annotations

import gzip
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from holdfast.errors import HoldfastError

PANELS = (
    "now",
    "incidents",
    "incident",
    "findings",
    "timeline",
    "decisions",
    "strip",
    "ranks",
    "stall",
    "launches",
    "cost",
    "series",
    "checkpoints",
    "samples",
    "log",
    "lines",
)
"""Each is `/api/v1/NAME`."""
CODE_PATH = "/page-code"
"""Where a process that knows the job's token asks the coordinator for a code, `?role=`."""
ACTIONS = ("drain", "resize", "clear", "stop")
GZIP_BYTES = 4096
"""A shorter answer is as fast as it is."""


class Refused(HoldfastError):
    """What was asked for cannot be given. status: of the HTTP answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """JSON, and the same compressed if that pays."""

    body: bytes
    packed: bytes | None = None


class Source(Protocol):
    """One job."""

    async def panel(self, name: str, query: Mapping[str, str]) -> Answer:
        """One of PANELS. Raises Refused."""

    def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """Server-sent events after a number of the ledger that is named. It ends where the client is to connect again."""

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> Answer:
        """One of ACTIONS. dry: only says what would happen. Raises Refused."""


def answer(value: Any) -> Answer:
    """Encodes and compresses: to be called from a thread where the value is large."""
    body = msgspec.json.encode(value)
    # Compressed once and kept with the answer, and not once more for each viewer.
    return Answer(body, gzip.compress(body, 5) if len(body) > GZIP_BYTES else None)


def whole(query: Mapping[str, str], name: str, default: int | None, most: int = 1 << 53) -> int | None:
    """A whole number, 0 or more, of a query. Raises Refused."""
    text = query.get(name)
    if text is None or text == "":
        return default
    # int() also takes signs, underscores and digits of other scripts, and is slow for a text without a bound.
    if len(text) > 16 or not text.isascii() or not text.isdigit() or int(text) > most:
        raise Refused(f"{name}: send a whole number from 0 to {most}")
    return int(text)


def frame(kind: str, data: bytes, number: int | None = None) -> bytes:
    """One server-sent event. number: of the ledger, with which a browser asks for what follows when it connects again."""
    # JSON of msgspec has no line breaks, which would end the event.
    known = b"" if number is None else b"id: %d\n" % number
    return b"%sevent: %s\ndata: %s\n\n" % (known, kind.encode(), data)
