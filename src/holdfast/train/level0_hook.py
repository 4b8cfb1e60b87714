"""Levels 0 and 1: the progress of a script that does not know of Holdfast, counted by its optimizer steps.

Ranks that train together make their steps together, and their phases are unknown. Where each of them is, and for which one the
others wait, is derived from its own time (`OwnTime`) and from torch's record of its collectives (`CollectivesTeller`).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.protocol.messages import BeganAnew, InCollectives, Progress
from holdfast.protocol.phases import BLOCK_STEPS, MOST_GROUPS, GroupReading, Phase, Spent
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Link
from holdfast.train.script import hold_process_groups
from holdfast.train.step_report import mean_without_longest

PROGRESS_EVERY_S = 0.05


class StepCounter:
    """A hook of every optimizer, after its steps. Counts the steps of the first optimizer that it sees."""

    def __init__(self, link: Link, faults: FaultPlan, first: Callable[[], None] = lambda: None) -> None:
        """first: called after the first step of this process, at any level."""
        self._link = link
        self._faults = faults
        self._first: Callable[[], None] | None = first
        self._optimizer: int | None = None
        self._has_begun: Callable[[], None] = lambda: None
        self._empty: int | None = None  # the first optimizer, if it had no state before its first step
        self._steps = 0
        self._last = time.perf_counter()
        self._sent = -math.inf
        self.every_s = PROGRESS_EVERY_S
        self._durations: deque[float] = deque(maxlen=31)
        self._own_time: OwnTime | None = None
        self._generation = int(link.start.env.get("HOLDFAST_GENERATION", "0"))
        self._spent: list[Spent] = []

    def listen(self) -> Callable[[], None]:
        """To all optimizers of torch's, from now on; returns what ends it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        before = register_optimizer_step_pre_hook(self._before_the_first)
        after = register_optimizer_step_post_hook(self)
        # Torch goes through the hooks before a step while it calls them, so that one of them must not remove itself.
        self._has_begun = before.remove

        def end() -> None:
            before.remove()
            after.remove()

        return end

    def _before_the_first(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._empty = None if optimizer.state else id(optimizer)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After one optimizer step."""
        if self._first is not None:
            first, self._first = self._first, None
            self._has_begun()
            first()
        hold_process_groups()
        if self._link.record.generation:
            # An unmodified script has no commit. At level 2 this hook would count an optimizer's step before
            # its commit is noted, and the agent would see one too many.
            return  # at level 2 the commit counts
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._own_time = OwnTime(ThreadClock()) if trains_on_cpu(optimizer) else None
            # One that never has state, as plain SGD, says nothing about what was loaded.
            if self._empty == id(optimizer) and optimizer.state and self._link.start.env.get("RANK") == "0":
                self._link.send(BeganAnew(self._generation))
        # A GAN has two optimizers and one step. Counting the first one that steps is the only rule that needs
        # nothing of the script.
        if id(optimizer) != self._optimizer:
            return
        now = time.perf_counter()
        if self._steps:
            self._durations.append(now - self._last)
        self._last = now
        self._steps += 1
        record = self._link.record
        record.committed = self._steps
        record.enter(Phase.FORWARD)
        block = self._own_time.stepped(self._steps - 1) if self._own_time is not None else None
        if block is not None:
            self._spent.append(block)
        # The second is always told: until the duration of a step is known nobody can call it a standstill.
        if self._steps == 2 or now - self._sent >= self.every_s:
            self._sent = now
            median = statistics.median(self._durations) if self._durations else None
            spent, self._spent = tuple(self._spent), []
            self._link.send(
                Progress(generation=self._generation, committed=self._steps, median_s=median, spent=spent)
            )
        self._faults.poison = lambda: _poison(optimizer)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.COMMIT):
            self._faults.reach(phase, self._steps)


def _poison(optimizer: Any) -> None:
    """What an update with a gradient of NaN leaves behind, in one parameter of this rank's."""
    optimizer.param_groups[0]["params"][0].data.view(-1)[:1] = math.nan


class ThreadClock:
    """Seconds that the calling thread ran on a processor or waited for one.

    Torch does not record when a collective of gloo ends. But a thread that waits in one has no processor and asks for none. So
    the time that the training thread was on a processor, or queued for one, is its own. This holds on CPUs: beside a GPU the
    thread may spin while it waits.
    """

    def __init__(self) -> None:
        # The link is followed once: what is read later is still of the thread that opened it. It stays open as long
        # as the process lives.
        try:
            self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._waits = -1

    def __call__(self) -> float:
        """Call it in the thread that made the clock. A kernel without counts of waits leaves them out."""
        fields = os.pread(self._waits, 64, 0).split() if self._waits >= 0 else []
        return time.thread_time() + (int(fields[1]) / 1e9 if len(fields) > 1 else 0.0)


class OwnTime:
    """Own time per block of steps, as `StepTimer` measures it at level 2. Phases that are unknown count as 0."""

    def __init__(self, own: Callable[[], float], wall: Callable[[], float] = time.perf_counter) -> None:
        """own: a clock of what counts; wall: of all time."""
        self._own, self._wall = own, wall
        self._last: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []

    def stepped(self, step: int) -> Spent | None:
        """An optimizer step with this number, from 0, is made. Returns the block that it completes, if there is one."""
        own_s, wall_s = self._own(), self._wall()
        last, self._last = self._last, (own_s, wall_s)
        if step % BLOCK_STEPS == 0:
            self._steps = []
        if last is None:  # this step began with the script's imports
            return None
        self._steps.append((own_s - last[0], wall_s - last[1]))
        if len(self._steps) < BLOCK_STEPS or (step + 1) % BLOCK_STEPS:
            return None
        own, whole = (mean_without_longest(parts) for parts in zip(*self._steps, strict=True))
        return Spent(
            first=step + 1 - BLOCK_STEPS,
            micros=1,
            data_s=0.0,
            forward_s=0.0,
            backward_s=0.0,
            wait_s=max(0.0, whole - own),
            update_s=0.0,
            aside_s=0.0,
            thread_s=own,
        )


def trains_on_cpu(optimizer: Any) -> bool:
    """Whether all parameters that the optimizer updates are on the CPU."""
    return all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
LAST_GROUPS = 8
"""Of so many groups the end of a script is told: it is kept for every worker that has left."""
_WORD = 128
"""Characters of a name, at most."""


# ---------------------------------------------------------------- collectives


class CollectivesTeller:
    """Reports the position of a script in the collectives of its process groups, each time from a thread of its own.

    Torch's flight recorder notes the newest collectives of gloo and NCCL by itself, so a script pays nothing until somebody
    asks.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._answering = threading.Lock()
        link.on_where = self.answer

    def answer(self, request: int) -> None:
        """Sends InCollectives soon. Nothing is sent while an earlier answer is still on its way."""
        # Not on the link's own thread: torch takes locks of its own here, and should one never be given back, this
        # worker must still hear what its agent says.
        if self._answering.acquire(blocking=False):
            threading.Thread(target=self._answer, args=(request,), name="holdfast-where", daemon=True).start()

    def _answer(self, request: int) -> None:
        try:
            self._link.send(InCollectives(request, positions()))
        finally:
            self._answering.release()


def last_positions(within_s: float = 1.0) -> tuple[GroupReading, ...] | None:
    """The positions at the end of a script, of the largest groups only. None: torch did not report them in time."""
    found: list[tuple[GroupReading, ...] | None] = []
    # On a thread, as above: a lock that is never given back must not keep the process from its end.
    asking = threading.Thread(target=lambda: found.append(positions()), name="holdfast-where", daemon=True)
    asking.start()
    asking.join(within_s)
    groups = found[0] if found else None
    return None if groups is None else tuple(sorted(groups, key=lambda g: -g.size)[:LAST_GROUPS])


def positions() -> tuple[GroupReading, ...] | None:
    """The position of this process in each of its groups of more than one member; None: this torch cannot tell, or there is no
    process group."""
    # Nothing is imported here: a script that has not used torch.distributed is in no collective, and an import would
    # wait for the lock that a main thread which imports holds.
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return None
    try:
        groups = [
            (pg.group_name, pg.group_desc, tuple(c10d.get_process_group_ranks(pg)), _backends(c10d, pg))
            for pg in list(c10d._world.pg_map)
        ]
        return _readings(groups, _recorded())
    # Torch promises none of these names. Whatever is missing in another version, "not known" is an answer that the
    # core can judge, and an error in this thread would be none.
    except Exception:  # noqa: BLE001 - see above
        return None


def _recorded() -> list[dict[str, Any]]:
    """Entries of the flight recorders, oldest first in each: gloo's, and with CUDA also NCCL's."""
    torch_c: Any = sys.modules.get("torch._C")
    dumps = [getattr(torch_c._distributed_c10d, name, None) for name in _RECORDERS]
    texts = [dump(includeCollectives=True, onlyActive=False) for dump in dumps if dump is not None]
    return [entry for text in texts for entry in json.loads(text).get("entries", [])]


def _backends(c10d: Any, pg: Any) -> tuple[str, ...]:
    """Names of what computes the group's collectives: one for each kind of device, and each counts by itself."""
    return tuple(sorted({part.rpartition(":")[2] for part in str(c10d.get_backend_config(pg)).split(",")}))


def _readings(
    groups: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]], entries: list[dict[str, Any]]
) -> tuple[GroupReading, ...] | None:
    """groups: name, description, ranks and backends of each; entries: of the flight recorder. None: it holds nothing,
    so it is turned off."""
    if not entries:
        return None
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    waits: set[tuple[str, str]] = set()
    for entry in entries:
        backend, _, operation = str(entry["profiling_name"]).partition(":")
        key = str(entry["process_group"][0]), backend
        # Retired by the thread that completes it, whether or not the script looked at the result.
        if not entry["retired"]:
            waits.add(key)
        # Messages between two members have a number of their own, or none: members send different numbers of them.
        if not entry["is_p2p"]:
            # The newest, not the largest: a group that is made again under its old name counts from 1 on.
            newest[key] = int(entry["collective_seq_id"]), operation
    found = []
    for name, description, ranks, backends in groups:
        if len(ranks) < 2:
            continue
        members = zlib.crc32(repr(sorted(ranks)).encode())
        for backend in backends:
            number, operation = newest.get((name, backend), (0, ""))
            label = description if description and description != "undefined" else f"group {name}"
            found.append(
                GroupReading(
                    group=f"{name[: _WORD - 40]}/{members:08x}/{backend[:20]}",
                    label=label[:_WORD],
                    size=len(ranks),
                    entered=number,
                    operation=operation[:_WORD],
                    waits=(name, backend) in waits,
                )
            )
    found.sort(key=lambda g: not g.waits)
    return tuple(found[:MOST_GROUPS])
