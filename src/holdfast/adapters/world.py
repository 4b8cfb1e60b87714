"""How a script that never calls `holdfast.start` sees no other world than itself, and becomes a member of its job."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack, closing
from weakref import WeakSet

from holdfast.data.decoding import is_decoder
from holdfast.errors import UsageError
from holdfast.train import torchrun_world, worker
from holdfast.train.run import Run, under_way

_slot = int(os.environ.get("LOCAL_RANK", "0"))

_runs: list[Run] = []
"""This process's run: a worker belongs to one job for its whole life."""

_of_one = ExitStack()
"""What the job of one has open: its sockets and threads end with it, when the next one begins or Python ends."""
atexit.register(_of_one.close)

_trained: WeakSet[Run] = WeakSet()
"""Runs that a training has taken. Weakly: a run whose `main` is run again, as another shard, goes with its model."""


def slot() -> int:
    """This worker's number on its node."""
    return _slot


def enter() -> None:
    """What the import of an adapter does: this process sees no other world than itself.

    Not so a process that decodes samples, which imports the script for the dataset's class: a run would take memory of a
    GPU there, and threads.
    """
    if not is_decoder():
        own_run()


def entered() -> bool:
    """Whether an adapter for level 2 was imported."""
    return bool(_runs)


def own_run() -> Run:
    """The run of this process: of the job under `holdfast run`, a job of one under plain `python`; that of `main` in it.

    Called when the adapter is imported, before a framework looks at the environment: then the framework sees one
    process, and never asks torch for a process group. A group over all workers could not lose one of them, and a spare
    that comes late would wait in it for ever.

    Raises:
        UsageError: this process was started by the script, and imports it.
    """
    if is_decoder():
        raise UsageError(
            "a process that loads data imported the script, and would start to train: put the training code below if "
            '__name__ == "__main__":'
        )
    begun = under_way()
    # A script may call `holdfast.start(main)` as well, for sharded replicas: then `main` has the run. Of a job of one, a
    # second training in it takes another.
    if begun is not None and not (begun.alone and begun in _trained):
        return begun
    if _runs:
        return _runs[0]
    attachment = worker.attachment()
    run = _alone() if attachment is None else Run(attachment)  # reads LOCAL_RANK, for this worker's GPU
    torchrun_world.hide()
    _runs.append(run)
    return run


def run_for_training() -> Run:
    """The run, for training with it: this worker is a member of its job from here on, and no sooner. A script that only
    evaluates never comes here, and may end when it likes. Under plain `python` every training has a run of its own.

    Raises:
        UsageError: the job's run was taken before. Its state is that of one training, and a newcomer could not know which.
    """
    run = own_run()
    if run in _trained:
        if not run.alone:
            raise UsageError(
                "this job has already trained: a job can call train() only once. Start the second training as a "
                "separate job, with another script or another argument"
            )
        # Its hooks are on the parameters, which may be those of the next training, too.
        run.close()
        run = _alone()
        _runs[:] = [run]
    elif not run.alone:
        worker.attach()
        worker.leave_sigterm_to_the_agent()
    _trained.add(run)
    return run


def _alone() -> Run:
    _of_one.close()
    return Run(_of_one.enter_context(closing(worker.alone())))
