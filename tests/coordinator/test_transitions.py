"""Phases change in one file, along one table, and a state that cannot be is named."""

import ast
from pathlib import Path

import pytest
from desk import Desk, running

from holdfast.coordinator import kernel
from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.state import CoreState, JobPhase, WorkerPhase
from holdfast.coordinator.kernel.transitions import IllegalTransition
from holdfast.coordinator.kernel.validate import validate

CORE = Path(kernel.__file__).parent.parent
PARTS = ("kernel", "membership", "storage", "health")


def modules():
    for part in PARTS:
        for path in sorted((CORE / part).glob("*.py")):
            yield part, path, ast.parse(path.read_text())


def targets(tree):
    """What is assigned to, one expression at a time."""
    for node in ast.walk(tree):
        assigned = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        assigned = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else assigned
        for target in assigned:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def test_one_file_assigns_phases():
    found = {
        (path.name, target.attr)
        for _, path, tree in modules()
        for target in targets(tree)
        if isinstance(target, ast.Attribute) and target.attr in ("phase", "alive")
    }
    assert found == {("transitions.py", "phase"), ("transitions.py", "alive")}


FIELDS = set(CoreState.__struct_fields__)
CHANGES = {
    "append",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "clear",
    "update",
    "setdefault",
    "add",
    "discard",
    "sort",
}


def field_of(node):
    """The field of the state through which an expression goes; None: through none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        owner = node.value
        if isinstance(node, ast.Attribute) and node.attr in FIELDS:
            named = isinstance(owner, ast.Name) and owner.id in ("s", "state")
            if named or (isinstance(owner, ast.Attribute) and owner.attr == "state"):
                return node.attr
        if isinstance(node, ast.Attribute) and isinstance(owner, ast.Subscript):
            return None  # a field of one node, worker or incident
        node = owner
    return None


def writes(tree):
    yield from filter(None, map(field_of, targets(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield from filter(None, [field_of(node.func.value)])


def test_a_field_of_the_state_is_written_by_one_part():
    """The others ask that part to. Each part's own fields of nodes and workers are not told apart here."""
    owners = {}
    for part, _, tree in modules():
        for name in writes(tree):
            owners.setdefault(name, set()).add(part)
    assert {name: parts for name, parts in owners.items() if len(parts) > 1} == {}
    assert len(owners) > 60  # else this test sees nothing


def test_every_phase_has_its_row_and_can_be_reached():
    for table, phases in ((transitions.JOB, set(JobPhase)), (transitions.WORKER, set(WorkerPhase))):
        assert set(table) == phases
        assert set().union(*table.values()) == phases


def test_a_worker_that_is_gone_does_not_come_back():
    desk = running(2)
    worker = next(iter(desk.state.workers.values()))
    transitions.enter(desk.core, worker, WorkerPhase.GONE)
    with pytest.raises(IllegalTransition, match=rf"{worker.name} cannot go from gone to member, while None"):
        transitions.enter(desk.core, worker, WorkerPhase.MEMBER)
    assert worker.phase is WorkerPhase.GONE


def test_a_job_that_has_ended_begins_nothing():
    desk = Desk()
    transitions.enter_job(desk.core, JobPhase.ENDED)
    with pytest.raises(IllegalTransition, match="the job cannot go from ended to running"):
        transitions.enter_job(desk.core, JobPhase.RUNNING)


def test_the_state_of_a_running_job_is_valid_and_what_is_wrong_is_named():
    desk = running(2)
    assert validate(desk.state) == []
    one, other = desk.state.workers.values()
    other.node, other.slot = one.node, one.slot
    desk.state.restarts_used = -1
    one.phase = WorkerPhase.READY
    one.ready = None
    desk.state.outcome, desk.state.phase = None, JobPhase.ENDED
    assert set(validate(desk.state)) == {
        "the job has ended without an outcome",
        "restarts_used is -1",
        f"{one.name} is ready, and it is not known for what",
        f"2 workers have slot {one.slot} of {one.node}",
    }
