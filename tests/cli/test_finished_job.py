"""The commands on a job that has ended: all is read from its folder."""

import csv
import json

import msgspec
import pytest

from holdfast.coordinator.kernel.state import CoreState, JobPhase, MembershipState
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.store import Store
from holdfast.engines.jobs import JobFolder
from holdfast.protocol.job import JobSpec
from holdfast.protocol.messages import ReportedStep

SECRET = "a-secret-of-the-script"
UTC = "2026-01-02T03:04:05+00:00"


def write_job(name, outcome="finished"):
    """A job's folder as a coordinator leaves it."""
    spec = JobSpec(name=name, script="train.py", args=("--api-key", SECRET), max_nodes=2)
    folder = JobFolder(name)
    folder.prepare(spec)
    logs = folder.path / "logs"
    logs.mkdir()
    for node, incarnation in ((0, 1), (1, 2), (2, 3)):
        log = logs / f"node{node}.0-{incarnation}.log"
        log.write_text("".join(f"node{node} line {i}\n" for i in range(30)))
    state = CoreState(spec=spec, began_s=5.0)
    state.membership = MembershipState(phase=JobPhase.ENDED, number=2, committed=8, outcome=outcome)
    store = Store(folder.path / "job.sqlite")
    store.begin()
    for node, incarnation in ((0, 1), (1, 2), (2, 3)):
        worker = f"node{node}.0#{incarnation}"
        log = str(logs / f"node{node}.0-{incarnation}.log")
        store.add_event(
            1.0, UTC, "worker-started", {"worker": worker, "node": f"node{node}", "pid": 1, "log": log}
        )
    formed = {"start": 0, "world": 2, "restore": [], "applied": False, "source": "live"}
    store.add_event(2.0, UTC, "formed", formed | {"generation": 1, "workers": ["node0.0#1", "node1.0#2"]})
    store.add_event(3.0, UTC, "formed", formed | {"generation": 2, "workers": ["node0.0#1", "node2.0#3"]})
    store.add_event(9.0, UTC, "ended", {"outcome": outcome, "reason": None, "step": 8})
    store.add_steps(4.0, [ReportedStep(i, 5.0 - i / 4, 0.1) for i in range(10)], 1, 2)
    store.save(state)
    store.commit()
    if outcome:
        report = build_report(state, store.summary(), 14.0)
        (folder.path / "report.json").write_bytes(msgspec.json.encode(report))
    store.close()
    folder.close()
    return folder.path


@pytest.fixture
def job(home):
    return write_job("done")


def test_status(holdfast, job):
    said = holdfast("status", "--job", "done")
    assert said.code == 0
    assert "done  finished  step 10" in said.out
    assert "`holdfast report --job done`" in said.out


def test_status_as_json(holdfast, job):
    told = json.loads(holdfast("status", "--json").out)
    assert (told["job"], told["outcome"], told["running"], told["t_s"]) == ("done", "finished", False, 9.0)


def test_the_newest_job_is_taken(holdfast, job):
    write_job("newer")
    assert json.loads(holdfast("status", "--json").out)["job"] == "newer"
    assert json.loads(holdfast("status", "--json", "--job", "done").out)["job"] == "done"


def test_events(holdfast, job):
    lines = holdfast("events").out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("     1.00 s  worker-started     node0.0#1 started on node0 (pid 1)")
    assert lines[-1] == "     9.00 s  ended              finished at step 8"


def test_events_of_one_kind_as_json(holdfast, job):
    told = [json.loads(line) for line in holdfast("events", "--kind", "formed", "--json").out.splitlines()]
    assert [(e["seq"], e["fields"]["generation"]) for e in told] == [(4, 1), (5, 2)]


def test_events_follow_ends_with_the_job(holdfast, job):
    assert len(holdfast("events", "--follow").out.splitlines()) == 6


def test_an_unknown_kind_is_refused(holdfast, job):
    said = holdfast("events", "--kind", "former")
    assert (said.code, said.out) == (2, "")
    assert "formed" in said.err


def test_logs_of_the_newest_generation(holdfast, job):
    assert holdfast("logs", "-n", 1).out.splitlines() == [
        "rank 0 node0.0#1 | node0 line 29",
        "rank 1 node2.0#3 | node2 line 29",
    ]


def test_logs_of_a_rank_go_through_all_its_workers(holdfast, job):
    assert holdfast("logs", "--rank", 1, "-n", 2).out.splitlines() == [
        "node1 line 28",
        "node1 line 29",
        "node2 line 28",
        "node2 line 29",
    ]


