"""Reports of jobs for tests, of the parts that a test is about."""

from typing import Any

import msgspec

from holdfast.protocol.job_report import JobReport
from holdfast.protocol.job_view import IncidentView

_UNKNOWN = {
    field.name: None
    for field in msgspec.structs.fields(IncidentView)
    if field.required and type(None) in getattr(field.type, "__args__", ())
}
_NOTHING = {
    **_UNKNOWN,
    "id": 1,
    "injected": False,
    "ranks": [],
    "cause": "",
    "quiet": False,
    "earlier_stalls": 0,
    "earlier_stall_s": 0.0,
}


def incident_of(told: dict[str, Any]) -> IncidentView:
    """An incident of which nothing is known but this."""
    return msgspec.convert(_NOTHING | told, IncidentView)


def report_of(told: dict[str, Any]) -> JobReport:
    """A report that says this, and nothing else."""
    incidents = [_NOTHING | one for one in told.get("incidents", [])]
    return msgspec.convert({"job": "demo"} | told | {"incidents": incidents}, JobReport)
