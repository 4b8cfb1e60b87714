"""`holdfast metrics`: a job's figures in Prometheus' text format, of one that runs or of one that has ended."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.cli.common import JobName, kept_state, ledger


def metrics(job: JobName = None) -> None:
    """Prints a job's figures in Prometheus' text format, for node_exporter's textfile collector, or to look at."""
    from holdfast.engines import jobs

    sys.stdout.write(read_metrics(jobs.existing(job)).decode())


def read_metrics(folder: Path) -> bytes:
    """From the coordinator, as Prometheus gets them; from the ledger when the job does not run."""
    import asyncio

    from holdfast.engines.client import NoAnswer
    from holdfast.engines.reach import client_of

    async def ask() -> bytes:
        async with client_of(folder) as client:
            return await client.get_bytes("/metrics")

    try:
        return asyncio.run(ask())
    except NoAnswer:
        return _stored(folder)


def _stored(folder: Path) -> bytes:
    """As the job's last coordinator left them.

    Raises:
        UsageError: the job was never started.
    """
    from holdfast.coordinator.service.metrics import metrics_text

    with ledger(folder) as store:
        state = kept_state(store, folder)
        return metrics_text(state, store.count_steps(), state.began_s + store.last_t_s())
