"""The node's copy of the coordinator's ledger, for a coordinator that starts on another machine.

Two files: a base, which is a complete copy, and the batches that were written since. Each record begins with a mark and a
length. An agent does not interpret what is in them: it only keeps and returns it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator
from pathlib import Path

from holdfast.protocol import messages as m
from holdfast.protocol.messages import LedgerMark

_log = logging.getLogger(__name__)
_HEAD = struct.Struct(">QQQ")
"""Term, batch and length of what follows."""
PART_BYTES = 4 << 20
MOST_WAITING = 4096
"""Parts that wait for a disk. One that takes none of them for so long is not to cost the node its memory."""


class LedgerCopy:
    """The copy in a folder. `run` writes what was passed to `keep`. A copy with a gap is discarded and never sent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base, self._work, self._batches = (
            folder / name for name in ("ledger.base", "ledger.base.tmp", "ledger.pages")
        )
        self._waiting: asyncio.Queue[m.KeepLedger] = asyncio.Queue(MOST_WAITING)
        self._begun = bytearray()
        self._broken = False
        self.mark = self._read_mark()
        """How far it goes: what is in the files."""

    def keep(self, part: m.KeepLedger) -> None:
        """Adds a part, in the order in which the coordinator sent it."""
        try:
            self._waiting.put_nowait(part)
        except asyncio.QueueFull:
            self._give_up("the disk is too slow")

    async def run(self) -> None:
        """Writes, until it is cancelled."""
        while True:
            part = await self._waiting.get()
            try:
                await asyncio.to_thread(self._put, part)
            except OSError as error:
                self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """Until the next base. A copy that lacks a batch would let its coordinator decide again what it had decided."""
        if not self._broken:
            _log.warning("this node keeps no copy of the coordinator's ledger: %s", why)
        self._broken, self.mark = True, LedgerMark()

    def _put(self, part: m.KeepLedger) -> None:
        if part.base:
            self._put_base(part)
        elif not self._broken:
            if part.begins:
                self._begun.clear()  # of a connection that ended in the middle of a batch
            # Numbers without a gap, and no batch twice: a coordinator that goes on from this copy acts on
            # every decision in it, and believes that there were no others.
            if part.mark.batch != self.mark.batch + 1:
                self._give_up(f"batch {part.mark.batch} came after batch {self.mark.batch}")
                return
            self._begun += part.data
            if not part.more:
                with self._batches.open("ab") as batches:
                    batches.write(_HEAD.pack(*part.mark, len(self._begun)) + self._begun)
                self._begun.clear()
                self.mark = part.mark

    def _put_base(self, part: m.KeepLedger) -> None:
        if not part.mark.batch:
            self._end()
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._work.open("wb" if part.begins else "ab") as work:
            work.write(part.data)
        if part.more:
            return
        # A base without batches counts as no copy. So an agent that is killed between two of these lines has none, and never
        # one base under the mark of another: the older ledger would be taken for the newest.
        self._batches.unlink(missing_ok=True)
        size = self._work.stat().st_size
        self._work.replace(self._base)
        with self._batches.open("wb") as batches:
            batches.write(_HEAD.pack(*part.mark, 0))
        self._begun.clear()
        self._broken, self.mark = False, part.mark
        _log.info("keeps a copy of the coordinator's ledger", extra={"bytes": size, "batch": part.mark.batch})

    def _end(self) -> None:
        """Others keep newer copies. This one would let a coordinator that hears of no other go back to what was long ago."""
        # In this order: a base without batches counts as no copy, as in `_put_base`.
        for file in (self._batches, self._base):
            file.unlink(missing_ok=True)
        self._begun.clear()
        self._broken, self.mark = False, LedgerMark()
        _log.info("keeps no copy of the coordinator's ledger any more")

    def _read_mark(self) -> LedgerMark:
        """Of what an agent before this one kept. A batch that it was just writing is cut off."""
        self._work.unlink(missing_ok=True)
        # A base without a record of batches has no mark, and so counts as none: an agent that was killed
        # between the two writes of `_put_base` left it.
        mark, whole = LedgerMark(), 0
        if self._base.exists():
            for mark, end in self._records():  # noqa: B007 - the last one counts
                whole = end
            if self._batches.exists():
                with self._batches.open("ab") as batches:
                    batches.truncate(whole)
        return mark

    def _records(self) -> Iterator[tuple[LedgerMark, int]]:
        """The mark of each record of batches that is complete, and where it ends."""
        try:
            with self._batches.open("rb") as batches:
                size = batches.seek(0, 2)
                at = 0
                while at + _HEAD.size <= size:
                    batches.seek(at)
                    term, batch, length = _HEAD.unpack(batches.read(_HEAD.size))
                    at += _HEAD.size + length
                    if at > size:
                        return
                    yield LedgerMark(term, batch), at
        except FileNotFoundError:
            return

    def parts(self) -> Iterator[m.LedgerKept]:
        """All of it, for a coordinator that begins; nothing but the last word where there is none. Reads files."""
        mark = self.mark
        if mark.batch and not self._broken:
            try:
                yield from self._all_parts()
            except OSError as error:
                _log.warning("the copy of the coordinator's ledger cannot be read: %s", error)
        yield m.LedgerKept(mark=mark, data=b"", last=True)

    def _all_parts(self) -> Iterator[m.LedgerKept]:
        records = list(self._records())
        with self._base.open("rb") as base:
            left = base.seek(0, 2)
            base.seek(0)
            while left > 0:
                data = base.read(PART_BYTES)
                left -= len(data)
                yield m.LedgerKept(mark=records[0][0], data=data, base=True, more=left > 0)
        begin = 0
        with self._batches.open("rb") as batches:
            for mark, end in records:
                batches.seek(begin + _HEAD.size)
                size, begin = end - begin - _HEAD.size, end
                while size > 0:
                    data = batches.read(min(size, PART_BYTES))
                    size -= len(data)
                    yield m.LedgerKept(mark=mark, data=data, more=size > 0)
