"""No deadline is forgotten: before the time that the core names as its next, nothing is to be done."""

from __future__ import annotations

import ast
import copy
import random
from contextlib import suppress
from pathlib import Path

import msgspec
from simcluster.checks import Checks, Violation
from simcluster.run import run_seed
from simcluster.seeds import some_and_at_night_many

import holdfast
from holdfast.coordinator.kernel import state
from holdfast.coordinator.kernel.deadlines import move_times
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
NO_TIMES = {"Slow.ratio", "Slow.share", "Worker.loss", "MembershipState.figures"}
"""Numbers of the state that are no times."""
AWAY_S = 600.0

PROBED = 0.02
"""Share of the events after which somebody looks at the clock too early."""
FAR_S = 7200.0
"""So far ahead somebody looks where the core names no time at all."""


def run_all(seeds, monkeypatch, on_handled):
    """Schedules, in which this is called after every event. It reports at the end: an error within becomes a Violation."""
    monkeypatch.setattr(Checks, "handled", on_handled)
    for seed in seeds:
        with suppress(Violation):  # found by another test
            run_seed(seed)


@some_and_at_night_many
def test_a_look_at_the_clock_finds_nothing_before_the_next_deadline(seeds, monkeypatch):
    handled, probes, wrong = Checks.handled, 0, []
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
        if found:
            wrong.append(f"{found} at {early_s}, and the next deadline is {due_s}; after {event}")
        probes += 1

    run_all(seeds, monkeypatch, on_handled)
    assert not wrong
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


def annotations():
    """Each field of a struct of the state, and its type as it is written."""
    for kind in vars(state).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == state.__name__:
            for field, hint in kind.__annotations__.items():
                yield f"{kind.__name__}.{field}", hint


def test_every_time_of_the_state_says_what_becomes_of_it_when_nobody_listened():
    assert {field for field, hint in annotations() if "float" in hint} == NO_TIMES
    assert {field for field, hint in annotations() if hint.split(" | ")[0] in ("Since", "Until")} > {
        "Act.until_s",
        "Node.last_seen_s",
        "Storing.moved_s",
    }


def moving(kind):
    """Fields whose times are of this kind."""
    return {field for field, hint in annotations() if kind in hint}


def leaves(value, name=""):
    """Every number of a state by its path, with its struct and field."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            for path, *rest in leaves(getattr(value, field), f"{type(value).__name__}.{field}"):
                yield (field, *path), *rest
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            for path, *rest in leaves(part, name):
                yield (key, *path), *rest
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield (), name, value


@some_and_at_night_many
def test_all_times_of_their_kind_move_and_nothing_else_does(seeds, monkeypatch):
    since, until = moving("Since"), moving("Until")
    handled, seen, wrong = Checks.handled, set(), []
    rng = random.Random(7)

    def on_handled(self, event, actions, core):
        handled(self, event, actions, core)
        if rng.random() >= PROBED / 4:
            return
        now = core.now + AWAY_S
        for back_s in (None, now + 1.0):
            after = copy.deepcopy(core.state)
            move_times(after, now, AWAY_S, back_s)
            moved = {path: value for path, _, value in leaves(after)}
            for path, name, value in leaves(core.state):
                timer = state.Timer(path[2]) if path[:2] == ("deadlines", "at_s") else None
                if name in until or (timer is not None and timer.awaits):
                    expected = value + AWAY_S if back_s is None else max(value, back_s)
                else:
                    expected = min(now, value + AWAY_S) if name in since else value
                if moved[path] != expected:
                    wrong.append((path, back_s, value, moved[path], expected))
                if expected != value:
                    seen.add(name)

    run_all(seeds, monkeypatch, on_handled)
    assert not wrong
    of_membership = {f"MembershipState.{field}" for field in ("told_to_leave_s", "formed_s", "asked_at_s")}
    assert seen >= {"Node.last_seen_s", "Worker.awaited_s", *of_membership}
