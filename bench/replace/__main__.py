"""`python -m bench.replace`: from a fatal Xid on one node to training at full strength on another.

On the local engine, and with `--engine slurm` on a real Slurm of this machine (there after a power loss, too), against
Slurm's own requeue of the same job under torchrun. With `--engine kubernetes` on a real Kubernetes of this machine: from
the job's object to its first step, and a power loss. The published figures of a managed cloud service (detect 80-90 s,
replace 900-980 s, resume 1200-1440 s) stand below the table: clouds boot machines, and this does not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.processes import Children, stop_signals
from bench.progress import Progress
from bench.recovery import model as job
from bench.recovery.analyse import spread
from bench.recovery.environments import versions
from bench.replace import kube_exact, kubeflow, kubernetes, local, slurm
from bench.replace.figures import Beside, Failed, Replaced

WIDTH = 100
GOALS = {"local": (1.0, 2.0), "slurm": (1.0, 5.0), "kubernetes": (2.5, 2.0)}
"""Seconds from the fault to the verdict, and from there to full strength, that we mean to stay below."""
PUBLISHED = (
    "A managed cloud service publishes 80-90 s to detect, 900-980 s to replace and 1200-1440 s to resume "
    "(Amazon SageMaker HyperPod): it boots machines, which this benchmark does not."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replace", description=__doc__)
    parser.add_argument(
        "--models", default="10m", help=f"comma-separated: {', '.join(job.WIDTHS)} (default: 10m)"
    )
    parser.add_argument(
        "--engine", choices=tuple(GOALS), default="local", help="slurm, kubernetes: need root"
    )
    parser.add_argument(
        "--kinds",
        default="xid,power",
        help=f"faults on Slurm, comma-separated: {', '.join(slurm.FAULTS)} (default: both)",
    )
    parser.add_argument("--faults", type=int, default=5, help="nodes to replace (default: 5)")
    parser.add_argument("--starts", type=int, default=5, help="of a job on Kubernetes (default: 5)")
    parser.add_argument(
        "--peer-faults",
        type=int,
        default=3,
        help="of each kind on Kubernetes, beside Kubeflow Trainer where KUBEFLOW_BIN is given (default: 3)",
    )
    parser.add_argument(
        "--coordinators", type=int, default=3, help="to lose with their machines on Kubernetes (default: 3)"
    )
    parser.add_argument(
        "--outage",
        type=float,
        default=300.0,
        help="of Kubernetes' API server, in s, with a power loss in it; all machines are drained in another job (default: 300; "
        "0: neither)",
    )
    parser.add_argument(
        "--detection",
        type=float,
        default=2.0,
        help="of the jobs on Kubernetes: a node that is silent for so many seconds is lost (default: 2)",
    )
    chosen = parser.parse_args()
    kinds = chosen.kinds.split(",") if chosen.engine == "slurm" else ["xid"]
    if unknown := set(kinds) - set(slurm.FAULTS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: there are {', '.join(slurm.FAULTS)}")
    if chosen.engine == "slurm":
        slurm.begin_cluster()
    if chosen.engine == "kubernetes":
        kubernetes.begin_cluster()
    console, progress = Console(width=WIDTH), Progress()
    machine.introduce(
        console, versions(Path(sys.executable), ["torch", "holdfast-train"]), "gloo on this machine"
    )
    table = Table(
        title=f"{chosen.faults} replacements: median (min to max)", box=box.SIMPLE_HEAD, width=WIDTH
    )
    for name in ("system", "fault → verdict, s", "verdict → full strength, s", "stall, s"):
        table.add_column(name, justify="left" if name == "system" else "right")
    done, cpu, beside = True, machine.ForeignCpu(), list[Beside]()
    started, made, succeeded = list[float](), list[float](), list[float]()
    exact = list[kube_exact.Exact]()
    with stop_signals(), cpu, Children() as children:
        if chosen.engine == "kubernetes":
            try:
                asked = kubernetes.Asked(
                    starts=chosen.starts,
                    faults=chosen.faults,
                    coordinators=chosen.coordinators,
                    outage_s=chosen.outage,
                    peer_faults=chosen.peer_faults,
                    detection_s=chosen.detection,
                )
                measured = kubernetes.measure(asked, progress)
                system = f"Holdfast, 10m, power loss, detection {chosen.detection:g} s"
                table.add_row(system, *cells(measured.replaced))
                started, made, succeeded = measured.started_s, measured.made_s, measured.succeeded_s
                beside, exact = measured.beside, measured.exact
                for why in measured.failed:
                    done = bool(console.print(why, style="red", markup=False))
            except Failed as error:
                done = bool(console.print(str(error), style="red"))
            kinds = []
        for model, kind in itertools.product(chosen.models.split(","), kinds):
            with tempfile.TemporaryDirectory(prefix="bench-replace-") as scratch, children.group() as group:
                try:
                    if chosen.engine == "slurm":
                        found = slurm.measure(group, model, chosen.faults, kind, progress)
                    else:
                        found = local.measure(Path(scratch), group, model, chosen.faults, progress)
                except Failed as error:
                    done = bool(console.print(str(error), style="red"))
                    continue
            table.add_row(f"Holdfast, {chosen.engine}, {model}, {slurm.FAULTS[kind]}", *cells(found))
        if chosen.engine == "slurm":
            try:
                table.add_row(
                    "Slurm's requeue, torchrun, told at once",
                    *cells(slurm.measure_requeue(chosen.faults, progress)),
                )
            except Failed as error:
                done = bool(console.print(str(error), style="red"))
    console.print(table)
    if beside:
        console.print(_beside_table(beside))
    if exact:
        console.print(_exact_table(exact))
        done = done and all(one.is_same for one in exact)
    if (start := spread(started)) is not None:
        told = f"{start.median:.2f} s ({start.low:.2f}–{start.high:.2f})"
        console.print(
            f"From the object to the first step, {len(started)} jobs of 2 nodes and a spare: {told}."
        )
    if (after := spread(made)) is not None:
        console.print(
            f"After the verdict there is a pod for another spare in {after.median:.2f} s "
            f"({after.low:.2f}–{after.high:.2f})."
        )
    if (after := spread(succeeded)) is not None:
        console.print(
            f"A coordinator's machine without power, {len(succeeded)} times: another one answers after "
            f"{after.median:.2f} s ({after.low:.2f}–{after.high:.2f})."
        )
    verdict_s, full_s = GOALS[chosen.engine]
    console.print(
        f"Goals: at most {verdict_s:g} s to the verdict, then at most {full_s:g} s to full strength."
    )
    console.print(PUBLISHED, highlight=False)
    machine.conclude(console, cpu)
    if chosen.engine == "slurm":
        console.print(
            "(The nodes are child processes of Slurm, so their CPU time counts as that of other processes.)"
        )
    return 0 if done else 1


def _beside_table(found: list[Beside]) -> Table:
    table = Table(
        title="Beside it, on the same cluster: median (min to max)", box=box.SIMPLE_HEAD, width=WIDTH
    )
    for name in ("system", "fault", "times", "training again, s", "steps again", "not back"):
        table.add_column(name, justify="left" if name in ("system", "fault") else "right")
    for one in found:
        stall, again = spread(one.stall_s), spread([float(steps) for steps in one.steps_again])
        table.add_row(
            one.system,
            one.kind,
            str(len(one.stall_s) + one.not_back),
            "–" if stall is None else f"{stall.median:.2f} ({stall.low:.2f}–{stall.high:.2f})",
            "–" if again is None else f"{again.median:.0f} ({again.low:.0f}–{again.high:.0f})",
            f"{one.not_back}, after {kubeflow.LIMIT_S:.0f} s" if one.not_back else "0",
        )
    return table


def _exact_table(found: list[kube_exact.Exact]) -> Table:
    table = Table(title="Beside a run without faults", box=box.SIMPLE_HEAD, width=WIDTH)
    for name in ("what happened", "stalls, s", "steps", "again", "each loss the same"):
        table.add_column(name, justify="left" if name == "what happened" else "right")
    for one in found:
        stalls = ", ".join(f"{stall_s:.2f}" for stall_s in one.stall_s) or "–"
        same = "yes" if one.is_same else "no"
        table.add_row(one.what, stalls, str(one.steps), str(one.again), same)
    return table


def cells(found: list[Replaced]) -> list[str]:
    """The columns of one system."""
    columns = ([r.verdict_s for r in found], [r.full_s for r in found], [r.stall_s for r in found])
    return [f"{s.median:.2f} ({s.low:.2f}–{s.high:.2f})" for s in map(spread, columns) if s is not None]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
