"""The report as people see it."""

import io
from pathlib import Path

import pytest

from holdfast.observe.tables import advice, print_report
from holdfast.protocol.causes import KilledForMemory
from holdfast.protocol.job_view import RootCauseView
from reports import report_of

FOLDER = Path("/somewhere/jobs/demo")


def shown(report, folder=FOLDER):
    stream = io.StringIO()
    print_report(report_of(report), folder, stream)
    return stream.getvalue()


def test_it_fits_100_columns(report, failed, incident):
    many = [
        incident
        | {
            "id": i,
            "fault": None,
            "cause": "hang: makes no progress in backward while others wait for it, for a very long time",
            "node": f"ip-10-0-12-{i}.ec2.internal",
            "ranks": list(range(i, 64, 2)),
            "at_step": 1_234_567,
            "stall_s": 4000.0 + i,
            "full_strength_s": 4800.0,
            "lost_steps": 12_345,
            "rung": "restart of all workers",
        }
        for i in range(12)
    ]
    long = report | {"incidents": many, "world": {"target": 4, "history": [[i, i] for i in range(100)]}}
    for one in (report, failed, long):
        assert max(map(len, shown(one).splitlines())) <= 100


def test_it_holds_what_was_measured(report):
    text = shown(report)
    for words in (
        "400 committed, 0 lost, 9.91 steps/s; one step takes 0.21 s",
        "85.8% of 93.2 s",
        "4 → 3 → 4 (target 4)",
        "xxh3 5df08a9268549ac9, bit-equal",
        "kill-node:rank=1",
        "its agent's connection closed",
        "0.44 s",
        "48 ms",
        "/somewhere/jobs/demo/logs",
    ):
        assert words in text


def test_a_script_without_steps_has_no_table_of_them(report):
    none = {"committed": None, "lost": 0, "computed": None, "median_s": None, "skipped": None}
    text = shown(report | {"outcome": "finished", "steps": none, "incidents": []})
    assert "steps      none: the script did not report steps to Holdfast" in text
    assert not any(words in text for words in ("goodput", "–", "Wall time"))


def test_a_large_loss_comes_with_what_makes_it_smaller(report):
    goodput = {
        "wall_s": 1000.0,
        "productive_s": 600.0,
        "share": 0.6,
        "classes": {"productive": 600.0, "idle_division": 320.0},
    }
    text = " ".join(shown(report | {"goodput": goodput}).split())
    assert "to do idle division takes 32.0% of 16 min 40 s: workers wait in each step" in text
    assert "See `holdfast plan division --global-batch N --micro-batch M`." in text
    assert "to do" not in shown(report)


def test_unknown_is_a_dash_never_zero(report, incident):
    nothing = {"id": 1, "cause": "lost"}
    text = shown(
        report
        | {
            "incidents": [nothing],
            "steps": {"committed": None, "lost": None, "median_s": None},
            "goodput": {"wall_s": None, "productive_s": None, "share": None},
            "final": {"loss": None, "params_xxh3": None, "replicas_equal": None},
            "world": {"target": None, "history": []},
        }
    )
    assert "0" not in text.replace("Where", "")
    rows = [line for line in text.splitlines() if line.lstrip().startswith("1 ")]
    assert [row.count("–") for row in rows] == [7, 7]


def test_a_killed_job_has_a_report_too():
    text = shown({"outcome": "killed", "reason": "stopped at once", "incidents": []})
    assert "killed (stopped at once)" in text
    assert "– committed" in text


def test_unequal_replicas_are_loud(report):
    text = shown(report | {"final": {"loss": 1.0, "params_xxh3": None, "replicas_equal": False}})
    assert "NOT equal in all replicas" in text


def test_the_closing_error_comes_last_and_whole(failed):
    end = shown(failed).partition("the job failed")[2]
    order = ["what happened", "ValueError in forward: a bad sample", "where", "rank 1 on node1, at step 12",
             "/home/someone/train.py:37, in main", 'raise ValueError("a bad sample")', "/logs/node1.0-1.log",
             "the same error at step 12", "what to do"]  # fmt: skip
    at = [end.index(words) for words in order]
    assert at == sorted(at)
    assert all(end.count(words) == 1 for words in order)
    assert "epoch 1" not in end, "a traceback says more"
    assert " ".join(end.split()).endswith("fix the script.")


def test_a_worker_without_a_traceback_shows_its_last_lines(failed):
    failed["blame"] |= {
        "cause": "killed by signal 9 (SIGKILL)",
        "traceback": "",
        "tail": ["epoch 1", "epoch 2"],
    }
    end = shown(failed).partition("the job failed")[2]
    assert end.index("epoch 2") < end.index("what happened") < end.index("what to do")


def test_nobody_to_blame(failed):
    """What happened is the reason then, and is said once."""
    failed["blame"] = None
    failed["steps"] = failed["steps"] | {"committed": 3}
    end = " ".join(shown(failed).partition("the job failed")[2].split())
    assert (
        "what happened the same error at step 12 in 2 attempts on 2 workers where after 3 committed steps"
        in end
    )
    assert "why it ended" not in end


def test_checkpoints_that_will_not_do_are_said(report):
    assert "not loaded" not in shown(report)
    report["unread"] = [
        "step 20 in /data: the manifest is damaged",
        "step 10 in /data: the manifest is damaged",
    ]
    first, second = (line for line in shown(report).splitlines() if "is damaged" in line)
    assert first.split(maxsplit=2) == ["not", "loaded", "step 20 in /data: the manifest is damaged"]
    assert second.strip() == "step 10 in /data: the manifest is damaged"


