"""What is known of nodes, and what was changed about them, as figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.metric_families import counter, gauge, summary
from holdfast.protocol.health import NODE_FIGURES

Readings = Sequence[tuple[str, str, float]]
"""Name, subject and value of each, see `protocol.node_figures`."""


def readings(of: Mapping[str, Readings]) -> Iterator[Metric]:
    """What machines read of themselves and told; of one that has left there is nothing."""
    for reading, figure in NODE_FIGURES.items():
        kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
        family = kind(figure.metric, figure.text, labels=["node", figure.label])
        for node, told in of.items():
            for name, subject, value in told:
                if name == reading:
                    family.add_metric([node, subject.removeprefix("gpu ")], value * figure.scale)
        yield family


def changes(state: CoreState) -> Iterator[Metric]:
    """Planned changes of the membership."""
    done = state.membership.changed
    yield summary(
        "holdfast_change_stall_seconds",
        "The stall of each planned change of the membership.",
        done.count,
        done.stall_s,
    )
    yield gauge("holdfast_wanted_nodes", "Nodes that the job wants to train on now.", state.wanted_nodes)


def health(state: CoreState) -> Iterator[Metric]:
    """Findings, remedies, and machines that are not used."""
    known = state.health
    tables = (
        ("holdfast_findings", "Findings of each rule.", "rule", known.totals.findings),
        ("holdfast_health_actions", "Remedies that were carried out.", "remedy", known.totals.acts),
        (
            "holdfast_health_withheld",
            "Findings without action, by the reason against it.",
            "against",
            known.totals.withheld,
        ),
    )
    for name, text, label, table in tables:
        family = CounterMetricFamily(name, text, labels=[label])
        for key, number in sorted(table.items()):
            family.add_metric([key], number)
        yield family
    yield gauge(
        "holdfast_quarantined_machines",
        "Machines that are not used until they have passed the deep checks.",
        len(known.quarantine),
    )
    yield gauge("holdfast_health_asks", "Matters that a person has to inspect.", len(known.asks))


def slow(state: CoreState) -> Iterator[Metric]:
    """Ranks that others wait for."""
    # Only ranks that are slow now: a gauge that stayed after the rank recovered would keep its alert
    # firing.
    now = [x for x in state.health.slow if x.until_step is None]
    ratio = GaugeMetricFamily(
        "holdfast_slow_rank_ratio",
        "A slow rank's computing time over that of its peers.",
        labels=["rank", "node", "part"],
    )
    for x in now:
        ratio.add_metric([str(x.rank), x.node, x.part], x.ratio)
    yield ratio
    yield gauge(
        "holdfast_slow_ranks",
        "Ranks that compute longer than their peers, so that all wait for them.",
        len(now),
    )
    lost_s = sum(x.lost_s for x in state.health.slow)
    yield counter("holdfast_slow_seconds", "Training time spent waiting for slow ranks.", lost_s)
