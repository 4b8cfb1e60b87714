"""A script that works for itself between steps, evaluates now and then and loads slowly: each figure of the job, on a made-up
clock, and the same on every surface."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from desk import Desk, running
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import JobPhase
from holdfast.coordinator.membership import wall_time
from holdfast.coordinator.service import job_view
from holdfast.coordinator.service.job_view import build_report, build_status
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.coordinator.service.tally import StepSummary, Tally
from holdfast.observe.dashboard import headline, progress_line
from holdfast.observe.incident_report import incident_lines
from holdfast.observe.tables import report_view
from holdfast.protocol import messages as m
from holdfast.protocol import units
from holdfast.protocol.phases import BLOCK_STEPS, Spent, TimeClass
from holdfast.web import views
from holdfast.web.timeline import JobTimeline

T = TimeClass
STEP_S, DATA_S, BETWEEN_S = 0.03, 0.02, 0.06
EVALUATION_S, EVERY = 1.0, 50
UNTIL = 300
RECENT = {
    "ledger": "",
    "ledger_seq": 0,
    "began_utc_s": None,
    "step": None,
    "loss": None,
    "t_s": None,
    "weight": 6.0,
}


def trains(
    desk: Desk, until: int, announced: bool = True, script: tuple[float, float] = (1.0, 1.0), since: int = 0
) -> None:
    """Two workers make steps until so many are committed. script: which share of the script's time each of them has.
    announced: the evaluations are. since: from which step on that was so; before, the script had no time."""
    members = desk.members()
    script_s = dict.fromkeys(members, 0.0)
    for n in range(1, until + 1):
        own_s, evaluates = BETWEEN_S, n % EVERY == 1 and n > 1
        if n <= since:
            own_s, evaluates = 0.0, False
        if evaluates and not announced:
            own_s += EVALUATION_S
        for worker, share in zip(members, script, strict=True):
            script_s[worker] += share * own_s
        if n <= desk.state.membership.committed:
            continue
        if evaluates and announced:
            for on in (True, False):
                for worker in members:
                    hears(desk, worker, m.OffStep(on))
                desk.do(e.Tick(), EVALUATION_S if on else 0.0)
        desk.do(e.Tick(), own_s + STEP_S)
        for worker in members:
            spent = Spent(
                first=n - BLOCK_STEPS, micros=1, data_s=DATA_S, forward_s=0.005, backward_s=0.003, wait_s=0.0,
                update_s=0.002, aside_s=own_s,
            )  # fmt: skip
            word = m.Progress(
                generation=desk.state.membership.number, committed=n, median_s=STEP_S, script_s=script_s[worker],
                spent=(spent,) if n % BLOCK_STEPS == 0 else (), losses=(m.ReportedStep(n - 1, 2.191e-14, STEP_S),),
            )  # fmt: skip
            hears(desk, worker, word)


def hears(desk: Desk, worker: str, message: m.WorkerMessage, after_s: float = 0.0) -> None:
    """The core, of a worker, at this very moment."""
    desk.do(e.WorkersSay(worker.partition(".")[0], (m.FromWorker(worker, message),)), after_s)


def job() -> Desk:
    desk = running(2, committed=0)
    desk.state.membership.micro_batches = 3  # 2 and 1: a quarter of the time of two workers
    desk.state.membership.until = UNTIL
    return desk


def classes(desk: Desk) -> dict[TimeClass, float]:
    found = wall_time.classes(desk.state, desk.now)
    assert sum(found.values()) == pytest.approx(desk.now - desk.state.began_s, abs=1e-9)
    shown = job_view.goodput_of(desk.state, desk.now)
    assert sum(shown.classes.values()) == pytest.approx(shown.wall_s, abs=1e-3)
    return found


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("script", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_every_second_of_such_a_job(announced: bool, script: tuple[float, float]) -> None:
    """Whoever does the script's work, and whoever's word comes first: the others wait for it."""
    desk = job()
    trains(desk, 1, since=1)
    start_s = desk.now - desk.state.began_s
    trains(desk, 201, announced, script, since=1)
    found = classes(desk)
    assert found == {
        T.START: pytest.approx(start_s),
        T.PAUSED: pytest.approx(200 * BETWEEN_S + 4 * EVALUATION_S),
        T.DATA_WAIT: pytest.approx(200 * DATA_S),
        T.IDLE_DIVISION: pytest.approx(200 * STEP_S / 4),
        T.PRODUCTIVE: pytest.approx(200 * (STEP_S * 3 / 4 - DATA_S)),
    }
    share = job_view.goodput_of(desk.state, desk.now).share
    assert share == pytest.approx(found[T.PRODUCTIVE] / (desk.now - desk.state.began_s), abs=1e-4)


def test_one_rate_and_one_time_to_go_on_every_surface() -> None:
    desk = job()
    trains(desk, 201)
    rate = 200 / (200 * (BETWEEN_S + STEP_S) + 4 * EVALUATION_S)  # by wall time: 9.1 and not 33 steps/s
    left_s = (UNTIL - 201) / rate
    status = build_status(desk.state, desk.now)
    paced = msgspec.structs.asdict(status.pace)
    assert paced == {
        "steps_per_s": pytest.approx(rate, rel=1e-5),
        "until": UNTIL,
        "left": 99,
        "eta_s": pytest.approx(left_s, rel=1e-4),
    }
    begun_s = desk.now
    samples = {
        s.name: s.value
        for family in text_string_to_metric_families(metrics_text(desk.state, Tally(), desk.now).decode())
        for s in family.samples
    }
    assert samples["holdfast_step_rate"] == status.pace.steps_per_s
    assert samples["holdfast_remaining_seconds"] == status.pace.eta_s
    index = PhaseIndex(desk.state.membership, desk.state.spec.nproc)
    on_page = job_view.page_status(desk.state, index, desk.now, RECENT) | {
        "live": True,
        "ledger_trouble": None,
    }
    page = views.now(on_page, JobTimeline())
    assert page["pace"] == paced
    assert page["goodput"]["share"] == status.goodput.share
    assert page["weight_per_s"] == pytest.approx(6 * rate, rel=1e-4)
    report = build_report(desk.state, StepSummary(count=201, median_s=STEP_S), desk.now)
    assert (msgspec.to_builtins(report.pace), report.goodput) == (paced, status.goodput)
    words = f"{rate:.2f} steps/s"
    for line in (headline(status).plain, progress_line(desk.state.spec, status)):
        for part in (words, f"{left_s:.1f} s left", "loss 2.191e-14"):
            assert part in line
    stream = io.StringIO()
    Console(file=stream, width=140).print(report_view(report, Path("job")))
    assert f"{words}; one step takes 30 ms (median)" in stream.getvalue()
    # What was foretold is what it takes.
    trains(desk, UNTIL)
    assert desk.now - begun_s == pytest.approx(left_s, abs=EVALUATION_S)


def test_the_rate_of_a_job_that_has_ended_is_that_of_all_its_steps() -> None:
    desk = job()
    trains(desk, UNTIL)
    took_s = 299 * (BETWEEN_S + STEP_S) + 5 * EVALUATION_S
    for worker in desk.members():
        desk.says(worker, m.Done(committed=UNTIL, params_xxh3="a", loss=1.0))
    for worker in list(desk.members()):
        desk.exits(worker, 0)
    desk.wait(20.0)
    assert desk.state.membership.phase is JobPhase.ENDED
    shown = msgspec.structs.asdict(job_view.pace_of(desk.state, desk.now + 1000.0))
    assert shown == {
        "steps_per_s": pytest.approx(299 / took_s, rel=1e-5),
        "until": UNTIL,
        "left": None,
        "eta_s": None,
    }


def test_the_rate_forgets_what_is_long_past_and_keeps_few_points() -> None:
    desk = job()
    desk.state.membership.until = 100_000
    trains(desk, 1)

    def goes(steps: int, each_s: float) -> None:
        for _ in range(steps):
            desk.do(e.Tick(), each_s)
            done = desk.state.membership.committed + 1
            for worker in desk.members():
                hears(desk, worker, m.Progress(generation=1, committed=done, median_s=each_s))

    goes(1000, 1.0)
    assert wall_time.steps_per_s(desk.state, desk.now) == pytest.approx(1.0)
    goes(4000, 0.5)
    assert wall_time.steps_per_s(desk.state, desk.now) == pytest.approx(2.0, rel=0.05)
    assert len(desk.state.membership.pace) < 4 * wall_time.POINTS
    # A step that is under way costs nothing while it is no longer than others; a job that stands gets slower.
    assert wall_time.steps_per_s(desk.state, desk.now + 0.4) == wall_time.steps_per_s(desk.state, desk.now)
    assert wall_time.steps_per_s(desk.state, desk.now + 1500.0) == pytest.approx(1500 / 2250, rel=0.05)


def test_steps_that_did_not_stay_are_in_no_rate() -> None:
    desk = running(1, committed=0)
    desk.commit(1)
    desk.snapshot(1, "n0")
    desk.stores()
    begun_s = desk.now
    for n in range(2, 12):
        desk.do(e.Tick(), 0.5)
        desk.commit(n)
    assert wall_time.steps_per_s(desk.state, desk.now) == pytest.approx(2.0, rel=0.1)
    desk.exits(desk.members()[0], -9)
    desk.ready(desk.workers()[0])
    assert desk.state.membership.lost_steps == 10
    assert wall_time.steps_per_s(desk.state, desk.now) is None
    for n in range(2, 7):
        desk.do(e.Tick(), 0.5)
        desk.commit(n)
    assert wall_time.steps_per_s(desk.state, desk.now) == pytest.approx(5 / (desk.now - begun_s), rel=0.1)


def strikes(desk: Desk, worker: str) -> None:
    node = worker.partition(".")[0]
    desk.do(e.Injected(fault="kill-worker:rank=1", kind="kill-worker", node=node, worker=worker), 0.0)
    desk.do(e.NodeSays(node, m.Exited(worker=worker, code=-9)), 0.05)


@pytest.mark.parametrize(
    ("when", "announced"), [("as it is decided", True), ("after it", True), ("after it", False)]
)
def test_an_evaluation_is_no_part_of_what_an_incident_costs(when: str, announced: bool) -> None:
    """A survivor evaluates while it is decided how the job goes on, or before the next generation's first step: it would have
    done so without the fault."""
    desk = running(2, committed=0, spares=1, max_restarts=5)
    trains(desk, 10)
    survivor, lost = desk.members()
    before = classes(desk)
    began_s = desk.now
    if when == "as it is decided":
        hears(desk, survivor, m.OffStep(True))
        strikes(desk, lost)
        desk.wait(2.0)
        desk.parks(survivor, 10)
    else:
        strikes(desk, lost)
        desk.parks(survivor, 10)
    assert desk.state.membership.number == 2
    for worker in desk.members():
        desk.says(worker, m.Joined(2, 0.001))
    pause_s = 2.0
    if when == "after it" and announced:
        hears(desk, survivor, m.OffStep(True))
        desk.wait(pause_s)
        hears(desk, survivor, m.OffStep(False))
    elif when == "after it":
        desk.wait(pause_s)
    desk.do(e.Tick(), STEP_S)
    script_s = 0.0 if announced else pause_s
    word = m.Progress(generation=2, committed=11, median_s=STEP_S, script_s=script_s)
    hears(desk, survivor, word)
    found = classes(desk)
    took_s = desk.now - began_s
    paused_s = found[T.PAUSED] - before[T.PAUSED]
    told = incidents.shown(desk.state, desk.state.incidents[-1])
    assert told["paused_s"] == pytest.approx(paused_s, abs=0.06)  # it struck 50 ms before it was seen
    assert told["paused_s"] >= 1.9
    assert told["stall_s"] == pytest.approx(took_s - told["paused_s"], abs=1e-3)
    assert told["stall_s"] < 0.3
    assert max(told[x] or 0.0 for x in ("decide_s", "first_step_s")) < 0.3
    lost_s = {
        k: found.get(k, 0.0) - before.get(k, 0.0)
        for k in (T.INTERRUPTED, T.DETECT, T.DECIDE, T.REPLACE, T.JOIN, T.RESTORE, T.FIRST_STEP)
    }
    # The report's classes and the story of the incident tell the same cost.
    assert sum(lost_s.values()) == pytest.approx(told["stall_s"], abs=0.06)
    kinds = ("incident-opened", "incident-resumed")
    entries = [
        {"seq": n, "t_s": told["t_s"], "utc": "", "kind": k, "fields": told} for n, k in enumerate(kinds)
    ]
    lines = incident_lines(1, entries)
    assert f"  training stalled for {units.seconds(told['stall_s'])}; 0 steps to be repeated" in lines
    assert (
        f"  not counting {units.seconds(told['paused_s'])} of the script's own work between two steps"
        in " ".join(lines)
    )
