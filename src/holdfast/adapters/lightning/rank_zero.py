"""What one worker does for all: loggers, and the files of checkpoints. All workers must know where these are, since any of
them may be rank 0 after a fault."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only


def set_rank(rank: int) -> None:
    """For everything that Lightning does on rank 0 alone."""
    setattr(rank_zero_only, "rank", rank)  # noqa: B010 - declared as a function


def name_folders(trainer: Any, job: str) -> None:
    """Gives loggers that would number their folders by what is there a version that follows from the job's name. Each worker
    comes at another time, and would find another number.

    job: its name.
    """
    version = f"version_{job}"
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger) and logger._version is None:
            logger._version = version
    # A service names a run when rank 0 logs to it, and the others never hear the name.
    first = trainer.loggers[0] if trainer.loggers else None
    if first is None or isinstance(first, CSVLogger | TensorBoardLogger) or first.version is not None:
        return
    root = first.save_dir if first.save_dir is not None else trainer.default_root_dir
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = f"{root}/{first.name}/{version}/checkpoints"


def known_files(trainer: Any) -> set[str]:
    """Checkpoint files that are there before the training begins."""
    found: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and Path(callback.dirpath).is_dir():
            found.update(os.path.normpath(file) for file in Path(callback.dirpath).iterdir())
    return found


def share_files(trainer: Any, is_known: Callable[[Any], bool]) -> None:
    """Lets every `ModelCheckpoint` choose the names of files by those that the job knows, and not by what rank 0 has written so
    far. is_known: whether a path is one of them."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            setattr(callback, "file_exists", lambda filepath, trainer: is_known(filepath))  # noqa: B010 - a method


def take_over(trainer: Any) -> None:
    """This worker is rank 0 now, in the place of another one, and writes into the same files."""
    for logger in trainer.loggers:
        if type(logger) is not CSVLogger or logger._experiment is not None:
            continue
        # Lightning's writer deletes what is there when it is made.
        file = Path(logger.log_dir) / "metrics.csv"
        if not file.is_file():
            continue
        before = file.read_text()
        experiment = logger.experiment
        file.write_text(before)
        experiment.metrics_keys = next(csv.reader(before.splitlines()), [])
