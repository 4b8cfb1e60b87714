"""Generations of the membership, and planned changes of it."""

from __future__ import annotations

from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.units import level, plural, seconds


class Level(LedgerEvent, frozen=True, kw_only=True):
    """The script called `holdfast.start`: the job goes on at this level."""

    ROUTINE = True

    level: int
    """2."""

    def sentence(self) -> str:
        return f"the script called holdfast.start: the job continues at level {level(self.level)}"


class Waiting(LedgerEvent, frozen=True, kw_only=True):
    """There are too few workers to go on."""

    workers: int
    """Workers that are there."""
    target: int
    """Workers at full strength."""

    def sentence(self) -> str:
        return f"waiting for nodes: {self.workers} of {plural(self.target, 'worker')}"


class Started(LedgerEvent, frozen=True, kw_only=True):
    """At level 0: all workers were started together."""

    generation: int
    """Its number."""
    world: int
    """Workers in it."""
    workers: list[str]
    """Their names, by rank."""
    unnamed: bool = False
    """The ledger has let go of the names since."""

    def sentence(self) -> str:
        again = " again, from warm processes" if self.generation > 1 else ""
        return f"{plural(self.world, 'worker')} started{again}"


class Restart(LedgerEvent, frozen=True, kw_only=True):
    """At level 0: all workers are ended and started again."""

    generation: int
    """The one that ends."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"restarting all workers: {self.reason}"


class BeganAnew(LedgerEvent, frozen=True, kw_only=True):
    """At level 0, once: after a restart the script's optimizer began without state."""

    generation: int
    """The start."""
    steps: int
    """Optimizer steps of the start before it."""

    def sentence(self) -> str:
        return (
            f"the optimizer began this start without state, and the start before made {plural(self.steps, 'step')}: does the "
            "script resume from its own checkpoint? If not, it computes them again and overwrites what it saved"
        )


_RESTORED_FROM = {"disk": "the checkpoint on disk", "memory": "a snapshot in memory"}


# `workers` is in the order of ranks, because ranks decide the order of the reduction. With this entry a curve
# can be replayed bit by bit.
class Formed(LedgerEvent, frozen=True, kw_only=True):
    """A generation was formed."""

    generation: int
    """Its number."""
    start: int
    """Committed steps that it goes on from."""
    world: int
    """Workers that compute."""
    workers: list[str]
    """Their names, by rank."""
    unnamed: bool = False
    """The ledger has let go of the names since."""
    restore: list[str]
    """Those that get the state from others."""
    applied: bool
    """The step in flight was committed first."""
    source: str
    """Where the state comes from: `live`, `memory`, `disk` or `fresh`."""
    groups_connected_in: list[int] | None = None
    """Of each replica, the generation in which its process groups were connected; None: one worker each."""

    def sentence(self) -> str:
        line = f"generation {self.generation}: {plural(self.world, 'worker')} from step {self.start}"
        if self.applied:
            line += ", the step in flight was committed"
        # A list of names only while it is short; a generation of a thousand workers gets a count.
        restored = self.restore or []
        if self.source in ("disk", "memory"):
            return f"{line}, state from {_RESTORED_FROM[self.source]}"
        if restored:
            names = ", ".join(restored) if len(restored) <= 2 else plural(len(restored), "worker")
            return f"{line}, {names} restored from peers"
        return line


class Broke(LedgerEvent, frozen=True, kw_only=True):
    """A generation broke."""

    generation: int
    """Its number."""
    reason: str
    """The cause, in words."""
    step: int
    """Committed steps."""

    def sentence(self) -> str:
        return f"generation {self.generation} broke at step {self.step}: {self.reason}"


class Yield(LedgerEvent, frozen=True, kw_only=True):
    """A generation ends at its next commit, as planned."""

    generation: int
    """Its number."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"generation {self.generation} ends at its next commit: {self.reason}"


class Resize(LedgerEvent, frozen=True, kw_only=True):
    """A person changed how many nodes the job wants."""

    nodes: int
    """Nodes that are wanted now."""
    before: int | None
    """Nodes that were wanted before."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"from {self.before} to {plural(self.nodes, 'node')}: {self.reason}"


class FewMicroBatches(LedgerEvent, frozen=True, kw_only=True):
    """The global batch has fewer micro-batches than the job may have workers: the others are spares."""

    micro_batches: int
    """In a global batch."""
    workers: int
    """Workers that train, at most."""
    wanted: int
    """Workers of as many nodes as the job wants."""

    def sentence(self) -> str:
        there = "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return (
            f"{self.workers} of {plural(self.wanted, 'worker')} train, the others are spares: a global batch has "
            f"only {there}"
        )


class Capacity(LedgerEvent, frozen=True, kw_only=True):
    """The engine changed how many nodes the job may have."""

    nodes: int | None
    """At most; None: no limit."""
    before: int | None
    """The limit before."""
    reason: str
    """As the engine gave it."""
    within_s: float | None
    """How long the job has to shrink, in seconds; None: no limit."""

    def sentence(self) -> str:
        if self.nodes == 0:
            within = "" if self.within_s is None else f" within {seconds(self.within_s)}"
            return f"the engine takes all nodes back{within}: {self.reason}"
        limit = "any number of nodes" if self.nodes is None else f"at most {plural(self.nodes, 'node')}"
        return f"the engine now allows {limit}: {self.reason}"


# Written at the first commit after the change, when its cost is known; the change itself began at `t_s`.
class Changed(LedgerEvent, frozen=True, kw_only=True):
    """A planned change of the membership is complete."""

    id: int
    """Its number."""
    reason: str
    """Why."""
    t_s: float
    """When the last member left, in seconds since the job's start."""
    at_step: int
    """Committed steps then."""
    from_world: int
    """Workers before."""
    to_world: int
    """Workers after."""
    newcomers: int
    """Workers that came with it."""
    join_s: float | None
    """The longest that a member needed to connect."""
    restore_s: float | None
    """The longest that a member needed to get the state."""
    stall_s: float | None
    """For how long training stood, less a median step."""

    def sentence(self) -> str:
        return f"{self.from_world} \u2192 {plural(self.to_world, 'worker')} at step {self.at_step}: stall {seconds(self.stall_s)}"
