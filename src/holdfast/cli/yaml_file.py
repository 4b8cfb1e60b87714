"""Files in YAML that people give to commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.protocol.wire.stored import decode_file

MOST_BYTES = 1 << 20
MOST_DEPTH = 100
"""Brackets that are open at a time, those in texts included."""


def read_yaml(option: str, path: Path) -> dict[str, Any]:
    """A mapping. option: as which the file was given.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(f"{option} {path}: PyYAML is not installed: pip install pyyaml") from None

    def mapping(data: bytes) -> Any:
        text = data.decode()
        _check_depth(text)
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None

    try:
        read = decode_file(
            mapping, path, f"{option} {path}: not valid YAML", error=UsageError, most=MOST_BYTES
        )
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise UsageError(f"{option} {path}: must contain a mapping of names to values")
    return read


def _check_depth(text: str) -> None:
    """PyYAML's time grows with the square of the number of open brackets. Raises ValueError."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_DEPTH:
            raise ValueError("it is nested too deeply")


def yaml_text(values: list[dict[str, Any]]) -> str:
    """Documents one after the other, as kubectl reads them."""
    import yaml

    return str(yaml.safe_dump_all(values, sort_keys=False, default_flow_style=False))