def test_logs_of_a_node(holdfast, job):
    lines = holdfast("logs", "--node", 1, "-n", 0, "-f").out.splitlines()
    assert len(lines) == 30
    assert lines[0] == "rank 1 node1.0#2 | node1 line 0"


def test_logs_of_nobody(holdfast, job):
    said = holdfast("logs", "--rank", 5)
    assert said.code == 2
    assert "there are logs of ranks 0-1 and of node0, node1, node2" in said.err
    assert holdfast("logs", "--rank", 0, "--node", 0).code == 2


def test_logs_that_hold_nothing(holdfast, job):
    for log in (job / "logs").iterdir():
        log.write_text("")
    said = holdfast("logs")
    assert (said.code, said.out) == (0, "")
    assert "nothing was printed" in said.err


def test_report(holdfast, job):
    said = holdfast("report")
    assert "finished" in said.out
    assert "8 committed" in said.out
    assert json.loads(holdfast("report", "--json").out)["outcome"] == "finished"


def test_report_as_csv_has_every_start_that_is_kept(holdfast, job):
    (job / "runs" / "7" / "logs").mkdir(parents=True)  # of a start that was refused
    write_job("done", outcome=None)  # the one before is put away as the eighth
    (job / "runs" / "8" / "report.json").write_text(
        json.dumps(
            {
                "job": "done",
                "outcome": "failed",
                "incidents": [],
                "goodput": {
                    "wall_s": 4.0,
                    "classes": {"start": 1.0, "computed": 3.0},
                    "unknown": ["productive"],
                },
            }
        )
    )
    said = holdfast("report", "--csv")
    rows = list(csv.DictReader(said.out.splitlines()))
    assert [tuple(row.values()) for row in rows[:3]] == [
        ("8", "failed", "start", "1.0", "0.25"),
        ("8", "failed", "computed", "3.0", "0.75"),
        ("8", "failed", "productive", "", ""),
    ]
    assert {(row["start"], row["outcome"]) for row in rows[3:]} == {("9", "killed")}
    assert sum(float(row["share"] or 0) for row in rows[3:]) == pytest.approx(1.0)
    assert "start 7 was left out" in said.err
    assert holdfast("report", "--csv", "--json").code == 2


def test_report_draws_the_curve(holdfast, job, tmp_path):
    pytest.importorskip("matplotlib")
    write_job("second")
    said = holdfast("report", "--job", "done", "--curve", tmp_path / "c.png", "--baseline", "second")
    assert said.code == 0
    assert (tmp_path / "c.png").stat().st_size > 1000
    assert holdfast("report", "--baseline", "second").code == 2


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ('{"job": "done", "incidents": []}', "is not the report of a job that has ended: remove the file"),
        ('{"job": "done"}', "is damaged: Object missing required field `incidents`; remove the file"),
        (None, "cannot be read (Is a directory): remove the file"),
    ],
)
def test_what_is_no_report_is_named_with_what_to_do(holdfast, job, there, why):
    path = job / "report.json"
    path.unlink()
    if there is None:
        path.mkdir()
    else:
        path.write_text(there)
    said = holdfast("report", "--job", "done")
    assert said.code == 2
    assert f"{path} {why}" in said.err
    listed = holdfast("ls")
    assert "unknown" in listed.out
    assert f"done: {path} {why}" in listed.err
    path.rmdir() if there is None else path.unlink()
    assert "finished" in holdfast("report", "--job", "done").out


def test_report_of_a_job_that_was_killed(holdfast, home):
    write_job("dead", outcome=None)
    assert "killed" in holdfast("report", "--job", "dead").out
    assert "dead  killed  step 10" in holdfast("status", "--job", "dead").out


@pytest.mark.parametrize("command", [["fault", "kill-worker"], ["resize", "2"]])
def test_what_needs_a_running_job(holdfast, job, command):
    said = holdfast(*command, "--job", "done")
    assert (said.code, said.out) == (2, "")
    assert "the job 'done' is not running; `holdfast report --job done` shows what it did" in said.err


@pytest.mark.parametrize("command", ["status", "events", "logs", "report", "stop"])
def test_no_such_job(holdfast, job, command):
    said = holdfast(command, "--job", "other")
    assert said.code == 2
    assert "the job 'other' does not exist" in said.err
    assert "the newest jobs are done" in said.err


@pytest.mark.parametrize("command", ["status", "events", "logs", "report", "stop"])
def test_no_job_at_all(holdfast, home, command):
    said = holdfast(command)
    assert said.code == 2
    assert "start one with `holdfast run`" in said.err


def test_a_job_that_never_came_up(holdfast, home):
    folder = JobFolder("stillborn")
    folder.prepare(JobSpec(name="stillborn", script="train.py"))
    folder.close()
    for command in ("status", "events", "logs", "report"):
        said = holdfast(command)
        assert said.code == 2
        assert "was never started" in said.err


