"""Figures that are counted over all nodes, workers and ranks, of which a large job has thousands.

The loop must answer heartbeats, so `Rows` only copies there what may change. The rest is counted where the answer is encoded, in
another thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from holdfast.coordinator.kernel.phases import NodePhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.metric_families import gauge

_node_facts = attrgetter("name", "host", "place", "identity", "failures", "held", "leaving", "phase")


class Rows:
    """All nodes, workers and ranks at one moment."""

    def __init__(self, state: CoreState, ready: int) -> None:
        """ready: workers that wait to be used."""
        there = state.membership.nodes.values()
        # Members of a generation never change, so they are not copied.
        self._generation = state.membership.generation
        self._nodes = list(map(_node_facts, there))
        self._unknown = sum(bool(n.unknown) and n.alive for n in there)
        self._ready = ready
        # By reference: a look at each took 3 ms of 16,000. Of them only the medians are read, each of which is its worker's
        # own and agrees with nothing else; one that is some milliseconds younger is as true.
        self._everybody = dict(state.membership.workers)

    def families(self) -> Iterator[Metric]:
        """For the thread that encodes."""
        members = self._generation.members if self._generation else ()
        ranks = Counter(m.worker.partition(".")[0] for m in members)
        yield gauge("holdfast_ready_workers", "Warm workers that wait to be used.", self._ready)
        there = (self._everybody.get(m.worker) for m in members)
        medians = [w.median_s for w in there if w is not None and w.median_s is not None]
        if medians:
            text = "The median time of a step, on the slowest rank."
            yield gauge("holdfast_step_median_seconds", text, max(medians))
        alive = [row for row in self._nodes if row[-1] is not NodePhase.LOST]
        yield gauge("holdfast_nodes", "Connected nodes, spares included.", len(alive))
        # By the generation and not by what workers do now: while all start again, their nodes are no spares.
        free = sum(
            name not in ranks and held is None and leaving is None
            for name, *_, held, leaving, _phase in alive
        )
        yield gauge("holdfast_spares", "Connected nodes that may be used and on which no rank is.", free)
        counts = {"leaving": 0, "held": 0}
        for *_, held, leaving, _phase in alive:
            counts["held"] += held is not None
            counts["leaving"] += leaving is not None
        text = "Nodes that are to leave and are still connected."
        yield gauge("holdfast_leaving_nodes", text, counts["leaving"])
        yield gauge("holdfast_held_nodes", "Connected nodes that are not used now.", counts["held"])
        yield gauge(
            "holdfast_unwatched_nodes",
            "Nodes with a source of readings that does not answer or cannot be read.",
            self._unknown,
        )
        # Four series for each connected node; one that has left has none.
        info = InfoMetricFamily("holdfast_node", "Always 1; the labels say where the node is.")
        has = GaugeMetricFamily(
            "holdfast_node_ranks", "Ranks of the newest generation on the node.", labels=["node"]
        )
        failures = CounterMetricFamily(
            "holdfast_node_failures", "Failures of the node's workers.", labels=["node"]
        )
        unused = GaugeMetricFamily(
            "holdfast_node_held", "1 while the node is not used, else 0.", labels=["node"]
        )
        for name, host, place, identity, failed, held, *_ in alive:
            where = {"place": "/".join(place), "rack": place[-1] if place else ""}
            info.add_metric([], {"node": name, "host": host, **where, "identity": identity})
            has.add_metric([name], ranks[name])
            failures.add_metric([name], failed)
            unused.add_metric([name], float(held is not None))
        yield from (info, has, failures, unused)
