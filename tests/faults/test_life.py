"""A job's life seen from outside: Ctrl-C and going on, a killed launcher, errors of the script's own."""

import json
import os
import re
import select
import signal
from contextlib import suppress

import pytest
from conftest import STEPS
from harness import HERE, TINY, finish, held, leftovers, run, start, wait_for


@pytest.mark.long
def test_ctrl_c_keeps_the_state_and_the_same_job_goes_on(tmp_path, undisturbed):
    process = start(tmp_path, "--nnodes", 3, "--fault", "stop-worker:rank=0,step=60", TINY, STEPS)
    wait_for(process, "injecting")
    process.send_signal(signal.SIGINT)
    first = finish(process, tmp_path)
    assert first.report["outcome"] == "stopped", first.output
    assert 60 <= first.report["steps"]["committed"] < STEPS
    losses = first.losses()
    second = run(tmp_path, "--nnodes", 3, TINY, STEPS)
    assert second.report["outcome"] == "finished"
    assert second.report["final"] == undisturbed.report["final"]
    assert losses + second.losses() == undisturbed.losses()


@pytest.mark.long
def test_a_terminal_that_is_closed_stops_the_job_in_order(tmp_path):
    ours, theirs = os.openpty()
    process = start(tmp_path, "--nnodes", 2, TINY, 1_000_000, terminal=theirs)
    with open(ours, "rb") as terminal:
        shown = b""
        while b"generation 1" not in shown:
            shown += terminal.read1()
    # The kernel sends SIGHUP to the launcher, and nothing can be written to where it wrote until now. A shell sends another.
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGHUP)
    ran = finish(process, tmp_path)
    assert (ran.code, ran.report["outcome"]) == (75, "stopped")
    assert list((tmp_path / "jobs" / "job" / "checkpoint").glob("step-*"))


def test_killed_launcher_leaves_no_orphans(tmp_path):
    process = start(tmp_path, "--nnodes", 2, TINY, 1_000_000)
    wait_for(process, "generation 1")
    left = held(tmp_path, process.pid)
    process.kill()
    process.communicate()
    # Of those that were there, and of warm processes that an agent was just making.
    while left:
        for fd in left:
            signal_when_gone(fd)
        left = held(tmp_path)
    assert not leftovers(tmp_path)
    assert list((tmp_path / "jobs" / "job" / "checkpoint").glob("step-*"))


def signal_when_gone(fd, timeout=40):
    poll = select.poll()  # `select` refuses a descriptor above 1023
    poll.register(fd, select.POLLIN)
    assert poll.poll(timeout * 1000), "a process outlived its launcher"
    os.close(fd)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("exec('def broken(:')\n", "SyntaxError"),
        pytest.param("import no_such_module_at_all\n", "ModuleNotFoundError", marks=pytest.mark.nightly),
        ("raise ValueError('always')\n", "ValueError: always"),
    ],
)
def test_an_error_of_the_scripts_own_is_shown_once_and_not_retried_for_ever(tmp_path, source, error):
    script = tmp_path / "broken.py"
    script.write_text(source)
    ran = run(tmp_path, "--nnodes", 2, script)
    assert ran.code == 1
    assert ran.report["outcome"] == "failed"
    assert error in ran.output
    assert (
        ran.output.count("Traceback (most recent call last)") <= 2
    )  # the log of rank 0, and the closing error
    assert "rank" in ran.output.splitlines()[-1] or "log" in "\n".join(ran.output.splitlines()[-12:])


