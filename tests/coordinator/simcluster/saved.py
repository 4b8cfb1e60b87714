"""Invariants of snapshots and checkpoints: who holds what as far as the coordinator was told, and of which history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import CoreState, JobPhase
from holdfast.coordinator.storage import memory_snapshots, queries
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Copy, Key, Lack
from simcluster.plan import FOREVER

if TYPE_CHECKING:
    from simcluster.checks import Checks

Taken = tuple[int, int]
"""Step and generation of a snapshot."""


class SavedChecks:
    """Keeps its own books of what was said, and compares what the core makes of it."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.durable_step = 0
        self.restored_from: dict[str, int] = {}
        self._holds: dict[str, set[Key]] = {}
        self._asked: set[tuple[str, Key]] = set()
        self._complete: list[Taken] = []
        self._safe: dict[Taken, bool] = {}
        self._short: set[Taken] = set()
        self._said_last: m.SnapshotComplete | None = None
        self._orders: dict[tuple[str, int], str] = {}
        self._refused: set[Key] = set()
        self._known: set[Taken] = set()
        self._pushed_out: set[Taken] = set()

    def handled(self, event: e.Event, actions: list[e.Action], state: CoreState) -> None:
        """After every event."""
        self._hear(event, state)
        left = {a.fields["node"] for a in actions if isinstance(a, e.Record) and a.kind == "node-left"}
        for name in [
            n for n in self._holds if n not in state.membership.nodes or not state.membership.nodes[n].alive
        ]:
            if name in left:
                self._check_left(name, state)
            self._lose(name)
        for action in actions:  # before what is forgotten for its sake
            if isinstance(action, e.Record) and action.kind == "formed" and action.fields["source"] != "live":
                self._check_start(_number(action.fields, "start"), str(action.fields["source"]))
        wholes = [
            a.message for a in actions if isinstance(a, e.Send) and isinstance(a.message, m.SnapshotComplete)
        ]
        self._said_last = wholes[-1] if wholes else None
        # It may come with a node that is not needed, and go with it at once.
        shuts = any(isinstance(a, e.Send) and isinstance(a.message, m.Shutdown) for a in actions)
        if self._said_last is not None and shuts and not any(x.complete for x in state.storage.snapshots):
            self._said_last = None
        for action in actions:
            self._check(action, state)
        if self.checks.cluster.plan.shard_count > 1:
            known = {(x.step, x.generation) for x in state.storage.snapshots}
            self._pushed_out |= self._known - known
            self._known = known
        self._check_size(state)

    # ------------------------------------------------------------ what was said

    def _hear(self, event: e.Event, state: CoreState) -> None:
        match event:
            case e.NodeJoined(hello):
                node = state.membership.nodes.get(hello.node)
                if node is not None and node.alive and node.session == hello.session:
                    self._lose(hello.node, keeps_orders=True)
                    self._holds[hello.node] = {c.key for c in hello.copies}
            case e.NodeSays(name, m.SnapshotStored(copy)) if name in self._holds:
                self._holds[name].add(copy.key)
                self._asked.discard((name, copy.key))
            case e.NodeSays(name, m.SnapshotRejected(key, _, lack)) if name in self._holds:
                self._asked.discard((name, key))
                self._refused.add(key)
                if lack is Lack.MEMORY:  # what is kept beside the newest is given up for the next one's sake
                    self._safe = {taken: taken == max(self._safe) for taken in self._safe}
                    self._short.add((key.step, key.generation))
            case e.NodeSays(name, m.Published(tier, step, None)) if self._orders.get((tier, step)) == name:
                self.durable_step = max(self.durable_step, step)
            case e.DurableFound(durable) if durable is not None:
                self.durable_step = durable.step
            case _:
                pass

    def _lose(self, name: str, keeps_orders: bool = False) -> None:
        self._holds.pop(name, None)
        held = {key for keys in self._holds.values() for key in keys}
        # Of what nobody holds any more the core knows nothing; a node that comes back with it begins anew.
        self._asked = {(n, key) for n, key in self._asked if n != name and key in held}
        if not keeps_orders:
            self._orders = {at: n for at, n in self._orders.items() if n != name}

    def _is_held(self, taken: Taken) -> bool:
        """Every shard, by somebody."""
        ranks = {k.rank for held in self._holds.values() for k in held if (k.step, k.generation) == taken}
        return len(ranks) == self.checks.cluster.plan.shard_count or self.checks.cluster.plan.level != 2

    def _copies(self, taken: Taken) -> int:
        """So many nodes hold the shard that the fewest hold; no more than are asked for."""
        plan = self.checks.cluster.plan
        holders = [
            sum(
                any((k.step, k.generation, k.rank) == (*taken, rank) for k in held)
                for held in self._holds.values()
            )
            for rank in range(plan.shard_count)
        ]
        return min(*holders, plan.spec.saving.snapshots.copies + 1)

    def _check_retired(self, said: m.SnapshotComplete, state: CoreState) -> None:
        """Of the snapshots that agents may write over now, none has more copies than what they are to keep. firm (the
        values of `_safe`): agents were told to keep it, and memory was not short since."""
        if state.membership.level != 2:
            return
        told = {said.step, said.kept}
        short = any(step == said.step for step, _ in self._short)
        self._short = {t for t in self._short if t[0] >= said.step}
        steps = {
            (x.step, x.generation) for x in state.storage.snapshots if x.step in told and queries.has_all(x)
        }
        stays = max((self._copies(t) for t in steps), default=0)
        for taken, firm in self._safe.items():
            gone = taken[0] < said.step and taken[0] != said.kept
            self.checks.require(
                short or not (gone and firm) or self._copies(taken) <= stays,
                "step %d has more copies than %s, and is given up for it",
                taken[0],
                said,
            )
        self._safe = {t: f for t, f in self._safe.items() if t[0] > said.step} | dict.fromkeys(
            steps, not short
        )

    def _check_left(self, name: str, state: CoreState) -> None:
        """A node that leaves as planned takes no part along of what the job would go on from, if another could keep it."""
        plan = self.checks.cluster.plan
        if (
            not plan.only_planned
            or plan.no_memory
            or state.membership.phase not in (JobPhase.RUNNING, JobPhase.GATHERING)
        ):
            return
        takes = [
            k for k in self._holds[name] if not any(k in held for n, held in self._holds.items() if n != name)
        ]
        newest = max(
            (k for held in self._holds.values() for k in held if self._is_held((k.step, k.generation))),
            default=None,
        )
        for key in takes:
            only = newest is not None and (key.step, key.generation) == (newest.step, newest.generation)
            self.checks.require(
                not only or key in self._refused, "%s leaves with the only copy of %s", name, key
            )

    # ------------------------------------------------------------ what the core makes of it

    def _check(self, action: e.Action, state: CoreState) -> None:
        require = self.checks.require
        match action:
            case e.Send(node, m.ForgetSnapshots(step, until)):
                held = self._holds.get(node, set())
                last = until if until is not None else max((k.step for k in held), default=0)
                held -= {k for k in held if step < k.step <= last}
                self._asked = {
                    (n, key)
                    for n, key in self._asked
                    if n != node or key.step <= step or (until is not None and key.step > until)
                }
            case e.Send(node, m.Replicate(copy, holders)):
                self._check_asked(node, copy)
                require(bool(holders), "%s is to copy step %d from nobody", node, copy.key.step)
                require(node not in {h.node for h in holders}, "%s is to copy from itself", node)
            case e.Send(_, m.SnapshotComplete(step) as said) if (
                said == self._said_last
            ):  # others are overtaken
                self._check_retired(said, state)
                known = [x for x in state.storage.snapshots if x.step == step and x.complete]
                require(bool(known), "step %d is called complete and is not known", step)
                there = {h.copy.key.rank for x in known for h in x.shards if h.nodes}
                require(
                    there == set(range(known[0].world)), "step %d is called complete, held: %s", step, there
                )
                held = any(self._is_held((x.step, x.generation)) for x in known)
                require(held, "step %d is called complete and nobody holds it", step)
            case e.Send(node, m.Publish(tier, step, shards)):
                bits = self.checks.canon_state(step)
                require(bits is not None, "step %d is to be published and did not happen", step)
                rows = [f"{b:x}" for b in bits or ()]
                require([x.blob.xxh3 for x in shards] == rows, "other bits of step %d", step)
                self._orders[(tier.url, step)] = node
            case e.Record(kind="snapshot", fields=fields):
                self._complete = [*self._complete, (_number(fields, "step"), _number(fields, "generation"))]
                self._complete = sorted(self._complete)[-memory_snapshots.KEPT_COMPLETE :]
            case e.Record(kind="snapshot-unreadable", fields=fields):
                gone = (_number(fields, "step"), _number(fields, "generation"))
                self._safe.pop(gone, None)
                self._complete = [x for x in self._complete if x != gone]
            case e.Record(kind="saved", fields=fields):
                step = _number(fields, "step")
                durables = self.checks.cluster.durables
                there = durables.get((str(fields["url"]), step))
                require(there is not None, "step %d is called saved and is not there", step)
                require(
                    there is not None and there[1] == self.checks.canon_state(step),
                    "saved other bits: %s",
                    there,
                )
                self.durable_step = max(self.durable_step, step)
            case _:
                pass

    def _check_asked(self, node: str, copy: Copy) -> None:
        """Nobody is asked to hold twice the same, unless it may not have heard."""
        key = copy.key
        if (key.step, key.generation) in self._pushed_out:
            return  # the core has begun anew with it
        self.checks.require(
            key not in self._holds.get(node, set()), "%s holds step %d already", node, key.step
        )
        self.checks.require(
            (node, key) not in self._asked, "%s was asked for step %d already", node, key.step
        )
        self._asked.add((node, key))

    def _check_start(self, start: int, source: str) -> None:
        """Nothing newer than where training goes on from is known to be safe."""
        self.restored_from[source] = self.restored_from.get(source, 0) + 1
        safe = max((step for step, g in self._complete if self._is_held((step, g))), default=0)
        self.checks.require(start >= safe, "starts at %d, and a complete snapshot has step %d", start, safe)
        self.checks.require(
            start >= self.durable_step, "starts at %d, and a checkpoint has %d", start, self.durable_step
        )
        safe = max((t[0] for t, firm in self._safe.items() if firm and self._is_held(t)), default=0)
        self.checks.require(start >= safe, "starts at %d, and agents keep step %d", start, safe)
        self._complete = [x for x in self._complete if x[0] <= start]
        self._safe = {t: f for t, f in self._safe.items() if t[0] <= start}
        self._orders = {at: n for at, n in self._orders.items() if at[1] <= start}

    def _check_size(self, state: CoreState) -> None:
        require, nodes = self.checks.require, len(state.membership.nodes)
        most = memory_snapshots.KEPT_COMPLETE + 2 * memory_snapshots.KEPT_PARTIAL + 1
        require(len(state.storage.snapshots) <= most, "%d snapshots are kept", len(state.storage.snapshots))
        require(
            len(state.storage.rewinds) <= memory_snapshots.KEPT_REWINDS,
            "%d rewinds",
            len(state.storage.rewinds),
        )
        require(
            len(state.storage.storing) <= len(state.spec.saving.tiers),
            "stored at once: %s",
            state.storage.storing,
        )
        for snapshot in state.storage.snapshots:
            require(len(snapshot.shards) <= snapshot.world * nodes, "shards of %d", snapshot.step)
            require(
                len(snapshot.refused) <= len(set(snapshot.refused)), "refused twice: %s", snapshot.refused
            )
            for entry in snapshot.shards:
                require(bool(entry.nodes), "a shard of %d without a holder", snapshot.step)
                require(
                    all(state.membership.nodes[n].alive for n in entry.nodes),
                    "a lost node holds %d",
                    snapshot.step,
                )

    def final(self, state: CoreState) -> None:
        """Undisturbed, snapshots become complete."""
        cluster = self.checks.cluster
        plan, after_s = cluster.plan, cluster.whole_s + 5.0
        memories = [a for a in cluster.agents.values() if a.alive and a.memory.there]
        if (
            state.membership.outcome != "finished"
            or not plan.snapshot_every
            or plan.hold_fails
            or plan.no_memory
        ):
            return
        if (
            plan.steps != FOREVER
            or not memories
            or cluster.clock.now < after_s
            or state.membership.phase is not JobPhase.ENDED
        ):
            return
        newest = max((step for step, _ in self._complete), default=0)
        # A node that comes as planned is asked for copies, which hold up the next ones where steps are quick.
        # So do the copies of shards that only one node has.
        copied = bool(plan.changes) or plan.shard_count > 1
        on_its_way = 2 * (plan.pull_s + plan.copy_s) / plan.step_s if copied else 0
        self.checks.require(
            newest > cluster.until - 30 - on_its_way,
            "the newest complete snapshot is of %d of %d",
            newest,
            cluster.until,
        )


def _number(fields: dict[str, object], name: str) -> int:
    value = fields[name]
    assert isinstance(value, int)
    return value
