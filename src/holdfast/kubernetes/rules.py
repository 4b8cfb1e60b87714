"""What has to hold between fields of an object: written once, as a method of the type, and read twice. Here it is called, and for
the API server its expression is translated to CEL, so that `kubectl apply` refuses what the operator would.

    @rule("min_nodes", "at most nodes")
    def fewest_fit(self) -> bool:
        return self.min_nodes is None or self.min_nodes <= self.nodes

An expression may have comparisons, `and`, `or`, `not`, sums, `is None`, fields, constants of the module, and `exactly_one`. A
field that may be None has to be asked for that before it is used: in CEL a field that is not there is an error.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import msgspec

_MARK = "__holdfast_rule__"
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


class Rule(msgspec.Struct, frozen=True):
    """One of them."""

    field: str
    """The one to be corrected, by its path in the object as users write it; empty: the part as a whole."""
    accepted: str
    """What may stand there."""
    holds: Callable[[Any], bool]
    cel: str

    def value(self, part: msgspec.Struct) -> Any:
        """What stands in the field."""
        found: Any = part
        for name in filter(None, self.field.split(".")):
            found = msgspec.to_builtins(found) if isinstance(found, msgspec.Struct) else found
            found = found.get(name)
        return msgspec.to_builtins(found)


def rule(field: str, accepted: str) -> Callable[[Callable[[Any], bool]], Callable[[Any], bool]]:
    """Marks a method of a part of the object as something that has to hold. field: as in `Rule`."""

    def mark(method: Callable[[Any], bool]) -> Callable[[Any], bool]:
        setattr(method, _MARK, (field, accepted))
        return method

    return mark


def exactly_one(found: Iterable[bool]) -> bool:
    """CEL's `exists_one`."""
    return sum(found) == 1


@cache
def rules_of(cls: type[msgspec.Struct]) -> tuple[Rule, ...]:
    """In the order of the source."""
    found = []
    for name, method in vars(cls).items():
        if (marked := getattr(method, _MARK, None)) is not None:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
            assert isinstance(tree, ast.FunctionDef)
            returned = tree.body[-1]
            assert isinstance(returned, ast.Return), (
                f"{cls.__name__}.{name}: one expression, which CEL can say"
            )
            cel = _Translation(cls).of(returned.value)
            field, accepted = marked
            found.append(Rule(field=field, accepted=accepted, holds=method, cel=cel))
    return tuple(found)


class _Translation:
    def __init__(self, cls: type[msgspec.Struct]) -> None:
        self._constants = vars(sys.modules[cls.__module__])

    def of(self, node: ast.expr | None) -> str:
        match node:
            case ast.BoolOp(op, values):
                sign = "&&" if isinstance(op, ast.And) else "||"
                return sign.join(self._within(one) for one in values)
            case ast.UnaryOp(ast.Not(), operand):
                return f"!{self._within(operand)}"
            case ast.Compare(left, [ast.Is()], [ast.Constant(None)]):
                return f"!has({self.of(left)})"
            case ast.Compare(left, [ast.IsNot()], [ast.Constant(None)]):
                return f"has({self.of(left)})"
            case ast.Compare(left, [sign], [right]) if type(sign) in _OPERATORS:
                return f"{self._within(left)}{_OPERATORS[type(sign)]}{self._within(right)}"
            case ast.BinOp(left, ast.Add(), right):
                return f"{self.of(left)}+{self.of(right)}"
            case ast.Attribute(value, name):
                return f"{self.of(value)}.{_camel(name)}"
            case ast.Subscript(value, ast.Constant(str(name))):
                return f"{self.of(value)}.{name}"
            case ast.Name("self"):
                return "self"
            case ast.Name("one"):
                return "c"
            case ast.Name(name) if name in self._constants:
                return _literal(self._constants[name])
            case ast.Constant(value):
                return _literal(value)
            case ast.Call(ast.Name("exactly_one"), [ast.GeneratorExp(elt, [each])]):
                return f"{self.of(each.iter)}.exists_one(c,{self.of(elt)})"
            case _:
                raise TypeError(f"{ast.unparse(node) if node else node}: CEL has no word for it here")

    def _within(self, node: ast.expr) -> str:
        """A part of another expression, in brackets where it would be read otherwise."""
        said = self.of(node)
        return f"({said})" if isinstance(node, ast.BoolOp) else said


def _camel(name: str) -> str:
    """A field's name as `rename="camel"` has it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _literal(value: Any) -> str:
    assert isinstance(value, int | str), value
    return str(value) if isinstance(value, int) else f"'{value}'"