def test_only_the_lines_of_the_script_are_shown(failed):
    failed["blame"]["traceback"] = """Traceback (most recent call last):
  File "/home/a/train.py", line 67, in main
    loss = compute(batch)
           ^^^^^^^^^^^^^^
  File "/home/a/losses.py", line 4, in compute
    return functional.cross_entropy(batch["labels"])
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 3, in cross_entropy
    raise KeyError
KeyError: 'labels'"""
    said = [line.strip() for line in shown(failed).partition("the job failed")[2].splitlines()]
    first = said.index("/home/a/train.py:67, in main")
    assert said[first + 1 : first + 4] == [
        "loss = compute(batch)",
        "/home/a/losses.py:4, in compute",
        'return functional.cross_entropy(batch["labels"])',
    ]
    assert "functional.py" not in " ".join(said)
    assert "^^^" not in " ".join(said)


@pytest.mark.parametrize("outcome", ["failed", "stopped"])
@pytest.mark.parametrize("committed", [0, None, 4], ids=["none", "not known", "of an earlier start"])
def test_a_job_that_ended_before_its_first_step_has_no_tables(report, committed, outcome):
    tables = {"Incidents", "Where the time went"}
    report["outcome"] = outcome
    assert tables <= set(map(str.strip, shown(report).splitlines()))
    report["steps"] |= {"committed": committed, "median_s": None}
    report["final"]["loss"] = None
    told = shown(report)
    assert not tables & set(map(str.strip, told.splitlines()))
    heads = [line.split()[0] for line in told.splitlines() if line and not line[0].isspace()]
    assert heads[: heads.index("logs") + 1] == ["job", "outcome", "incidents", "logs"]


def test_the_closing_error_says_nothing_of_what_is_not_known(failed):
    failed["blame"] |= {"rank": None, "step": None}
    end = shown(failed).partition("the job failed")[2]
    assert "node1" in end
    assert "rank" not in end
    assert "step   " not in end


def test_a_saved_job_is_told_how_to_go_on(failed):
    assert "continues" not in shown(failed)
    failed["saved"] = {"step": 12, "url": "s3://bucket/run"}
    assert "--job demo continues from the newest saved step" in " ".join(shown(failed).split())


def test_a_finished_job_has_no_closing_error(report):
    assert "what to do" not in shown(report)


def test_long_lines_of_code_are_not_broken(failed):
    line = "    " + "x = [" + "1, " * 60 + "]"
    failed["blame"]["traceback"] = f"Traceback (most recent call last):\n{line}\nValueError"
    assert line in shown(failed)


@pytest.mark.parametrize(
    ("reason", "cause", "words"),
    [
        (
            "the same error before the first step",
            "ModuleNotFoundError: No module named 'x'",
            "Install the module",
        ),
        ("the same error at step 3", "ValueError: x", "fix the script"),
        (
            "refused before the first step; another attempt would be refused, too",
            "UsageError: x",
            "as the message says",
        ),
        ("the restart budget is used up", "exit code 1", "--max-restarts"),
        ("too few workers for 300 s", None, "--spares"),
        ("no restarts are allowed", "killed by signal 9 (SIGKILL)", "memory"),
        ("no restarts are allowed", str(KilledForMemory(1 << 30)), "--node-memory"),
        (
            "step 41 ended a worker in 3 attempts, on a and b, which",
            "killed by signal 9 (SIGKILL)",
            "the samples of that step",
        ),
        ("something new", "exit code 3", "holdfast events"),
    ],
)
def test_advice(reason, cause, words):
    assert words in advice(reason, RootCauseView(cause=cause or ""))


SAVED = {"step": 50, "url": "/data/run"}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"saved": SAVED}, "Step 50 is saved: the same command with --job demo continues from it."),
        (
            {"saved": SAVED, "queued_again": True},
            "Step 50 is saved. The job is queued again and continues from it without further action.",
        ),
        (
            {"saved": SAVED, "unsaved": 70},
            "Step 70 could not be saved: the same command with --job demo continues from step 50.",
        ),
        (
            {"saved": None, "unsaved": 70},
            "Step 70 could not be saved: the same command with --job demo starts from the beginning.",
        ),
        (
            {"saved": SAVED, "unsaved": 70, "in_memory": {"step": 70}},
            "Step 70 is only in the memory of the nodes: the same command with --job demo continues from it if it is "
            "run on the same machines before they are restarted.",
        ),
        (
            {"saved": None, "steps": {"computed": 0}},
            "No step was done: the same command with --job demo starts from the beginning.",
        ),
        (
            {"saved": None},
            "Holdfast did not save a state: the same command with --job demo starts from the beginning, unless the "
            "script resumes from a checkpoint of its own.",
        ),
    ],
)
def test_a_job_that_was_stopped_says_last_what_is_saved_and_how_it_goes_on(report, told, words):
    text = shown(report | {"outcome": "stopped", "reason": "the time limit of the Slurm job"} | told)
    assert "stopped (the time limit of the Slurm job)" in text
    assert " ".join(text.split()).endswith(f"what now {words}")
    assert "what now" not in shown(report | told)
