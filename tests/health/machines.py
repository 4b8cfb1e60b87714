"""Machines made of files: what /proc and /sys of real ones look like, as far as the sources read it."""

from pathlib import Path

from holdfast.health.samples import LogLine, Reading


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def values(readings) -> dict[tuple[str, str], float | str | None]:
    """By name and subject; no value comes twice."""
    found = {}
    for reading in readings:
        assert isinstance(reading, Reading), reading
        assert (reading.name, reading.subject) not in found
        assert (reading.value is None) == bool(reading.why)
        found[reading.name, reading.subject] = reading.value
    return found


def lines(readings) -> list[str]:
    return [reading.text for reading in readings if isinstance(reading, LogLine)]


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
