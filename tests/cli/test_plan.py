import json
import shutil
from pathlib import Path


def test_the_sizes_of_a_job_and_what_they_leave_idle(holdfast):
    said = holdfast("plan", "--global-batch", 64, "--micro-batch", 8, "--nnodes", "1:9")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert ["8", "8", "1", "0.0%"] in rows
    assert ["3", "3", "2", "to", "3", "11.1%"] in rows
    assert "more than 8 workers cannot share 8 micro-batches" in said.out
    assert "--micro-batch 4 leaves at most" in said.out or "--micro-batch 1 leaves" in said.out


def test_as_json(holdfast):
    said = holdfast("plan", "--global-batch", 12, "--micro-batch", 2, "--nnodes", "4", "--json")
    assert json.loads(said.out)["sizes"] == [{"world": 4, "most": 2, "least": 1, "idle": 0.25}]


def test_sizes_that_cannot_be(holdfast):
    assert "not a multiple" in holdfast("plan", "--global-batch", 10, "--micro-batch", 4).err
    said = holdfast("plan", "--global-batch", 8, "--micro-batch", 4, "--nnodes", "3:4")
    assert said.code == 2
    assert "2 micro-batches are too few for 3 workers" in said.err


def test_ways_to_survive_failures_side_by_side(holdfast, tmp_path):
    (tmp_path / "run.yaml").write_text("nodes: 64\ngpu_hours: 100k\nrate: {gpu: 0.01%, network: 0.005%}\n")
    said = holdfast("plan", "run", "run.yaml", "--spares", 1, "--price", 2)
    assert said.code == 0, said.err
    assert sum("►" in line for line in said.out.splitlines()) == 3
    assert "holdfast plan simulate --nnodes 64" in said.out
    assert said.out.splitlines()[3].startswith("recommended: peers in memory")
    whole = holdfast("plan", "run", "run.yaml", "--spares", 1, "--price", 2, "--all")
    short_rows, all_rows = (text.count("peers in memory ") for text in (said.out, whole.out))
    assert (short_rows, all_rows) == (1, 4)
    found = json.loads(holdfast("plan", "run", "run.yaml", "--json").out)
    assert sum(c["best"] for c in found["candidates"]) == 1
    assert found["inputs"]["rates"] == {"gpu": 0.0001, "network": 0.00005}


def test_bad_fields_are_refused(holdfast, tmp_path):
    (tmp_path / "bad.yaml").write_text("- 1\n")
    assert "fields are missing; for example" in holdfast("plan", "run", "bad.yaml").err
    said = holdfast("plan", "run", "--nodes", "4", "--gpu-hours", "5", "--rate", "-1%")
    assert (said.code, said.err) == (2, "holdfast: rate: '-1%' is negative; for example 0.016%\n")


def test_published_tables(holdfast):
    assert holdfast("plan", "tables").out.endswith("77 of 80 cells follow from the formulas, 3 (≠) do not\n")
    assert len(json.loads(holdfast("plan", "tables", "--json").out)) == 80


def test_simulated_runs_and_one_of_them_again(holdfast, home):
    asked = ("plan", "simulate", "--nodes", 8, "--days", 1, "--rate", "1%", "--spares", 2)
    found = json.loads(holdfast(*asked, "--trials", 3, "--json").out)["trials"]
    assert [t["seed"] for t in found] == [0, 1, 2]
    assert "where the time goes" in holdfast(*asked, "--trials", 2).out
    said = holdfast(*asked, "--replay", 1)
    assert said.code == 0, said.err
    assert f"{found[1]['incidents']} incidents" in said.out
    events = holdfast("events", "--job", "simulated-1").out
    assert events.count("incident-opened") == found[1]["incidents"]
    assert events.rstrip().endswith("finished at step 8640")
    report = json.loads(holdfast("report", "--job", "simulated-1", "--json").out)
    assert len(report["incidents"]) == found[1]["incidents"]
    assert report["goodput"]["share"] == round(found[1]["goodput"], 4)
    assert "has a job already" in holdfast(*asked, "--replay", 1).err


def test_past_runs_say_what_the_next_one_may_expect(holdfast, home):
    asked = ("plan", "simulate", "--nodes", 8, "--days", 30, "--rate", "1%", "--spares", 2)
    holdfast(*asked, "--replay", 4, "--job", "past")
    said = holdfast("plan", "calibrate", "past", "--out", "next.yaml")
    assert said.code == 0, said.err
    assert "95% confidence" in said.out
    folder = home / "jobs" / "past"
    by_ledger = holdfast("plan", "calibrate", folder / "job.sqlite", "--json").out
    assert by_ledger == holdfast("plan", "calibrate", folder / "report.json", "--json").out
    rate = next(r for r in json.loads(by_ledger)["rates"] if r["kind"] == "all")
    assert rate["low"] < 0.01 < rate["high"]
    assert holdfast("plan", "run", "next.yaml", "--nodes", 8, "--gpu-hours", 1000).code == 0
    # Another start of the job, put away, and the ledger of a coordinator that took over.
    (folder / "runs" / "1").mkdir(parents=True)
    for name in ("job.sqlite", "report.json"):
        shutil.copy(folder / name, folder / "runs" / "1")
    (folder / "runs" / "2").mkdir()
    both = holdfast("plan", "calibrate", "past", "--json")
    assert json.loads(both.out)["runs"] == 2
    assert "start 2 was left out" in both.err
    (folder / "job.sqlite").rename(folder / "job-2.sqlite")
    assert holdfast("plan", "calibrate", folder / "job-2.sqlite", "--json").out == by_ledger
    (folder / "bad.json").write_text("{}")
    assert "is not the report of a job" in holdfast("plan", "calibrate", folder / "bad.json").err


def test_a_rate_that_is_not_known_is_left_out_and_said(holdfast, home):
    short = {
        "job": "short",
        "world": {"history": [[0.0, 2]]},
        "goodput": {"wall_s": 4.0},
        "steps": {"median_s": 2.5},
        "incidents": [],
    }
    Path("short.json").write_text(json.dumps(short))
    said = holdfast("plan", "calibrate", "short.json", "--out", "next.yaml")
    assert said.code == 0, said.err
    written = Path("next.yaml").read_text()
    assert written.startswith("# rate is left out: no failure in 0.0 node-hours; set your own")
    assert written.strip() in "\n".join(line.strip() for line in said.out.splitlines())
    assert "rate is missing" in holdfast("plan", "run", "next.yaml", "--nodes", 8, "--gpu-hours", 9).err
    assert "for example --nodes 256" in holdfast("plan", "run").err
    assert "for example --nodes" in holdfast("plan", "simulate").err
