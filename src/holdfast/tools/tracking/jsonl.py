"""`jsonl:PATH`: one JSON object on each line, for scripts, pandas and jq."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast.coordinator.service.store import LedgerEntry, NewStep
from holdfast.errors import UsageError
from holdfast.observe.event_text import event_line
from holdfast.protocol.wire.decoding import decode
from holdfast.tools.tracking.base import FileTracker, PositionFile
from holdfast.tools.tracking.position import Batch, WentBack

TEXT_CHARS = 1000


class JsonLines(FileTracker):
    """Each step that counts has exactly one line, at the place of its first commit.

    A line has `kind`: `step`, `event`, or `went-back` where steps were computed again; the lines of the earlier attempts
    are then removed from the file.
    """

    def __init__(self, target: str, folder: Path) -> None:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._other = path, path.with_name(path.name + ".rewritten")
        super().__init__(path.with_name(path.name + ".position"))

    def _begin(self) -> None:
        if self._kept.value.swaps:
            self._swap()
        self._other.unlink(missing_ok=True)
        with self._path.open("ab") as file:
            file.truncate(min(self._kept.value.size_bytes, file.tell()))

    def write(self, batch: Batch) -> None:
        rewrites = any(isinstance(part, WentBack) for part in batch.parts)
        with (self._other if rewrites else self._path).open("wb" if rewrites else "ab") as out:
            if rewrites:
                self._copy_what_counts(batch, out)
            # A step that was committed twice within the batch also has its first commit among the parts.
            for part in _what_counts(batch):
                out.write(_line(part, batch.began_utc_s))
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        # After the lines are on the disk. If it is killed in between, the file is longer than its position
        # says, and is truncated to it at the next start.
        self._kept.replace(PositionFile(position=batch.position, size_bytes=size, swaps=rewrites))
        if rewrites:
            self._swap()

    def _swap(self) -> None:
        # The file is renamed after its position was kept, so the position says whether it counts. The mark
        # must be removed before another file gets that name: an incomplete one would count.
        if self._other.exists():
            self._other.replace(self._path)
        self._kept.replace(msgspec.structs.replace(self._kept.value, swaps=False))

    def _copy_what_counts(self, batch: Batch, out: BinaryIO) -> None:
        first = min(part.step for part in batch.parts if isinstance(part, WentBack))
        with self._path.open("rb") as lines:
            for line in lines:
                if decode(partial(_is_kept, first), line, f"{self._path} is damaged", error=UsageError):
                    out.write(line)


def _is_kept(first: int, line: bytes) -> bool:
    known = msgspec.json.decode(line)
    return bool(known["kind"] != "step" or known["step"] < first)


def _what_counts(batch: Batch) -> list[NewStep | LedgerEntry | WentBack]:
    counts: list[NewStep | LedgerEntry | WentBack] = []
    for part in batch.parts:
        if isinstance(part, WentBack):
            counts = [x for x in counts if not (isinstance(x, NewStep) and x.row.step >= part.step)]
        counts.append(part)
    return counts


def _line(part: NewStep | LedgerEntry | WentBack, began_utc_s: float) -> bytes:
    if isinstance(part, NewStep):
        row = msgspec.to_builtins(part.row)
        fields: dict[str, Any] = {
            "kind": "step",
            "step": row.pop("step"),
            "time_s": began_utc_s + row.pop("t_s"),
        }
        fields |= {**row, "figures": part.figures}
    elif isinstance(part, WentBack):
        fields = {"kind": "went-back", "to_step": part.step}
    else:
        entry = msgspec.to_builtins(part)
        fields = {"kind": "event", "seq": part.seq, "time_s": began_utc_s + part.t_s, "event": part.kind}
        fields |= {"text": event_line(entry, everything=True, width=TEXT_CHARS), "fields": part.fields}
    return msgspec.json.encode(fields) + b"\n"
