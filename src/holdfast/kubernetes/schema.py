"""The CustomResourceDefinition, made of the types of `resource` and `status`.

The API server wants a *structural* schema: no references, one type at each place, and unions of nothing but numbers and
strings. What field docs say becomes the description, so `kubectl explain hj.spec` has the same words as the source. `crd.yaml`
beside this file is what comes out; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect as kinds
import yaml

from holdfast.kubernetes.resource import (
    API_VERSION,
    GROUP,
    KIND,
    MAX_NAME,
    NAME_PATTERN,
    PLURAL,
    VERSION,
    HoldfastJobSpec,
)
from holdfast.kubernetes.rules import Rule, rules_of
from holdfast.kubernetes.status import JobStatus

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
"""What `kubectl get hj` shows: heading, type, path; priority 1: only with `-o wide`."""

SIZE_OF_A_RUN = {
    "rule": "self.spec.nodes==oldSelf.spec.nodes||self.spec.runPolicy.suspend"
    "||self.spec.nodes>=self.?status.fewest.orValue(1)&&self.spec.nodes<=self.?status.most.orValue(10000)",
    "message": "spec.nodes: from status.fewest to status.most while it runs",
}
"""So `kubectl scale` is refused at once. About changes alone: a status is written whatever the size is."""


def crd() -> dict[str, Any]:
    """The whole object."""
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
    """As `crd.yaml` has it."""
    head = f"# {KIND} {API_VERSION}. Made of the types in resource.py and status.py by `make crd`; do not change it by hand.\n"
    body: str = yaml.safe_dump(crd(), sort_keys=False, width=200, default_flow_style=None)
    return head + body


@cache
def job_schema() -> dict[str, Any]:
    """Of the object as a whole."""
    name = {"type": "string", "maxLength": MAX_NAME, "pattern": NAME_PATTERN}
    return {
        "type": "object",
        "description": "A training job that goes on through failures.",
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": _of_struct(HoldfastJobSpec, documented=True),
            # Descriptions are for what people write. Of the status they would cost a third of what the CRD may have.
            "status": _of_struct(JobStatus, documented=False),
        },
        "x-kubernetes-validations": [SIZE_OF_A_RUN],
    }


def _of_struct(cls: type[msgspec.Struct], documented: bool) -> dict[str, Any]:
    info = kinds.type_info(cls)
    assert isinstance(info, kinds.StructType)
    docs = _field_docs(cls) if documented else {}
    properties: dict[str, Any] = {}
    for field in info.fields:
        schema = _of_type(field.type, documented)
        if field.name in docs:
            schema = {"description": docs[field.name], **schema}
        # Defaults are written into the object when it is made. So a later version with other defaults does
        # not change jobs that exist, and `kubectl get -o yaml` shows what holds.
        if documented and not field.required and (default := _default(field)) is not None:
            schema["default"] = default
        properties[field.encode_name] = schema
    required = [field.encode_name for field in info.fields if field.required]
    rules = [{"rule": one.cel, "message": _told(one)} for one in rules_of(cls)]
    return (
        {"type": "object"}
        | ({"required": required} if required else {})
        | {"properties": properties}
        | ({"x-kubernetes-validations": rules} if rules else {})
    )


def _told(one: Rule) -> str:
    """The API server names the part of the object, and the message the field in it."""
    return f"{one.field}: {one.accepted}" if one.field else one.accepted


def _default(field: kinds.Field) -> Any:
    """None: nothing is filled in. A nested object gets an empty one: without it the defaults within would not apply."""
    if field.default is msgspec.NODEFAULT:
        return None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    # omit_defaults leaves nothing of a struct of defaults, which is what is wanted: an empty object.
    plain = msgspec.to_builtins(field.default)
    return None if plain in ((), []) else list(plain) if isinstance(plain, tuple) else plain


def _of_type(kind: kinds.Type, documented: bool) -> dict[str, Any]:
    match kind:
        case kinds.Metadata(extra_json_schema=dict(extra)) if "x-kubernetes-preserve-unknown-fields" in extra:
            return dict(extra)  # the whole of it
        case kinds.Metadata():
            return _of_type(kind.type, documented) | (kind.extra_json_schema or {})
        case kinds.StructType():
            return _of_struct(kind.cls, documented)
        case kinds.UnionType():
            return _of_union([one for one in kind.types if not isinstance(one, kinds.NoneType)], documented)
        case kinds.VarTupleType():
            most = {} if kind.max_length is None else {"maxItems": kind.max_length}
            return {"type": "array", **most, "items": _of_type(kind.item_type, documented)}
        case kinds.DictType(value_type=kinds.StrType()):
            return {"type": "object", "additionalProperties": _of_type(kind.value_type, documented)}
        case kinds.DictType():  # what it holds is said by the field's own schema
            return {"type": "object"}
        case kinds.LiteralType():
            return {"type": "string", "enum": sorted(str(one) for one in kind.values)}
        case kinds.BoolType():
            return {"type": "boolean"}
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
    # The one union that a structural schema knows. The pattern is looked at where the value is a string.
    return {
        "x-kubernetes-int-or-string": True,
        **_given(pattern=text.pattern),
    }


def _given(**limits: Any) -> dict[str, Any]:
    return {name: limit for name, limit in limits.items() if limit is not None}


@cache
def _field_docs(cls: type[msgspec.Struct]) -> dict[str, str]:
    """The text under each field, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(crd_text())