def test_a_job_that_came_up_and_has_no_ledger(holdfast, job):
    (job / "job.sqlite").unlink()
    said = holdfast("events")
    assert said.code == 2
    assert f"{job}/job.sqlite does not exist): see its logs in {job}/logs" in said.err


def test_a_ledger_that_is_torn(holdfast, job):
    (job / "job.sqlite").write_bytes(b"no database at all, " * 100)
    said = holdfast("events")
    assert said.code == 2
    assert "cannot be read" in said.err


def test_secrets_are_never_shown(holdfast, job):
    token = (job / "token").read_text()
    for command in (
        ["status", "--json"],
        ["status"],
        ["events", "--json"],
        ["logs"],
        ["report", "--json"],
        ["report"],
    ):
        said = holdfast(*command)
        assert token not in said.out + said.err
        assert SECRET not in said.out + said.err


def test_report_as_a_picture(holdfast, job, tmp_path):
    picture = tmp_path / "report.svg"
    said = holdfast("report", "--job", "done", "--picture", str(picture))
    assert said.code == 0
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert "outcome" in drawn
    assert "url(http" not in drawn  # nothing is loaded from elsewhere


def test_metrics_of_a_job_that_has_ended(holdfast, job):
    said = holdfast("metrics", "--job", "done")
    assert said.code == 0
    assert "holdfast_steps_committed_total 10.0\n" in said.out
    # A state without times, as older versions wrote it.
    assert 'holdfast_time_seconds{class="unexplained"} 9.0\n' in said.out
    assert 'holdfast_phase{phase="ended"} 1.0\n' in said.out
    assert "holdfast_wall_seconds_total 9.0\n" in said.out


def test_ls_lists_the_newest_first_and_says_what_is_wrong_with_one(holdfast, job, home):
    write_job("other", outcome=None)
    write_job("damaged")
    (home / "jobs" / "damaged" / "spec.json").write_text("{")
    told = json.loads(holdfast("ls", "--json").out)
    assert [(x["job"], x["state"], x["step"]) for x in told] == [
        ("damaged", "unknown", None),
        ("other", "killed", 8),
        ("done", "finished", 8),
    ]
    said = holdfast("ls")
    assert [line.split()[:3] for line in said.out.splitlines()[1:]] == [
        ["damaged", "unknown", "–"],
        ["other", "killed", "8"],
        ["done", "finished", "8"],
    ]
    assert said.err.startswith(f"damaged: {home}/jobs/damaged/spec.json is damaged")


def test_ls_of_no_job(holdfast, home):
    assert holdfast("ls").out == f"there is no job in {home}/jobs\n"


def test_a_stop_of_a_job_that_has_ended_is_no_error(holdfast, job):
    said = holdfast("stop", "--job", "done")
    assert (said.code, said.out) == (0, "the job done is not running\n")


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("stopped", 75), ("failed", 1), (None, 1)])
def test_attach_ends_as_the_job_did_that_does_not_run(holdfast, home, outcome, code):
    write_job("ended", outcome)
    said = holdfast("attach", "--job", "ended")
    assert said.code == code
    assert "the job ended is not running" in said.out


def test_version(holdfast):
    assert [line.split()[0] for line in holdfast("version").out.splitlines()] == [
        "holdfast",
        "Python",
        "torch",
    ]


def test_events_of_a_time_and_the_newest_of_them(holdfast, home):
    folder = JobFolder("timed")
    folder.prepare(JobSpec(name="timed", script="train.py"))
    store = Store(folder.path / "job.sqlite")
    store.begin()
    for minute in range(4):
        utc = f"2026-11-23T09:0{minute}:00.000+00:00"
        store.add_event(60.0 * minute, utc, "level", {"level": 2})
        store.add_event(60.0 * minute, utc, "waiting", {"workers": minute, "target": 4})
    store.commit()
    store.close()
    folder.close()

    def seen(*options):
        return [json.loads(line)["seq"] for line in holdfast("events", "--json", *options).out.splitlines()]

    assert seen("--tail", 3) == [6, 7, 8]
    assert seen("--tail", 2, "--kind", "waiting") == [6, 8]
    assert seen("--since", "2026-11-23T09:02") == [5, 6, 7, 8]
    assert seen("--since", "2026-11-23T11:02+02:00", "--tail", 1) == [8]
    assert seen("--since", "5m") == []
    said = holdfast("events", "--since", "yesterday")
    assert (said.code, "for example 30m" in said.err) == (2, True)
