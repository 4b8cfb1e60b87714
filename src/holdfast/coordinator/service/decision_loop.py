"""The only path from an event to an action, the clock that drives it, and the detection of agents that had no time on this
machine's processors.

Connections and timers put events into an inbox. One task takes all events that wait there, lets the core decide, waits until
the decision is written, and then carries it out. Further events wait meanwhile. However long a write takes, no order is sent
before it, no report is lost, and no node counts as silent because of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.index import validate
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.machine import Core
from holdfast.coordinator.membership import workers
from holdfast.coordinator.service.history_store import JobHistory
from holdfast.coordinator.service.injector import FaultOrder, Injector
from holdfast.coordinator.service.ledger import Ledger, LedgerCopies
from holdfast.coordinator.service.queues import AgentLines, AgentQueue, Inbox, QueuedEvent
from holdfast.coordinator.service.store import SNAPSHOT, SPOKEN, LedgerBatch, LedgerEntry, ReportedSteps
from holdfast.coordinator.service.watchers import Watchers
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import (
    EngineOrder,
    MarkNode,
    OrderDone,
    ProvideNode,
    RebootNode,
    ReleaseNode,
)
from holdfast.protocol.faults import NODE_FAULTS, FaultKind
from holdfast.protocol.ledger import LedgerEvent
from holdfast.protocol.machine.processes import ThreadTimes, kernel_id, memory_stall_s, thread_times

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- starvation
# Which agents are silent for want of a processor or of memory, as far as this machine's kernel knows.
#
# On a machine that is overloaded an agent may not get to speak for seconds, and is well. One that is stopped, hangs, or is
# cut off does not wait for a processor while it is silent: so only that time counts as silence in which no thread of it
# did. Nor does the time count in which nothing on the machine could run, because the kernel looked for memory for all.
# Agents on other machines cannot be looked at. There an agent has its machine to itself, and threads that mostly sleep get
# a processor before those that compute.


class _Silence:
    """How long one silent agent has waited for a processor or for memory, from the first look at it on."""

    def __init__(
        self, heard_s: float, now: float, threads: Mapping[int, ThreadTimes], stall_s: float
    ) -> None:
        self.heard_s = heard_s
        """When the agent was heard of last, with what was excused since."""
        self._looked_s = now
        self._waits: dict[int, tuple[float, float]] = {}
        self._totals = self._count(threads, now)
        self._owed_s = 0.0
        self._stall_s = stall_s

    def look(self, threads: Mapping[int, ThreadTimes], now: float, stall_s: float) -> float:
        """For how long of the time since the last look it could not run (s). stall_s: see `memory_stall_s`."""
        totals = self._count(threads, now)
        # The thread that waited longest: any one of an agent's threads may be the one that sends heartbeats,
        # or hold what that one waits for.
        grown_s = max(
            (total - self._totals[t] for t, total in totals.items() if t in self._totals), default=0.0
        )
        # A wait may show only when it ends, and be longer than the time since the last look. The rest is kept,
        # and not cut off: of many long waits little would be excused. Never more at once than the time between
        # the looks, whatever the kernel counts, or a node would be trusted into the future.
        self._owed_s += max(0.0, grown_s)
        waited_s = min(self._owed_s, now - self._looked_s)
        self._owed_s -= waited_s
        # The larger, and not the sum: who waits for a processor behind those who look for memory waits once.
        waited_s = max(waited_s, min(stall_s - self._stall_s, now - self._looked_s))
        self._stall_s = stall_s
        self._totals, self._looked_s = totals, now
        self.heard_s += waited_s
        return waited_s

    def _count(self, threads: Mapping[int, ThreadTimes], now: float) -> dict[int, float]:
        """By thread, for how long it has waited, with the wait that goes on now: the kernel adds that one only when it
        ends, and at a low priority that can take longer than a node has to speak."""
        waits, totals = {}, {}
        for thread, times in threads.items():
            totals[thread] = times.waited_s
            if times.runnable:
                # Runnable, and it has not run since that look: so it has waited from there on.
                since_s, ran_s = self._waits.get(thread, (now, times.ran_s))
                waits[thread] = (since_s if ran_s == times.ran_s else now, times.ran_s)
                totals[thread] += now - waits[thread][0]
        self._waits = waits
        return totals


class Starving:
    """Finds agents of this machine that were silent because they got no time on a processor, or waited for memory."""

    def __init__(
        self,
        patience_s: float,
        times: Callable[[int], Mapping[int, ThreadTimes]] = thread_times,
        stall: Callable[[], float] = memory_stall_s,
    ) -> None:
        """
        Args:
            patience_s: nobody who was heard of more lately is looked at.
            times: what the kernel has counted for each thread of a process, by its pid.
            stall: for how long nothing on this machine could run for want of memory, since some moment (s).
        """
        self._patience_s, self._times, self._stall, self._here = patience_s, times, stall, kernel_id()
        self._pids: dict[str, int] = {}
        self._silences: dict[str, _Silence] = {}

    def on_agent_joined(self, node: str, kernel: str, pid: int) -> None:
        """An agent said hello. kernel: as `kernel_id` says there."""
        self._silences.pop(node, None)
        if kernel and kernel == self._here:
            self._pids[node] = pid
        else:
            self._pids.pop(node, None)

    def look(self, heard: Iterable[tuple[str, float]], now: float) -> dict[str, float]:
        """Seconds that nodes waited for a processor or for memory since the last call, by name. heard: when each live node was
        last heard of, on the clock of `now`."""
        starved = {}
        silences: dict[str, _Silence] = {}
        for node, heard_s in heard:
            if node not in self._pids:
                continue
            silence = self._silences.get(node)
            # What was excused counts as heard of, in the core and here. Only what is later than that was said by
            # the agent itself, and ends its silence.
            if silence is not None and heard_s <= silence.heard_s:
                waited_s = silence.look(self._times(self._pids[node]), now, self._stall())
                if waited_s > 0:
                    starved[node] = waited_s
                silences[node] = silence
            elif now - heard_s > self._patience_s:
                # A first look gives numbers to compare with, and no verdict. Only their growth is time in which
                # the agent could not run.
                silences[node] = _Silence(heard_s, now, self._times(self._pids[node]), self._stall())
        self._silences = silences
        return starved


# ---------------------------------------------------------------- clock
# The core's clock: seconds that never go back, across machines too.
#
# A machine's own steady clock counts from its boot. A coordinator that goes on with the state of one on another machine
# therefore carries the times over by UTC.


class Anchor(msgspec.Struct, frozen=True):
    """What the core's clock showed at a moment that other machines can determine, too."""

    now_s: float
    """The core's clock."""
    utc_s: float
    """Seconds since 1970."""
    boot: str
    """Of which machine's run."""
    steady_s: float = 0.0
    """What that machine's own clock (CLOCK_MONOTONIC) showed."""


