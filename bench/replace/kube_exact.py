"""On a real Kubernetes of this machine: what leaves the training as it is. All machines are drained, one by one; and the API
server is down while a node that trains loses power. Each step's loss is compared with that of a run without faults."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.progress import Progress
from bench.replace.figures import Failed
from holdfast.engines.jobs import EXIT_STOPPED


@dataclass
class Exact:
    """One trial."""

    what: str
    steps: int
    """That were committed."""
    again: int
    """That were committed, and had to be done again."""
    is_same: bool
    """Each step's loss is bit by bit that of the run without faults."""
    stall_s: list[float] = field(default_factory=list)
    """Of each planned change, or each fault."""


async def measure(api: Any, home: Path, outage_s: float, progress: Progress, found: list[Exact]) -> None:
    """outage_s: how long the API server is down. found: is added to.

    Raises:
        Failed: a job did not train on.
    """
    import realkube

    try:
        await _measure(api, home, outage_s, progress, found)
    except AssertionError as error:  # as in tests, which wait by the same means
        raise Failed(str(error)) from None
    finally:
        await realkube.mend(api)


async def _measure(api: Any, home: Path, outage_s: float, progress: Progress, found: list[Exact]) -> None:
    import realkube
    import realtrials

    undisturbed = realkube.Undisturbed(home)
    progress("Holdfast on Kubernetes: every machine drained, one by one")
    options = {"steps": realkube.STEPS, "pace_s": realkube.PACE_S}
    async with realkube.Job(api, home, "drained", "--nnodes", 2, **options) as job:
        status = await job.training(2, beyond=2)
        await realtrials.drain_every_machine(api)
        await job.training(2, beyond=status.step + 20)
        what = f"all {len(realkube.MACHINES)} machines drained, one by one"
        found.append(await _ended(job, undisturbed, what, "changes"))
    progress(f"Holdfast on Kubernetes: the API server is down for {outage_s:.0f} s")
    async with realkube.pair(api, home, "alone") as (job, status):
        await realtrials.lose_node_without_api_server(api, job, status, outage_s)
        what = f"a power loss while the API server is down for {outage_s:.0f} s"
        found.append(await _ended(job, undisturbed, what, "incidents"))


async def _ended(job: Any, undisturbed: Any, what: str, kind: str) -> Exact:
    """Stops the job, and compares. kind: what of its report has the stalls."""
    await job.stop()
    if (code := await job.wait()) != EXIT_STOPPED:
        raise Failed(f"the job {job.name} ended with exit code {code}: {job.log.read_text()[-2000:]}")
    report, mine = json.loads((job.dir / "report.json").read_text()), job.losses()
    return Exact(
        what,
        steps=len(mine),
        again=report["steps"]["lost"],
        is_same=bool(mine) and mine == await asyncio.to_thread(undisturbed.losses, len(mine)),
        stall_s=[one["stall_s"] for one in report[kind] if one["stall_s"] is not None],
    )
