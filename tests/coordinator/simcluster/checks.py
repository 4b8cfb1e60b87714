"""The invariants. Each is looked at whenever something happens that could break it."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from holdfast.coordinator.health.admission import CHECKS_S
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.index import validate
from holdfast.coordinator.kernel.state import CoreState, JobPhase, WorkerPhase, by_the_day
from holdfast.coordinator.machine import Core
from holdfast.coordinator.membership import nodes, notices, queries, wall_time
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.phases import Phase, TimeClass
from simcluster.plan import FOREVER
from simcluster.saved import SavedChecks

if TYPE_CHECKING:
    from simcluster.agent import SimAgent
    from simcluster.cluster import Cluster
    from simcluster.worker import Script, Trainer

PROGRESS_BOUND_S = 90.0
"""After the faults, with nodes to be had, no job stands still for longer."""


class Violation(AssertionError):
    """An invariant does not hold. The message holds the seed and the last events."""


class Checks:
    """Knows the truth of the whole cluster, which no coordinator can."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.newest = 0
        self.newest_s = cluster.clock.now
        self.formed = 0
        self.formed_s = 0.0
        self.records: dict[str, int] = {}
        self.named = 0
        self.saved = SavedChecks(self)
        self._canon: dict[tuple[int, int], int] = {}
        self._places: dict[str, int] = {}
        self._source = ""
        self.beside = self.kept = 0
        self._before = 0
        self._lines: dict[int, int] = {}
        self._line = 0
        self._lineage = 0
        self._began: dict[tuple[int, int, int], int] = {}
        self._starts: dict[tuple[str, str, int], int] = {}
        self._early = 0
        self._provided = 0
        self._late = False
        self._gathered_s = 0.0
        self._committed = 0
        self._lost = 0
        self._number = 0
        self._idle_changes = 0
        self._heard = (0, 0)
        self._heard_s = cluster.clock.now
        self._core: Core | None = None
        self._members: list[tuple[str, tuple[str, ...]]] = []
        self._notified: dict[str, tuple[str, tuple[int, ...]]] = {}

    def fail(self, text: str, *args: Any) -> NoReturn:
        """Says what is wrong, with everything that helps to see why."""
        cluster = self.cluster
        lines = [
            f"{t - cluster.began_s:9.4f}  {line % tuple(map(brief, rest))}" for t, line, rest in cluster.trace
        ]
        plan = cluster.plan
        raise Violation(
            f"HOLDFAST_SEED={plan.seed}: {text % args} (at {cluster.clock.now - cluster.began_s:.4f} s)\n"
            f"plan: {plan}\nthe last {len(lines)} events:\n" + "\n".join(lines)
        )

    def require(self, holds: bool, text: str, *args: Any) -> None:
        """Fails when it does not hold."""
        if not holds:
            self.fail(text, *args)

    # ------------------------------------------------------------ the core

    def restarted(self, core: Core) -> None:
        """A new coordinator process; what the old one had not written is not known to it."""
        self._committed, self._lost = core.state.membership.committed, core.state.membership.lost_steps
        self._core = core
        self._notified.clear()  # what the old one sent may be lost

    def handled(self, event: e.Event, actions: list[e.Action], core: Core) -> None:
        """After every event."""
        self._core = core
        state, cluster = core.state, self.cluster
        if not isinstance(event, e.Tick) and not _is_heartbeat(event):
            cluster.log("core <- %s", event)
        self._provided -= isinstance(event, e.NodeUnavailable)
        for action in actions:
            if not isinstance(action, e.Record):
                cluster.log("core -> %s", action)
            self._check_action(action, state)
        heard = (state.membership.number, state.membership.generation_committed)
        if heard != self._heard and _is_progress(event):
            self._heard_s = cluster.clock.now
        self._heard = heard
        wrong = [*validate(state), *core.index.differences()]
        self.require(not wrong, "after %s the state is not valid: %s", event, wrong)
        self._check_watch(core)
        self._check_notices(actions, core)
        self._check_wall_time(core)
        self.saved.handled(event, actions, state)
        cluster.ailments.handled(event, actions, core)
        lost = state.membership.lost_steps - self._lost
        self.require(
            state.membership.committed >= self._committed - lost or state.membership.number != self._number,
            "committed went from %d to %d, with %d steps lost",
            self._committed,
            state.membership.committed,
            lost,
        )
        self._committed, self._lost = state.membership.committed, state.membership.lost_steps
        if state.membership.number != self._number:
            self._number = state.membership.number
            if state.membership.generation is not None and state.membership.level == 2:
                self._check_formed(core)
        self.require(sum(isinstance(a, e.End) for a in actions) <= 1, "two ends at once")

    def _check_wall_time(self, core: Core) -> None:
        """Every second since the job's start is in one class."""
        found = wall_time.classes(core.state, core.now)
        wall_s = core.now - core.state.began_s
        self.require(
            abs(sum(found.values()) - wall_s) < 1e-3 and min(found.values(), default=0.0) >= 0.0,
            "the wall time is %.6f s, and the classes are %s",
            wall_s,
            found,
        )
        # At level 2 the core is told everything that it needs to explain all of it.
        if core.state.membership.counts_steps:
            self.require(TimeClass.UNEXPLAINED not in found, "nobody knows of a part of %s", found)
            self.require(
                TimeClass.RECOMPUTED not in found or core.state.membership.lost_steps > 0,
                "no step was lost, and %s were done again",
                found,
            )

    def _check_notices(self, actions: list[e.Action], core: Core) -> None:
        """What an agent was told last is what stands. A session that was never told anything knows of nothing."""
        known = core.state.membership.nodes
        for action in actions:
            match action:
                case e.Send(name, m.Notify(told)) if name in known:
                    self._notified[name] = known[name].session, tuple(n.number for n in told)
                case _:
                    pass
        recovered = self.cluster.service.crashes > 0
        for node in core.alive_nodes():
            session, numbers = self._notified.get(node.name, ("", ()))
            stands = tuple(n.number for n in notices.standing(core, node))
            if session == node.session or not recovered:
                numbers = numbers if session == node.session else ()
                self.require(numbers == stands, "%s knows %s of the notices %s", node.name, numbers, stands)

    def _check_watch(self, core: Core) -> None:
        """The heaps of deadlines say what a look at every node and worker says."""
        membership, timing = core.state.membership, core.timing
        workers = [w for w in membership.workers.values() if w.phase is not WorkerPhase.GONE]
        starting = [w for w in workers if w.phase in (WorkerPhase.STARTING, WorkerPhase.ATTACHED)]
        silent = [n.last_seen_s + timing.detection_s for n in membership.nodes.values() if n.alive]
        vanished = [w.vanished_s + timing.detection_s for w in workers if w.vanished_s is not None]
        recount = {
            Watched.SILENT: silent,
            Watched.VANISHED: vanished,
            Watched.NOT_READY: [w.awaited_s + timing.start_s for w in starting],
        }
        if core.mode.replaces_one:  # else nobody asks when workers should be ready, and an entry may go
            for kind, times in recount.items():
                self.require(
                    core.watch.next_s(kind) == min(times, default=None), "%s is not watched well", kind
                )

    def _check_action(self, action: e.Action, state: CoreState) -> None:
        spec = state.spec
        match action:
            case e.Send(node, m.Relay(name, m.JoinGeneration(generation=generation))):
                worker = state.membership.workers.get(name)
                self.require(
                    worker is not None and worker.phase is not WorkerPhase.GONE, "JoinGeneration to %s", name
                )
                self.require(generation == state.membership.generation, "%s is told an old generation", name)
                self.require(worker is not None and worker.node == node, "%s is not on %s", name, node)
            case e.ProvideNode():
                self._provided += 1
                wanted = state.wanted_nodes + spec.spares
                allowed = by_the_day(spec.max_restarts, max(wanted, spec.max_nodes + spec.spares))
                allowed += state.membership.unpaid
                self.require(
                    self._provided <= allowed + 8 * self.cluster.service.crashes,
                    "%d nodes were asked for, %d are allowed",
                    self._provided,
                    allowed,
                )
            case e.Record(kind=kind, fields=fields):
                msgspec.json.encode(fields)
                if kind == "started":
                    names = frozenset(str(w) for w in _listed(fields["workers"]))
                    self.cluster.attempts |= dict.fromkeys(names, names)
                    self.require(
                        state.membership.number <= spec.max_restarts + 1 + len(self.cluster.plan.changes),
                        "attempt %d of %d",
                        state.membership.number,
                        spec.max_restarts + 1,
                    )
                if kind == "stall-judged" and fields["collective"]:
                    self._check_named(_listed(fields["workers"]))
                if kind == "formed":
                    self._goes_on(state.membership.number, str(fields["source"]), fields["start"])
                if kind == "incident-resumed" and fields["fault"] is None:
                    self._check_stall(fields["id"], fields["stall_s"])
            case _:
                pass

    def _check_named(self, workers: list[object]) -> None:
        """Nobody is named by its collectives that waits in the one of all ranks."""
        self.named += 1
        for name in map(str, workers):
            worker = self.cluster.workers.get(name)
            self.require(worker is not None and not worker.waits, "%s waits, and is named", name)

    def _check_stall(self, number: object, stall_s: object) -> None:
        """Training cannot have stood still since before the last step that the core heard of."""
        assert isinstance(stall_s, float)
        since_s = self.cluster.clock.now - self._heard_s
        self.require(
            stall_s <= since_s + incidents.NEAR_S,
            "incident %s stalled for %g s, and a step was heard of %g s ago",
            number,
            stall_s,
            since_s,
        )

    def _goes_on(self, number: int, source: str, start: object) -> None:
        """A generation goes on from live state, or from an earlier step: then the later ones never happened."""
        assert isinstance(start, int)
        self._source, self._before = source, self.newest
        planned = self.cluster.plan.only_planned and self.formed
        self.require(
            not planned or source == "live", "what was planned takes training back to step %d", start
        )
        if source == "live":
            self.require(
                start >= self.newest, "step %d was committed, and it goes on from %d", self.newest, start
            )
        else:
            self._line = number
            self.newest = min(self.newest, start)
            if not self.cluster.plan.equal_starts:
                fresh = source == "fresh"
                kept = {} if fresh else {at: b for at, b in self._canon.items() if at[1] <= start}
                self._canon = kept
                self._lineage = number
        self._lines[number] = self._line

    def line_of(self, number: int) -> int:
        """The line of history that a generation is on: it is named after the first generation on it."""
        return self._lines[number]

    def canon_bits(self, step: int, shard_index: int) -> int | None:
        """A shard of the state after so many steps, as training went. None: it never came there."""
        if step == self.cluster.plan.durable_step and (shard_index, step) not in self._canon:
            return self.cluster.chain(step, shard_index)
        return self._canon.get((shard_index, step))

    def canon_state(self, step: int) -> tuple[int, ...] | None:
        """All shards of it."""
        shards = [self.canon_bits(step, p) for p in range(self.cluster.plan.shard_count)]
        known = tuple(bits for bits in shards if bits is not None)
        return known if len(known) == len(shards) else None

    def published_state(self, durable: Durable, shard_index: int) -> tuple[int, int]:
        """What a start reads from a tier."""
        step, bits = self.cluster.durables.get((durable.url, durable.step), (durable.step, None))
        if bits is None:
            self.fail("%s is not there, or torn", durable)
        return step, bits[shard_index]

    def restored(self, worker: Trainer, step: int, bits: int) -> None:
        """A worker has its state from snapshot memory or a tier: it is what was committed at that step."""
        assert worker.form is not None
        if worker.seen < self._lineage or self._condemned(worker.name):
            return
        start = worker.form.generation.start
        self.require(step == start, "%s restored step %d, not %d", worker.name, step, start)
        known = self.canon_bits(step, worker.shard_index)
        self.require(bits == known, "%s restored other bits of step %d", worker.name, step)

    def _check_formed(self, core: Core) -> None:
        """Who may be in, and from where they go on."""
        state, generation = core.state, core.state.membership.generation
        assert generation is not None
        if not self.formed:
            self.formed_s = self.cluster.clock.now
        self.formed += 1
        self.cluster.moment("formed")
        names = [x.worker for x in generation.members]
        places = [(x.node, x.slot) for x in generation.members]
        self.require(len(set(names)) == len(names), "a worker is in twice: %s", names)
        self.require(len(set(places)) == len(places), "a slot is in twice: %s", places)
        self.require([x.rank for x in generation.members] == list(range(len(names))), "ranks of %s", names)
        if generation.shard_count == 1:
            leaving = any(state.membership.nodes[x.node].leaving is not None for x in generation.members)
            most = max(1, state.target) + leaving
            self.require(
                max(1, state.minimum) <= len(names) <= most, "%d members are not allowed", len(names)
            )
        else:
            self._check_rows(state, generation)
        for member in generation.members:
            self.require(state.membership.nodes[member.node].alive, "%s is on a lost node", member.worker)
            self.require(
                state.membership.workers[member.worker].phase is WorkerPhase.MEMBER,
                "%s is no member",
                member.worker,
            )
        self._check_survivors(state, generation)
        self._check_donors(state, generation)
        self._check_places(state, generation)

    def _check_places(self, state: CoreState, generation: m.Generation) -> None:
        """Members of a place follow each other, and a lost one is replaced from as near as anybody was taken from."""
        known = state.membership.nodes
        paths = {x.worker: ("", *known[x.node].place, x.node) for x in generation.members}
        before, self._members = self._members, [(x.worker, paths[x.worker]) for x in generation.members]
        if not any(known[x.node].place for x in generation.members) or generation.shard_count > 1:
            return
        order = [paths[x.worker] for x in generation.members]
        stayed = {w for w, _ in before} & paths.keys()
        if len(before) != len(order) or not stayed:
            for level in range(1, max(map(len, order)) + 1):
                runs = [at for at, _ in itertools.groupby(p[:level] for p in order if known[p[-1]].place)]
                self.require(
                    len(runs) == len(set(runs)), "members of a place do not follow each other: %s", order
                )
            return
        holes = {rank: at for rank, (w, at) in enumerate(before) if w not in paths}
        came = [order[rank] for rank in holes]
        for level in range(2, max(map(len, came), default=0) + 1):
            free, there = (Counter(p[:level] for p in ps if len(p) > level) for ps in (holes.values(), came))
            near = sum(
                at[:level] == order[rank][:level] and len(at) > level < len(order[rank])
                for rank, at in holes.items()
            )
            self.require(near >= sum((free & there).values()), "%s took the ranks of %s", came, holes)

    def _check_survivors(self, state: CoreState, generation: m.Generation) -> None:
        """Every worker that lives and is reachable has left its generation, and no state of it is lost."""
        names = {x.worker for x in generation.members}
        for name, known in state.membership.workers.items():
            worker = self.cluster.find_trainer(name)
            if worker is None or known.phase is WorkerPhase.GONE or not worker.alive:
                continue
            if name not in names and worker.plane is not None and known.phase is WorkerPhase.PARKED:
                self.fail("%s survived and was left out of generation %d", name, generation.number)
            if worker.held is None or self._source != "live":
                continue
            holds = worker.held[0] + (
                1 if name in state.membership.assignments and state.membership.assignments[name].apply else 0
            )
            self.require(
                holds <= generation.start,
                "generation %d starts at %d, but %s holds %d",
                generation.number,
                generation.start,
                name,
                holds,
            )

    def _check_rows(self, state: CoreState, generation: m.Generation) -> None:
        """Replicas are complete, and everyone holds its own shard; what is left over of others goes on beside them."""
        size, members = generation.shard_count, generation.members
        self.require(generation.shape == self.cluster.plan.shape, "replicas of %s", generation.shape)
        strength = generation.strength
        self.require(state.needed <= strength <= state.target, "%d workers compute", strength)
        for member in members:
            place = divmod(member.rank, size) if member.rank < strength else (-1, member.shard_index)
            self.require((member.replica, member.shard_index) == place, "%s sits wrong", member)
            worker = self.cluster.find_trainer(member.worker)
            known = self._places.setdefault(member.worker, member.shard_index)
            self.require(known == member.shard_index, "%s had shard_index %d", member, known)
            if worker is not None:
                self.require(
                    worker.shard_index == member.shard_index, "%s holds shard %d", member, worker.shard_index
                )
                self.require(member.replica >= 0 or worker.plane is not None, "%s came to no replica", member)
        self.beside += len(members) - strength
        for replica, number in enumerate(generation.groups_connected_in):
            replica_members = [self.cluster.find_trainer(x.worker) for x in members if x.replica == replica]
            kept = {(w.groups_since, w.begun) for w in replica_members if w is not None and w.alive}
            whole = len(kept) <= 1 and all(begun >= 0 and since == number for since, begun in kept)
            self.require(number == generation.number or whole, "replica %d is not whole: %s", replica, kept)
            self.kept += number != generation.number
        columns = [[members[r] for r in generation.replica_group(p)] for p in range(size)]
        there = [sum(state.membership.nodes[x.node].leaving is None for x in column) for column in columns]
        least, most = min(there), min(map(len, columns))
        wanted, rows = state.target // size, generation.replicas
        self.require(min(least, wanted) <= rows <= min(most, wanted), "%d replicas, and %s stay", rows, there)
        if self._source != "live":
            self._check_lost(generation)

    def _check_lost(self, generation: m.Generation) -> None:
        """Training goes back only where a shard of the newest state is held by nobody."""
        workers = [self.cluster.find_trainer(x.worker) for x in generation.members]
        held = [(w.shard_index, *w.held, w.prepared) for w in workers if w is not None and w.held and w.plane]
        newest = max((step for _, step, *_ in held), default=0)
        there = {p for p, step, _, ready in held if step == newest or (step == newest - 1 and ready)}
        if newest and newest >= self._before:
            self.require(len(there) < generation.shard_count, "step %d is held complete and given up", newest)

    def _check_donors(self, state: CoreState, generation: m.Generation) -> None:
        forms = {
            name: queries.form(state, state.membership.workers[name]) for name in state.membership.assignments
        }
        for form in forms.values():
            if not form.restore:
                continue
            sources = (
                bool(form.donors),
                form.copy is not None,
                form.durable is not None,
                bool(form.shards),
            )
            place = generation.members[form.rank].shard_index
            self.require(
                form.copy is None or form.copy.key.rank == place, "rank %d restores %s", form.rank, form.copy
            )
            self.require(sum(sources) == 1, "the sources of rank %d are %s", form.rank, sources)
            self.require(
                form.copy is None or bool(form.holders), "nobody holds the copy of rank %d", form.rank
            )
            for rank in form.donors:
                donor = forms[generation.members[rank].worker]
                has = not donor.restore or donor.durable is not None
                self.require(donor.serve and has, "rank %d is no donor", rank)
                same = generation.members[rank].shard_index == place
                self.require(same, "rank %d is donor of another shard", rank)

    def recorded(self, record: e.Record) -> None:
        """An entry of the ledger that was really written."""
        self.records[record.kind] = self.records.get(record.kind, 0) + 1
        if record.kind == "yield":
            self.cluster.moment("yield")
        elif record.kind == "changed":
            same = record.fields["from_world"] == record.fields["to_world"] and not record.fields["newcomers"]
            self._idle_changes = self._idle_changes + 1 if same else 0  # the newcomer may have died
            self.require(self._idle_changes <= 3, "changes that change nothing: %s", record.fields)
        elif record.kind == "broke":
            self.cluster.moment("broke")
        self.cluster.log("ledger: %s %s", record.kind, record.fields)

    def deadline(self, due: float | None) -> None:
        """A Tick must change something, or the coordinator would spin."""
        now = self.cluster.clock.now
        self.require(due is None or due > now, "the next deadline (%s) is not after now (%s)", due, now)

    # ------------------------------------------------------------ workers

    def worker_started(self, agent: SimAgent, start: m.StartWorker) -> None:
        """A process became a worker."""
        self.require(start.worker not in self.cluster.workers, "%s started twice", start.worker)
        others = [w.name for w in agent.living() if w.slot == start.slot and not self._condemned(w.name)]
        self.require(not others, "%s and %s share a slot", start.worker, others)
        key = (agent.name, agent.session, start.slot)
        self._starts[key] = self._starts.get(key, 0) + 1
        spec = self.cluster.plan.spec
        extra = sum(n - 1 for n in self._starts.values())
        if self.formed == 0:
            self._early = extra  # all of them at once, for one restart of the budget
        # All may be lost together, for one of the budget, and each commit renews it.
        renewed = 1 + (self.newest if self.cluster.plan.level == 2 else 0)
        allowed = spec.max_restarts * spec.target * renewed + spec.target
        allowed += self._early if self.formed else 0
        allowed += len(self.cluster.plan.changes) * spec.target
        self.require(extra <= allowed, "%d workers were started again, %d may be", extra, allowed)

    def _condemned(self, name: str) -> bool:
        known = self._core.state.membership.workers.get(name) if self._core else None
        return known is None or known.phase is WorkerPhase.GONE or known.told_to_end

    def formed_worker(self, worker: Trainer, form: m.JoinGeneration) -> None:
        """A worker hears of its generation: what it is told must fit what it holds."""
        me, start = form.generation.members[form.rank], form.generation.start
        self.require(me.worker == worker.name, "%s was told the rank of %s", worker.name, me.worker)
        self.require(me.shard_index == worker.shard_index, "%s holds shard %d", me, worker.shard_index)
        held = worker.held[0] if worker.held else None
        if form.apply:
            self.require(
                worker.prepared and held == start - 1, "%s cannot apply step %d", worker.name, start - 1
            )
        elif not form.restore:
            fresh = worker.plane is None and start == 0
            self.require(
                held == start or (held is None and fresh),
                "%s holds %s and is to begin at %d",
                worker.name,
                held,
                start,
            )

    def rebuilds(self, worker: Trainer, shard_index: int) -> None:
        """Only who holds nothing is built anew."""
        idle = worker.plane is None and worker.phase is Phase.IDLE
        self.require(idle or self._condemned(worker.name), "%s is to be rebuilt", worker.name)
        self.require(0 <= shard_index < self.cluster.plan.shard_count, "shard_index %d", shard_index)

    def stopped_worker(self, worker: Trainer, stop: m.Stop) -> None:
        """One worker alone can save a state that it holds whole."""
        sharded = self.cluster.plan.shard_count > 1
        self.require(not (stop.save_to if sharded else stop.keep), "%s is told %s", worker.name, stop)

    def step_began(self, worker: Trainer) -> None:
        """All members begin a step with the same bits."""
        assert worker.held is not None
        step, bits = worker.held
        first = self._began.setdefault((worker.seen, step, worker.shard_index), bits)
        self.require(
            first == bits,
            "%s begins step %d of generation %d with other bits",
            worker.name,
            step,
            worker.seen,
        )

    def reduced(self, worker: Trainer, step: int, payloads: dict[str, Any]) -> frozenset[int]:
        """A reduction holds every micro-batch exactly once."""
        contents = sorted(v for share in payloads.values() for v in share)
        total = list(range(self.cluster.plan.micro_batches))
        self.require(contents == total, "step %d of generation %d sums %s", step, worker.seen, contents)
        return frozenset(contents)

    def committed(self, worker: Trainer) -> None:
        """A step counts on one worker: it is the same step everywhere, in a generation that may still commit."""
        assert worker.held is not None
        step, bits = worker.held
        self.cluster.log("%s commits step %d in generation %d", worker.name, step - 1, worker.seen)
        if worker.seen < self._number and not self._condemned(worker.name):
            self.fail("%s commits in generation %d while %d exists", worker.name, worker.seen, self._number)
        if worker.seen < self._lineage:
            return
        first = self._canon.setdefault((worker.shard_index, step), bits)
        self.require(first == bits, "%s has other bits after step %d", worker.name, step - 1)
        if self.cluster.plan.equal_starts:
            undisturbed = self.cluster.chain(step, worker.shard_index)
            self.require(bits == undisturbed, "step %d is not the undisturbed one", step - 1)
        if not self._condemned(worker.name):
            self.newest, self.newest_s = max(self.newest, step), self.cluster.clock.now

    def script_started(self, script: Script) -> None:
        """Level 0: no worker of an earlier attempt may live on, but on nodes that were lost."""
        if self._condemned(script.name):
            return  # its node was lost while the order was on the way
        for other in self.cluster.workers.values():
            if other.alive and not self._condemned(other.name) and other.env != script.env:
                same = other.env["HOLDFAST_GENERATION"] == script.env["HOLDFAST_GENERATION"]
                self.require(same, "%s runs with %s of an earlier attempt", script.name, other.name)
                self.require(other.env["RANK"] != script.env["RANK"], "two workers have one rank")
                for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                    self.require(other.env[name] == script.env[name], "%s differs", name)

    def last_state(self) -> CoreState:
        """The state of the newest coordinator process."""
        assert self._core is not None
        return self._core.state

    # ------------------------------------------------------------ life

    def alive(self) -> None:
        """After the faults training goes on."""
        plan = self.cluster.plan
        over_s = self.cluster.began_s + plan.faults_until_s
        since = max(self.newest_s, self.formed_s, over_s)
        bound_s = PROGRESS_BOUND_S + 4 * plan.aside_s
        self._late = self._late or any(w.running_late for w in self.cluster.workers.values())
        if self._late:
            bound_s += plan.spec.timing.start_s
        state = self.last_state()
        if plan.check_silent:
            bound_s += CHECKS_S
        if plan.repair_silent:
            bound_s += plan.spec.timing.start_s  # for the answer of an agent that gives none
        if state.membership.phase is JobPhase.GATHERING:
            bound_s += plan.spec.timing.wait_s / 2  # a node that was on its way may never come
            self._gathered_s = self.cluster.clock.now
        else:
            since = max(since, self._gathered_s)
        if state.membership.stop_reason is not None:
            return  # no more steps: the end has deadlines of its own
        if plan.level == 2 and self.cluster.clock.now - since > bound_s:
            self.fail("no step was committed for %g s after the last fault", bound_s)

    def final(self) -> None:
        """The job has ended: as it should, with everything accounted for."""
        plan, core = self.cluster.plan, self._core
        assert core is not None
        state = core.state
        self.require(state.membership.phase is JobPhase.ENDED, "End in phase %s", state.membership.phase)
        self.require(
            state.membership.outcome in self._outcomes(state),
            "it ended as %s: %s",
            state.membership.outcome,
            state.membership.stop_reason,
        )
        if state.membership.outcome == "finished" and plan.level == 2:
            self._check_finished(state)
        self.saved.final(state)
        if state.membership.outcome == "stopped" and plan.level == 2:
            self._check_stopped(state)
        self.require([i.id for i in state.incidents] == list(range(1, len(state.incidents) + 1)), "ids")
        for incident in state.incidents:
            told = incidents.shown(state, incident)
            for name, value in told.items():
                self.require(
                    not name.endswith("_s") or value is None or float(str(value)) >= 0,
                    "%s is %s",
                    name,
                    value,
                )
        self._check_changes(state)
        most = 2 * nodes.KEPT_GONE + 4 * plan.spec.target
        self.require(
            len(state.membership.workers) <= most, "%d workers are kept", len(state.membership.workers)
        )

    def _check_changes(self, state: CoreState) -> None:
        """Who was to leave has left, if the job could go on without; and where nothing broke nothing was lost."""
        plan, now = self.cluster.plan, self.cluster.clock.now
        staying = sum(n.alive and n.leaving is None for n in state.membership.nodes.values())
        for node in state.membership.nodes.values():
            late = (
                node.leaving is not None
                and now - node.leaves_since_s > plan.spec.timing.form_s + PROGRESS_BOUND_S
            )
            enough = staying >= max(plan.spec.min_nodes, state.least_nodes)
            if node.alive and late and enough and not self._late:
                self.fail(
                    "%s is still there %g s after it was to leave", node.name, now - node.leaves_since_s
                )
        self.require(
            not plan.only_planned or not state.membership.lost_steps,
            "%d steps are lost",
            state.membership.lost_steps,
        )
        sudden = {"preempt-soon", "preempt"} & {kind for _, kind in plan.changes}
        if plan.only_changes and not plan.asides and plan.compile_s < 5 and plan.level == 2:
            self.require(
                state.membership.lost_steps == 0 or bool(sudden),
                "%d steps are lost",
                state.membership.lost_steps,
            )
            if not sudden:
                self.require(
                    state.membership.restarts_used == 0,
                    "%d restarts were counted",
                    state.membership.restarts_used,
                )
                causes = {
                    str(i.cause) for i in state.incidents
                }  # the last word of a vote may come after its sender left
                self.require(causes <= {"a collective failed"}, "incidents: %s", causes)
        for change in state.membership.changes:
            self.require(change.stall_s is None or change.stall_s >= 0, "change %d has no stall", change.id)

    def _outcomes(self, state: CoreState) -> set[str]:
        plan, reason = self.cluster.plan, state.membership.stop_reason or ""
        taken = state.membership.stop_cause in (NoticeCause.PREEMPTION, NoticeCause.RESIZE)
        asked = plan.stop_after_s is not None or taken
        if plan.bug == "start":
            return {"failed", "stopped"} if asked else {"failed"}
        allowed = {"finished"}
        if asked:
            allowed.add("stopped")
        if plan.bug == "step" and plan.level == 2:
            allowed.add("failed")
            if self.newest > plan.bug_step >= (plan.durable_step or 0):
                self.fail("step %d cannot be committed", plan.bug_step)
        if plan.budget_is_small and any(x in reason for x in ("budget", "restarts", "can be requested")):
            allowed.add("failed")
        same = "same error" in reason or "ended a worker in" in reason
        if same and len(self.cluster.faults.killed) >= 3:
            allowed.add("failed")
        if same and self.cluster.faults.made_bad and plan.spec.min_nodes == 1:
            allowed.add("failed")  # on one node alone a bad machine and a bad script look the same
        if "for the same reason" in reason and not state.membership.number:
            allowed.add("failed")  # as many as it needs are refused alike, by chance
        return allowed

    def _check_finished(self, state: CoreState) -> None:
        until = self.cluster.until
        self.require(
            state.membership.committed == until,
            "finished at step %d of %d",
            state.membership.committed,
            until,
        )
        expected = [f"{b:x}" if b is not None else None for b in self._last_bits(until)]
        ended = [w for w in state.membership.workers.values() if w.digest is not None]
        self.require(bool(ended), "nobody finished")
        for known in ended:
            digest = expected[known.shard_index]
            self.require(known.digest == digest, "%s ended with %s, not %s", known.name, known.digest, digest)
        plan, durable = self.cluster.plan, state.storage.durable
        undisturbed = self.cluster.clock.now - self.cluster.faults.last_s > 30.0
        if (
            undisturbed
            and plan.spec.saving.tiers
            and not (plan.hold_fails or self.records.get("tier-failed"))
            and not (plan.shard_count > 1 and plan.no_memory)
        ):
            there = durable is not None and durable.step == until
            self.require(there, "finished at step %d, and %s is saved", until, durable)
        plan_allows_smaller = self.cluster.plan.budget_is_small
        if self.cluster.plan.steps == FOREVER:
            for incident in state.incidents:
                late = incident.detected_at_s > self.cluster.whole_s
                late = late or plan_allows_smaller
                late = late or incident.quiet  # it may be decided at any time, and wait for another node
                self.require(
                    late or not incident.open, "incident %d (%s) is still open", incident.id, incident.cause
                )

    def _last_bits(self, step: int) -> list[int | None]:
        return [self._canon.get((p, step)) for p in range(self.cluster.plan.shard_count)]

    def _check_stopped(self, state: CoreState) -> None:
        plan = self.cluster.plan
        quiet = self.cluster.clock.now - self.cluster.faults.last_s > 15.0
        if plan.shard_count > 1 and (
            plan.hold_fails or plan.no_memory or plan.tier_fails or not state.membership.last_step
        ):
            return
        if quiet and self.newest > 0 and self.cluster.plan.spec.saving.tiers:
            durable = state.storage.durable
            self.require(
                durable is not None and durable.step == self.newest, "saved %s, not %d", durable, self.newest
            )


