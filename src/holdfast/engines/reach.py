"""The client of a job wherever it runs, as its folder says. For commands: who runs a job knows the way to it."""

from __future__ import annotations

import importlib
from pathlib import Path

from holdfast.engines import jobs
from holdfast.engines.client import JobClient

REACHES = {"kubernetes": "holdfast.kubernetes.commands.reach:KubernetesReach"}
"""By engine: where to find the `client.Reach` of jobs whose folder has no address. Made with the folder and its allocation."""


def client_of(folder: Path) -> JobClient:
    """The client of the job in this folder."""
    allocation = jobs.read_allocation(folder)
    if allocation is None or allocation.engine not in REACHES:
        return JobClient(folder)
    # By name, and only for such a job: nothing that a job needs imports the cluster's client.
    module, _, name = REACHES[allocation.engine].partition(":")
    return JobClient(folder, getattr(importlib.import_module(module), name)(folder, allocation))
