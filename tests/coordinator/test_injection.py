"""What is decided about an injected fault is what would be decided about one that nobody injected."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from simcluster.checks import Checks, Violation
from simcluster.run import run_seed
from simcluster.seeds import some_and_at_night_many

import holdfast.coordinator
from holdfast.coordinator.kernel.events import Injected, Record
from holdfast.coordinator.machine import Core

ROOT = Path(holdfast.coordinator.__file__).parent
KNOWN_TO = {
    "injected": {"kernel/incidents.py", "machine.py"},
    "injected_at_s": {"kernel/incidents.py", "kernel/state.py"},
    "struck_s": {"kernel/incidents.py", "membership/wall_time.py"},
    "injections": {"kernel/incidents.py"},
    "was_injected": {"service/decision_loop.py"},
}
"""Attribute to the modules that may look at it: the record, the account of time, and whoever writes machines' histories."""


def decided(seed: int, monkeypatch: pytest.MonkeyPatch, told: bool) -> tuple[list[str], int]:
    """All that was done in a schedule, with its time, and how many faults were said to be injected."""
    found: list[str] = []
    injected = 0
    handled, known = Checks.handled, Core._injected

    def on_handled(self, event, actions, core):
        nonlocal injected
        injected += isinstance(event, Injected)
        found.extend(f"{core.now:.6f} {action!r}" for action in actions if not isinstance(action, Record))
        handled(self, event, actions, core)

    with monkeypatch.context() as patched:
        patched.setattr(Checks, "handled", on_handled)
        patched.setattr(Core, "_injected", known if told else lambda self, event: None)
        try:
            run_seed(seed)
        except Violation:  # found by another test
            found.append("violation")
    return found, injected


@some_and_at_night_many
def test_nothing_is_decided_upon_it(seeds, monkeypatch):
    injections = 0
    for seed in seeds:
        told, injected = decided(seed, monkeypatch, told=True)
        assert told == decided(seed, monkeypatch, told=False)[0], seed
        injections += injected
    assert injections >= len(seeds) / 2


def test_it_is_known_to_the_record_alone():
    seen = {
        (node.attr, str(path.relative_to(ROOT)))
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in KNOWN_TO
    }
    assert seen == {(name, where) for name, places in KNOWN_TO.items() for where in places}
