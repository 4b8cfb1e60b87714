"""What a framework's method says, as a short digest: the adapters do in their own words what some of them do."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any


def digest(method: Any) -> str:
    """Of its source, without comments, empty lines and indentation."""
    lines = (line.strip() for line in inspect.getsource(method).splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]
