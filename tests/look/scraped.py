"""What a real Prometheus has of a job's figures, against the table of docs/metrics.md: nothing of it may be missing or other."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from servers import Prometheus, program

from holdfast.observe.traces import trace_id

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
ROW = re.compile(r"^\| `(holdfast_\w+)` \| (\w+) \|([^|]*)\|", re.M)
UNITS = ("seconds", "bytes", "ratio", "celsius", "watts")
"""The base units that a figure may have; Prometheus' rules want it at the end of the name."""
OF_THE_SCRAPE = {"job", "instance", "holdfast_job"}
"""Labels that every series of a job has from its target, see `holdfast metrics config`."""
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}

NEVER_HERE = {
    "holdfast_health_withheld_total": "every finding of this job has its remedy",
}
"""Families that have no sample in the job of `test_monitoring`, each with the reason. All others have one: whoever adds a family
adds what gives it a sample there, or a line here."""
EMPTY_HERE = {"holdfast_node_info": {"place", "rack", "identity"}}
"""Labels without a value, which Prometheus does not keep: a node of the local engine has no place and no identity."""
RENAMED = {"holdfast_job_info": {"exported_holdfast_job"}}
"""The target has a label of this name too. Prometheus keeps the target's, and the job's own beside it under this name."""


def documented() -> dict[str, tuple[str, set[str]]]:
    """Name of each family to its type and labels, as the page's tables have them."""
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(PAGE.read_text())
    }


def unit_of(family: str) -> str:
    """What its name says; empty: a plain number."""
    end = family.removesuffix("_total").rpartition("_")[2]
    return end if end in UNITS else ""


def family_and_type(name: str, kind: str) -> tuple[str, str]:
    """As OpenMetrics has them: there `_total` and `_info` belong to the samples, and information has a type of its own."""
    if name.endswith("_info"):
        return name.removesuffix("_info"), "info"
    return (name.removesuffix("_total"), kind) if kind == "counter" else (name, kind)


def check_families(server: Prometheus, text: str) -> None:
    """Of every documented family Prometheus knows the type, the unit and the help. text: the job's own `/metrics`."""
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    told = {name: about for name, about in server.get("metadata").items() if name.startswith("holdfast_")}
    wanted = {}
    for name, (kind, _) in documented().items():
        family, openly = family_and_type(name, kind)
        assert helps[name].endswith("."), name
        wanted[family] = [{"type": openly, "unit": unit_of(name), "help": helps[name]}]
    other = {name: (told.get(name), wanted.get(name)) for name in {*told, *wanted}}
    assert told == wanted, {name: both for name, both in other.items() if both[0] != both[1]}


def check_series(server: Prometheus) -> None:
    """Every documented family has its series and these only, with the documented labels and what the target adds."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for series in server.get("series", **{"match[]": '{__name__=~"holdfast_.*"}'}):
        found[series.pop("__name__")].append(series)
    wanted = {}
    for name, (kind, labels) in documented().items():
        if name not in NEVER_HERE:
            for part in PARTS.get(kind, ("",)):
                more = {"le"} if part == "_bucket" else RENAMED.get(name, set())
                wanted[name + part] = (labels - EMPTY_HERE.get(name, set())) | OF_THE_SCRAPE | more
    # Both ways: a family of NEVER_HERE that has a sample after all is checked from then on.
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    for name, series in found.items():
        for one in series:
            assert set(one) == wanted[name], (name, set(one) ^ wanted[name])
        if name.endswith("_bucket"):
            whole = [one for one in series if one["le"] == "+Inf"]
            assert len(whole) == len(found[name.removesuffix("_bucket") + "_count"]), name


def check_exemplars(server: Prometheus, ledger: str) -> None:
    """Each histogram says which incident it was, and the id of its trace. ledger: its name."""
    now = float(server.rows("vector(time())")[0]["value"][1])
    for name in (name for name, (kind, _) in documented().items() if kind == "histogram"):
        asked = {"query": name + "_bucket", "start": str(now - 600), "end": str(now + 60)}
        told = [e["labels"] for series in server.get("query_exemplars", **asked) for e in series["exemplars"]]
        assert "1" in {one["incident"] for one in told}, name
        assert all(one["trace_id"] == trace_id(ledger, int(one["incident"])) for one in told), (name, told)


def check_by_promtool(text: str) -> None:
    """Prometheus' own rules of names, types, units and help find nothing to complain about."""
    asked = [program("promtool"), "check", "metrics"]
    done = subprocess.run(asked, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
