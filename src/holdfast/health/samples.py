"""What sources say of the machine: lines that it logged, and values that were read. Rules judge them."""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line that something logged. source: `kmsg`, or the name of a log. worker: whose log it is, if it is one's.
    age_s: since it was logged."""

    source: str
    text: str
    worker: str = ""
    age_s: float = 0.0


class Reading(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A value that was read. name: `edac.ue_count`, `nvml.ecc.volatile.uncorrected`, with the unit where it has one
    (`disk.free_bytes`). subject, device: as in a Finding. value None: it could not be read now (`why`), which is no
    sign of health; what a machine does not have gives no reading at all."""

    source: str
    name: str
    value: float | str | None
    subject: str = ""
    device: str = ""
    why: str = ""
