"""Snapshots of a replica: its state is copied into the agent's memory while the next step computes.

Parameters and moments do not change from one update to the next, so the copy runs in parallel with the forward and backward
pass; the update waits for it, and nothing else does. Rank 0 decides when; its word travels with the vote, so that
all who save do so at the same commit.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from holdfast.checkpoint.agent_link import AgentSlots
from holdfast.checkpoint.policy import parse_cadence
from holdfast.errors import StateError, TierError
from holdfast.formulas import daly_interval_s
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.protocol.snapshots import Key
from holdfast.tensors import staging
from holdfast.tensors.staging import Pinning
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.state_image import Image

CPU = torch.device("cpu")

SLOT_WAIT_S = 0.05
"""So long an update waits for a slot that the agent has not given yet; then the snapshot is given up."""

LEAST_COST_S = 0.001
"""What a snapshot is thought to cost at least, so that `auto` does not take one in every step of a tiny model."""

SLOT_GIVEN_S = 60.0
"""The first slot of a large state takes its time: the agent brings its pages in."""

LAST_SLOT_S = 240.0
"""After the last step nothing else waits: the snapshots before may reach their durable tiers first."""


class StateSnapshots:
    """Takes snapshots as the job wants them. Used by the main thread; owns the thread that copies."""

    def __init__(self, link: Link, faults: FaultPlan, device: torch.device = CPU) -> None:
        """device: where the state is."""
        self._link, self._faults = link, faults
        self._cadence = parse_cadence(link.start.env.get("HOLDFAST_SNAPSHOT_EVERY", "0"))
        self._saves = False
        self._generation = 0
        self._shard = 0, 1
        self._mtbf_s = 0.0
        self._interval_s = math.inf
        self._last_s = time.monotonic()
        self._costs: deque[float] = deque(maxlen=15)
        self._pinning = Pinning(device)
        self._slots = AgentSlots(link, self._pinning)
        self._wanted = False
        self._expected: tuple[int, int] | None = None
        self._current: _Copying | None = None

    def join(self, form: m.JoinGeneration) -> None:
        """A new generation: whether this worker saves, and what `auto` goes by."""
        self._saves, self._mtbf_s = form.saves, form.mtbf_s
        self._generation, self._wanted = form.generation.number, False
        self._shard = form.generation.members[form.rank].shard_index, form.generation.shard_count
        self._choose_interval()

    @property
    def saves(self) -> bool:
        """Whether this worker takes the generation's snapshots."""
        return self._saves

    def due(self, committed: int) -> bool:
        """Rank 0: is the state after `committed` steps to be saved?"""
        return self._cadence.due(committed, time.monotonic() - self._last_s, self._interval_s)

    def _choose_interval(self) -> None:
        """What `auto` means from now on: by what snapshots have cost, and how often the job has failed."""
        cost_s = max(LEAST_COST_S, statistics.median(self._costs)) if self._costs else LEAST_COST_S
        self._interval_s = daly_interval_s(cost_s, self._mtbf_s) if self._mtbf_s else math.inf

    def want(self) -> None:
        """The vote said so: the next step begins with a snapshot."""
        self._wanted = True
        self._last_s = time.monotonic()

    def expect(self, committed: int, measure: Callable[[], int]) -> None:
        """Before a step: says once for a shard how large it is, so that the agent brings its memory in before the first
        snapshot wants it. measure: returns the bytes of the state."""
        if self._expected == self._shard or not self._saves or self._cadence.never:
            return
        # Before the first update an optimizer has no moments yet, which are most of the state.
        if committed > 0:
            self._expected = self._shard
            self._link.send(m.SnapshotExpected(self._shard[0], measure()))

    def begin(self, step: int, capture: Callable[[], Image]) -> None:
        """Before a step: begins the copy, if one is wanted and this worker saves."""
        # The wish is all replicas' and came with the vote; whether this worker saves is its generation's. It
        # is consumed either way, or the wish would outlive the step that it was for.
        if not self._wanted:
            return
        self._wanted = False
        if not self._saves:
            return
        began_s = time.perf_counter()
        # A copy of the step before may still be under way. One at a time: the slots are for one snapshot, and
        # a second reader of the tensors would delay the update further.
        self.before_update()
        # Captured by the main thread, between two steps. The copying thread must not call `state_dict`, which
        # runs the script's code.
        image = capture()
        key = Key(step, self._generation, *self._shard)
        self._slots.want(key, image.index.nbytes)
        copying = self._current = _Copying(key, image)
        copying.stall_s = time.perf_counter() - began_s
        threading.Thread(target=self._copy, args=(copying,), name="holdfast-snapshot", daemon=True).start()

    def before_update(self) -> None:
        """Nothing may change the state while it is copied: waits for the copy, or gives it up."""
        copying, self._current = self._current, None
        if copying is not None:
            began_s = time.perf_counter()
            copying.end()
            copying.stall_s += time.perf_counter() - began_s
            self._costs.append(copying.stall_s)
            self._choose_interval()

    def last(self, step: int, capture: Callable[[], Image]) -> bool:
        """After the last step: copies the state. True when the agent has it."""
        self.before_update()
        image = capture()
        copying = _Copying(Key(step, self._generation, *self._shard), image)
        self._slots.want(copying.key, image.index.nbytes, waits=True)
        self._copy(copying, LAST_SLOT_S)
        return copying.filled

    def close(self) -> None:
        """No more snapshots; one that has not begun is given up."""
        self.before_update()

    def _copy(self, copying: _Copying, patience_s: float = SLOT_GIVEN_S) -> None:
        """The copying thread. The first slot and its mapping may take a while: unless the update is quicker."""
        key, image = copying.key, copying.image

        def copy(blob: memoryview) -> bool:
            # The main thread may have given this copy up while the slot was waited for, and the
            # update may be running. `begin` and `end` decide under one lock who came first.
            if not copying.begin():
                return False
            self._faults.reach(Phase.SNAPSHOT, key.step)
            whole = image.parts(0, image.index.nbytes)
            staging.copy_into(blob, whole, image.ready, self._pinning.covers(blob))
            return True

        def cost_s() -> float:
            copying.done()
            return copying.stall_s

        given = self._slots.given(key, patience_s)
        with suppress(TierError, StateError):  # the agent says why: its slot is gone
            copying.filled = self._slots.fill(key, image.index, given.path if given else None, copy, cost_s)


class _Copying:
    """One copy: begun by its own thread, waited for or given up by the main thread."""

    def __init__(self, key: Key, image: Image) -> None:
        self.key, self.image = key, image
        self.stall_s = 0.0
        self.filled = False
        self._news = threading.Condition()
        self._begun = self._over = False

    def begin(self) -> bool:
        """From now on the state is read; False when it was given up."""
        with self._news:
            self._begun = not self._over
            self._news.notify_all()
            return self._begun

    def done(self) -> None:
        """The state is not read any more."""
        with self._news:
            self._over = True
            self._news.notify_all()

    def end(self) -> None:
        """Returns when the state is not read, and will not be."""
        with self._news:
            # A copy that has not begun is given up after SLOT_WAIT_S: training does not wait for memory. One
            # that has begun is waited for, because its bytes are being read.
            if not self._news.wait_for(lambda: self._begun or self._over, SLOT_WAIT_S):
                self._over = True
            self._news.wait_for(lambda: self._over)
