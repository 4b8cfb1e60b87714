"""Which versions of Accelerate the adapters support."""

from __future__ import annotations

from holdfast.errors import UsageError

OLDEST, BEFORE = (1, 2), (2, 0)
"""Versions of Accelerate: from this one, up to but without this one."""


def check_version(version: str, who: str) -> None:
    """Raises UsageError for a version of Accelerate that is not supported. who: what does not support it."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= numbers < BEFORE:
        low, high = (".".join(map(str, v)) for v in (OLDEST, BEFORE))
        raise UsageError(
            f"accelerate {version} is installed, and {who} supports {low} up to but without {high}: pip "
            f"install 'accelerate>={low},<{high}'"
        )