REFUSED = """
import holdfast

def main(run):
    run.mesh(shard=3)

holdfast.start(main)
"""
"""Three workers share a replica, and the job has two."""
CAUGHT = """
import sys
import traceback
from holdfast.errors import UsageError

def entry(task):
    try:
        task()
    except Exception as error:
        try:
            traceback.print_exception(error)
        except Exception:
            raise
        sys.exit(1)

def task():
    raise UsageError("train.stpes: did you mean train.steps?")

entry(task)
"""
"""As Hydra's `main` runs a script: it prints an exception and leaves."""


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (REFUSED, "UsageError: run.mesh(shard=3) makes replicas of 3 workers, but the job has 2"),
        (
            "from holdfast.errors import UsageError\nraise UsageError('train.stpes: did you mean train.steps?')\n",
            "UsageError: train.stpes: did you mean train.steps?",
        ),
        (CAUGHT, "UsageError: train.stpes: did you mean train.steps?"),
    ],
    ids=["in main", "at the top", "caught by what runs the script"],
)
def test_what_is_refused_ends_the_job_at_the_first_attempt(tmp_path, source, sentence):
    script = tmp_path / "refused.py"
    script.write_text(source)
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, script)
    assert ran.code == 1
    assert ran.report["reason"] == "refused before the first step; another attempt would be refused, too"
    told = " ".join(ran.output.split())
    assert sentence in told
    assert "Change the script as the message says" in told
    # Every node started a worker once at most, and none is at fault.
    assert ran.report["incidents"] == []
    nodes = [started["node"] for started in ran.fields("worker-started")]
    assert nodes
    assert len(nodes) == len(set(nodes))


def test_a_fault_that_repeats_at_its_step_is_the_scripts(tmp_path):
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, "--fault", "raise:rank=1,step=20,times=9", TINY, STEPS)
    assert ran.code == 1
    assert ran.report["outcome"] == "failed"
    assert "step 20" in ran.report["reason"]
    assert "InjectedError" in ran.output


@pytest.mark.nightly
def test_going_on_smaller_and_growing_again(tmp_path):
    ran = run(tmp_path, "--nnodes", "1:2", "--fault", "kill-node:rank=1,step=30", TINY, 1500, timeout=110)
    assert ran.code == 0, ran.output[-3000:]
    assert [n for _, n in ran.report["world"]["history"]] == [2, 1, 2]
    assert ran.report["final"]["replicas_equal"]
    assert ran.report["steps"]["lost"] == 0


def test_level_0_restarts_from_warm_processes(tmp_path):
    script = HERE / "train_ddp.py"
    ran = run(
        tmp_path,
        "--nnodes",
        2,
        "--spares",
        1,
        "--fault",
        "kill-worker:rank=1,step=20",
        script,
        60,
        tmp_path / "ck",
    )
    assert ran.code == 0, ran.output[-3000:]
    assert ran.kinds().count("started") == 2
    assert ran.report["incidents"][0]["full_strength_s"] is not None
    assert "finished at 60" in ran.output
    assert "what to do" not in ran.output, "a job that ended well needs no advice"
    assert json.loads((ran.job_dir / "report.json").read_text())["blame"] is None


def test_where_only_the_script_knows_where_it_went_on_lost_steps_are_not_known(tmp_path):
    """Its checkpoints are its own. What is known is how many steps all starts made."""
    script = HERE / "train_ddp.py"
    faults = ["--fault", "kill-worker:rank=1,step=20", "--fault", "kill-worker:rank=0,step=11"]
    ran = run(tmp_path, "--nnodes", 2, *faults, script, 60, tmp_path / "ck")
    assert ran.code == 0, ran.output[-3000:]
    starts = ran.kinds().count("started")
    assert starts >= 2
    steps = ran.report["steps"]
    assert (steps["committed"], steps["lost"]) == (None, None)
    # Each start goes back to a multiple of five steps, by up to five.
    assert 60 <= steps["computed"] <= 60 + 6 * (starts - 1)
    assert {i["lost_steps"] for i in ran.report["incidents"]} == {None}
    goodput = ran.report["goodput"]
    assert (goodput["share"], goodput["productive_s"], goodput["recomputed_s"]) == (None, None, None)
    assert goodput["unknown"] == ["productive", "recomputed"]
    assert goodput["computed_s"] == goodput["classes"]["computed"] > 0
    assert {"start", "restart", "interrupted", "saving"} <= goodput["classes"].keys()
    assert "unexplained" not in goodput["classes"]
    assert "only the script knows which steps it repeated" in " ".join(ran.output.split())
    assert "– committed, – lost of" in ran.output
    assert "what to do" not in ran.output


