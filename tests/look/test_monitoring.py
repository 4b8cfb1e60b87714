"""Alerts and dashboards, and what they ask for: it exists, and a real Prometheus gets it from a real job (`make look-test`)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from gpus import stand_in
from harness import HERE, end_leftovers, end_started, start
from machines import write
from scraped import check_by_promtool, check_exemplars, check_families, check_series, documented
from servers import Prometheus, alertmanager, listener, program, prometheus, until

from holdfast.cli.app import app
from holdfast.coordinator.service.store import Store
from holdfast.protocol.ledger import EVENTS
from holdfast.tools.monitoring.make_dashboards import dashboards

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src/holdfast/tools/monitoring"
DOCUMENTED = set(documented())
OF_A_FAMILY = re.compile(r"_(bucket|count|sum)$")
LABELS = {"holdfast_job"}
VARIABLES = {"$holdfast_job": ".*", "$__rate_interval": "10s", "$__range": "10m"}


def rules() -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]


def panels() -> list[dict[str, Any]]:
    return [p for content in dashboards().values() for p in json.loads(content)["panels"]]


def queries() -> Iterator[tuple[str, str]]:
    """Title of its panel and each query, with the variables filled in."""
    asked = [(p["title"], t["expr"]) for p in panels() for t in p["targets"]]
    asked += [
        (f"annotations of {name}", a["expr"])
        for name, content in dashboards().items()
        for a in json.loads(content)["annotations"]["list"]
    ]
    for title, expr in asked:
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        yield title, expr


def named(expr: str) -> set[str]:
    """The job's own metrics, without what a family adds to its name."""
    found = set(re.findall(r"\bholdfast_\w+", expr)) - LABELS
    return {OF_A_FAMILY.sub("", name) if name not in DOCUMENTED else name for name in found}


def test_the_committed_dashboards_are_what_the_script_makes():
    there = {path.name: path.read_bytes() for path in (FOLDER / "dashboards").iterdir()}
    assert there == dashboards()


def test_every_panel_says_what_it_shows_and_in_which_unit():
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    boards = [json.loads(content) for content in dashboards().values()]
    assert len({board["uid"] for board in boards}) == 4
    assert all(board["schemaVersion"] == 39 and "id" not in board for board in boards)


def test_dashboards_and_alerts_ask_for_figures_that_exist():
    # What is in the document is in /metrics, see tests/coordinator/test_metrics.py.
    for title, expr in [*queries(), *((r["alert"], r["expr"]) for r in rules())]:
        assert named(expr) <= DOCUMENTED, title


def test_every_alert_ends_with_a_command_that_exists():
    commands = typer.main.get_command(app)
    for rule in rules():
        said = rule["annotations"]["description"].replace("{{ $labels.holdfast_job }}", "pretrain")
        words = shlex.split(said.rpartition(": holdfast ")[2])
        assert words, rule["alert"]
        command, context = commands, commands.make_context("holdfast", list(words), resilient_parsing=True)
        while hasattr(command, "get_command"):
            name = words.pop(0)
            command = command.get_command(context, name)
            assert command is not None, (rule["alert"], name)
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= flags, rule["alert"]

    for kind in re.findall(r'--kind (\S+)|kind="([a-z-]+-[a-z]+)"', (FOLDER / "alerts.yaml").read_text()):
        assert "".join(kind) in EVENTS


def test_every_alert_has_a_moment_in_which_it_fires_and_one_in_which_it_does_not():
    asked = [
        asked
        for case in yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
        for asked in case.get("alert_rule_test", [])
    ]
    there = {rule["alert"] for rule in rules()}
    assert {x["alertname"] for x in asked if x["exp_alerts"]} == there
    assert {x["alertname"] for x in asked if not x["exp_alerts"]} == there


