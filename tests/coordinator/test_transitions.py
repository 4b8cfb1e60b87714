"""Phases change in one file, along one table, and a state that cannot be is named."""

import ast
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from desk import Desk, running

from holdfast.coordinator import kernel
from holdfast.coordinator.kernel import state, transitions
from holdfast.coordinator.kernel.index import validate
from holdfast.coordinator.kernel.state import CoreState, JobPhase, NodePhase, WorkerPhase
from holdfast.coordinator.kernel.transitions import IllegalTransition

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


INDEXED = ("phase", "held", "leaving", "lemon")
"""Fields of nodes and workers that the index goes by."""


def test_one_file_assigns_phases():
    found = {
        (path.name, target.attr)
        for _, path, tree in modules()
        for target in targets(tree)
        if isinstance(target, ast.Attribute) and target.attr in INDEXED
    }
    assert found == {("transitions.py", field) for field in INDEXED}


OWNERS = {
    "membership": {"membership"},
    "storage": {"storage"},
    "health": {"health"},
    "deadlines": {"membership"},
}
"""Part of the state to the folders that may write it. What stands beside the parts is the kernel's."""
MOVED = [("membership", field) for field in ("phase", "nodes", "workers")]
"""What transitions write, and with it the index. Entries of nodes and workers come and go there alone."""
FIELDS = {
    name: set(kind.__struct_fields__) for name, kind in get_type_hints(CoreState).items() if name in OWNERS
}
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
    "set",
    "not_before",
}


OF_NODES = {
    "health": {"devices", "identity"},
    "kernel": {"held", "leaving", "left", "lemon", "phase"},
}
OF_INCIDENTS = {
    "health": {
        *(
            "asked",
            "device",
            "does",
            "due_s",
            "firm",
            "full_at_s",
            "rule",
            "severity",
            "source",
            "verdict",
            "workers",
        ),
    },
    "membership": {"cause", "lost_at_s", "lost_nodes", "lost_steps", "place", "where"},
}
"""Folder to the fields that it writes. Other fields of nodes and workers are of `membership`, of incidents of `kernel`."""


ROOTS = {
    "membership": (state.MembershipState,),
    "storage": (state.StorageState, state.NodeMemory),
    "health": (state.Health, state.NodeHealth, state.Evidence),
    "kernel": (state.CoreState, state.Incident, state.Injection, state.OpenOrders, state.Evidence),
}
"""Folder to the structs that are its own, with all that they are made of up to the struct of another folder."""


