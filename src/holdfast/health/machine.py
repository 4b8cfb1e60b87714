"""Every source that a machine has."""

from __future__ import annotations

from holdfast.health.sources import Factory, Place, Source

FACTORIES: tuple[Factory, ...] = ()


def machine_sources(place: Place) -> list[Source]:
    """The sources of a machine, or of the stand-in for one."""
    return [source for factory in FACTORIES for source in factory(place)]
