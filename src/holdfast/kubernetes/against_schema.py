"""Compares a value with a structural schema, as the API server does, but tells what is accepted in words of one line each.

Pure. The command line uses it before anything is sent, and the operator where an older CRD let something through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

SHOWN_CHARS = 80
"""Of a value in a message."""


class Problem(msgspec.Struct, frozen=True):
    """One field that cannot be taken as it is."""

    path: str
    """As `kubectl explain` takes it, for example `spec.checkpoints[1].url`."""
    value: Any
    """What stands there; None: nothing."""
    accepted: str
    """What may stand there."""

    def __str__(self) -> str:
        text = msgspec.json.encode(self.value).decode()
        shown = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
        return f"{self.path}: {'is missing' if self.value is None else shown}; accepted: {self.accepted}"


Schema = Mapping[str, Any]


def problems(value: Any, schema: Schema, path: str) -> Iterator[Problem]:
    """Every place at which the value does not fit, in the order of the schema."""
    if not _has_type(value, schema):
        yield Problem(path, value, accepted(schema))
    elif isinstance(value, Mapping):
        yield from _of_object(value, schema, path)
    elif isinstance(value, list | tuple):
        yield from _of_list(value, schema, path)
    elif not _within(value, schema):
        yield Problem(path, value, accepted(schema))


def _of_object(value: Mapping[str, Any], schema: Schema, path: str) -> Iterator[Problem]:
    fields: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield Problem(f"{path}.{name}", None, accepted(fields[name]))
    # The one form of `oneOf` that our own schema uses. A schema with another one must extend this, or its
    # rule would hold on the server alone.
    choices = [branch["required"][0] for branch in schema.get("oneOf", ())]
    if choices and sum(name in value for name in choices) != 1:
        yield Problem(path, dict(value) or None, f"exactly one of {' and '.join(choices)}")
    for name, one in value.items():
        if name in fields:
            yield from problems(one, fields[name], f"{path}.{name}")
        elif "additionalProperties" in schema:
            yield from problems(one, schema["additionalProperties"], f"{path}.{name}")
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            known = ", ".join(sorted(fields)) or "nothing"
            yield Problem(f"{path}.{name}", one, f"no such field; {path} has {known}")


def _of_list(value: Sequence[Any], schema: Schema, path: str) -> Iterator[Problem]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield Problem(path, list(value), accepted(schema))
        return
    for position, one in enumerate(value):
        yield from problems(one, schema["items"], f"{path}[{position}]")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    seen: set[tuple[Any, ...]] = set()
    for position, one in enumerate(value):
        # As the server merges lists of this type: two entries of one key would be one after an apply, and a
        # tier would be lost without a word.
        key = tuple(one.get(name) for name in keys) if keys and isinstance(one, Mapping) else None
        if key is not None and key in seen:
            yield Problem(
                f"{path}[{position}].{keys[0]}", key[0], f"each {keys[0]} once; an earlier entry has this one"
            )
        elif key is not None:
            seen.add(key)


def _has_type(value: Any, schema: Schema) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    match schema.get("type"):
        case "object":
            return isinstance(value, Mapping)
        case "array":
            return isinstance(value, list | tuple)
        case "boolean":
            return isinstance(value, bool)
        case "integer":  # bool is a kind of int in Python, and not in JSON
            return isinstance(value, int) and not isinstance(value, bool)
        case _:
            return isinstance(value, str)


def _within(value: Any, schema: Schema) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str):
        pattern = schema.get("pattern")
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and (pattern is None or re.search(pattern, value) is not None)
    if isinstance(value, int) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def accepted(schema: Schema) -> str:
    """In words."""
    words = _accepted(schema)
    return f"{words} ({schema['description'].rstrip('.')})" if "description" in schema else words


def _accepted(schema: Schema) -> str:
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema.get("x-kubernetes-int-or-string"):
        return f"a number or a word that matches {schema['pattern']}"
    match schema.get("type"):
        case "object":
            return "an object"
        case "array":
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            return f"a list of {least} to {most} entries" if most else f"a list of {least} or more entries"
        case "boolean":
            return "true or false"
        case "integer":
            low, high = schema.get("minimum"), schema.get("maximum")
            if low is not None and high is not None:
                return f"a whole number from {low} to {high}"
            return "a whole number" if low is None else f"a whole number of {low} or more"
        case _:
            if "pattern" in schema:
                return f"text that matches {schema['pattern']}" + (
                    f", at most {schema['maxLength']} characters" if "maxLength" in schema else ""
                )
            low, high = schema.get("minLength", 0), schema.get("maxLength")
            return f"text of {low} to {high} characters" if high else "text"
