"""The client of a job wherever it runs, according to its folder. For commands; a launcher makes its own client."""

from __future__ import annotations

from pathlib import Path

from holdfast import plugins
from holdfast.engines import jobs
from holdfast.engines.base import engine_named
from holdfast.engines.client import JobClient


def client_of(folder: Path) -> JobClient:
    """The client of the job in this folder, which reaches it in the way that the job's engine provides."""
    allocation = jobs.read_allocation(folder)
    if allocation is None or plugins.find(plugins.ENGINES, allocation.engine) is None:
        return JobClient(folder)
    return JobClient(folder, engine_named(allocation.engine).reach(folder, allocation))