def structs_in(hint):
    """The structs of the state that a type hint names."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return {hint} if hint.__module__ == state.__name__ else set()
    return {kind for argument in get_args(hint) for kind in structs_in(argument)}


def owned_structs(part):
    """The structs that a folder writes."""
    others = {kind for folder, roots in ROOTS.items() if folder != part for kind in roots} - {*ROOTS[part]}
    found, todo = set(), list(ROOTS[part])
    while todo:
        kind = todo.pop()
        if kind not in found | others:
            found.add(kind)
            todo += [x for hint in get_type_hints(kind).values() for x in structs_in(hint)]
    return found


def owners_of_fields():
    """Name of a field of anything that the core remembers, to the folders that may write it. A name that several structs
    have is of all of theirs."""
    owners = {}
    for part in PARTS:
        for kind in owned_structs(part):
            special = {"Node": OF_NODES, "Incident": OF_INCIDENTS, "Worker": {"kernel": {"phase"}}}.get(
                kind.__name__, {}
            )
            for field in kind.__struct_fields__:
                found = {folder for folder, fields in special.items() if field in fields} or {part}
                # The book of incidents is the kernel's, and parts add what they alone know.
                found |= {"kernel"} if kind is state.Incident else set()
                owners.setdefault(field, set()).update(found)
    return owners


def test_each_struct_of_the_state_has_an_owner():
    owned = {part: {kind.__name__ for kind in owned_structs(part)} for part in PARTS}
    assert {"Node", "Worker", "PlannedChange"} <= owned["membership"]
    assert {"MemorySnapshot", "NodeMemory"} <= owned["storage"] - owned["membership"]
    assert {"NodeHealth", "Checking", "Act"} <= owned["health"] - owned["membership"]
    everything = {name for name, kind in vars(state).items() if structs_in(kind)}
    assert everything - {"Timers"} <= set().union(*owned.values())


def fields_written(tree):
    """Fields of any object that are assigned, or changed by a method, whatever variable holds the object."""
    changed = [*targets(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed.append(node.func.value)
    for target in changed:
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        if isinstance(target, ast.Attribute) and not (
            isinstance(target.value, ast.Name) and target.value.id == "self"
        ):
            yield target.attr


def test_a_field_is_written_by_the_folder_that_it_belongs_to():
    owners = owners_of_fields()
    seen = {
        (field, folder) for folder, _, tree in modules() for field in fields_written(tree) if field in owners
    }
    # Timers are set through the methods of their struct, by the folder that has them (`OWNERS`).
    moved = {(field, "kernel") for _, field in MOVED} | {("deadlines", "membership")}
    assert {(field, folder) for field, folder in seen if folder not in owners[field]} <= moved
    assert {"boots_until_s", "leaves_until_s", "refused_steps", "lost_nodes", "vanished_s"} <= {
        f for f, _ in seen
    }
    assert len(seen) > 150  # else this test sees nothing


def path_of(node, aliases):
    """The names by which an expression goes through the state: `s.membership.nodes[name]` is `("membership", "nodes")`.
    None: it is nothing of the state, or a field of one node, worker or incident."""
    match node:
        case ast.Name(name):
            return () if name in ("s", "state") else aliases.get(name)
        case ast.Attribute(_, "state"):
            return ()
        case ast.Attribute(ast.Subscript(), _):
            return None
        case ast.Attribute(owner, name):
            path = path_of(owner, aliases)
            return None if path is None else (*path, name)
        case ast.Subscript(owner):
            return path_of(owner, aliases)
    return None


def aliases_in(function):
    """Local names of parts and fields: `membership = context.state.membership`."""
    aliases = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = path_of(node.value, {}) if isinstance(node.value, ast.Attribute) else None
            if path:
                aliases[node.targets[0].id] = path
    return aliases


def written(function, aliases):
    """What an assignment changes, or a call of a method that changes its object."""
    for target in targets(function):
        if not isinstance(target, ast.Name):
            yield path_of(target, aliases)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield path_of(node.func.value, aliases)


def writes(tree):
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from filter(None, written(function, aliases_in(function)))


def test_a_part_of_the_state_is_written_by_its_folder_alone():
    """The others ask that folder to."""
    wrong, seen = set(), set()
    for folder, path, tree in modules():
        for names in writes(tree):
            part = names[0]
            seen.add(names[:2] if part in OWNERS else part)
            moves = path.name == "transitions.py" and names in MOVED
            # It moves every time of the state, timers among them, when nobody listened.
            moves |= path.name == "deadlines.py" and names == ("deadlines",)
            if folder not in OWNERS.get(part, {"kernel"}) and not moves:
                wrong.add((path.name, ".".join(names)))
    assert wrong == set()
    assert len(seen) > 60  # else this test sees nothing
    for part, fields in FIELDS.items():
        assert {x[1] for x in seen if isinstance(x, tuple) and x[0] == part and x[1:]} <= fields


def test_every_phase_has_its_row_and_can_be_reached():
    for table, phases in (
        (transitions.JOB, set(JobPhase)),
        (transitions.NODE, set(NodePhase)),
        (transitions.WORKER, set(WorkerPhase)),
    ):
        assert set(table) == phases
        assert set().union(*table.values()) == phases


def test_a_worker_that_is_gone_does_not_come_back():
    desk = running(2)
    worker = next(iter(desk.state.membership.workers.values()))
    transitions.enter(desk.core, worker, WorkerPhase.GONE)
    with pytest.raises(IllegalTransition, match=rf"{worker.name} cannot go from gone to member, while None"):
        transitions.enter(desk.core, worker, WorkerPhase.MEMBER)
    assert worker.phase is WorkerPhase.GONE


def test_a_node_that_is_lost_stays_lost():
    desk = running(2)
    node = next(iter(desk.state.membership.nodes.values()))
    transitions.lose_node(desk.core, node)
    for change in (transitions.leave, transitions.hold):
        change(desk.core, node, "a reason that comes late")
        assert node.phase is NodePhase.LOST
    with pytest.raises(IllegalTransition, match=f"node {node.name} cannot go from lost to lost"):
        transitions.lose_node(desk.core, node)
    assert [n.name for n in desk.core.alive_nodes()] == [
        n for n in desk.state.membership.nodes if n != node.name
    ]


def test_a_node_that_leaves_while_it_is_held_is_held_again_when_it_stays():
    desk = running(2)
    node = next(iter(desk.state.membership.nodes.values()))
    seen = []
    for change in (
        lambda: transitions.hold(desk.core, node, "its device is to be reset"),
        lambda: transitions.leave(desk.core, node, "a person drains it"),
        lambda: transitions.stay(desk.core, node),
        lambda: transitions.use(desk.core, node),
    ):
        change()
        seen.append(node.phase)
        assert list(desk.core.index.differences()) == []
    assert seen == [NodePhase.HELD, NodePhase.LEAVING, NodePhase.HELD, NodePhase.IN_SERVICE]


def test_what_the_index_does_not_know_is_found():
    desk = running(2)
    one = next(iter(desk.state.membership.workers.values()))
    one.phase = WorkerPhase.PARKED
    assert [wrong.split(" than ")[0] for wrong in desk.core.index.differences()] == [
        "the index has other member",
        "the index has other parked",
    ]


def test_a_job_that_has_ended_begins_nothing():
    desk = Desk()
    transitions.enter_job(desk.core, JobPhase.ENDED)
    with pytest.raises(IllegalTransition, match="the job cannot go from ended to running"):
        transitions.enter_job(desk.core, JobPhase.RUNNING)


def test_the_state_of_a_running_job_is_valid_and_what_is_wrong_is_named():
    desk = running(2)
    assert validate(desk.state) == []
    one, other = desk.state.membership.workers.values()
    other.node, other.slot = one.node, one.slot
    desk.state.membership.restarts_used = -1
    one.phase = WorkerPhase.READY
    one.ready = None
    desk.state.membership.outcome, desk.state.membership.phase = None, JobPhase.ENDED
    assert set(validate(desk.state)) == {
        "the job has ended without an outcome",
        "the count restarts_used is negative: -1",
        f"{one.name} is ready without a Ready report",
        f"2 workers have slot {one.slot} of {one.node}",
    }
