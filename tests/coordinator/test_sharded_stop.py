"""A job whose replicas are several workers ends: every shard of its last state is kept, and becomes a checkpoint."""

from desk import TIER, Desk, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import Saving


def sharded(nodes: int = 4, spares: int = 0) -> Desk:
    """Replicas of two workers; each shard is held by one more node than copies are wanted."""
    return running(nodes, spares, shape=(2, 1), saving=Saving(SnapshotOptions("1", 0), 0, (TIER,)))


def parked(desk: Desk, committed: int = 6, prepared: bool = False) -> Desk:
    """It is asked to stop, and everyone leaves the generation."""
    desk.do(e.StopRequested("enough"))
    for worker in desk.members():
        desk.parks(worker, committed, prepared)
    return desk


def keepers(desk: Desk) -> list[str]:
    """Nodes that were told to keep their shard."""
    return [w.node for w in map(desk.known, desk.members()) if any(x.keep for x in desk.told(w.name, m.Stop))]


def leaves(desk: Desk, node: str, held: bool, step: int = 6) -> None:
    worker = desk.worker_on(node)
    desk.says(worker, m.Done(committed=step, params_xxh3="bits", loss=0.5, stopped=True, held=held))
    desk.exits(worker, 0)


def outcome(desk: Desk) -> str | None:
    return desk.state.membership.outcome if desk.state.membership.phase is JobPhase.ENDED else None


def test_one_of_each_shard_keeps_it_and_the_agents_write_the_checkpoint():
    desk = parked(sharded())
    assert keepers(desk) == ["n0", "n1"]
    assert not any(x.save_to for w in desk.members() for x in desk.told(w, m.Stop))
    leaves(desk, "n0", held=True)
    leaves(desk, "n1", held=True)
    assert set(desk.workers(WorkerPhase.PARKED)) == {"n2.0#3", "n3.0#4"}, "until it is sure that it is kept"
    for shard_index in (0, 1):
        desk.holds(f"n{shard_index}", desk.shard(6, shard_index))
    leaves(desk, "n2", held=False)
    leaves(desk, "n3", held=False)
    assert outcome(desk) is None, "it is written"
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("stopped", Durable(6, TIER.url))


def test_what_all_are_prepared_for_counts():
    desk = parked(sharded(2), prepared=True)
    assert all(x.apply and x.keep for w in desk.members() for x in desk.told(w, m.Stop))
    for shard_index in (0, 1):
        leaves(desk, f"n{shard_index}", held=True, step=7)
        desk.holds(f"n{shard_index}", desk.shard(7, shard_index))
    desk.stores()
    assert desk.state.storage.durable == Durable(7, TIER.url)


def test_where_one_has_no_memory_the_other_holder_keeps_it():
    desk = parked(sharded())
    desk.refuses("n1", desk.shard(6, 1))
    leaves(desk, "n1", held=False)
    leaves(desk, "n0", held=True)
    desk.holds("n0", desk.shard(6, 0))
    assert keepers(desk) == ["n0", "n1", "n3"]
    assert [x.keep for x in desk.told("n2.0#3", m.Stop)] == []
    leaves(desk, "n3", held=True)
    desk.holds("n3", desk.shard(6, 1))
    leaves(desk, "n2", held=False)
    desk.stores()
    assert desk.state.storage.durable == Durable(6, TIER.url)


def test_where_one_is_lost_meanwhile_the_other_holder_keeps_it():
    desk = parked(sharded())
    desk.lose("n0")
    leaves(desk, "n1", held=True)
    desk.holds("n1", desk.shard(6, 1))
    assert keepers(desk) == ["n0", "n1", "n2"]


def test_without_a_whole_state_the_newest_snapshot_is_what_is_left():
    desk = sharded(2)
    desk.holds("n0", desk.shard(5, 0))
    desk.holds("n1", desk.shard(5, 1))
    desk.exits(desk.worker_on("n1"), -9)
    desk.do(e.StopRequested("enough"))
    desk.parks(desk.worker_on("n0"), 6)
    assert keepers(desk) == []
    assert not desk.workers()
    assert outcome(desk) is None
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("stopped", Durable(5, TIER.url))


def test_a_state_that_nobody_can_keep_is_said():
    desk = parked(sharded(2))
    for node in ("n0", "n1"):
        desk.refuses(node, desk.shard(6, int(node[1])))
        leaves(desk, node, held=False)
    assert outcome(desk) == "stopped"
    assert [r["step"] for r in desk.records("tier-failed")] == [6]


def test_an_agent_that_never_answers_holds_up_the_end_for_its_time_only():
    desk = parked(sharded(2))
    leaves(desk, "n0", held=True)
    leaves(desk, "n1", held=True)
    desk.wait(2 * desk.core.timing.start_s + 5)
    assert outcome(desk) == "stopped"


def test_a_new_coordinator_goes_on_with_the_end():
    desk = parked(sharded(2))
    leaves(desk, "n0", held=True)
    desk.crash()
    desk.back(held={"n0": (desk.shard(6, 0),)})
    assert outcome(desk) is None
    leaves(desk, "n1", held=True)
    desk.holds("n1", desk.shard(6, 1))
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("stopped", Durable(6, TIER.url))


def test_the_end_of_training_is_kept_by_all_that_save():
    desk = sharded(2)
    desk.commit(9)
    for node in ("n0", "n1"):
        leaves(desk, node, held=True, step=9)
        desk.holds(node, desk.shard(9, int(node[1])))
    assert outcome(desk) is None
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(9, TIER.url))


def test_who_comes_to_the_end_by_what_it_prepared_keeps_its_shard():
    desk = sharded(2)
    desk.commit(8)
    leaves(desk, "n0", held=True, step=9)
    desk.holds("n0", desk.shard(9, 0))
    desk.parks(desk.worker_on("n1"), 8, prepared=True)
    assert desk.told(desk.worker_on("n1"), m.Stop) == [m.Stop(apply=True, keep=True)]
    leaves(desk, "n1", held=True, step=9)
    desk.holds("n1", desk.shard(9, 1))
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(9, TIER.url))


def test_where_a_shard_of_the_last_state_is_lost_training_goes_on_from_the_snapshot():
    desk = sharded(2)
    desk.shards(7, "n0", "n1")
    desk.commit(8)
    leaves(desk, "n0", held=True, step=9)
    desk.exits(desk.worker_on("n1"), -9)
    assert outcome(desk) is None
    for node in ("n0", "n1"):
        desk.ready(desk.worker_on(node))
    assert desk.state.membership.generation is not None
    assert (desk.state.membership.number, desk.state.membership.generation.start) == (2, 7)
    assert desk.state.membership.lost_steps == 2
