"""`tensorboard:DIR`: event files, written by tensorboardX, which needs neither TensorFlow nor torch.

TensorBoard cannot change what it has read. But a file may begin with a mark that everything from a step on no longer
counts (`SessionLog.START`), and every reader drops that part. So each follower begins a file at its position, and another
one whenever the job goes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.coordinator.service.store import LedgerEntry, NewStep
from holdfast.errors import UsageError
from holdfast.observe.event_text import event_line
from holdfast.tools.tracking.base import FileTracker, figures
from holdfast.tools.tracking.position import Batch, Position, WentBack

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

EVENTS = "events"
"""A run of its own, below the folder, with the events as text. Its steps are the numbers in the ledger."""
TEXT_CHARS = 1000


class TensorBoard(FileTracker):
    """A scalar for each figure of each step, and a text for each event that a person would read.

    A step that was reported late, after a higher one, may be there twice if the follower was killed while it wrote it.
    """

    needs_module = "tensorboardX"

    def __init__(self, target: str, folder: Path) -> None:
        self._folder = Path(target)
        self._folder.mkdir(parents=True, exist_ok=True)
        super().__init__(self._folder / "holdfast.position")

    def _begin(self) -> None:
        step = self.position.step
        self._steps = self._begin_file(self._folder, 0 if step is None else step + 1)
        self._happened: SummaryWriter | None = None
        if self.position.ledger:
            self._happened = self._begin_file(self._run_of(self.position), self.position.seq + 1)

    def write(self, batch: Batch) -> None:
        if self._happened is None or batch.position.ledger != self.position.ledger:
            if self._happened is not None:
                self._happened.close()
            self._happened = self._begin_file(self._run_of(batch.position), 0)
        for part in batch.parts:
            if isinstance(part, WentBack):
                self._steps.close()
                self._steps = self._begin_file(self._folder, part.step)
            elif isinstance(part, NewStep):
                for name, value in figures(part).items():
                    self._steps.add_scalar(name, value, part.row.step, batch.began_utc_s + part.row.t_s)
            elif text := _text(part):
                self._happened.add_text(part.kind, text, part.seq, batch.began_utc_s + part.t_s)
        self._steps.flush()
        self._happened.flush()
        self._kept.replace(msgspec.structs.replace(self._kept.value, position=batch.position))

    def close(self) -> None:
        self._steps.close()
        if self._happened is not None:
            self._happened.close()
        super().close()

    def _begin_file(self, folder: Path, step: int) -> SummaryWriter:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UsageError(
                "tensorboard needs the package tensorboardX: pip install 'holdfast-train[tensorboard]'"
            ) from None
        # Readers take files in the order of their names, which have whole seconds. The number distinguishes
        # those of one second.
        number = self._kept.value.files + 1
        self._kept.replace(msgspec.structs.replace(self._kept.value, files=number))
        return SummaryWriter(str(folder), purge_step=step, filename_suffix=f".{number:08d}")

    def _run_of(self, position: Position) -> Path:
        # A separate one for each start of the job: the numbers of events start anew with it.
        return self._folder / EVENTS / position.ledger.replace(":", "")


def _text(entry: LedgerEntry) -> str:
    return event_line(msgspec.to_builtins(entry), width=TEXT_CHARS)
