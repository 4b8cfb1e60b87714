"""`holdfast plan simulate`: runs of a simulated cluster, decided by the coordinator's own core."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import AsJson, Output, width_of, write_as
from holdfast.cli.options import command
from holdfast.cli.plan_run import days, read_yaml
from holdfast.cli.ui import PORT
from holdfast.protocol.options import given
from holdfast.tools.simulate.options import ScenarioOptions

if TYPE_CHECKING:
    from holdfast.tools.simulate.scenario import Scenario
    from holdfast.tools.simulate.trace import NodeTrace
    from holdfast.tools.simulate.trial import Trial


@command
def simulate(
    options: ScenarioOptions,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help=(
                "YAML file whose fields have the names of the options, and a field `failures`, a list of classes of "
                "failures."
            ),
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="How many runs to simulate.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The seed of the first run.")] = 0,
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="SEED", help="Repeat the run with this seed and keep its ledger."),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="With --replay or --page: name of the job.",
            show_default="simulated-SEED",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="File (CSV or JSON) that records when nodes come and go."
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page",
            help="Show a simulated job on its page, where racks, switches and ranks can be made to fail.",
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            help="With --page: port on this machine's loopback address; 0 takes any free one.",
            min=0,
            show_default=str(PORT),
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Simulates complete runs with failures, spares, repairs and resizes. The coordinator's own code decides."""
    from holdfast.errors import UsageError
    from holdfast.tools.simulate.scenario import read

    if trials < 1:
        raise UsageError(f"--trials must be at least 1 (got {trials})")
    fields = (read_yaml(config) if config else {}) | given(options)
    if port is not None and not page:
        raise UsageError("--port needs --page")
    if page:
        if trace is not None or replay is not None or as_json or output is not None:
            raise UsageError(
                "--page shows a run while it goes on; remove --trace, --replay, --json and --output"
            )
        _page(fields, seed, job, PORT if port is None else port, as_flags=config is None)
        return
    # A trace says when nodes come and go. So it sets size and length of the run, and there are no random
    # failures besides, unless the flags or the file ask for them.
    record = _trace(trace) if trace else None
    if record is not None:
        fields = {"nodes": record.most, "days": record.ends_s / 86400, "rate": 0} | fields
    scenario = read(fields, as_flags=config is None)
    if replay is not None:
        _replay(scenario, replay, job, record)
        return
    found = _run(scenario, trials, seed, record)
    if write_as({"scenario": scenario, "trials": found}, as_json, output):
        return
    from holdfast.observe.tables import WIDTH

    _print(scenario, found, width_of(output, WIDTH))


PAGE = {"nodes": "2000", "days": "365", "spares": "48", "rate": "0.0161%", "max_restarts": "10000"}
"""What --page simulates where nothing else is given. A person strikes more in an hour than fails in a month: with the usual
limit of new nodes a day, the job would soon have used up all of them."""
PAGE_LEAST = 0.8
"""Of the nodes: with fewer the job waits."""
PAGE_MOST = 8192
"""Nodes of a page: beyond that a generation takes the processor for seconds."""


def _page(fields: dict[str, Any], seed: int, job: str | None, port: int, as_flags: bool) -> None:
    import asyncio

    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.tools.simulate.options import FAILURES
    from holdfast.tools.simulate.scenario import read

    fields = {k: v for k, v in PAGE.items() if k != "rate" or FAILURES not in fields} | fields
    scenario = read(fields, as_flags)
    if scenario.nodes + scenario.spares > PAGE_MOST:
        raise UsageError(
            f"--page: {scenario.nodes} nodes and {scenario.spares} spares are more than {PAGE_MOST}, which is what one "
            "process decides about while it serves the page; without --page there is no such limit"
        )
    if "min_nodes" not in fields:
        import msgspec

        least = max(1, int(PAGE_LEAST * scenario.nodes))
        scenario = msgspec.structs.replace(scenario, min_nodes=least)
    name = jobs.check_name(job) if job else jobs.default_name("simulated")
    if (jobs.job_dir(name) / "spec.json").exists():
        raise UsageError(
            f"the job {name!r} exists already; choose another --job, or remove it with `holdfast rm {name}`"
        )
    asyncio.run(_serve(scenario, seed, name, port))


async def _serve(scenario: Scenario, seed: int, name: str, port: int) -> None:
    import asyncio

    from holdfast.cli.ui import serve
    from holdfast.engines import jobs
    from holdfast.ui.simulated import SIMULATED_ACTIONS, SIMULATED_PANELS, SimulatedHost

    sys.stdout.write(f"a simulated job of {scenario.nodes} nodes and {scenario.spares} spares: {name}\n")
    host = SimulatedHost(scenario, seed, jobs.JobFolder(name, here=False))
    try:
        async with asyncio.TaskGroup() as tasks:
            driving = tasks.create_task(host.run())
            await serve(host, port, True, None, SIMULATED_PANELS, SIMULATED_ACTIONS)
            driving.cancel()
    finally:
        await host.finish()
    sys.stdout.write(
        f"its ledger is kept: `holdfast events --job {name}` shows it, `holdfast rm {name}` removes it\n"
    )


