"""Times as people write them."""

from __future__ import annotations

import re

from holdfast.errors import UsageError

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(where: str, text: str) -> float:
    """`8s`, `500ms`, `2m` or `1.5h` (without a unit: seconds) in seconds. where: the option, for the message.

    Raises:
        UsageError: anything else.
    """
    # No sign, no exponent, no spaces: whatever else a person types is answered with an example, and not
    # guessed.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None:
        raise UsageError(f"{where}={text!r} is not a time; write for example 8s, 500ms or 2m")
    return float(match[1]) * _UNITS_S[match[2] or "s"]
