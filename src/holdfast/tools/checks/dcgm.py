"""NVIDIA's own diagnostic: `dcgmi diag`, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.errors import Damaged
from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.wire.decoding import decode

LEVELS = ((30.0, 1), (180.0, 2), (1200.0, 3))
"""Seconds that each level takes, with a margin: level 1 takes some 30 s, 2 two minutes, 3 a quarter of an hour."""

_CONDITIONS = {"pass": Condition.HEALTHY, "warn": Condition.HEALTHY, "fail": Condition.FAULTY}
"""A warning concerns the configuration of the machine (persistence mode, another clock); it is shown, but is no fault."""


def check_dcgm(task: Task) -> Iterator[CheckResult]:
    """Runs the level that fits the time: 1, or more if each check may last longer. Gives no result if the tool is not
    installed."""
    if (command := shutil.which("dcgmi")) is None:
        return
    level = level_for(task.seconds)
    limit_s = 100.0 + 20 * task.seconds
    try:
        ran = subprocess.run(
            [command, "diag", "-r", str(level), "-j"],
            capture_output=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise CannotCheck(f"dcgmi diag -r {level} did not end within {limit_s:g} s") from None
    yield from parse_diag(ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace"))


def level_for(seconds: float) -> int:
    """The highest level that fits into ten times the seconds of a check; 1 at least."""
    return max((level for needs_s, level in LEVELS if needs_s <= 10 * seconds), default=1)


def parse_diag(text: str, error: str = "") -> list[CheckResult]:
    """Parses the output of `dcgmi diag -j`: one result for every test of every GPU. Tests that were skipped are left out.

    Raises:
        CannotCheck: the tool could not run, or its output cannot be parsed.
    """
    # Warnings of the host engine may come before the JSON.
    begin = text.find("{")
    try:
        parsed = decode(msgspec.json.decode, text[begin:], "its report") if begin >= 0 else None
    except Damaged:
        parsed = None
    if not isinstance(parsed, dict):
        why = next(
            (line.strip() for line in (error + text).splitlines() if line.strip()), "it printed nothing"
        )
        raise CannotCheck(f"dcgmi diag: {why[:200]}")
    # Errors of the tool itself (no host engine, no permission) have a key of their own and say nothing about the GPU.
    if "DCGM Diagnostic" not in parsed:
        raise CannotCheck(f"dcgmi diag: {str(parsed.get('DCGM GPU Diagnostic Error') or parsed)[:200]}")
    report = parsed["DCGM Diagnostic"]
    if "runtime_error" in report:
        raise CannotCheck(f"dcgmi diag: {str(report['runtime_error'])[:200]}")
    found: list[CheckResult] = []
    for category in report.get("test_categories", []):
        for test in category.get("tests", []):
            for result in test.get("results", []):
                if (made := _result(str(test.get("name", "?")), result)) is not None:
                    found.append(made)
    # All tests skipped: this says something about the installation, not about the hardware.
    if not found:
        raise CannotCheck("dcgmi diag ran no test")
    return found


def _result(test: str, result: dict[str, Any]) -> CheckResult | None:
    """The result of one test. Older versions name GPUs in `gpu_ids`, newer ones by entity."""
    status = str(result.get("status", "")).lower()
    if status in ("skip", "skipped", "not run", ""):
        return None
    gpu = result.get("gpu_id", result.get("gpu_ids", result.get("entity_id", "")))
    details = [
        str(w.get("warning", w)) if isinstance(w, dict) else str(w) for w in _listed(result.get("warnings"))
    ]
    details += [str(i) for i in _listed(result.get("info"))] if status != "pass" else []
    name = "dcgm-" + "-".join(test.lower().split())
    subject = f"gpu {gpu}" if str(gpu) != "" else ""
    return CheckResult(
        name=name,
        condition=_CONDITIONS.get(status, Condition.UNKNOWN),
        detail="; ".join(details)[:300],
        subject=subject,
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value in (None, "") else [value]
