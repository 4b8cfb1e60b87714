"""What a HoldfastJob is to the coordinator and its agents: the same specification as with every other engine. Pure."""

from __future__ import annotations

from holdfast.kubernetes.check import snapshot_bytes, worker_container, workers_of_node
from holdfast.kubernetes.names import CODE_FOLDER
from holdfast.kubernetes.resource import HoldfastJob
from holdfast.protocol.faults import parse_fault
from holdfast.protocol.health import HealthSpec
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import Timing
from holdfast.protocol.snapshots import DurableTier, Saving


def job_spec(job: HoldfastJob) -> JobSpec:
    """`spec.json` of the job."""
    spec = job.spec
    container = worker_container(spec) or {}
    cwd = CODE_FOLDER if spec.run.code is not None else container.get("workingDir", ".")
    return JobSpec(
        name=job.id.name,
        script=spec.run.script or spec.run.module or "",
        module=spec.run.module is not None,
        args=spec.run.args,
        min_nodes=spec.fewest,
        max_nodes=spec.nodes,
        nproc=workers_of_node(spec),
        spares=spec.spares,
        wait_for_spare=spec.wait_for_spare,
        engine="kubernetes",
        preload=spec.run.preload,
        faults=tuple(parse_fault(text) for text in spec.faults),
        max_restarts=spec.run_policy.max_restarts,
        cwd=cwd,
        timing=Timing(spec.timing.detection_milliseconds / 1000, spec.timing.stall_factor_percent / 100),
        saving=Saving(
            memory=spec.snapshots.every,
            copies=spec.snapshots.copies,
            budget_bytes=snapshot_bytes(spec) or 0,
            tiers=tuple(
                DurableTier(tier.url, tier.every, tier.keep, tier.keep_every) for tier in spec.checkpoints
            ),
        ),
        health=HealthSpec(
            dry_run=spec.health.dry_run,
            blast_share=spec.health.blast_radius_percent / 100,
            deep=spec.health.deep_checks,
            replace_slow=(spec.health.replace_slow_percent or 0) / 100,
            replace_suspect=spec.health.replace_suspect,
        ),
    )
