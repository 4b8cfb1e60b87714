"""The client of a job wherever it runs, as its folder says. For commands: who runs a job knows the way to it."""

from __future__ import annotations

from pathlib import Path

from holdfast import plugins
from holdfast.engines import jobs
from holdfast.engines.base import engine_named
from holdfast.engines.client import JobClient


def client_of(folder: Path) -> JobClient:
    """The client of the job in this folder, whose engine may know a way of its own."""
    allocation = jobs.read_allocation(folder)
    if allocation is None or plugins.find(plugins.ENGINES, allocation.engine) is None:
        return JobClient(folder)
    return JobClient(folder, engine_named(allocation.engine).reach(folder, allocation))
