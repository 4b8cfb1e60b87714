"""What is known of nodes, and what was changed about them, as figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from holdfast.coordinator.kernel.membership_state import Node
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.metric_families import counter, gauge, summary
from holdfast.protocol.node_figures import NODE_FIGURES

Readings = Sequence[tuple[str, str, float]]
"""Name, subject and value of each, see `protocol.node_figures`."""
NodeRow = tuple[str, str, str, str, int, int, bool]
"""Of a connected node: name, host, place, identity, ranks, failures, whether it is held."""


def node_rows(state: CoreState) -> list[NodeRow]:
    """Every connected node, as values: families of thousands of them are made beside the loop."""
    ranks: dict[str, int] = {}
    for member in state.membership.generation.members if state.membership.generation else ():
        name = member.worker.partition(".")[0]
        ranks[name] = ranks.get(name, 0) + 1
    return [
        (n.name, n.host, "/".join(n.place), n.identity, ranks.get(n.name, 0), n.failures, n.held is not None)
        for n in state.membership.nodes.values()
        if n.alive
    ]


def nodes(rows: Sequence[NodeRow]) -> Iterator[Metric]:
    """Four series for each connected node; one that has left has none."""
    info = InfoMetricFamily("holdfast_node", "Always 1; the labels say where the node is.")
    ranks = GaugeMetricFamily(
        "holdfast_node_ranks", "Ranks of the newest generation on the node.", labels=["node"]
    )
    failures = CounterMetricFamily(
        "holdfast_node_failures", "Failures of the node's workers.", labels=["node"]
    )
    held = GaugeMetricFamily("holdfast_node_held", "1 while the node is not used, else 0.", labels=["node"])
    for name, host, place, identity, has, failed, is_held in rows:
        labels = {"node": name, "host": host, "place": place, "rack": place.rpartition("/")[2]}
        info.add_metric([], {**labels, "identity": identity})
        ranks.add_metric([name], has)
        failures.add_metric([name], failed)
        held.add_metric([name], float(is_held))
    yield from (info, ranks, failures, held)


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


def spares(state: CoreState) -> Iterator[Metric]:
    """Nodes that could take another's place."""
    # By the generation and not by what workers do now: while all start again, their nodes are no spares.
    generation = state.membership.generation
    used = {m.worker.partition(".")[0] for m in generation.members} if generation else set()
    free = sum(n.name not in used and _is_usable(n) for n in state.membership.nodes.values())
    yield gauge("holdfast_spares", "Connected nodes that may be used and on which no rank is.", free)
    yield gauge("holdfast_wanted_spares", "Spares that the job was started with.", state.spec.spares)


def _is_usable(node: Node) -> bool:
    return node.alive and node.held is None and node.leaving is None


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
    leaving = sum(n.alive and n.leaving is not None for n in state.membership.nodes.values())
    yield gauge("holdfast_leaving_nodes", "Nodes that are to leave and are still connected.", leaving)


def health(state: CoreState) -> Iterator[Metric]:
    """Findings, remedies, and nodes that are not used."""
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
    held = sum(n.alive and n.held is not None for n in state.membership.nodes.values())
    yield gauge("holdfast_held_nodes", "Connected nodes that are not used now.", held)
    unknown = sum(n.alive and bool(n.unknown) for n in state.membership.nodes.values())
    yield gauge(
        "holdfast_unwatched_nodes",
        "Nodes with a source of readings that does not answer or cannot be read.",
        unknown,
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