def _trace(path: Path) -> NodeTrace:
    from holdfast.errors import UsageError
    from holdfast.protocol.wire.stored import decode_file
    from holdfast.tools.simulate.trace import parse

    try:
        text = decode_file(bytes.decode, path, f"--trace {path} cannot be read", error=UsageError)
        return parse(path.name, text)
    except OSError as error:
        raise UsageError(f"--trace {path} cannot be read: {error}") from error


def _replay(scenario: Scenario, seed: int, job: str | None, record: NodeTrace | None) -> None:
    from holdfast.engines import jobs
    from holdfast.tools.simulate.trial import replay

    # A trial follows from scenario and seed alone, so the run of a seed is the same again, this time with a
    # ledger.
    name = jobs.check_name(job or f"simulated-{seed}")
    trial = replay(scenario, seed, jobs.job_dir(name), record)
    sys.stdout.write(
        f"seed {seed}: {days(trial.wall_s)}, goodput {trial.goodput:.2%}, {trial.incidents} incidents\n"
        f"  holdfast events --job {name}\n  holdfast report --job {name}\n"
    )


def _run(scenario: Scenario, trials: int, seed: int, record: NodeTrace | None) -> list[Trial]:
    import time

    from holdfast.tools.simulate.trial import run_all

    found = []
    shown = began = time.monotonic()
    for trial in run_all(scenario, trials, seed, record):
        found.append(trial)
        if time.monotonic() - shown > 2:
            shown = time.monotonic()
            left_s = (shown - began) / len(found) * (trials - len(found))
            sys.stderr.write(f"{len(found)} of {trials} trials, about {left_s:.0f} s left\n")
    return found


def _print(scenario: Scenario, trials: list[Trial], width: int) -> None:
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units

    out = sys.stdout
    ideal = scenario.work_s
    out.write(
        f"{scenario.nodes} nodes x {scenario.gpus_per_node} GPUs, {scenario.spares} spares, at least "
        f"{scenario.least} nodes; {days(ideal)} of work; {len(trials)} trials, seeds {trials[0].seed} to "
        f"{trials[-1].seed}\n\n"
    )
    measures: list[tuple[str, list[float], Any]] = [
        ("wall time", [t.wall_s for t in trials], days),
        ("goodput", [t.goodput for t in trials], units.share),
        ("incidents", [float(t.incidents) for t in trials], "{:.0f}".format),
        ("nodes that were replaced", [float(t.new_nodes) for t in trials], "{:.0f}".format),
        ("GPU-hours", [t.node_hours * scenario.gpus_per_node for t in trials], "{:,.0f}".format),
    ]
    print_table(
        out,
        ("", "10%", "50%", "90%"),
        [(name, *(shown(_percentile(values, p)) for p in (10, 50, 90))) for name, values, shown in measures],
        width=width,
    )
    out.write("\nwhere the time goes (mean)\n")
    wall = sum(t.wall_s for t in trials)
    words = {
        "training": "training",
        "smaller": "fewer nodes than wanted",
        "slow": "waiting for slow nodes",
        "lost_steps": "steps done again",
        "stalled": "recovery",
        "changes": "planned changes",
        "starting": "start",
        "given_up": "restarted by hand",
    }
    parts = [(word, sum(getattr(t.spent, name) for t in trials) / wall) for name, word in words.items()]
    print_table(
        out,
        ("", "share", ""),
        [(word, f"{100 * share:.2f}%", "█" * round(50 * share)) for word, share in parts if share > 0],
        width=width,
    )
    _print_trouble(trials)
    # The command as it was given: a trial follows from all of its options, and one that was left out would
    # repeat another run.
    again = shlex.join(["holdfast", *sys.argv[1:], "--replay", str(trials[0].seed)])
    out.write(f"\nnext\n  {again}   # its events and report\n")


def _print_trouble(trials: list[Trial]) -> None:
    failures: dict[str, int] = {}
    for trial in trials:
        for name, count in trial.failures.items():
            failures[name] = failures.get(name, 0) + count
    if failures:
        each = ", ".join(f"{name} {count / len(trials):.1f}" for name, count in failures.items())
        sys.stdout.write(f"\nfailures in a run: {each}\n")
    reasons = [reason for t in trials for reason in t.given_up]
    if reasons:
        count = sum(bool(t.given_up) for t in trials)
        sys.stdout.write(
            f"in {count} of {len(trials)} trials the job gave up and was restarted by hand: "
            f"{max(set(reasons), key=reasons.count)} (spares, --min-nodes or a longer --detection help)\n"
        )
    short = [t for t in trials if t.done < 1]
    if short:
        done = sum(t.done for t in short) / len(short)
        sys.stdout.write(f"the trace ended before the work was done: {done:.1%} of it on average\n")


def _percentile(values: list[float], percent: float) -> float:
    """By linear interpolation."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
