"""`holdfast check` on this machine: what it prints, writes and returns."""

import io
import json
import sys

import pytest
from rich.console import Console

from holdfast.cli import check
from holdfast.cli.app import main
from holdfast.health.checks.fleet import summary
from holdfast.observe.checks import checks_table, figure
from holdfast.protocol.health import CheckResult, Condition


@pytest.fixture
def holdfast(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "check", *map(str, args)])
        try:
            main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
        return code, *capsys.readouterr()

    return call


def test_this_machine(holdfast, tmp_path):
    report = tmp_path / "report.json"
    code, out, err = holdfast("--folder", tmp_path, "--json", report)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    (node,) = json.loads(report.read_text())["nodes"].values()
    assert node["condition"] == "healthy"
    assert {r["name"] for r in node["results"]} >= {"memory", "disk", "port"}


@pytest.mark.parametrize(("condition", "code"), [(Condition.FAULTY, 1), (Condition.UNKNOWN, 3)])
def test_the_exit_code_says_how_it_is(holdfast, monkeypatch, condition, code):
    monkeypatch.setattr(
        check, "_of_machine", lambda *_: [CheckResult(name="disk", condition=condition, detail="why")]
    )
    assert holdfast("--json", "-")[0] == code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--folder", "/none"), "this folder does not exist"),
        (("--seconds", "-1"), "--seconds must be between 0 and 3600"),
        (("--json", "/none/x.json"), "/none does not exist"),
        (("node1",), "there are no jobs in"),
    ],
)
def test_refused(holdfast, args, message):
    code, out, err = holdfast(*args)
    assert (code, out) == (2, "")
    assert message in err


def test_of_many_nodes_only_what_is_not_healthy_has_a_row():
    results = {
        f"node{i}": [CheckResult(name="disk-read", condition=Condition.HEALTHY, value=900.0, unit="MB/s")]
        for i in range(9)
    }
    results["node7"] = [
        CheckResult(
            name="gpu-matrix",
            condition=Condition.FAULTY,
            detail="x" * 200,
            value=1.0,
            floor=2.0,
            unit="GFLOP/s",
            subject="gpu 3",
        ),
        CheckResult(
            name="link", condition=Condition.FAULTY, detail="slow", value=0.1, unit="GB/s", with_node="node8"
        ),
    ]
    out = io.StringIO()
    Console(file=out, width=100).print(checks_table(results, summary(results)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "node7" in lines[3]
    assert "gpu-matrix gpu 3" in lines[3]
    assert sum("all healthy" in line for line in lines) == 8


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (21.4e9, "B", "21.4 GB"),
        (2e-5, "s", "20 µs"),
        (12, "files", "12 files"),
        (1234.5, "MB/s", "1,234 MB/s"),
        (0.1234, "GB/s", "0.123 GB/s"),
    ],
)
def test_figures(value, unit, shown):
    assert figure(value, unit) == shown