@pytest.mark.parametrize("end", ["", pytest.param("raise SystemExit(0)", marks=pytest.mark.nightly)])
def test_files_left_open_by_the_script_are_complete(tmp_path, end):
    """A worker ends without Python's teardown, which would have closed them."""
    script, out = tmp_path / "script.py", tmp_path / "out.txt"
    script.write_text(f"out = open({str(out)!r}, 'w')\nout.write('all of it')\n{end}\n")
    assert run(tmp_path, script).code == 0
    assert out.read_text() == "all of it"


@pytest.mark.long
def test_an_evaluation_between_two_steps_is_no_hang(tmp_path, undisturbed):
    """Rank 0 is away for many times the detection time; a worker that is killed meanwhile waits for it too."""
    script = tmp_path / "train_aside.py"
    text = TINY.read_text().replace("        run.log(loss=step.loss)\n", EVALUATE)
    script.write_text(text.replace("import sys\n", "import sys\nimport time\n"))
    faults = ["--fault", "kill-worker:rank=1,step=81,phase=forward"]
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, "--detection", 0.5, *faults, script, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()
    assert [i["cause"] for i in ran.report["incidents"]] == ["killed by signal 9 (SIGKILL)"]
    # The first one; in the second a worker is killed.
    assert ran.report["goodput"]["classes"]["paused"] > 2.5


EVALUATE = """        run.log(loss=step.loss)
        if run.rank == 0 and step.committed and step.index in (40, 80):
            with run.relaxed_watchdog():
                time.sleep(3.0)  # stands for an evaluation
"""


DETECTION_S = 0.35
"""A hang at level 0 is looked at after 20 times this, and again. With 0.2 a busy machine's agents were silent for as long."""


def level_0(tmp_path, between_steps: str, *options: object):
    script = tmp_path / "train_ddp.py"
    text = (HERE / "train_ddp.py").read_text()
    script.write_text(text.replace("    optimizer.step()\n", "    optimizer.step()\n" + between_steps))
    usual = ("--nnodes", 2, "--spares", 1, "--detection", DETECTION_S)
    return run(tmp_path, *usual, *options, script, 60, tmp_path / "ck")


@pytest.mark.long
def test_level_0_leaves_a_rank_alone_that_computes_between_two_steps(tmp_path):
    """An evaluation on rank 0 that goes on until the coordinator has looked whether it is a hang. (On a machine that is
    busy with other tests an agent may be silent for the 0.35 s of this one, and its node is given up. That is another
    matter.)"""
    ran = level_0(tmp_path, EVALUATE_0.replace("LEDGER", str(tmp_path / "jobs" / "job" / "job.sqlite")))
    assert ran.code == 0, ran.output[-3000:]
    assert [i for i in ran.report["incidents"] if not i["cause"].startswith("silent")] == []
    assert "stall-judged" in ran.kinds()  # it was looked at


def test_level_0_names_the_rank_that_hangs_and_the_collective_in_which_the_others_wait(tmp_path):
    ran = level_0(tmp_path, "", "--fault", "deadlock:rank=1,step=20")
    assert ran.code == 0, ran.output[-3000:]
    (incident,) = ran.report["incidents"]
    assert incident["cause"].startswith("hang")
    assert incident["detect_s"] < 50 * DETECTION_S
    assert incident["ranks"] == [1]
    assert incident["node"] in ran.fields("started")[0]["workers"][1]
    assert incident["stood_at_step"] == 20
    assert re.fullmatch(r"all_reduce \d+ of default_pg", incident["collective"])
    assert incident["cause"] == f"hang: has not entered {incident['collective']}, in which others wait"
    judged = ran.fields("stall-judged")[-1]
    assert judged["workers"] == [ran.fields("started")[0]["workers"][1]]
    assert (judged["collective"], judged["stood_at_step"]) == (incident["collective"], 20)
    assert "finished at 60" in ran.output


EVALUATE_0 = """    if dist.get_rank() == 0 and step == 20:
        import sqlite3
        ledger = sqlite3.connect("file:LEDGER?mode=ro", uri=True)
        while not ledger.execute("select 1 from events where kind = 'stall-judged'").fetchall():
            for _ in range(100):
                model(x)
        ledger.close()
"""
