"""Families of figures for Prometheus, as every part of `/metrics` makes them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from holdfast.coordinator.service.tally import BOUNDS_S, Durations
from holdfast.observe.trace_ids import trace_id

UNITS = frozenset({"seconds", "bytes", "ratio", "celsius", "watts"})
"""Units that a figure may have. By Prometheus' rules they are base units, in the plural, at the end of the name."""


def with_unit(family: Metric) -> Metric:
    """The same family, which now says its unit to whoever asks for OpenMetrics."""
    # Read from the name and never written beside it. OpenMetrics refuses a whole scrape in which the two differ.
    unit = family.name.rpartition("_")[2]
    if unit in UNITS:
        family.unit = unit
    return family


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """One value."""
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """One count."""
    return CounterMetricFamily(name, text, value=value)


def summary(name: str, text: str, count: int, total: float) -> SummaryMetricFamily:
    """How many, and their sum."""
    return SummaryMetricFamily(name, text, count_value=count, sum_value=total)


def histogram(
    name: str, text: str, label: str, found: Mapping[str, Durations], ledger: str
) -> HistogramMetricFamily:
    """Durations by a label. ledger: of the incidents, for the ids of their traces."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for key, durations in sorted(found.items()):
        below = 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for i, bound in enumerate((*BOUNDS_S, float("inf"))):
            below += durations.counts[i]  # Prometheus' buckets are cumulative
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            newest = durations.newest.get(i)
            if newest is None:
                buckets.append((le, below))
                continue
            incident, seconds, utc_s = newest
            # The same id as the trace has, so a point of a chart leads to its trace.
            labels = {"incident": str(incident), "trace_id": trace_id(ledger, incident)}
            buckets.append((le, below, Exemplar(labels, seconds, utc_s)))
        family.add_metric([key], buckets, durations.total_s)
    return family
