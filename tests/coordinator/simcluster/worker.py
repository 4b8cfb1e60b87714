"""Simulated workers. At level 2: the life of `hf.Run` in states and delays; at level 0: a script that ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.protocol import messages as m
from holdfast.protocol.phases import GroupReading, PageReading, Phase
from holdfast.protocol.snapshots import DurableTier
from holdfast.protocol.snapshots import Key as SnapshotKey
from holdfast.train import place

if TYPE_CHECKING:
    from simcluster.agent import SimAgent
    from simcluster.plane import Key, Plane

SIGKILL = -9
BLOCKED = frozenset({Phase.JOIN, Phase.TRANSFER, Phase.REDUCE, Phase.VOTE})
"""Where a Break frees the worker at once."""


class SimWorker:
    """A process that runs, or does not run any more; what both levels have in common."""

    def __init__(self, agent: SimAgent, start: m.StartWorker) -> None:
        self.agent = agent
        self.cluster = agent.cluster
        self.name, self.slot, self.env = start.worker, start.slot, start.env
        self.alive = True
        self.code: int | None = None
        self.killed = False
        self.frozen = False
        self.stopped = False
        self.hangs = False
        self.waits = False
        self.ticket = 0
        self.own_s = 0.0
        self.trouble: m.WorkerMessage | None = None
        self.trained = False
        self.phase = Phase.STARTUP
        self.moved_s = self.cluster.clock.now
        self._heard_s = 0.0

    @property
    def running(self) -> bool:
        """The process executes."""
        return self.alive and not self.frozen

    @property
    def running_late(self) -> bool:
        """It stands still in what might be its first step, or work of the script's: that has the time of a start."""
        return False

    @property
    def process(self) -> str:
        """The letter in /proc/PID/stat."""
        return "X" if not self.alive else "T" if self.stopped else "S"

    def page(self) -> PageReading:
        """What the progress record says."""
        return PageReading(phase=int(self.phase))

    def groups(self) -> tuple[GroupReading, ...] | None:
        """What a script answers when it is asked for its collectives."""
        return None

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Goes on after a while, unless it was interrupted, frozen or killed."""
        self.cluster.clock.after(delay_s, self._go_on, self.ticket, call, args)

    def _go_on(self, ticket: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.running and ticket == self.ticket:
            call(*args)

    def hear(self, message: m.ToWorker) -> None:
        """A message of the agent, in order."""
        clock = self.cluster.clock
        self._heard_s = max(self._heard_s, clock.now + self.cluster.rng.uniform(0.0, 0.002))
        clock.at(self._heard_s, self._hear, message)

    def _hear(self, message: m.ToWorker) -> None:
        if self.running:
            self.obey(message)

    def obey(self, message: m.ToWorker) -> None:
        """Acts on a message."""

    def freeze(self, stopped: bool) -> None:
        """SIGSTOP, or a deadlock: it never moves again."""
        self.frozen, self.stopped = True, stopped

    def die(self, code: int) -> None:
        """The process ends."""
        if self.alive:
            self.alive, self.code = False, code
            self.cluster.log("%s dies with %d", self.name, code)
            self.left()
            self.agent.exited(self, code)

    def end(self) -> None:
        """Its agent kills it."""
        self.killed = self.alive
        self.die(SIGKILL)

    def left(self) -> None:
        """Whatever peers see of its end."""

    def fail_to_start(self) -> None:
        """User code raises before anything else happened."""
        error = self.cluster.start_error(self)
        self.agent.relay(
            self,
            m.Failed(
                generation=0,
                step=None,
                phase=Phase.STARTUP,
                error="CudaError",
                message=error,
                traceback=f"CudaError: {error}",
            ),
        )
        self.die(1)


class Trainer(SimWorker):
    """A worker at level 2. `held` is (committed steps, bits of the state) or None; `init` the state as built."""

    def __init__(self, agent: SimAgent, start: m.StartWorker) -> None:
        super().__init__(agent, start)
        rng, plan = self.cluster.rng, self.cluster.plan
        self.shard_index = int(self.env[m.SHARD_INDEX_VARIABLE]) % plan.shard_count
        self.init = self._build()
        self.held: tuple[int, int] | None = None
        self.prepared = False
        self.seen = 0
        self.form: m.JoinGeneration | None = None
        self.plane: Plane | None = None
        self.waits_for: Key | None = None
        self.deaf_in: str | None = None
        self.collectives = 0
        self.yields_in = 0
        self.line = 0
        self.wanted = False
        self.contents: frozenset[int] = frozenset()
        self.agreed = False
        self.broken = False
        self.hurt = False
        self.leaving = self.kept = False
        self.restore_s: float | None = None
        self.armed: dict[str, int | None] = {}
        self.orders: list[m.ToWorker] = []
        self.groups_since, self.begun = 0, -1  # when its replica was connected; how far its collectives are
        self.more = 0  # calls of another group
        self.halts = False
        self.later(rng.uniform(0.2, 1.0) * plan.start_s, self._attach)

    @property
    def running_late(self) -> bool:
        stuck = (self.frozen and not self.stopped) or (self.hurt and not self.cluster.plan.repeats)
        return self.alive and stuck and (not self.trained or self.phase is Phase.ASIDE)

    # ------------------------------------------------------------ start

    def _attach(self) -> None:
        if self.cluster.start_error(self):
            self.fail_to_start()
            return
        self.say(m.Attached())
        self.later(self.cluster.rng.uniform(0.05, 0.5) * self.cluster.plan.start_s, self._get_ready)

    def _build(self) -> int:
        """The model, or this worker's shard of it."""
        root = 1 if self.cluster.plan.equal_starts else self.cluster.new_root()
        return self.cluster.root(root, self.shard_index)

    def _get_ready(self) -> None:
        self.enter(Phase.IDLE)
        shape = self.cluster.plan.shape
        self.say(
            m.Ready(
                digest=f"{self.init:x}",
                host=self.agent.host,
                vote_port=1,
                data_port=2,
                micro_batches=self.cluster.plan.micro_batches if self.cluster.plan.tells_micro_batches else 0,
                shape=shape,
                shard_index=self.shard_index,
            )
        )
        self.cluster.moment("ready", self)

    def _rebuild(self, shard_index: int) -> None:
        """`main` is run again: what came meanwhile is looked at when it is ready."""
        self.cluster.checks.rebuilds(self, shard_index)
        self.cluster.moment("rebuilds", self)
        if not self.running:
            return
        self.ticket += 1
        self.shard_index, self.phase = shard_index, Phase.STARTUP
        self.init = self._build()
        self.later(self.cluster.rng.uniform(0.05, 0.5) * self.cluster.plan.start_s, self._rebuilt)

    def _rebuilt(self) -> None:
        self._get_ready()
        self.cluster.moment("rebuilt", self)
        orders, self.orders = self.orders[-1:], []
        for order in orders:
            self.obey(order)

    def say(self, message: m.WorkerMessage) -> None:
        """Tells the agent, which passes it on."""
        self.agent.relay(self, message)

    def enter(self, phase: Phase) -> None:
        """Writes the page."""
        self.phase, self.moved_s = phase, self.cluster.clock.now

    def left(self) -> None:
        if self.plane is not None:
            self.plane.gone(self)

    def page(self) -> PageReading:
        return PageReading(
            generation=self.seen,
            committed=self.held[0] if self.held else 0,
            phase=int(self.phase),
            collectives=self.collectives,
        )

    # ------------------------------------------------------------ orders

    def obey(self, message: m.ToWorker) -> None:
        if self.phase is Phase.STARTUP and isinstance(message, m.JoinGeneration | m.Stop | m.Rebuild):
            self.orders.append(message)  # only the newest is looked at
            return
        match message:
            case m.JoinGeneration():
                self._form(message)
            case m.Rebuild(shard_index):
                self._rebuild(shard_index)
            case m.Break(number, _, halt):
                if number == self.seen and self.phase not in (Phase.PARKED, Phase.IDLE, Phase.DONE):
                    self._halt() if halt and not self.broken else self._break()
            case m.RunTo(number):
                if number == self.seen and self.halts:
                    self.later(self.cluster.rng.uniform(0.0, self.cluster.plan.step_s), self._run_to, message)
            case m.EndAtCommit(number):
                self.yields_in = max(self.yields_in, number)
            case m.Stop():
                self._stop(message)
            case _:
                raise AssertionError(f"no rule for {message}")

    def _form(self, form: m.JoinGeneration) -> None:
        generation = form.generation
        if generation.number <= self.seen or self.leaving:
            return
        self.cluster.checks.formed_worker(self, form)
        self.ticket += 1
        self.seen, self.form, self.waits_for = generation.number, form, None
        self.broken = self.hurt = self.agreed = self.wanted = self.halts = False
        if self._connects_groups:
            self.begun = -1
        self.line = self.cluster.checks.line_of(generation.number)
        self.deaf_in = None
        if form.apply:
            self._apply()
        self.prepared = False
        self.plane = self.cluster.plane(generation)
        self.plane.enter(self)
        if form.restore:
            self.held = None
            self.enter(Phase.TRANSFER)
            self.cluster.moment("transfer", self)
            self._fetch()
        else:
            if self.held is None:
                self.held = (0, self.init)
            self._connect(None)

    def _apply(self) -> None:
        assert self.held is not None
        step, bits = self.held
        self.prepared = False
        self.held = (step + 1, self.cluster.next_bits(step, bits, self.contents, self.line))
        self.cluster.checks.committed(self)

    def _halt(self) -> None:
        """Its replica is intact: it begins no further collective of it, and hears where to leave the step."""
        if self.begun < 0 or self.hurt or self.phase not in (*BLOCKED, Phase.FORWARD):
            self._break()
            return
        self.broken = self.halts = True
        self.ticket += 1
        self.waits_for = None
        self.say(m.Halted(self.seen, self.counts))

    @property
    def counts(self) -> dict[str, int]:
        return {"row": self.begun} | ({"more": self.more} if self.more else {})

    def _run_to(self, order: m.RunTo) -> None:
        """All of its replica come to the furthest calls, unless the step is over for this one."""
        if order.leave:
            self._park(whole=order.begun == self.counts, agreement=order.agreement)
            return
        behind = order.begun["row"] > self.begun
        if behind and self.phase is not Phase.FORWARD:
            self._break()
            return
        self.begun, self.more = order.begun["row"], max(self.more, order.begun.get("more", 0))
        if behind and self.cluster.rng.random() < 0.3:
            # A call of another group is on its way there, which others have not begun.
            self.more += 1
            self.say(m.Halted(self.seen, self.counts))
            return
        self.say(m.Halted(self.seen, self.counts, order.agreement))

    def _break(self) -> None:
        """The control thread frees the main thread from a collective; elsewhere it looks by itself."""
        self.broken = True
        if self.phase in (Phase.UPDATE, Phase.ASIDE) or self.hurt:
            if self.hurt:
                self._park()
            return
        busy_s = self.cluster.plan.step_s + (0.0 if self.trained else self.cluster.plan.compile_s)
        delay = 0.0 if self.phase in BLOCKED else self.cluster.rng.uniform(0.0, busy_s)
        self.ticket += 1
        self.waits_for = None
        self.later(delay, self._park)

    def _part(self, message: m.WorkerMessage) -> None:
        """Cannot go on in this generation: says why, and parks when the coordinator has broken it."""
        self.ticket += 1
        self.waits_for = None
        self.say(message)
        self.hurt, self.trouble = True, message
        if self.broken:
            self._park()
        elif self.cluster.plan.parks_itself:
            self.later(self.cluster.rng.uniform(0.0, 0.01), self._park)

    def _park(self, whole: bool = False, agreement: int = 0) -> None:
        """whole: the groups of its replica are. agreement: where it left them."""
        self.halts = False
        self.begun = self.begun if whole else -1
        self.ticket += 1
        self.waits_for = None
        self.hurt, self.trouble = False, None
        if self.plane is not None:
            self.plane.gone(self)
        self.enter(Phase.PARKED)
        held = self.held[0] if self.held else None
        self.say(
            m.Parked(
                generation=self.seen,
                committed=held,
                prepared=self.prepared,
                agreement=agreement if self.begun >= 0 else -1,
            )
        )
        self.cluster.moment("parked", self)

    def _stop(self, stop: m.Stop) -> None:
        if self.leaving or self.phase not in (Phase.PARKED, Phase.IDLE):
            return
        self.leaving = True
        self.ticket += 1
        if stop.apply and self.prepared:
            self._apply()
        self.cluster.checks.stopped_worker(self, stop)
        if stop.keep and self.held is not None and self.held[0]:
            self.cluster.moment("stopping", self)
            self.kept = self.cluster.plan.spec.saving.tiers != () and self.agent.memory.take_last(
                self._snapshot_key(self.held[0]), self.held[1]
            )
        if stop.save_to is not None and self.held is not None:
            self.cluster.moment("stopping", self)
            self.later(self.cluster.rng.uniform(0.05, 1.5), self._saved, stop.save_to)
        else:
            self._finish(stopped=True)

    def _saved(self, tier: DurableTier) -> None:
        assert self.held is not None
        self.cluster.durables[(tier.url, self.held[0])] = (self.held[0], (self.held[1],))
        self.cluster.moment("saved", self)
        self.say(m.Saved(self.held[0], tier.url))
        self._finish(stopped=True)

    def _finish(self, stopped: bool = False) -> None:
        self.ticket += 1
        self.leaving = True
        self.enter(Phase.DONE)
        if self.held is not None:
            kept = self.kept or (not stopped and self._save_last(*self.held))
            self.say(
                m.Done(
                    committed=self.held[0],
                    params_xxh3=f"{self.held[1]:x}",
                    loss=None,
                    stopped=stopped,
                    held=kept,
                )
            )
        self.cluster.moment("done", self)
        self.later(self.cluster.rng.uniform(0.0, 0.5), self.die, 0)

    def _save_last(self, step: int, bits: int) -> bool:
        """Into the node's memory; rank 0 itself writes to a tier where there is no room in it."""
        form, tiers = self.form, self.cluster.plan.spec.saving.tiers
        if form is None or not tiers:
            return False
        kept = form.saves and self.agent.memory.take_last(self._snapshot_key(step), bits)
        if not kept and not form.rank and self.cluster.plan.shard_count == 1:
            self.cluster.durables[(tiers[0].url, step)] = (step, (bits,))
            self.say(m.Saved(step, tiers[0].url))
        return kept

    def _snapshot_key(self, step: int) -> SnapshotKey:
        return SnapshotKey(step, self.seen, self.shard_index, self.cluster.plan.shard_count)

    # ------------------------------------------------------------ a generation

    def _fetch(self) -> None:
        """The state comes before the connections: a donor serves from the moment it heard of the generation."""
        assert self.form is not None
        rng, start = self.cluster.rng, self.form.generation.start
        if self.form.copy is not None or self.form.durable is not None:
            self.later(rng.uniform(0.01, 0.5), self._load_saved, self.form)
            return
        assert self.plane is not None
        members = self.form.generation.members
        names = [members[rank].worker for rank in self.form.donors]
        if any(self.plane.donor(name, start) for name in names):
            self.later(rng.uniform(0.01, 0.5), self._fetch_ends, names)
        elif all(self.plane.never_serves(name) for name in names):
            self._part(m.CollectiveError(self.seen, -1, "no donor could give the state"))
        else:
            self.later(0.05, self._fetch)

    def _load_saved(self, form: m.JoinGeneration) -> None:
        """From snapshot memory, or from a durable tier."""
        if form.copy is not None:
            step, bits = form.copy.key.step, self.cluster.read_memory(self.agent, form.copy, form.holders)
            if bits is None:
                self._part(m.CollectiveError(self.seen, -1, "nobody has the snapshot whole"))
                return
        else:
            assert form.durable is not None
            step, bits = self.cluster.checks.published_state(form.durable, self.shard_index)
        self.cluster.checks.restored(self, step, bits)
        self._fetched((step, bits))

    def _fetch_ends(self, names: list[str]) -> None:
        assert self.form is not None
        assert self.plane is not None
        start = self.form.generation.start
        donor = next((d for n in names if (d := self.plane.donor(n, start)) is not None), None)
        if donor is not None and donor.held is not None:
            self._fetched(donor.held)
        else:
            self._part(m.CollectiveError(self.seen, -1, "the donor closed the connection"))

    def _fetched(self, state: tuple[int, int]) -> None:
        self.held = state
        self._connect(0.1)

    def _connect(self, restore_s: float | None) -> None:
        assert self.plane is not None
        self.restore_s = restore_s
        self.enter(Phase.JOIN)
        self.plane.arrive(("join", 0, 0), self, None)

    def closed(self, key: Key, payloads: dict[str, Any]) -> None:
        """A collective closed for this worker."""
        kind, step, _ = key
        if kind == "join":
            self._connected()
            self.say(m.Joined(self.seen, 0.01, self.restore_s))
            self.cluster.moment("joined", self)
            assert self.held is not None
            if self.held[0] >= self.cluster.until:
                self._finish()
            else:
                self._begin_step()
        elif kind == "row":
            shares = [set(share) for share in payloads.values()]
            self._reduce(step, sorted(set().union(*shares)))
        elif kind == "reduce":
            self.contents = self.cluster.checks.reduced(self, step, payloads)
            self._reduced(step)
        else:
            self.agreed = any(payloads.values())
            every = self.cluster.plan.snapshot_every
            self.wanted = every > 0 and (step + 1) % every == 0
            self.cluster.moment("voted", self)
            self.enter(Phase.UPDATE)
            self.later(self.cluster.rng.uniform(0.0, 0.01), self._update)

    def _connected(self) -> None:
        if self._connects_groups:
            self.groups_since, self.begun, self.more = self.seen, -1 if self.beside else 0, 0

    @property
    def _connects_groups(self) -> bool:
        """Not so where its replica goes on with the groups that it has."""
        assert self.form is not None
        generation, replica = self.form.generation, self.form.generation.members[self.form.rank].replica
        return (
            replica < 0
            or not generation.groups_connected_in
            or generation.groups_connected_in[replica] == generation.number
        )

    def collective_failed(self, key: Key) -> None:
        """A collective raised: the worker says so."""
        self._part(m.CollectiveError(self.seen, key[1], "Connection closed by peer"))

    def _begin_step(self) -> None:
        assert self.held is not None
        self.collectives = 0
        self.cluster.checks.step_began(self)
        self._save()
        self.enter(Phase.FORWARD)
        if self.beside:
            self.own_s = 0.0
            self.later(0.0, self._computed)
            return
        compile_s = 0.0 if self.trained else self.cluster.rng.uniform(0.0, 1.0) * self.cluster.plan.compile_s
        self.own_s = compile_s + self.cluster.rng.uniform(0.5, 1.5) * self.cluster.plan.step_s
        self.later(self.own_s, self._computed)

    def _save(self) -> None:
        """The state is copied into the node's memory while this step computes."""
        assert self.held is not None
        if self.wanted and self.form is not None and self.form.saves:
            self.agent.memory.take(self, self._snapshot_key(self.held[0]), self.held[1])
        self.wanted = False

    def _fires(self, fault: str, step: int) -> bool:
        if fault not in self.armed:
            return False
        at = self.armed[fault]
        if at is not None and at != step:
            return False
        if fault != "raise-again":
            del self.armed[fault]
        return True

    def _computed(self) -> None:
        assert self.held is not None
        assert self.plane is not None
        assert self.form is not None
        step = self.held[0]
        if self._fires("hang", step):
            self.freeze(stopped=False)
            return
        for fault in ("raise", "raise-again"):
            if self._fires(fault, step):
                self.armed = {k: step if k == "raise-again" else v for k, v in self.armed.items()}
                self._raise(step, Phase.FORWARD, "ValueError", self.name)
                return
        if self.cluster.plan.bug == "step" and step == self.cluster.plan.bug_step:
            self._raise(step, Phase.FORWARD, "ValueError", "train.py:7")
            return
        if self._fires("deaf", step):
            self.deaf_in = "reduce"
        self.enter(Phase.REDUCE)
        self.collectives = 1
        generation, rank, total = self.form.generation, self.form.rank, self.cluster.plan.micro_batches
        if self.cluster.plan.shard_count == 1:
            self._reduce(step, range(rank, total, len(generation.members)))
        elif self.beside:
            self._reduce(step, ())
        else:
            share = place.share_of(total, generation, rank).micro_batches
            self.begun += 1
            self.plane.arrive(("row", step, generation.members[rank].replica), self, share)

    def _reduce(self, step: int, share: Sequence[int]) -> None:
        """The sum over the replicas, shard by shard."""
        assert self.plane is not None
        self.plane.arrive(("reduce", step, self.shard_index), self, share)

    @property
    def beside(self) -> bool:
        """Its replica is not intact: it makes every update and computes nothing."""
        return self.form is not None and self.form.generation.members[self.form.rank].replica < 0

    def _reduced(self, step: int) -> None:
        assert self.plane is not None
        if self.cluster.faults.nan_at(step, self.seen):
            self._raise(step, Phase.UPDATE, "NonFiniteGradient", "loss")
            return
        self.prepared = True
        self.cluster.moment("prepared", self)
        if not self.running:
            return
        self.enter(Phase.VOTE)
        self.collectives = 2
        self.plane.arrive(("vote", step, 0), self, self.yields_in == self.seen)

    def _raise(self, step: int, phase: Phase, error: str, where: str) -> None:
        self._part(
            m.Failed(
                generation=self.seen,
                step=step,
                phase=int(phase),
                error=error,
                message="simulated",
                traceback=f"{error}: simulated",
                where=where,
            )
        )

    def _update(self) -> None:
        assert self.held is not None
        step, bits = self.held
        self.prepared = False
        if self._fires("torn", step):
            self.held = None
            self._raise(step, Phase.UPDATE, "RuntimeError", f"torn:{self.name}")
            return
        self.held = (step + 1, self.cluster.next_bits(step, bits, self.contents, self.line))
        self.cluster.checks.committed(self)
        self.enter(Phase.COMMIT)
        self.trained = True
        self.say(m.Progress(generation=self.seen, committed=step + 1, median_s=self.cluster.plan.step_s))
        if self.agreed or self.broken:
            self._park()
        elif step + 1 >= self.cluster.until:
            self._finish()
        elif self.cluster.plan.asides and self.cluster.rng.random() < self.cluster.plan.asides:
            self.enter(Phase.ASIDE)
            self.say(m.OffStep(True))
            self.later(self.cluster.rng.uniform(0.1, 1.0) * self.cluster.plan.aside_s, self._come_back)
        else:
            self._begin_step()

    def _come_back(self) -> None:
        self.say(m.OffStep(False))
        self.enter(Phase.COMMIT)
        if self.broken:
            self._park()
        else:
            self._begin_step()


