"""No deadline is forgotten: before the time that the core names as its next, nothing is to be done."""

from __future__ import annotations

import ast
import copy
import random
from pathlib import Path

from simcluster.checks import Checks, Violation
from simcluster.run import run_seed
from simcluster.seeds import some_and_at_night_many

import holdfast
from holdfast.coordinator.kernel.events import Tick

CORE = Path(holdfast.__file__).parent / "coordinator"
AT_AN_EVENT = {
    "kernel/incidents.py": "which incident a report belongs to is asked when it comes; nothing waits for the answer to change",
    "kernel/deadlines.py Watch.due": "the next one of a kind that was asked for is a deadline of the core",
    "kernel/state.py Daily.roll": "a day begins when something is counted",
    "health/limits.py": "what was done before is weighed when something is decided, and not again by itself",
    "membership/nodes.py out_of_memory": "two times of the past are compared",
}
"""Where times are compared otherwise, and why nothing is missed by it."""

PROBED = 0.02
"""Share of the events after which somebody looks at the clock too early."""
FAR_S = 7200.0
"""So far ahead somebody looks where the core names no time at all."""


@some_and_at_night_many
def test_a_look_at_the_clock_finds_nothing_before_the_next_deadline(seeds, monkeypatch):
    handled, probes = Checks.handled, 0
    rng = random.Random(5)

    def on_handled(self, event, actions, core):
        nonlocal probes
        handled(self, event, actions, core)
        if rng.random() >= PROBED:
            return
        due_s = core.next_deadline()
        until_s = core.now + FAR_S if due_s is None else due_s
        if until_s <= core.now:
            return
        twin = copy.deepcopy(core)
        early_s = core.now + rng.choice((0.01, 0.5, 0.99)) * (until_s - core.now)
        found = twin.handle(Tick(), early_s)
        assert found == [], f"{found} at {early_s}, and the next deadline is {due_s}; after {event}"
        probes += 1

    monkeypatch.setattr(Checks, "handled", on_handled)
    for seed in seeds:
        try:
            run_seed(seed)
        except Violation:  # found by another test
            continue
    assert probes > 10 * len(seeds)


def comparisons(path, tree):
    """Where a time is compared with `now`, as file and function."""
    name = str(path.relative_to(CORE))

    def walk(node, inside):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inside = [*inside, node.name]
        if isinstance(node, ast.Compare):
            named = {getattr(x, "id", getattr(x, "attr", None)) for x in ast.walk(node)}
            if "now" in named:
                yield f"{name} {'.'.join(inside)}"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(tree, [])


def test_every_comparison_of_a_time_is_seen_by_the_context():
    paths = [p for part in ("kernel", "membership", "storage", "health") for p in (CORE / part).glob("*.py")]
    found = [x for p in [*paths, CORE / "machine.py"] for x in comparisons(p, ast.parse(p.read_text()))]
    assert "kernel/context.py Context.reached" in found
    others = {x for x in found if x != "kernel/context.py Context.reached"}
    known = {x for x in others for place in AT_AN_EVENT if x == place or x.split()[0] == place}
    assert others == known
    assert all(any(x == place or x.split()[0] == place for x in others) for place in AT_AN_EVENT)


def test_a_comparison_elsewhere_is_found():
    source = "def f(context):\n    return context.now - context.state.began_s > 5"
    assert list(comparisons(CORE / "membership" / "x.py", ast.parse(source))) == ["membership/x.py f"]
