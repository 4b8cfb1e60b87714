"""No decision depends on the words that a person reads: they are compared with nothing, and nothing is sought in them.

Read from the syntax. What is called `reason`, `message` and the like has such words, as a variable, as a field and as a key.
Views are excepted: what they choose by words is read by people as well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
VIEWS = ("observe", "ui", "web")
WORDS = {"reason", "stop_reason", "message", "why", "evidence", "detail", "sentence"}
SEEKING = {"startswith", "endswith", "find", "index", "count", "removeprefix"}
PATTERNS = {"match", "search", "fullmatch", "findall"}

CODES = "reasons of the Kubernetes API: words for programs, in CamelCase"
SLURM = "Slurm's reasons for a job's state: words for programs"
TOOL = "another program's error, which has no code"
ELSEWHERE = {
    "kubernetes/client/api.py": CODES,
    "kubernetes/commands/follow.py": CODES,
    "kubernetes/tasks/job_objects.py": CODES,
    "kubernetes/policy/conditions.py": CODES,
    "kubernetes/commands/reach.py": CODES,
    "kubernetes/objects/pod.py": CODES,
    "engines/slurm/launcher.py": SLURM,
    "engines/slurm/submit.py": SLURM,
    "checkpoint/objects.py": TOOL,
    "kubernetes/pods/coordinator.py": "a cause is not printed twice",
}


def has_words(node: ast.expr) -> bool:
    """Whether an expression is a text that a person reads, by its name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in WORDS
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key in WORDS
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]):
            return key in WORDS
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            return has_words(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip" | "sentence" | "casefold")):
            return has_words(inner) or (isinstance(node.func, ast.Attribute) and node.func.attr in WORDS)
        case ast.BoolOp(values=values):
            return any(map(has_words, values))
    return False


def looks(tree: ast.AST) -> Iterator[int]:
    """Lines that look into such a text."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for op, one, other in zip(ops, [left, *comparators], comparators, strict=False):
                    within = isinstance(op, ast.In | ast.NotIn) and (has_words(other) or has_words(one))
                    same = isinstance(op, ast.Eq | ast.NotEq) and (
                        (has_words(one) and is_text(other)) or (has_words(other) and is_text(one))
                    )
                    if within or same:
                        yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in SEEKING and has_words(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=attr), args=args) if attr in PATTERNS and any(
                map(has_words, args)
            ):
                yield node.lineno


def is_text(node: ast.expr) -> bool:
    """A text that is not empty, or a name in capitals, which may have one."""
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.JoinedStr():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
    return False


def modules() -> dict[str, ast.AST]:
    paths = (p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in VIEWS)
    return {
        p.relative_to(PACKAGE).as_posix(): ast.parse(text)
        for p in paths
        if any(word in (text := p.read_text()) for word in WORDS)
    }


def test_nothing_is_decided_by_words() -> None:
    found = {name: lines for name, tree in modules().items() if (lines := sorted(set(looks(tree))))}
    unknown = {f"{name}:{line}" for name, lines in found.items() if name not in ELSEWHERE for line in lines}
    assert not unknown, "compare a value, such as a cause's type, and not the words: " + ", ".join(
        sorted(unknown)
    )
    assert set(ELSEWHERE) <= set(found), "an exception that is not needed"


@pytest.mark.parametrize(
    "source",
    [
        'x = "too few workers" in reason',
        'x = any(text in event.reason for text in ("a", "b"))',
        'x = fields.get("reason") == "SIGTERM"',
        'x = TAKEN_BACK in str(value.get("reason") or "")',
        'x = report["reason"].startswith("Slurm ")',
        'x = re.match("hang", error.message)',
        "x = reason in WANTING",
        'x = "lost" in event.sentence()',
    ],
)
def test_a_look_into_words_is_found(source: str) -> None:
    assert list(looks(ast.parse(source))) == [1]


@pytest.mark.parametrize(
    "source",
    [
        'x = f"giving up: {reason}"',
        'x = reason or "none"',
        "x = cause is NoticeCause.PREEMPTION",
        'x = reason == ""',
        "x = reason == other.reason",
    ],
)
def test_words_may_be_passed_on(source: str) -> None:
    assert not list(looks(ast.parse(source)))
