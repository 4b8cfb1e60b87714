"""No deadline is forgotten: before the time that the core names as its next, nothing is to be done."""

from __future__ import annotations

import copy
import random

from simcluster.checks import Checks, Violation
from simcluster.run import run_seed
from simcluster.seeds import some_and_at_night_many

from holdfast.coordinator.kernel.events import Tick

PROBED = 0.02
"""Share of the events after which somebody looks at the clock too early."""
FAR_S = 7200.0
"""So far ahead somebody looks where the core names no time at all."""


@some_and_at_night_many
def test_a_look_at_the_clock_finds_nothing_before_the_next_deadline(seeds, monkeypatch):
    handled, probes = Checks.handled, 0
    rng = random.Random(5)

    def on_handled(self, event, actions, core):
        nonlocal probes
        handled(self, event, actions, core)
        if rng.random() >= PROBED:
            return
        due_s = core.next_deadline()
        until_s = core.now + FAR_S if due_s is None else due_s
        if until_s <= core.now:
            return
        twin = copy.deepcopy(core)
        early_s = core.now + rng.choice((0.01, 0.5, 0.99)) * (until_s - core.now)
        found = twin.handle(Tick(), early_s)
        assert found == [], f"{found} at {early_s}, and the next deadline is {due_s}; after {event}"
        probes += 1

    monkeypatch.setattr(Checks, "handled", on_handled)
    for seed in seeds:
        try:
            run_seed(seed)
        except Violation:  # found by another test
            continue
    assert probes > 10 * len(seeds)