def brief(value: Any) -> Any:
    """Short enough for one line of a trace."""
    if not isinstance(value, msgspec.Struct):
        return value
    match value:
        case m.StartWorker(worker=worker):
            return f"StartWorker({worker})"
        case m.WorkerView():
            page = value.page
            state = f"g{page.generation} c{page.committed} {Phase(page.phase).name} idle {value.idle_s:.1f}"
            return f"[{value.worker} {value.process} formed {value.formed} {state} median {value.median_s}]"
        case m.Generation(number=number, members=members, start=start):
            return f"g{number} from {start}: {' '.join(x.worker for x in members)}"
        case _:
            parts = []
            for name in value.__struct_fields__:
                part = getattr(value, name)
                if isinstance(part, tuple):
                    part = tuple(map(brief, part))
                if part not in (None, "", (), 0.0, False) or name == "committed":
                    parts.append(f"{name}={brief(part)}")
            return f"{type(value).__name__}({', '.join(parts)})"


def _is_heartbeat(event: e.Event) -> bool:
    return isinstance(event, e.NodeSays) and isinstance(event.message, m.Heartbeat)


def _is_progress(event: e.Event) -> bool:
    return isinstance(event, e.WorkersSay) and any(isinstance(r.message, m.Progress) for r in event.reports)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []
