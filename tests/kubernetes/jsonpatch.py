"""JSON patches as Kubernetes' API server applies them: what is tested is compared byte for byte with Go's encoding."""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[^\s,:\[\]{}]+|[,:\[\]{}])')
_GO = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Refused(Exception):
    """A test failed, or a path leads nowhere."""


def go_encoded(value: Any) -> str:
    """As `encoding/json` writes it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda m: _GO[m[0]], text)


def raw_tree(text: str) -> Any:
    """JSON whose strings and numbers stay as they are written; names of fields are decoded, as Go compares them."""
    tokens = iter(_TOKEN.findall(text))

    def value(token: str) -> Any:
        if token == "[":
            found = []
            while (token := next(tokens)) != "]":
                if token != ",":
                    found.append(value(token))
            return found
        if token == "{":
            fields = {}
            while (token := next(tokens)) != "}":
                if token != ",":
                    name = json.loads(token)
                    assert next(tokens) == ":"
                    fields[name] = value(next(tokens))
            return fields
        return token

    return value(next(tokens))


def patched(there: dict[str, Any], body: str) -> dict[str, Any]:
    """The object after a patch, given as it was sent.

    Raises:
        Refused: as the API server, with 422.
    """
    made = json.loads(json.dumps(there))
    for operation, raw in zip(json.loads(body), raw_tree(body), strict=True):
        *above, last = operation["path"].removeprefix("/").split("/")
        holder = made
        for name in above:
            holder = _child(holder, name)
        match operation["op"]:
            case "test" if raw["value"] == "null" and isinstance(holder, dict) and last not in holder:
                pass  # what is not there is null
            case "test":
                if raw_tree(go_encoded(_child(holder, last))) != raw["value"]:
                    raise Refused(f"testing value {operation['path']} failed")
            case "add" if isinstance(holder, list):
                if last != "-" and int(last) > len(holder):
                    raise Refused(f"no place {last}")
                holder.insert(len(holder) if last == "-" else int(last), operation["value"])
            case "add":
                holder[last] = operation["value"]
            case "replace":
                # In an object the real one takes it for an addition where nothing is there, against RFC 6902.
                if isinstance(holder, list):
                    _child(holder, last)
                holder[int(last) if isinstance(holder, list) else last] = operation["value"]
            case "remove":
                _child(holder, last)
                del holder[int(last) if isinstance(holder, list) else last]
    return made


def _child(holder: Any, name: str) -> Any:
    try:
        return holder[int(name) if isinstance(holder, list) else name]
    except (KeyError, IndexError, TypeError, ValueError):
        raise Refused(f"missing {name}") from None
