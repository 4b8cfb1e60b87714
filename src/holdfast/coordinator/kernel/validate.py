"""What must always be true of the state, after every event.

The random schedules check it after each of theirs, and a coordinator that is started with HOLDFAST_VALIDATE=1 does so too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.coordinator.kernel.phases import JobPhase, NodePhase, WorkerPhase
from holdfast.coordinator.kernel.state import CoreState

_USED = (WorkerPhase.MEMBER, WorkerPhase.PARKED)


def validate(state: CoreState) -> list[str]:
    """What is wrong with a state, in words; empty: nothing."""
    return [
        *_job(state),
        *_workers(state),
        *_nodes(state),
        *_incidents(state),
        *_snapshots(state),
        *_tiers(state),
    ]


def _job(s: CoreState) -> Iterator[str]:
    # Every message of a worker is matched by the generation's number. With a number that is ahead of the
    # generation, all their reports would be dropped as old ones, and the job would look hung.
    if s.membership.phase is JobPhase.RUNNING and (
        s.membership.generation is None or s.membership.generation.number != s.membership.number
    ):
        yield f"the job runs without its generation {s.membership.number}"
    # Launchers and operators act on the outcome: it says whether the job is run again.
    if s.membership.phase is JobPhase.ENDED and s.membership.outcome is None:
        yield "the job has ended without an outcome"
    if s.membership.stop_reason is not None and s.membership.outcome is None:
        yield "the job is to stop without an outcome"
    counts = {
        "restarts_used": s.membership.restarts_used,
        "replacing": s.membership.replacing,
        "committed": s.membership.committed,
        "lost_steps": s.membership.lost_steps,
        "fruitless": s.membership.fruitless,
        "bad_starts": s.membership.bad_starts,
    }
    yield from (f"the count {name} is negative: {count}" for name, count in counts.items() if count < 0)
    # `happened` compares a shard's step with each of these. Falling starts would make a state count as having
    # happened that an earlier rewind had undone.
    starts = [r.start for r in s.storage.rewinds]
    if starts != sorted(set(starts)):
        yield f"the starts of rewinds do not rise: {starts}"


def _workers(s: CoreState) -> Iterator[str]:
    # A worker that trains and is in no generation would keep a stale copy of the state, and could become a
    # donor of it later.
    members = {x.worker for x in s.membership.generation.members} if s.membership.generation else set()
    slots: Counter[tuple[str, int]] = Counter()
    for name, worker in s.membership.workers.items():
        if worker.name != name:
            yield f"worker {worker.name} is known as {name}"
        if worker.phase is WorkerPhase.GONE:
            continue
        # Two workers in one slot would share its GPU: both run out of memory, and both are blamed.
        slots[worker.node, worker.slot] += 1
        node = s.membership.nodes.get(worker.node)
        if node is None or not node.alive:
            yield f"{name} is {worker.phase.value} on a lost node"
        if worker.phase in _USED and name not in members:
            yield f"{name} is {worker.phase.value} and not in generation {s.membership.number}"
        if worker.phase is WorkerPhase.READY and worker.ready is None:
            yield f"{name} is ready without a Ready report"
    yield from (
        f"{count} workers have slot {slot} of {node}" for (node, slot), count in slots.items() if count > 1
    )
    if s.membership.level == 2 and s.membership.phase is JobPhase.RUNNING:
        yield from (f"{name} is a member without a seat" for name in members - set(s.membership.seats))
    # Who was told to leave is waited for. One that does not exist never leaves, and the job would end by its
    # time-out alone.
    unknown = set(s.membership.stops) - set(s.membership.workers)
    if unknown:
        yield f"workers were told to leave that are not known: {sorted(unknown)}"


def _nodes(s: CoreState) -> Iterator[str]:
    for name, node in s.membership.nodes.items():
        if node.name != name:
            yield f"node {node.name} is known as {name}"
        # `held` is what keeps workers away from a node. A node that is checked and not held would be measured
        # under the load of training, and fail.
        if node.checking is not None and node.held is None:
            yield f"{name} runs deep checks and is not held"
        # `Context.held_or_leaving` gives these alone to whoever waits for a check or a remedy.
        aside = node.phase in (NodePhase.HELD, NodePhase.LEAVING)
        if (node.checking is not None or node.then is not None) and not aside:
            yield f"{name} is {node.phase.value}, and a remedy is planned for it"
        why = {
            NodePhase.IN_SERVICE: node.held is None and node.leaving is None,
            NodePhase.HELD: node.held is not None and node.leaving is None,
            NodePhase.LEAVING: node.leaving is not None,
            NodePhase.LOST: True,
        }
        if not why[node.phase]:
            yield f"{name} is {node.phase.value}: held is {node.held!r}, leaving is {node.leaving!r}"
        # A refused node is kept away by being lost. One that is not would get workers again, with the fault
        # for which it was refused.
        if node.refused is not None and node.alive:
            yield f"{name} is refused and still in the job"
        # A script that believes it would save and wait for an end that does not come.
        if node.notice is not None and node.leaving is None:
            yield f"{name} stays, but its scripts were told that it leaves"
    # Both are removed together when a person clears a machine. A rule that stayed behind would be a
    # quarantine that no longer keeps anybody away, and looks as if it did.
    stray = set(s.health.quarantine_rules) - set(s.health.quarantine)
    if stray:
        yield f"quarantine_rules names machines that are not in quarantine: {sorted(stray)}"


def _incidents(s: CoreState) -> Iterator[str]:
    # Incidents are looked up by their number less those that are forgotten; a gap would give a remedy to another
    # fault's node.
    if [i.id for i in s.incidents] != list(range(s.forgotten + 1, s.forgotten + len(s.incidents) + 1)):
        yield "incidents are not numbered one after the other"
    closed = s.closed - s.forgotten
    if not 0 <= closed <= len(s.incidents) or any(i.open for i in s.incidents[:closed]):
        yield f"not all of the first {s.closed} incidents are closed"


def _snapshots(s: CoreState) -> Iterator[str]:
    keys = Counter((x.step, x.generation, x.world) for x in s.storage.snapshots)
    yield from (
        f"the snapshot of step {key[0]} is in the state {count} times"
        for key, count in keys.items()
        if count > 1
    )
    for snapshot in s.storage.snapshots:
        ranks = {h.copy.key.rank for h in snapshot.shards}
        # A shard of such a rank is of a run of another size. Joined with the others it would be a state that
        # no run ever had.
        if not ranks <= set(range(snapshot.world)):
            yield f"the snapshot of step {snapshot.step} has shards of ranks that do not exist"
        # The most expensive lie of all: older snapshots are given up when a newer one is complete, so a wrong
        # mark here would lose the job's only good copy.
        if snapshot.complete and ranks != set(range(snapshot.world)):
            yield f"the snapshot of step {snapshot.step} counts as complete without all of its shards"
        for shard in snapshot.shards:
            gone = [
                n
                for n in (*shard.nodes, *shard.asked)
                if n not in s.membership.nodes or not s.membership.nodes[n].alive
            ]
            if gone:
                yield f"lost nodes count as holders of the snapshot of step {snapshot.step}: {gone}"


def _tiers(s: CoreState) -> Iterator[str]:
    urls = {t.url for t in s.spec.saving.tiers}
    # One checkpoint at a time per tier. Two would compete for a disk that is too slow for one, and the older
    # could be published after the newer.
    under_way = Counter(x.tier for x in s.storage.storing)
    yield from (
        f"{count} checkpoints are on their way to {url}" for url, count in under_way.items() if count > 1
    )
    yield from (
        f"a checkpoint is on its way to {url}, which is no tier of the job" for url in set(under_way) - urls
    )
    steps = [d.step for d in (s.storage.durable, *s.storage.older) if d is not None]
    # Whoever cannot read the newest goes on to the next of the list. Out of order, a job would go back
    # further than it must.
    if steps != sorted(steps, reverse=True):
        yield f"checkpoints are not in order from the newest to the oldest: {steps}"
