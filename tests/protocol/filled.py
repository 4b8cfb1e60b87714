"""Values of a type in which every field is set, so that what is written of them shows every field."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import msgspec.inspect as kinds

DEEPEST = 6
"""Types that hold themselves end here, with the shortest value that they have."""


def filled(type_: Any) -> Any:
    """One value; of a union the first member that is not None. Numbers and texts differ from each other and from defaults."""
    return msgspec.convert(_plain(kinds.type_info(type_), "x", 0), type_)


def _plain(kind: kinds.Type, name: str, depth: int) -> Any:
    match kind:
        case kinds.Metadata():
            return _plain(kind.type, name, depth)
        case kinds.StructType():
            plain = {
                field.encode_name: _plain(field.type, field.name, depth + 1)
                for field in kind.fields
                if depth < DEEPEST or field.required
            }
            if kind.tag_field is not None:
                plain = {kind.tag_field: kind.tag} | plain  # the first of an array
            return list(plain.values()) if kind.array_like else plain
        case kinds.DataclassType():
            return {field.encode_name: _plain(field.type, field.name, depth + 1) for field in kind.fields}
        case kinds.UnionType():
            some = [one for one in kind.types if not isinstance(one, kinds.NoneType)]
            return _plain(some[0], name, depth)
        case (
            kinds.ListType()
            | kinds.SetType()
            | kinds.FrozenSetType()
            | kinds.VarTupleType()
            | kinds.CollectionType()
        ):
            return [] if depth >= DEEPEST else [_plain(kind.item_type, name, depth + 1)]
        case kinds.NamedTupleType():
            return [_plain(field.type, field.name, depth + 1) for field in kind.fields]
        case kinds.TupleType():
            return [_plain(one, name, depth + 1) for one in kind.item_types]
        case kinds.DictType():
            if depth >= DEEPEST:
                return {}
            key = _plain(kind.key_type, f"{name} key", depth + 1)
            return {key: _plain(kind.value_type, name, depth + 1)}
        case kinds.EnumType():
            members = list(kind.cls)
            return (members[-1] if issubclass(kind.cls, enum.Enum) else members[0]).value
        case kinds.LiteralType():
            return sorted(kind.values, key=str)[-1]
        case kinds.BoolType():
            return True
        case kinds.IntType():
            return _within(kind, 3 + len(name))
        case kinds.FloatType():
            return _within(kind, 0.25 + len(name))
        case kinds.StrType():
            return name[: kind.max_length] if kind.max_length is not None else name
        case kinds.BytesType():
            return name.encode()
        case kinds.AnyType():
            return name
        case kinds.NoneType():
            return None
    raise TypeError(f"{kind}: give it a value here")


def _within(kind: kinds.IntType | kinds.FloatType, value: Any) -> Any:
    value = value if kind.ge is None else max(value, kind.ge)
    return value if kind.le is None else min(value, kind.le)
