"""The client of a job wherever it runs, as its folder says. For commands: who runs a job knows the way to it."""

from __future__ import annotations

from pathlib import Path

from holdfast.engines import jobs
from holdfast.engines.client import JobClient


def client_of(folder: Path) -> JobClient:
    """The folder of a job on Kubernetes has no address: its coordinator is asked for at the API server."""
    allocation = jobs.read_allocation(folder)
    if allocation is None or allocation.engine != "kubernetes":
        return JobClient(folder)
    # Only for such a job: commands for others must not pay for importing the cluster's client.
    from holdfast.engines.kubernetes.reach import KubernetesReach

    return JobClient(folder, KubernetesReach(folder, allocation))
