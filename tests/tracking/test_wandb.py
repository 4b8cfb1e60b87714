"""`wandb:PROJECT`: W&B's own offline files have each step that counts once, through kills and goings back (`make look-test`)."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_following import Job

from holdfast.coordinator.service.store import Store
from holdfast.errors import UsageError
from holdfast.tools.tracking.follower import check_target, read_ledger, tracker
from holdfast.tools.tracking.wandb import WeightsAndBiases


def follows(ledger: Path, folder: Path) -> None:
    with closing(Store(ledger, read_only=True)) as store, closing(tracker("wandb:runs", folder)) as to:
        read_ledger(store, to)


BLOCK, HEAD = 32_768, 7


def parts(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log, behind seven bytes of W&B's own. Its reader is not in the package."""
    at, whole = HEAD, b""
    assert data[:4] == b":W&B"
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:  # too little for a record: the rest of a block is empty
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # the only or the last piece
            yield whole
            whole = b""


def records(folder: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Rows of all segments in their order, and the runs that they are of."""
    from wandb.proto import wandb_internal_pb2

    rows, runs = [], set()
    for path in sorted(folder.rglob("*.wandb")):
        for data in parts(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.add(record.run.run_id)
            if record.HasField("history"):
                items = {
                    "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item
                }
                rows.append(items | {"number": record.history.step.num})
    return rows, runs


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"holdfast-train\[wandb\]"):
        tracker("wandb:runs", tmp_path)


@pytest.mark.parametrize(
    "target", ["jsonl:", "wandb:", "csv:x", "otlp:grpc://x", "mlflow:https://me:secret@x"]
)
def test_a_target_is_refused_before_a_job_starts(target: str) -> None:
    with pytest.raises(UsageError):
        check_target(target)


@pytest.mark.look
@pytest.mark.filterwarnings("default")  # those of W&B
def test_a_real_wandb_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    ledger, folder = tmp_path / "job.sqlite", tmp_path / "job"
    folder.mkdir()
    with closing(Store(ledger)) as store:
        job = Job(store)
        job.commits(0, 1, 2, 3, figures=(("eval", 1, 9.0),))
        to = tracker("wandb:runs", folder)
        assert isinstance(to, WeightsAndBiases)
        with monkeypatch.context() as killed:
            # As if it was killed after the segment and before the position was kept.
            killed.setattr(to._kept, "replace", lambda value: None)
            read_ledger(store, to)
            to._finish_segment()
        to._kept.close()
        follows(ledger, folder)
        job.goes_back()
        job.commits(2, 3, 4)
        follows(ledger, folder)
        follows(ledger, folder)
    rows, runs = records(folder)
    steps = [(r["holdfast/step"], r["holdfast/attempt"]) for r in rows if "loss" in r]
    assert steps == [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2)]
    assert {r["holdfast/step"]: r["loss"] for r in rows if "loss" in r} == job.counts
    assert [r["eval"] for r in rows if "eval" in r] == [9.0]
    assert [r["number"] for r in rows] == list(range(len(rows)))
    assert len(runs) == 1
    assert any("holdfast/event" in r for r in rows)
