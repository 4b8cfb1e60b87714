"""`-o`, `rm`, `logs --since` and what `holdfast metrics` writes."""

import json
import os
import stat

import yaml
from test_finished_job import write_job

from holdfast.checkpoint.layout import MANIFEST
from holdfast.engines.jobs import JobFolder


def test_a_table_is_printed_for_programs_and_with_full_paths(holdfast, home):
    write_job("done")
    told = json.loads(holdfast("ls", "--json").out)
    assert json.loads(holdfast("ls", "-o", "json").out)[0]["job"] == "done"
    assert [x["job"] for x in yaml.safe_load(holdfast("ls", "-o", "yaml").out)] == [x["job"] for x in told]
    assert str(home / "jobs" / "done") in holdfast("ls", "-o", "wide").out
    assert holdfast("ls", "-o", "xml").code == 2


def test_an_ended_job_is_removed_with_all_that_is_in_its_folder(holdfast, home):
    write_job("old")
    write_job("kept")
    said = holdfast("rm", "old")
    assert (said.code, said.out) == (0, "removed the job old\n")
    assert sorted(p.name for p in (home / "jobs").iterdir()) == ["kept"]


def test_nothing_is_removed_where_one_of_them_runs_or_has_checkpoints(holdfast, home):
    write_job("old")
    write_job("runs")
    lock = JobFolder("runs")
    try:
        said = holdfast("rm", "old", "runs")
    finally:
        lock.close()
    assert said.code == 2
    assert "holdfast stop --job runs" in said.err
    saved = home / "jobs" / "old" / "checkpoint" / "step-7"
    saved.mkdir(parents=True)
    (saved / MANIFEST).touch()
    said = holdfast("rm", "old")
    assert said.code == 2
    assert f"1 checkpoint in its folder, for example {saved}" in said.err
    assert (home / "jobs" / "old" / "job.sqlite").exists()
    assert holdfast("rm", "old", "--checkpoints").code == 0


def test_logs_that_were_not_written_to_since_are_left_out(holdfast, home):
    write_job("done")
    logs = home / "jobs" / "done" / "logs"
    os.utime(logs / "node0.0-1.log", (0, 0))
    said = holdfast("logs", "--job", "done", "-n", 1, "--since", "1h")
    assert said.out.splitlines() == ["rank 1 node2.0#3 | node2 line 29"]


def test_what_a_prometheus_and_a_grafana_need(holdfast, home, tmp_path):
    config = yaml.safe_load(holdfast("metrics", "config").out)
    [job] = config["scrape_configs"]
    token = home / "metrics-token"
    assert job["authorization"]["credentials_file"] == str(token)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert (home / "prometheus").is_dir()
    assert holdfast("metrics", "config").out
    for command, names in (
        ("rules", {"alerts.yaml", "alerts_test.yaml"}),
        ("dashboards", {"fleet.json", "job.json", "nodes.json", "storage.json"}),
    ):
        said = holdfast("metrics", command, "--out", tmp_path / command)
        assert said.code == 0
        assert {path.name for path in (tmp_path / command).iterdir()} == names
    assert holdfast("metrics", "rules").code == 2
