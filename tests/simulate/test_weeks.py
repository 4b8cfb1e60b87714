"""A job that trains for months: what the coordinator remembers does not grow with its incidents, its steps or its watchers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import pytest

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.coordinator.service.store import Store
from holdfast.coordinator.service.tally import StepSummary, Tally
from holdfast.coordinator.service.watchers import JobWatcher
from holdfast.protocol.ledger import LedgerEvent
from holdfast.tools.simulate.cluster import Cluster
from holdfast.tools.simulate.scenario import FailureClass, Scenario

WATCHERS = 5
STATE_BYTES = 256 * 1024
"""Of the encoded state of 32 nodes, which is written with each decision."""
MEMORY_BYTES = 4 << 20
"""Of the state and all that is made of it, and of five watchers with what waits for them (at most 256 KiB each)."""
NOT_OURS = (type, ModuleType, FunctionType, MethodType)
"""Shared by all of the process."""


def nbytes(root: Any) -> int:
    """Of all objects that are reached from this one."""
    seen, to_see, total = {id(root)}, [root], 0
    while to_see:
        one = to_see.pop()
        total += sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, NOT_OURS):
                seen.add(id(other))
                to_see.append(other)
    return total


class Weeks:
    """A job of 32 nodes and two spares on the virtual clock, looked at after every so many incidents."""

    def __init__(self, work_s: float, every: int) -> None:
        asked = Scenario(
            nodes=32, work_s=work_s, step_s=1.0, spares=2, min_nodes=16, max_restarts=1000,
            classes=(
                FailureClass(name="gpu", scope="node", rate=0.1),
                FailureClass(name="software", scope="worker", rate=0.03),
                FailureClass(name="hang", scope="hang", rate=0.01),
                FailureClass(name="throttled", scope="slow", rate=0.005, lasts_s=600.0),
            ),
        )  # fmt: skip
        self.every, self.events, self.incidents = every, 0, 0
        self.sizes: list[tuple[int, int]] = []
        self.watchers = [JobWatcher(0) for _ in range(WATCHERS)]
        self.then: Callable[[float, LedgerEvent], object] = lambda at_s, event: None
        self.cluster = Cluster(asked, 1, note=self.note)
        self.core = self.cluster.core

    def note(self, at_s: float, event: LedgerEvent) -> None:
        """Everybody is told, and nobody reads."""
        self.events += 1
        self.then(at_s, event)
        data = msgspec.json.encode({"seq": self.events, "t_s": at_s, "kind": event.kind, "fields": event})
        for watcher in self.watchers:
            watcher.tell(data, self.events)
            watcher.tell(b"words" * 20, must_arrive=False)
        self.incidents += event.kind == "incident-opened"
        if event.kind == "incident-opened" and self.incidents % self.every == 0:
            core = self.cluster.core
            self.sizes.append(
                (
                    len(msgspec.msgpack.encode(core.state)),
                    nbytes([core.state, core.index, core.watch, self.watchers]),
                )
            )


@pytest.mark.parametrize(
    ("faults", "steps"),
    [
        (250, 250_000),
        pytest.param(10_000, 10_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)]),
    ],
)
def test_what_is_remembered_does_not_grow(faults: int, steps: int) -> None:
    weeks = Weeks(steps, faults // 20)
    weeks.cluster.run()
    print(weeks.incidents, weeks.events, weeks.sizes[::4])
    assert weeks.cluster.steps.committed >= steps
    assert weeks.incidents >= faults
    assert weeks.cluster.job_starts == 1, "it gave up"
    # The first tenth fills what has a bound; from then on it is as large as that, however long it goes on.
    later = weeks.sizes[len(weeks.sizes) // 2 :]
    assert max(state for state, _ in later) < STATE_BYTES
    assert max(memory for _, memory in later) < MEMORY_BYTES


def test_a_report_tells_of_all_incidents_also_of_those_that_are_forgotten(tmp_path: Path) -> None:
    weeks = Weeks(200_000, 50)
    store = Store(tmp_path / "job.sqlite")
    with closing(store):
        store.begin()
        weeks.then = lambda at_s, event: store.add_event(at_s, "", event.kind, event)
        weeks.cluster.run()
        store.commit()
        state = weeks.core.state
        assert state.forgotten > 100
        assert state.forgotten + len(state.incidents) == weeks.incidents
        told = store.incidents(incidents.total(state))
    report = build_report(state, StepSummary(), weeks.cluster.now, told)
    assert [x.id for x in report.incidents] == list(range(1, weeks.incidents + 1))
    # Of those that are still there both say the same.
    there = {x["id"]: x for x in told}
    closed = [i for i in state.incidents if not i.open]
    assert [there[i.id] for i in closed] == [incidents.shown(state, i) for i in closed]
    counted = [
        line
        for line in metrics_text(state, Tally(), weeks.cluster.now).decode().splitlines()
        if "incidents_total{" in line
    ]
    assert sum(float(line.split()[-1]) for line in counted) == weeks.incidents
