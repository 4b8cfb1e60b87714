"""The input of rules: lines that the machine logged, and values that sources read."""

from __future__ import annotations

import msgspec


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line that something logged."""

    source: str
    """`kmsg`, or the name of a log."""
    text: str
    worker: str = ""
    """The worker whose log it is; empty: none."""
    age_s: float = 0.0
    """Seconds since it was logged."""


class Reading(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A value that a source read."""

    source: str
    """The source's name: `proc`, `nvml`, ..."""
    name: str
    """`edac.ue_count`, `nvml.ecc.volatile.uncorrected`; with the unit where it has one (`disk.free_bytes`)."""
    value: float | str | None
    """None: it could not be read now, which is no sign of health. For a property that the machine does not have there
    is no reading at all."""
    subject: str = ""
    """Its subject, as in a Finding; empty: the node."""
    device: str = ""
    """The subject's lasting identity, as in a Finding."""
    why: str = ""
    """Why there is no value."""