@pytest.mark.look
def test_promtool_agrees(tmp_path):
    for command in (
        ["check", "rules", FOLDER / "alerts.yaml"],
        ["test", "rules", FOLDER / "alerts_test.yaml"],
    ):
        done = subprocess.run([program("promtool"), *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


FAULTS = ("ecc:rank=1", "kill-worker:rank=1", "nan:rank=0", "slow=2x,rank=2")
"""One after the other: a fault during an incident is a part of it, and what came before the first scrape is no increase. The node
first: an ECC error on the node of a worker that was just killed would be taken for what killed it. By rank: a spare disturbs nobody."""
OTHERS = """
DCGM_FI_DEV_GPU_UTIL{{Hostname="127.0.0.1",gpu="0"}} 91
DCGM_FI_DEV_GPU_TEMP{{Hostname="127.0.0.1",gpu="0"}} 64
node_cpu_seconds_total{{cpu="0",mode="idle"}} {n}
node_network_receive_bytes_total{{device="eth0"}} {n}
"""
GPU = {"utilization": "91", "power": "350000", "memory_used": "5000000000"}
"""What the job's own agents read of the stand-in for the driver, beside what a healthy one has."""
OVER = (
    "holdfast_step > 0 and on (instance) holdfast_open_incidents == 0"
    ' and on (instance) holdfast_events_total{{kind="incident-opened"}} == {n}'
    ' and on (instance) sum by (instance) (holdfast_events_total{{kind=~"incident-(closed|settled)"}}) == {n}'
)
"""Open incidents are of the coordinator's state, what they took of its ledger, which is written a moment later: an incident that
follows in that moment would take the exemplar's place before it is scraped."""
NEVER_HERE = {"Findings without action"}
"""Panels of what does not happen to this job."""


def holdfast(home: Path, *words: str) -> str:
    env = {"HOLDFAST_HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "holdfast", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def config_of(home: Path, tmp_path: Path, others: str, alerts_to: int) -> str:
    """What `holdfast metrics config` prints, with what a test adds."""
    more = {"job_name": "others", "static_configs": [{"targets": [others]}]}
    to = {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alerts_to}"]}]}]}
    config = yaml.safe_load(holdfast(home, "metrics", "config"))
    config["scrape_configs"].append(more)
    config |= {"rule_files": [str(FOLDER / "alerts.yaml")], "alerting": to}
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return yaml.safe_dump(config)


def check_queries(server: Prometheus) -> None:
    """Every query of the dashboards is understood, and has rows."""
    without = {title for title, expr in queries() if not server.rows(expr) and "annotations" not in title}
    assert without <= NEVER_HERE


def check_figures(server: Prometheus, home: Path) -> None:
    """Every figure is in Prometheus as it is documented, and by Prometheus' own rules."""
    text = holdfast(home, "metrics", "--job", "job")
    check_families(server, text)
    check_series(server)
    check_by_promtool(text)
    with closing(Store(home / "jobs/job/job.sqlite", read_only=True)) as store:
        check_exemplars(server, store.news(0, 0, limit=1).ledger)


@pytest.mark.look
def test_a_real_prometheus_shows_a_job_with_incidents_and_raises_an_alert(tmp_path, monkeypatch):
    stand_in(tmp_path / "driver")
    write(tmp_path / "driver/0", GPU)
    home = tmp_path / "home"
    home.mkdir()
    tier = tmp_path / "tier"
    options = ["--nnodes", 3, "--spares", 1, "--snapshot-every", 20, "--checkpoint", f"{tier},every=40"]
    try:
        with listener() as hook, listener() as others, alertmanager(tmp_path, hook.url) as port:
            others.page = OTHERS.format(n=5)
            config = config_of(home, tmp_path, others.url.removeprefix("http://"), port)
            with prometheus(tmp_path, config) as server:
                until(lambda: server.rows("up") or None, "Prometheus answers")
                # Agents load the driver's library by its name.
                monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "driver"))
                start(home, *options, HERE / "train_logging.py", 100_000, 0.01)
                until(
                    lambda: server.rows('up{holdfast_job="job"} == 1') or None, "it finds the job by itself"
                )
                for done, fault in enumerate(FAULTS):
                    until(lambda n=done: server.rows(OVER.format(n=n)) or None, f"{done} incidents are over")
                    holdfast(home, "fault", fault, "--job", "job")
                until(
                    lambda: server.rows("holdfast_slow_ranks == 1") or None, "all that goes wrong went wrong"
                )
                check_queries(server)
                used = server.rows("sum by (gpu) (holdfast_node_gpu_utilization_ratio{node='node0'})")
                assert [(row["metric"]["gpu"], row["value"][1]) for row in used] == [("0000:5d:00", "0.91")]
                check_figures(server, home)
                assert {r["health"] for g in server.get("rules")["groups"] for r in g["rules"]} == {"ok"}
                hook.wait_for(lambda bodies: any(b"HoldfastRecoveryLoop" in body for body in bodies))
        alerts = [alert for body in hook.bodies for alert in json.loads(body)["alerts"]]
        told = next(a for a in alerts if a["labels"]["alertname"] == "HoldfastRecoveryLoop")
        assert told["annotations"]["description"].endswith("holdfast why --job job")
    finally:
        end_started()
        end_leftovers(home)
