"""Every cause that the core can write has its kind, and a fault of a machine is never counted as the script's."""

import ast
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from desk import Desk, running
from test_core_cases import at

import holdfast
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.incidents import kind_of
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import NodeOutOfMemory, NodeTaken
from holdfast.protocol.phases import Phase

SOURCES = Path(holdfast.__file__).parent
RECORDED = Path(__file__).parent / "recorded"
CAUSES = {cause.__name__: cause for cause in get_args(causes.Cause)}
KINDS = {
    "ConnectionClosed": "node", "NodeSilent": "node", "ContainerOutOfMemory": "node", "PlaceLost": "node",
    "AgentReplaced": "node", "WorkersFail": "node", "WorkersDoNotStart": "node", "StateRefused": "node", "ChecksFailed": "node", "NodeReclaimed": "reclaimed",
    "ProcessEnded": "process", "LeftEarly": "process", "KilledForMemory": "process", "ProcessVanished": "process", "NeverStarted": "process",
    "Hang": "hang", "ProcessStopped": "hang", "LeftBehind": "hang", "NotReady": "timeout", "NotSaved": "timeout",
    "CollectiveFailed": "collective", "MemberLeft": "collective", "CoordinatorLost": "coordinator",
    "StateUnread": "state", "NobodyHasState": "state", "LastStateIncomplete": "state", "Stopping": "stop", "RuleMatched": "health",
    "ScriptRaised": "script", "ShapesDiffer": "script", "NotFinite": "nan",
    "StatesDiffer": "corruption",
    "GradientsDiffer": "corruption",
}  # fmt: skip
"""Of every cause. A new one is added here by a person who has thought about whose fault it is."""


def an_example(cause: type[msgspec.Struct]) -> msgspec.Struct:
    """A cause with something in every field that has no default."""
    fields = [f for f in msgspec.structs.fields(cause) if f.required]
    values = {int: -9, float: 2.0, tuple[str, ...]: ("some text",)}
    return cause(**{f.name: values.get(f.type, "some text") for f in fields})


def calls(tree: ast.AST) -> set[str]:
    """Names of what is called anywhere in it."""
    found = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in found}


def names(tree: ast.AST) -> set[str]:
    """Names that occur anywhere in it."""
    return {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(tree)}


def test_every_cause_has_the_kind_that_somebody_gave_it():
    assert {name: an_example(cause).kind for name, cause in CAUSES.items()} == KINDS


def test_there_is_no_cause_that_is_not_one_of_these():
    made = {c.__name__ for c in _all_below(causes._Cause)}
    assert made == set(CAUSES)
    for path in (SOURCES / "coordinator").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert "Recorded" not in calls(tree), (
            f"{path}: only the reader of older versions makes a cause from text"
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                name = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
                text = name == "cause" and "str" in ast.unparse(node.annotation).split(" | ")
                assert not text, f"{path}: a cause as text"


def test_the_core_makes_every_one_of_them():
    made = set().union(*(names(ast.parse(p.read_text())) for p in (SOURCES / "coordinator").rglob("*.py")))
    used = made | names(ast.parse((SOURCES / "coordinator" / "kernel" / "events.py").read_text()))
    assert set(CAUSES) - {"Recorded"} <= used


def uses(path: Path) -> list[tuple[str, str]]:
    """(function, cause) of every cause that a module's functions make or choose; types and isinstance() make none."""
    text = path.read_text()
    if "causes" not in text:  # most modules: neither the module of causes nor one of its names is imported
        return []
    tree = ast.parse(text)
    only_types: set[int] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            parts += node.args[1:]
        only_types |= {id(n) for part in parts if isinstance(part, ast.AST) for n in ast.walk(part)}
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == causes.__name__
        for alias in node.names
    }
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                name = imported.get(getattr(node, "id", ""), "")
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("causes"):
                    name = node.attr
                if name in CAUSES and id(node) not in only_types:
                    found.append((getattr(function, "name", "lambda"), name))
    return found


OUTSIDE = sorted(p for p in SOURCES.rglob("*.py") if p.relative_to(SOURCES).parts[0] != "coordinator")


def test_agents_engines_and_workers_report_facts_and_make_no_cause():
    """What they send is exit codes, silence and reasons; the core alone says whose fault it is."""
    makers = {str(p.relative_to(SOURCES)) for p in OUTSIDE if uses(p)}
    assert makers <= {"protocol/causes.py"}


def test_only_two_functions_of_the_core_can_blame_the_script():
    script = {name for name, kind in KINDS.items() if kind in ("script", "nan")}
    blame = {
        (str(p.relative_to(SOURCES)), function, name)
        for p in (SOURCES / "coordinator").rglob("*.py")
        for function, name in uses(p)
        if name in script
    }
    assert blame == {
        ("coordinator/membership/failures.py", "failed", "NotFinite"),
        ("coordinator/membership/failures.py", "failed", "ScriptRaised"),
        ("coordinator/membership/replicas.py", "fits", "ShapesDiffer"),
    }