class Script(SimWorker):
    """A worker at level 0: it computes until its time is up; when a peer dies it raises or blocks for ever."""

    def __init__(self, agent: SimAgent, start: m.StartWorker) -> None:
        super().__init__(agent, start)
        plan, generation = self.cluster.plan, int(self.env["HOLDFAST_GENERATION"])
        self.hangs = generation <= plan.hanging_starts
        # All ranks of a start draw the same one.
        self._world, drawn = int(self.env["WORLD_SIZE"]), random.Random(f"{plan.seed}/{generation}")
        self.outside = self.hangs and drawn.randrange(self._world) == int(self.env["RANK"])
        self.cluster.checks.script_started(self)
        self.later(self.cluster.rng.uniform(0.2, 1.0) * self.cluster.plan.start_s, self._work)

    def _work(self) -> None:
        if self.cluster.start_error(self):
            self.fail_to_start()
            return
        self.phase = Phase.FORWARD
        if not self.hangs:
            self.later(self.cluster.rng.uniform(1.0, 1.2) * self.cluster.plan.script_s, self._end)
            return
        self.moved_s = self.cluster.clock.now
        if not self.outside:
            self.later(self.cluster.rng.uniform(0.0, 2.0), self._wait)

    def _wait(self) -> None:
        self.waits = True

    def groups(self) -> tuple[GroupReading, ...] | None:
        """See SimWorker: one group of all ranks."""
        if not self.hangs or not self.running:
            return None
        return (
            GroupReading(
                group="0",
                label="all",
                size=self._world,
                entered=20 + self.waits,
                operation="x",
                waits=self.waits,
            ),
        )

    def _end(self) -> None:
        if all(w.alive or w.code == 0 for w in self.cluster.peers(self)):
            self.die(0)

    def left(self) -> None:
        if self.code == 0:
            return
        for peer in self.cluster.peers(self):
            if peer.running and self.cluster.rng.random() < 0.5:
                peer.later(self.cluster.rng.uniform(0.02, 0.5), peer.crash, "DistBackendError")

    def crash(self, error: str) -> None:
        """User code raises."""
        self.agent.relay(
            self,
            m.Failed(
                generation=0,
                step=None,
                phase=Phase.FORWARD,
                error=error,
                message="simulated",
                traceback=f"{error}: simulated",
            ),
        )
        self.die(1)