class CoreClock:
    """Call it for the time now. anchor: the newest of the coordinator before, None for a new job. steady: this machine's own clock.

    No event of the state that goes with the anchor is later than the anchor, so a clock that begins there or later never
    goes back.
    """

    def __init__(
        self, anchor: Anchor | None, boot: str | None = None, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self.steady = steady
        self._boot = boot_id() if boot is None else boot
        if anchor is None:
            self._offset_s = 0.0
        # The same run of the same machine: its steady clock went on counting while no coordinator lived, so
        # no time is lost or invented.
        elif anchor.boot == self._boot:
            self._offset_s = anchor.now_s - anchor.steady_s
        else:  # UTC here may be behind: then no time has passed, rather than less than none
            passed_s = max(0.0, time.time() - anchor.utc_s)
            self._offset_s = anchor.now_s + passed_s - steady()
        self.anchor = self.mark()

    def __call__(self) -> float:
        return self.steady() + self._offset_s

    def mark(self) -> Anchor:
        """The time now, for the next coordinator: to be kept with every state."""
        steady_s = self.steady()
        return Anchor(steady_s + self._offset_s, time.time(), self._boot, steady_s)


def boot_id() -> str:
    """An identifier of this machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


LAST_S = 10.0
"""How long a job that ends waits for a ledger that cannot be written. What it trained is in its checkpoints."""
HANDED_OVER = "handed-over"
"""Under which name a coordinator that hands over says so: see `HandoverPoint`."""
VALIDATE_VARIABLE = "HOLDFAST_VALIDATE"
"""With 1 the state is checked after every batch of events; what is wrong goes to the coordinator's log."""


class HandoverPoint(msgspec.Struct, frozen=True):
    """The last record of a coordinator that was asked to hand over.

    It is valid for the ledger as it was then: each successor adds an entry, so the record never has to be removed.
    """

    seq: int
    """The newest entry of the ledger then."""
    at_s: float
    """When, on the core's clock."""


class DecisionLoop:
    """Feeds the core, writes what it decides, and carries it out."""

    def __init__(
        self,
        *,
        core: Core,
        clock: CoreClock,
        injector: Injector,
        ledger_file: Ledger,
        memory: JobHistory,
        lines: AgentLines,
        watchers: Watchers,
        copies: LedgerCopies,
        job_dir: Path,
    ) -> None:
        self.core, self.clock, self.injector = core, clock, injector
        self._ledger, self._memory, self._lines, self._watchers = ledger_file, memory, lines, watchers
        self._copies, self._job_dir = copies, job_dir
        # Counted here and not by SQLite, because a batch may be written twice when only its writer does not
        # know that it was. With numbers of its own an entry is inserted once, whatever happens.
        self.seq = ledger_file.store.last_seq()
        """Number of the ledger's newest entry."""
        self._validates = os.environ.get(VALIDATE_VARIABLE) == "1"
        self._inbox = Inbox(clock.steady)
        self._starving = Starving(core.timing.heartbeat_s)
        self._tick: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        # A future and not a flag: a write that waits for a broken disk has to be woken when the job begins to
        # end.
        self._ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends_at: float | None = None
        self._failed_at = 0.0
        self._ordered = core.state.orders.last_id
        self._leaving = False
        self.has_left = False
        """Nothing is decided any more: the job goes on with the next process."""
        self.unwritten = False
        """The job has ended without its last entries, because the ledger cannot be written."""
        self.over = asyncio.Event()
        """The job is over: the core has decided its end, and that is written."""

    # ------------------------------------------------------------ from events to decisions

    def handle(self, event: ev.Event, line: AgentQueue | None = None) -> None:
        """Queues an event for the core. line: the connection of the agent that sent it."""
        self._take_in(event, line)

    def _take_in(self, event: ev.Event, line: AgentQueue | None = None) -> QueuedEvent | None:
        # Noticed as the event comes in, not when it is decided. The loop may be waiting for a ledger that
        # cannot be written, and this is what limits that wait.
        if _ending(event) and self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time()
            self._ends.set_result(None)
        return self._inbox.put(event, line)

    async def effect(self, event: ev.Event) -> None:
        """Queues an event, and waits until the decision about it is written and carried out."""
        # None: the inbox merged it with another, so nothing waits for it alone.
        if (waiting := self._take_in(event)) is not None:
            waiting.done = asyncio.get_running_loop().create_future()
            await waiting.done

    def leave(self) -> None:
        """Lets `decide_all` return after the events that are already queued."""
        self._leaving = True
        self._inbox.wake()

    async def write_last(self) -> bool:
        """Writes the state as it is, for the process that this one hands over to; whether it is in the file."""
        self.has_left = True
        batch = LedgerBatch(kept=self._state_kept())
        batch.kept[HANDED_OVER] = msgspec.msgpack.encode(HandoverPoint(self.seq, self.clock()))
        writing = self._ledger.write(batch)
        await asyncio.wait([writing], timeout=LAST_S)
        return writing.done() and writing.exception() is None

    async def decide_all(self) -> None:
        """Decides on queued events and carries the decisions out, until `leave` is called or the task is cancelled."""
        # Starts the beat, so that the loop turns at least twice per heartbeat even if no event comes.
        self._late_s()
        while True:
            # Everything that has gathered becomes one batch with one write. Under load batches grow, and the
            # cost of a write is shared by more events: so the loop gets faster per event just when it must.
            waiting = await self._inbox.take()
            # Read here: what came in before `leave` is in this batch, or was in one before it.
            last = self._leaving
            now_s = self.clock.steady()
            # What waited here has aged, and the core measures stalls with these ages. Without this a slow
            # disk would look like slow training.
            events = [w.aged(now_s) for w in waiting]
            # Before the events of the batch: the core must learn that it was not listening before it compares
            # anybody's silence with a deadline.
            if (late_s := self._late_s()) is not None:
                events = [*self._excuses(late_s), *events]
            # Lines are handed over before the decision, so that its orders reach the agent which the core has
            # just heard of, and not the one that it replaced.
            for each in waiting:
                self._meet(each)
            if events:
                await self._decide(events)
            for each in waiting:
                if each.done is not None and not each.done.done():
                    each.done.set_result(None)
            if last:
                self.has_left = True
                return

    def _late_s(self) -> float | None:
        """How late this look is, of which there are two for every heartbeat; None: it is not time for one."""
        loop, every_s = asyncio.get_running_loop(), self.core.timing.heartbeat_s / 2
        late_s = 0.0
        if self._beat is not None:
            late_s = loop.time() - self._beat.when()
            # The loop was woken by events and not by the beat. Judging lateness then would count idle time as
            # time in which nobody listened.
            if late_s < 0:
                return None
            self._beat.cancel()
        self._beat = loop.call_later(every_s, self._inbox.wake)
        return late_s

    def _excuses(self, late_s: float) -> list[ev.Event]:
        """What the core has to know before it looks at any deadline, or it would end those for whom there was no time: that
        the processor or the ledger kept this process from listening, and agents from speaking."""
        excuses: list[ev.Event] = []
        # Half a heartbeat of tolerance: agents are lost after several missed ones, so less than that has cost
        # nobody its chance.
        if late_s > self.core.timing.heartbeat_s / 2:
            excuses.append(ev.Overslept(late_s))
        heard = [(n.name, n.last_seen_s) for n in self.core.state.membership.nodes.values() if n.alive]
        starved = self._starving.look(heard, self.clock())
        return [*excuses, *(ev.Starved(node, waited_s) for node, waited_s in starved.items())]

    def _meet(self, waiting: QueuedEvent) -> None:
        """From here on orders to a node go to the agent that the core hears of now. A decision about the agent before it must
        not reach it: it would start workers that nobody knows of."""
        # From the batch in which the core hears the hello. A moment earlier, an order from the batch before
        # would go to an agent that must not have it.
        if isinstance(waiting.event, ev.NodeJoined) and waiting.line is not None:
            waiting.line.introduced = True
            hello = waiting.event.hello
            self._starving.on_agent_joined(hello.node, hello.kernel, hello.pid)

    async def _decide(self, events: list[ev.Event]) -> None:
        """One batch: decided at one moment, written at once, then done."""
        now, state = self.clock(), self.core.state
        # The steps of this batch were made in the generation before the decision, which may replace it.
        before = state.membership.generation
        actions = self.core.handle_all(events, now)
        for wrong in (*validate(state), *self.core.index.differences()) if self._validates else ():
            _log.error("the coordinator's state is not valid: %s; after %s", wrong, events)
        # Faults that wait for a rank go to whoever holds the rank now, so they are armed anew with every
        # generation.
        formed = any(isinstance(a, ev.Record) and a.kind in ("formed", "started") for a in actions)
        orders = self.injector.formed(state, now) if formed else []
        orders += self.injector.due(state, now)
        # What only moves deadlines is not written: heartbeats come from every node several times a second,
        # and a successor learns the same within one heartbeat.
        urgent = bool(actions) or not all(map(routine, events))
        batch = self._batch(events, actions, now, before)
        if urgent:
            # State, clock and injector are in one batch, so in one transaction: a state whose clock is older
            # than its times would run backward in the next coordinator.
            batch.kept |= self._state_kept()
            # Written first, then carried out. If an order left before, and this process died, the next
            # coordinator would decide again, perhaps otherwise, and two workers could believe that they hold
            # the same rank.
            await self._written(batch)
            self._copies.choose(state.membership.nodes)
        elif batch.steps:
            # Not awaited: losses are reported again by agents, and nobody acts on them.
            self._ledger.write(batch)
        # Announced only after the actions have been queued: whoever watches may act on an event, and must
        # find it done.
        self._carry_out(actions, orders)
        for entry in batch.entries:
            _log.debug("event %s", entry.kind, extra={"seq": entry.seq, "event": entry.fields})
            self._watchers.announce("event", entry)
        # A sign of life is followed by no look, and so moves no deadline: the timer need not be set anew for each.
        if self.core.moved or self._tick is None:
            self.plan_tick()
        self._watchers.plan_status()

    def _state_kept(self) -> dict[str, bytes]:
        """What the next coordinator goes on from."""
        return {
            SPOKEN: msgspec.msgpack.encode(m.PROTOCOL_VERSION),
            SNAPSHOT: msgspec.msgpack.encode(self.core.state),
            "clock": msgspec.msgpack.encode(self.clock.mark()),
            "injector": msgspec.msgpack.encode(self.injector.plans),
        }

    def _batch(
        self, events: list[ev.Event], actions: list[ev.Action], now: float, before: m.Generation | None
    ) -> LedgerBatch:
        """What a batch leaves in the ledger. before: the generation in which its steps were made."""
        state = self.core.state
        records = [a for a in actions if isinstance(a, ev.Record)]
        # People count on an injected fault. One that never happened has to be reported before the ledger
        # closes.
        if any(isinstance(a, ev.End) for a in actions):
            records += [ev.Record(ledger.FaultNotFired(fault=f)) for f in self.injector.unfired()]
        batch = LedgerBatch([self._entry(r.event, now) for r in records])
        made_in = before or state.membership.generation
        for event, report in ((e, r) for e in events if isinstance(e, ev.WorkersSay) for r in e.reports):
            message = _with_losses(report, state)
            if message is not None and made_in is not None:
                t_s = round(now - state.began_s - report.age_s - event.waited_s, 4)
                logged = workers.rows(state, message) if isinstance(message, m.Progress) else ()
                batch.steps.append(
                    ReportedSteps(
                        t_s=t_s,
                        losses=message.losses,
                        generation=message.generation,
                        world=len(made_in.members),
                        figures=logged,
                    )
                )
        return batch

    def _entry(self, event: LedgerEvent, now: float) -> LedgerEntry:
        self.seq += 1
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        return LedgerEntry(
            seq=self.seq, t_s=round(now - self.core.state.began_s, 4), utc=utc, kind=event.kind, fields=event
        )

    async def _written(self, batch: LedgerBatch) -> None:
        """Waits until a decision is in the ledger: nobody may hear of it before, or the next coordinator could decide
        otherwise. Only a job that ends does not wait for ever: there is no next one."""
        # Waits for the disk, however long: training goes on without the coordinator, and must not go on with
        # decisions that nobody could repeat.
        writing = self._ledger.write(batch)
        # A job that ends is different. There is no next coordinator that could decide otherwise, and a person
        # waits for the end.
        if not self._ends.done():
            await asyncio.wait([writing, self._ends], return_when=asyncio.FIRST_COMPLETED)
        if writing.done() or self._ends_at is None:
            writing.result()
            return
        left_s = self._ends_at + LAST_S - asyncio.get_running_loop().time()
        # The first write that is given up waits for up to LAST_S; those after it wait for nothing more, or
        # each would cost a person ten seconds.
        await asyncio.wait([writing], timeout=max(left_s, 0.0 if self.unwritten else LAST_S / 2))
        if not writing.done() and not self.unwritten:
            self.unwritten = True
            told = (
                f"the job ends without its ledger, which cannot be written: {self._ledger.why or 'no answer'}"
            )
            self._watchers.say(told)

    def note(self, event: LedgerEvent) -> None:
        """Records an event that the core does not know of. It is announced when it is written."""
        entry = self._entry(event, self.clock())
        self._ledger.write(LedgerBatch([entry])).add_done_callback(
            lambda _: self._watchers.announce("event", entry)
        )

    def on_ledger_trouble(self, why: str | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if why is not None:
            self._failed_at = now_s
            where = f"{self._job_dir} ({why})"
            self._watchers.say(
                f"the ledger cannot be written in {where}: training continues, but changes of the membership wait; "
                "free some space there, or make it writable"
            )
            self.note(ledger.LedgerFailed(reason=why))
        else:
            failed_s = round(now_s - self._failed_at, 1)
            text = f"the ledger can be written again, after {failed_s:g} s; no entries are missing"
            self._watchers.say(text)
            self.note(ledger.LedgerBack(failed_s=failed_s))

    # ------------------------------------------------------------ what was decided is done

    def _carry_out(self, actions: list[ev.Action], orders: list[FaultOrder]) -> None:
        # Orders of a batch are sent in the order of the core's decisions, faults around them as they need:
        # one for a worker that exists goes first, since it may fire while the worker joins; one for a worker that is
        # only started in this batch would find nobody before.
        begun = {
            a.message.worker
            for a in actions
            if isinstance(a, ev.Send) and isinstance(a.message, m.StartWorker)
        }
        early = [s for s in orders if getattr(s.message, "worker", None) not in begun]
        for order in early:
            self.order_fault(order)  # before the JoinGeneration: a fault may wait for the joining itself
        with self._lines.together():
            for action in actions:
                self.do(action)
        for order in orders:
            if order not in early:
                self.order_fault(order)  # nobody can be told anything before it is started

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.Send(node, message):
                self._lines.send(node, message)
            case ProvideNode() | ReleaseNode() | MarkNode() | RebootNode():
                self._ordered = action.order_id
                self._watchers.announce_order(action)
            case ev.Remember():
                # A test must not make a good machine a lemon.
                if not incidents.was_injected(self.core.state, action.incident):
                    self._memory.remember(action)
            case ev.End():
                self.over.set()
            case _:
                pass

    def open_orders(self) -> tuple[EngineOrder, ...]:
        """What the engine was ordered to do and has not acknowledged, oldest first."""
        # Only what has been written: a successor of this process could give the number of an order that was not
        # written to another one, and the engine would take that for done.
        return tuple(o for o in self.core.state.orders.open.values() if o.order_id <= self._ordered)

    def plan_tick(self) -> None:
        times = [t for t in (self.core.next_deadline(), self.injector.next_due()) if t is not None]
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        # A millisecond late, never early: a Tick that comes a microsecond before its deadline finds nothing
        # due, and plans itself again at once.
        if times and not self.over.is_set():
            delay = max(0.0, min(times) - self.clock()) + 1e-3
            self._tick = asyncio.get_running_loop().call_later(delay, self._tick_due, 2)

    def _tick_due(self, turns: int) -> None:
        """A turn of the loop runs what timers are due before it reads on from what has arrived. Who has spoken in time is
        not to be judged before that is read."""
        # Two more turns of the loop first, see the docstring: timers run before sockets are read, so a
        # heartbeat that arrived in time may still be unread now.
        self._tick = None
        if turns:
            asyncio.get_running_loop().call_soon(self._tick_due, turns - 1)
        else:
            for excuse in self._excuses(0.0):
                self.handle(excuse)
            self.handle(ev.Tick())

    # ------------------------------------------------------------ injected faults

    def order_fault(self, order: FaultOrder) -> None:
        if order.message is None:
            self.fired(f"{order.plan}/", None, None)
        else:
            self._lines.send(order.node, order.message)

    def fired(self, id: str, node: str | None, worker: str | None, step: int | None = None) -> None:
        plan = self.injector.fired(id)
        if plan is None:
            return
        kind = plan.spec.kind
        struck = None if kind in NODE_FAULTS else worker
        # The event is written before the fault hits the coordinator itself; otherwise its successor would
        # not know why its predecessor died, and would inject the fault again.
        waiting = self._take_in(
            ev.Injected(fault=str(plan.spec), kind=kind.value, node=node, worker=struck, step=step)
        )
        if kind is FaultKind.KILL_COORDINATOR and waiting is not None:
            waiting.done = asyncio.get_running_loop().create_future()
            waiting.done.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _ending(event: ev.Event) -> bool:
    """From here on the job comes to its end, whatever the ledger does: it was asked to, or somebody has all steps."""
    if isinstance(event, ev.WorkersSay):
        return any(isinstance(report.message, m.Done) for report in event.reports)
    if isinstance(event, ev.NodeSays):
        return isinstance(event.message, m.Exited) and event.message.code == 0
    return isinstance(event, ev.StopRequested)


def _with_losses(report: m.FromWorker, state: CoreState) -> m.Progress | m.Parked | None:
    """What a worker reports, if it tells losses or figures which count."""
    message = report.message
    if not isinstance(message, m.Progress | m.Parked) or not _tells(message):
        return None
    message = workers.counted(state, report.worker, message)
    return message if _tells(message) else None


def _tells(message: m.Progress | m.Parked) -> bool:
    return bool(message.losses or (isinstance(message, m.Progress) and message.figures))


_REPEATED = (m.Progress, m.Restoring, m.Attached, m.Joined)
"""Reports of which a hello has the newest of each worker."""


def routine(event: ev.Event) -> bool:
    """Events that come in great number and change nothing that a successor could not learn anew."""
    # An acknowledgement that is forgotten is given again when the successor announces the order again. Time
    # in which nobody listened only moves deadlines, and a successor moves them by all that it did not see. If
    # it were written, a slow machine with a broken ledger would hear of no step any more.
    if isinstance(event, ev.WorkersSay):
        # Of each worker its agent knows the newest of these, and its hello repeats them. Every worker of a large job sends
        # some within the same second, when a generation breaks and the next one forms. Losses are not read out of a hello.
        return all(
            isinstance(message := report.message, _REPEATED)
            or (isinstance(message, m.Parked) and not message.losses)
            for report in event.reports
        )
    if isinstance(event, ev.NodeSays):
        return isinstance(event.message, m.Heartbeat | m.StoreProgress)
    return isinstance(event, ev.Tick | ev.Starved | ev.Overslept | OrderDone)