def test_only_a_worker_that_caught_an_exception_of_the_script_reports_one():
    """`Failed` is the one message that becomes ScriptRaised."""
    senders = {
        str(p.relative_to(SOURCES))
        for p in OUTSIDE
        if "Failed" in (text := p.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("m.Failed", "messages.Failed", "Failed")
    }
    assert senders == {"train/replica.py", "train/worker.py"}


def test_every_ledger_event_takes_its_kind_from_a_cause():
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "cause_kind" in text else ():
            if isinstance(node, ast.keyword) and node.arg == "cause_kind":
                assert ast.unparse(node.value).endswith("cause.kind"), f"{path}:{node.value.lineno}"


def _all_below(base: type) -> set[type]:
    return set(base.__subclasses__()).union(*(_all_below(c) for c in base.__subclasses__()))


@pytest.mark.parametrize("name", sorted(CAUSES))
def test_a_cause_is_the_same_after_it_was_written(name):
    cause = an_example(CAUSES[name])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cause), type=causes.Cause) == cause
    assert str(cause)


# ---------------------------------------------------------------- what became of the four that counted as the script's


def kinds(desk: Desk) -> list[str]:
    return [kind_of(i) for i in desk.incidents()]


def test_a_worker_that_does_not_leave_a_broken_generation_hangs():
    desk = running(3)
    desk.exits("n2.0#3", -9)
    desk.parks("n0.0#1", 5)
    desk.wait(3.1)
    assert kinds(desk) == ["process", "hang"]


def test_a_worker_whose_process_is_stopped_hangs():
    desk = running(3)
    desk.exits("n2.0#3", -9)
    desk.do(e.NodeSays("n1", m.Stalled("n1.0#2", at(desk, "n1.0#2", Phase.FORWARD, process="T"))))
    assert kinds(desk) == ["process", "hang"]


def test_a_worker_that_its_agent_does_not_know_is_a_lost_process():
    desk = running(2)
    desk.crash()
    desk.node("n0")
    desk.back("n1")
    desk.wait(2.1)
    assert kinds(desk)[-1] == "process"


def test_a_node_that_slurm_takes_is_reclaimed():
    desk = running(3)
    desk.do(NodeTaken("n1", "Slurm removed the node from the allocation"))
    assert kinds(desk) == ["reclaimed"]


@pytest.mark.parametrize("words", ["ValueError: bad", "RuntimeError: CUDA error", "exit code 1", ""])
def test_the_words_of_engines_agents_and_rules_never_change_a_kind(words):
    """Reasons and evidence are text of others, and may look like an error of the script."""
    assert causes.NodeReclaimed(words).kind == "reclaimed"
    assert causes.ChecksFailed(words).kind == "node"
    assert causes.WorkersDoNotStart(words).kind == "node"
    assert causes.WorkersFail(words).kind == "node"
    assert causes.RuleMatched("a-rule", words).kind == "health"
    assert causes.Hang(words).kind == "hang"
    desk = running(3)
    desk.do(NodeTaken("n1", words))
    assert kinds(desk) == ["reclaimed"]


# ---------------------------------------------------------------- what older versions wrote


def test_in_process_too_a_worker_that_was_killed_for_memory_names_the_limit():
    desk = running()
    worker = desk.members()[1]
    killed = m.Exited(worker=worker, code=-9, out_of_memory=True, memory_limit=1500 << 20)
    desk.do(e.NodeSays(worker.partition(".")[0], killed))
    (incident,) = desk.incidents()
    assert incident.cause == causes.KilledForMemory(1500 << 20)


def test_the_engine_names_why_a_whole_container_was_lost():
    """The agent was killed with its workers, so that nobody on the node can say it."""
    desk = running(3)
    desk.lose("n1")
    desk.wait(1.0, alive=("n0", "n2"))
    desk.do(NodeOutOfMemory("n1", 2 << 30, 3.0))
    (incident,) = desk.incidents()
    assert incident.cause == causes.ContainerOutOfMemory(2 << 30)
    assert "2.15 GB" in str(incident.cause)
    assert [one.text for one in incident.evidence] == ["its agent's connection closed"]
    explained = desk.records("incident-explained")
    assert [(one["id"], one["node"], one["was"]) for one in explained] == [
        (1, "n1", "its agent's connection closed")
    ]
    desk.do(NodeOutOfMemory("n1", 2 << 30, 3.1))
    assert len(desk.records("incident-explained")) == 1, "it is known"


@pytest.mark.parametrize(
    "killed",
    [
        NodeOutOfMemory("n0", None, 1.0),
        NodeOutOfMemory("n1", None, 30.0),
        NodeOutOfMemory("n9", None, 1.0),
    ],
    ids=["another node", "long before", "nobody"],
)
def test_memory_that_ran_out_elsewhere_explains_nothing(killed):
    desk = running(3)
    desk.lose("n1")
    desk.wait(1.0, alive=("n0", "n2"))
    desk.do(killed)
    (incident,) = desk.incidents()
    assert incident.cause == causes.ConnectionClosed()


def test_what_somebody_saw_at_the_node_is_not_replaced():
    desk = running(3)
    worker = desk.members()[1]
    desk.do(e.NodeSays("n1", m.Exited(worker=worker, code=-9, out_of_memory=True, memory_limit=1 << 30)))
    desk.do(NodeOutOfMemory("n1", 2 << 30, 0.0))
    assert [one.cause for one in desk.incidents()] == [causes.KilledForMemory(1 << 30)]
