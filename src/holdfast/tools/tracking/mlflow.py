"""`mlflow:URI`: one run of MLflow over all starts of a job.

MLflow cannot remove rows. But a row of a metric is its name, time, step and value together, so a row that is written
again with the
ledger's time is the same row. A follower that was killed between the write and its position therefore repeats nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.coordinator.service.store import LedgerEntry, NewStep
from holdfast.errors import UsageError
from holdfast.observe.event_text import event_line
from holdfast.tools.tracking.base import FileTracker, figures
from holdfast.tools.tracking.position import Batch, WentBack

EXPERIMENT = "holdfast"
TAG = "holdfast.run"
"""The tag by which the run is found: names of runs need not be unique."""
ROWS = 1000
"""MLflow refuses a request with more metrics."""
TAGS = 100
"""MLflow refuses a request with more tags."""
TEXT_CHARS = 1000
NEEDS = "mlflow needs the package MLflow: pip install 'holdfast-train[mlflow]'"


class MLflow(FileTracker):
    """A metric for each figure of each step; tags and points of `holdfast/event` for events that a person would read.

    If the job goes back, rows of steps that no longer count stay, because MLflow cannot remove them. The
    metric `holdfast/went_back` has a point at each such step.
    """

    needs_target = False
    needs_module = "mlflow"

    @classmethod
    def check(cls, target: str) -> None:
        """See `TrackerKind`."""
        super().check(target)
        tracking_uri(target)

    def __init__(self, uri: str, folder: Path) -> None:
        """uri: if '', that of MLFLOW_TRACKING_URI.

        Raises:
            UsageError: MLflow is missing or cannot open the URI, the URI has a password, or another follower uses it.
        """
        self._uri = tracking_uri(uri)
        self._name = folder.name
        place = folder / "tracked"
        place.mkdir(mode=0o700, exist_ok=True)
        key = hashlib.sha256(self._uri.encode()).hexdigest()[:16]
        super().__init__(place / f"mlflow-{key}.position")

    def _begin(self) -> None:
        try:
            # By name: type checkers need not have MLflow.
            self._entities = importlib.import_module("mlflow.entities")
            client_class = importlib.import_module("mlflow.tracking").MlflowClient
            self._error: Any = importlib.import_module("mlflow.exceptions").MlflowException
        except ImportError:
            raise UsageError(NEEDS) from None
        if not self._kept.value.run:
            self._kept.replace(msgspec.structs.replace(self._kept.value, run=uuid.uuid4().hex))
        try:
            self._client: Any = client_class(tracking_uri=self._uri)
            self._run = self._find_run()
        except self._error as error:
            raise self._refused(error) from error

    def _find_run(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        runs = self._client.search_runs(
            [experiment], f"tags.`{TAG}` = '{self._kept.value.run}'", max_results=1
        )
        if runs:
            return str(runs[0].info.run_id)
        tags = {TAG: self._kept.value.run, "holdfast.job": self._name}
        return str(self._client.create_run(experiment, run_name=self._name, tags=tags).info.run_id)

    def write(self, batch: Batch) -> None:
        """See `Tracker`. Raises UsageError: the server does not accept the data; the position stays as it was."""
        rows: list[Any] = []
        tags: list[Any] = []
        marks, went_back = self._marks(batch), False
        # Including the steps that this very batch takes back. After a kill it may come again with more steps
        # at its end, and the rows that were already written must not depend on that.
        for part in batch.parts:
            if isinstance(part, NewStep):
                step, time_s = part.row.step, batch.began_utc_s + part.row.t_s
                rows += [self._row(name, value, time_s, step) for name, value in figures(part).items()]
                if went_back:
                    rows.append(self._row("holdfast/went_back", step, time_s, step))
                went_back = False
            elif isinstance(part, WentBack):
                went_back = True  # the next step is the one to which the job went back
            elif text := _text(part):
                at_s = batch.began_utc_s + part.t_s
                rows.append(self._row("holdfast/event", part.seq, at_s, marks[part.seq]))
                # The numbers of events start anew with each start of the job, so its ledger is part of the
                # name.
                start = re.sub(r"[^0-9]", "", batch.position.ledger)
                tags.append(self._entities.RunTag(f"holdfast.event.{start}.{part.seq:06d}", text))
        try:
            for i in range(0, len(rows), ROWS):
                self._client.log_batch(self._run, metrics=rows[i : i + ROWS])
            for i in range(0, len(tags), TAGS):
                self._client.log_batch(self._run, tags=tags[i : i + TAGS])
        except self._error as error:
            raise self._refused(error) from error
        self._kept.replace(msgspec.structs.replace(self._kept.value, position=batch.position, marks={}))

    def _marks(self, batch: Batch) -> dict[int, int]:
        """Number of each event to the step of its point: that of the newest commit before it."""
        known, step = self._kept.value.marks, self.position.step or 0
        marks = {}
        for part in batch.parts:
            if isinstance(part, NewStep):
                step = part.row.step
            elif isinstance(part, LedgerEntry):
                marks[part.seq] = known.get(part.seq, step)
        # Kept before anything is written. Events are read at once, but steps only when they have settled. So
        # after a kill the same events come again after other steps, and would give other rows.
        if marks != known:
            self._kept.replace(msgspec.structs.replace(self._kept.value, marks=marks))
        return marks

    def _row(self, name: str, value: float, time_s: float, step: int) -> Any:
        # Always the same for the same part of the ledger: only this makes a second write harmless.
        return self._entities.Metric(_metric_name(name), float(value), round(time_s * 1000), step)

    def _refused(self, error: Exception) -> UsageError:
        answer = str(error).partition("\n")[0][:TEXT_CHARS]
        return UsageError(
            f"mlflow: the server did not accept the data: {answer}. Run the command again to continue from here"
        )


def tracking_uri(uri: str) -> str:
    """The given URI, else that of the environment. Raises UsageError: there is none, or it contains a password."""
    if _has_password(uri):
        raise UsageError(
            "mlflow: the URI contains a password, which every user of the machine could see in the command line: set "
            "MLFLOW_TRACKING_URI to the URI, and use mlflow: without one"
        )
    found = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not found:
        raise UsageError("mlflow: no tracking URI was given; use mlflow:URI, or set MLFLOW_TRACKING_URI")
    return found


def _has_password(uri: str) -> bool:
    try:
        return urlsplit(uri).password is not None
    except ValueError:
        return False


def _metric_name(name: str) -> str:
    """MLflow refuses names with other characters, or that are not plain relative paths."""
    parts = [part for part in re.sub(r"[^\w\-. /]", "_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:250] or "_"


def _text(entry: LedgerEntry) -> str:
    return event_line(msgspec.to_builtins(entry), width=TEXT_CHARS)
