"""Secrets are compared at one place: in constant time, and over bytes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import modules_of

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
PLACE = "holdfast.protocol.network.proof"
SECRET = {"token", "secret", "credential", "authorization", "proof", "answer", "nonce"}
EQUALITY = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def last_name(node: ast.expr) -> str:
    """`self._token` is `token`, and what a method like `.encode()` makes of it still is."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_").rpartition("_")[2]


def comparisons(tree: ast.Module) -> Iterator[int]:
    """Lines that compare a secret with something other than None, or that compare in constant time themselves."""
    for node in ast.walk(tree):
        named = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith("compare_digest")
        imported = isinstance(node, ast.ImportFrom) and any(a.name == "compare_digest" for a in node.names)
        if named or imported or (isinstance(node, ast.Compare) and compares_a_secret(node)):
            yield node.lineno


def compares_a_secret(node: ast.Compare) -> bool:
    by_value = any(isinstance(op, EQUALITY) for op in node.ops)
    return by_value and any(last_name(x) in SECRET for x in (node.left, *node.comparators))


def test_one_place_compares_secrets():
    found = {m.name: lines for m in modules_of(PACKAGE) if (lines := sorted(set(comparisons(m.tree))))}
    assert found.pop(PLACE), "the one place is found"
    # The simulator's tokens number runs of steps, and are no secrets.
    found.pop("holdfast.tools.simulate.cluster", None)
    found.pop("holdfast.tools.simulate.live", None)
    assert not found, f"compare with {PLACE}.is_same"


@pytest.mark.parametrize(
    "source",
    [
        "given == self._token",
        "token.encode() != given",
        "authorization in (f'Bearer {x}',)",
        "hmac.compare_digest(a, b)",
        "secrets.compare_digest(a, b)",
        "from hmac import compare_digest",
    ],
)
def test_a_comparison_elsewhere_is_found(source):
    assert list(comparisons(ast.parse(source)))


def test_a_missing_answer_is_no_comparison():
    assert not list(comparisons(ast.parse("answer is None and not token")))
