"""Generates the CustomResourceDefinition from the types of `resource` and `status`: their fields, and the rules between them.

The API server requires a *structural* schema: no references, one type at each place, and no unions except of numbers and strings.
The docstrings of fields become descriptions, so that `kubectl explain hj.spec` has the same text as the source. The result is
`crd.yaml` of this package; a test compares the two.

A rule is written once, as a method of the type, and used twice: `check` calls it, and its expression is translated to CEL for the
API server, so that `kubectl apply` refuses what the operator would refuse.

    @rule("min_nodes", "at most nodes")
    def fewest_fit(self) -> bool:
        return self.min_nodes is None or self.min_nodes <= self.nodes

An expression may have comparisons, `and`, `or`, `not`, sums, `is None`, fields, constants of the module, and `exactly_one`. A
field that may be None must be compared with None before it is used, because using a missing field is an error in CEL.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect as kinds
import yaml

from holdfast.kubernetes.objects.resource import (
    API_VERSION,
    GROUP,
    KIND,
    MAX_NAME,
    NAME_PATTERN,
    PLURAL,
    RULE_MARK,
    VERSION,
    HoldfastJobSpec,
    job_part,
    name_in_object,
)
from holdfast.kubernetes.objects.status import JobStatus
from holdfast.protocol.options import declared, is_options

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


class FieldRule(msgspec.Struct, frozen=True):
    """A rule between fields of a part of the object."""

    field: str
    """Path within the part, as users write it, of the field to correct; empty: the part as a whole."""
    accepted: str
    """Description of the values that are accepted."""
    holds: Callable[[Any], bool]
    cel: str

    def value(self, part: msgspec.Struct) -> Any:
        """The field's value in a part of an object."""
        found: Any = part
        for name in filter(None, self.field.split(".")):
            found = msgspec.to_builtins(found) if isinstance(found, msgspec.Struct) else found
            found = found.get(name)
        return msgspec.to_builtins(found)


@cache
def rules_of(cls: type[msgspec.Struct]) -> tuple[FieldRule, ...]:
    """The rules of a type, in the order of the source."""
    found = []
    for name, method in vars(cls).items():
        if (marked := getattr(method, RULE_MARK, None)) is not None:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
            assert isinstance(tree, ast.FunctionDef)
            returned = tree.body[-1]
            assert isinstance(returned, ast.Return), (
                f"{cls.__name__}.{name}: one expression, which CEL can say"
            )
            cel = _Translation(cls).of(returned.value)
            field, accepted = marked
            found.append(FieldRule(field=field, accepted=accepted, holds=method, cel=cel))
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
                return f"{self.of(value)}.{name_in_object(name)}"
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
        """A subexpression, in parentheses where precedence requires them."""
        text = self.of(node)
        return f"({text})" if isinstance(node, ast.BoolOp) else text


def _literal(value: Any) -> str:
    assert isinstance(value, int | str), value
    return str(value) if isinstance(value, int) else f"'{value}'"


