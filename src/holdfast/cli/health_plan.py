"""Makes the health part of a job's specification of the options of `holdfast run`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.agent.hooks import check_hooks
from holdfast.engines.run_options import HealthOptions
from holdfast.errors import UsageError
from holdfast.health.ruleset import load_rules
from holdfast.health.stragglers import SLOWER
from holdfast.protocol.health import HealthSpec


def plan_health(given: HealthOptions) -> HealthSpec:
    """Raises UsageError for what cannot work; nothing is written."""
    if not given.watch and (given.rules or given.dry_run_rules):
        raise UsageError(
            "--no-health turns all health rules off, so --health-rules and --health-dry-run would have no effect; "
            "remove either --no-health or these options"
        )
    rules = tuple(str(path.resolve()) for path in given.rules)
    if rules or given.dry_run_rules:
        load_rules(rules, given.dry_run_rules)
    if given.hooks is not None:
        check_hooks(given.hooks)
    if given.replace_slow and given.replace_slow < SLOWER:
        raise UsageError(
            f"--replace-slow must be 0 (only report) or at least {SLOWER:g}, below which a slow rank cannot be told "
            f"from noise (got {given.replace_slow:g}), for example 1.3"
        )
    return HealthSpec(
        watch=given.watch,
        rules=rules,
        dry_run=given.dry_run_rules,
        history=_history(given.history),
        blast_share=parse_share("--blast-radius", given.blast_radius),
        deep=given.deep,
        hooks=str(given.hooks.resolve()) if given.hooks else "",
        replace_slow=given.replace_slow,
        replace_suspect=given.replace_suspect,
    )


def parse_share(option: str, text: str) -> float:
    """`25%` or `0.25`: more than nothing, at most everything. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{option} must be a share of the nodes (got {text!r}), for example 25% or 0.25")
    return share


def _history(text: str) -> str:
    """A PostgreSQL URL as it is; a file as an absolute path, in a folder that can be written."""
    if not text:
        return ""
    # A URL may hold a password, so a message shows its scheme and nothing else of it.
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme not in ("postgresql", "postgres"):
            raise UsageError(
                f"--node-history {scheme}://...: must be a file, or a URL like postgresql://USER@HOST/DATABASE"
            )
        return text
    path = Path(text).resolve()
    if path.is_dir():
        raise UsageError(
            f"--node-history {text}: this is a folder; specify a file in it, for example health.sqlite"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--node-history {text}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--node-history {text}: the file cannot be written")
    return str(path)
