"""`wandb:PROJECT`: Weights & Biases, offline: files for `wandb sync`, in segments that are either complete or absent.

W&B ignores a step that is smaller than an earlier one, and does not tell when a row is on the disk. So rows have a
running number as W&B's step and the
job's step as an axis of its own. A segment is a folder that W&B has finished; the position is kept after that. The
incomplete segment of a killed
follower is removed, and its rows are read again from the ledger.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.service.store import LedgerEntry, NewStep
from holdfast.errors import UsageError
from holdfast.observe.event_text import event_line
from holdfast.tools.tracking.base import FileTracker, figures
from holdfast.tools.tracking.position import Batch, Position, WentBack

ROWS = 5000
"""A segment is finished after this many rows, ..."""
SEGMENT_S = 600.0
"""... or after this many seconds: each segment costs seconds of a processor."""
TEXT_CHARS = 1000
NEEDS = "wandb needs the package W&B: pip install 'holdfast-train[wandb]'"


class WeightsAndBiases(FileTracker):
    """A row for each step that counts, and for each event that a person would read; `holdfast/attempt` increases when
    the job goes back."""

    needs_module = "wandb"

    def __init__(self, project: str, folder: Path) -> None:
        """Raises UsageError: W&B is missing, or another follower writes to this project."""
        self._project, self._job = project, folder.name
        key = hashlib.sha256(project.encode()).hexdigest()[:16]
        self._folder = folder / "tracked" / f"wandb-{key}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(self._folder / "position")

    def _begin(self) -> None:
        try:
            # By name: type checkers need not have W&B.
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UsageError(NEEDS) from None
        self._rows: list[dict[str, Any]] = []
        self._began_s = time.monotonic()
        self._at, self._attempt = self._kept.value.position, self._kept.value.attempts
        # Left by an earlier follower that was killed while it wrote this segment.
        shutil.rmtree(self._segment(), ignore_errors=True)

    @property
    def position(self) -> Position:
        """The position of the rows that were received; the kept position is behind it by up to a segment."""
        return self._at

    @property
    def waits(self) -> bool:
        """Whether there are rows that are not in a segment yet."""
        return bool(self._rows)

    def write(self, batch: Batch) -> None:
        """See `Tracker`."""
        ended = False
        for part in batch.parts:
            if isinstance(part, NewStep):
                at_s = batch.began_utc_s + part.row.t_s
                axis = {"holdfast/step": part.row.step, "holdfast/attempt": self._attempt, "_timestamp": at_s}
                self._rows.append({**figures(part), **axis})
            elif isinstance(part, WentBack):
                self._attempt += 1
            elif text := event_line(msgspec.to_builtins(part), width=TEXT_CHARS):
                step = 0 if self._at.step is None else self._at.step
                self._rows.append({"holdfast/event": f"{part.kind}: {text}", "holdfast/step": step})
            ended = ended or (isinstance(part, LedgerEntry) and part.kind == "ended")
        self._at = batch.position
        late = time.monotonic() - self._began_s > SEGMENT_S
        if ended or late or len(self._rows) >= ROWS:
            self._finish_segment()

    def close(self) -> None:
        """See `Tracker`."""
        try:
            self._finish_segment()
        finally:
            super().close()

    def _segment(self) -> Path:
        return self._folder / f"segment-{self._kept.value.files + 1:06d}"

    def _finish_segment(self) -> None:
        self._began_s = time.monotonic()
        kept = self._kept.value
        if self._rows:
            folder = self._segment()
            # It must be new: if the folder exists, W&B writes into it next to the files that another process
            # left.
            folder.mkdir()
            self._log(folder, kept.rows)
        # Only after W&B has finished the file. Until then, only the ledger certainly has these rows.
        self._kept.replace(
            msgspec.structs.replace(
                kept,
                position=self._at,
                attempts=self._attempt,
                rows=kept.rows + len(self._rows),
                files=kept.files + bool(self._rows),
            )
        )
        self._rows = []

    def _log(self, folder: Path, first: int) -> None:
        # One run over all segments and starts: its id follows from the job's folder alone.
        run_id = hashlib.sha256(str(self._folder.parent.parent.absolute()).encode()).hexdigest()[:16]
        settings = self._wandb.Settings(
            silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True
        )
        run = self._wandb.init(
            project=self._project,
            id=run_id,
            name=self._job,
            resume="allow",
            mode="offline",
            dir=str(folder),
            settings=settings,
        )
        run.define_metric("holdfast/step")
        run.define_metric("*", step_metric="holdfast/step")
        for number, row in enumerate(self._rows, first):
            run.log(row, step=number)
        run.finish()  # returns when the file is written