COLUMNS = (
    ("State", "string", ".status.state", 0),
    ("Nodes", "string", ".status.nodes.summary", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Incidents", "integer", ".status.incidents.total", 0),
    ("Goodput", "string", ".status.progress.goodput", 1),
    ("Checkpoint", "string", ".status.saved.checkpoint", 1),
    ("Reason", "string", ".status.reason", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Columns of `kubectl get hj`: heading, type, path; with priority 1 only with `-o wide`."""

SIZE_OF_A_RUN = {
    "rule": "self.spec.nodes==oldSelf.spec.nodes||self.spec.runPolicy.suspend"
    "||self.spec.nodes>=self.?status.fewest.orValue(1)&&self.spec.nodes<=self.?status.most.orValue(10000)",
    "message": "spec.nodes: from status.fewest to status.most while it runs",
}
"""Has `kubectl scale` refused at once outside of the run's bounds. It applies only to changes of the size, so that a status can
be written whatever the size is."""


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition as an object."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes",
                "statusReplicasPath": ".status.nodes.present",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": path} | ({"priority": priority} if priority else {})
            for name, type_, path, priority in COLUMNS
        ],
        "schema": {"openAPIV3Schema": job_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": PLURAL,
                "kind": KIND,
                "shortNames": ["hj"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def crd_text() -> str:
    """The text of `crd.yaml`."""
    head = f"# {KIND} {API_VERSION}. Made of the types in resource.py and status.py by `make crd`; do not change it by hand.\n"
    body: str = yaml.safe_dump(crd(), sort_keys=False, width=200, default_flow_style=None)
    return head + body


@cache
def job_schema() -> dict[str, Any]:
    """The schema of the whole object."""
    name = {"type": "string", "maxLength": MAX_NAME, "pattern": NAME_PATTERN}
    return {
        "type": "object",
        "description": "A training job that goes on through failures.",
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": _of_struct(HoldfastJobSpec, documented=True),
            # Descriptions are for fields that people write. Those of the status would take a third of the CRD's size limit.
            "status": _of_struct(JobStatus, documented=False),
        },
        "x-kubernetes-validations": [SIZE_OF_A_RUN],
    }


def by_fields(value: Any, kind: kinds.Type) -> Any:
    """Renames the keys of an object's value to the names of the fields in parts that it shares with the job's specification, so
    that msgspec can convert it."""
    match kind:
        case kinds.StructType() | kinds.DataclassType():
            fields = dict(_fields(kind))
            shared = job_part(kind.cls) is not None
            return {
                fields[name].name if shared and name in fields else name: by_fields(one, fields[name].type)
                if name in fields
                else one
                for name, one in value.items()
            }
        case kinds.VarTupleType():
            return [by_fields(one, kind.item_type) for one in value]
        case kinds.Metadata():
            return by_fields(value, kind.type)
        case _:
            return value


def in_object(value: Any) -> Any:
    """The inverse: a part of the `spec`, or the whole, as the object has it. Values that are defaults are left out."""
    if isinstance(value, tuple):
        return [in_object(one) for one in value]
    if not isinstance(value, msgspec.Struct) and not is_options(type(value)):
        return value
    info = kinds.type_info(type(value))
    assert isinstance(info, kinds.StructType | kinds.DataclassType)
    given = {name: (getattr(value, field.name), field) for name, field in _fields(info)}
    return {
        name: in_object(one)
        for name, (one, field) in given.items()
        if one != (field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory())
    }


def _fields(info: kinds.StructType | kinds.DataclassType) -> Iterator[tuple[str, kinds.Field]]:
    """The fields that an object has, with their names in it."""
    part = job_part(info.cls)
    for field in info.fields:
        if part is None:
            yield field.encode_name, field
        elif field.name not in part.left_out:
            yield name_in_object(field.name), field


def _of_struct(cls: type, documented: bool) -> dict[str, Any]:
    info = kinds.type_info(cls)
    assert isinstance(info, kinds.StructType | kinds.DataclassType)
    docs = _field_docs(cls) if documented else {}
    bounds = _bounds(cls)
    properties: dict[str, Any] = {}
    for name, field in _fields(info):
        schema = _of_type(field.type, documented) | bounds.get(field.name, {})
        if field.name in docs:
            schema = {"description": docs[field.name], **schema}
        # The server writes defaults into the object when it is created. So a later version with other defaults does not change
        # existing jobs, and `kubectl get -o yaml` shows what applies.
        if documented and not field.required and (default := _default(field)) is not None:
            schema["default"] = default
        properties[name] = schema
    required = [name for name, field in _fields(info) if field.required]
    rules = [{"rule": one.cel, "message": _message_of(one)} for one in rules_of(cls)]
    return (
        {"type": "object"}
        | ({"required": required} if required else {})
        | {"properties": properties}
        | ({"x-kubernetes-validations": rules} if rules else {})
    )


def _bounds(cls: type) -> dict[str, dict[str, Any]]:
    """Schema bounds of a part of the job's specification: those of its options, and those that only the object has."""
    if (part := job_part(cls)) is None:
        return {}
    found = {name: dict(bounds) for name, bounds in part.bounds.items()}
    for one in declared(cls) if is_options(cls) else ():
        option = one.option
        limits = _given(minimum=option.least, maximum=option.most, pattern=option.pattern or None)
        found[one.name] = limits | found.get(one.name, {})
    return found


def _message_of(one: FieldRule) -> str:
    """The message of a rule. It names the field; the API server adds the part of the object."""
    return f"{one.field}: {one.accepted}" if one.field else one.accepted


def _default(field: kinds.Field) -> Any:
    """The default of a field; None: it has none. A nested object's is an empty object, because otherwise the defaults within it
    would not apply."""
    if field.default is msgspec.NODEFAULT:
        return None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if job_part(type(field.default)) is not None:
        return {}
    # With omit_defaults a struct of defaults becomes an empty object, as it should.
    plain = msgspec.to_builtins(field.default)
    return None if plain in ((), []) else list(plain) if isinstance(plain, tuple) else plain


def _of_type(kind: kinds.Type, documented: bool) -> dict[str, Any]:
    match kind:
        case kinds.Metadata(extra_json_schema=dict(extra)) if "x-kubernetes-preserve-unknown-fields" in extra:
            return dict(extra)  # the whole schema of the field
        case kinds.Metadata():
            return _of_type(kind.type, documented) | (kind.extra_json_schema or {})
        case kinds.StructType() | kinds.DataclassType():
            return _of_struct(kind.cls, documented)
        case kinds.UnionType():
            return _of_union([one for one in kind.types if not isinstance(one, kinds.NoneType)], documented)
        case kinds.VarTupleType():
            most = {} if kind.max_length is None else {"maxItems": kind.max_length}
            return {"type": "array", **most, "items": _of_type(kind.item_type, documented)}
        case kinds.DictType(value_type=kinds.StrType()):
            return {"type": "object", "additionalProperties": _of_type(kind.value_type, documented)}
        case kinds.DictType():  # the field's own schema describes its values
            return {"type": "object"}
        case kinds.LiteralType():
            return {"type": "string", "enum": sorted(str(one) for one in kind.values)}
        case kinds.BoolType():
            return {"type": "boolean"}
        case kinds.FloatType():
            return {"type": "number"}
        case kinds.IntType():
            return {"type": "integer", **_given(minimum=kind.ge, maximum=kind.le)}
        case kinds.StrType():
            limits = _given(minLength=kind.min_length, maxLength=kind.max_length, pattern=kind.pattern)
            return {"type": "string", **limits}
        case _:
            raise TypeError(f"{kind}: a structural schema has no place for it")


def _of_union(members: list[kinds.Type], documented: bool) -> dict[str, Any]:
    if len(members) == 1:
        return _of_type(members[0], documented)
    text = next(one for one in members if isinstance(one, kinds.StrType))
    assert {type(one) for one in members} == {kinds.IntType, kinds.StrType}, members
    # The only union in a structural schema. The pattern applies only to strings.
    return {
        "x-kubernetes-int-or-string": True,
        **_given(pattern=text.pattern),
    }


def _given(**limits: Any) -> dict[str, Any]:
    return {name: limit for name, limit in limits.items() if limit is not None}


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """The docstring of each field, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = _field_docs(cls.__base__) if dataclasses.is_dataclass(cls.__base__) else {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(crd_text())
