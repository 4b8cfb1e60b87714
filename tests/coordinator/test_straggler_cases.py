"""Workers whose own time differs from their peers', through the core."""

import pytest
from desk import Desk
from msgspec.structs import replace

from holdfast.coordinator.health.comparison import Peers
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.service.job_view import build_report, build_status
from holdfast.coordinator.service.tally import StepSummary
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.health import Finding, Remedy, Severity
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.phases import BLOCK_STEPS, Spent


def spent(first, own_s, step_s=0.2, micros=4, loss=None):
    return Spent(
        first=first,
        micros=micros,
        data_s=0.0,
        forward_s=own_s,
        backward_s=0.0,
        wait_s=step_s - own_s,
        update_s=0.0,
        aside_s=0.0,
        loss=loss,
    )


def spends(desk, worker, block):
    """A worker reports where the time of a block of steps went."""
    committed = block.first + BLOCK_STEPS
    desk.says(
        worker,
        m.Progress(
            generation=desk.state.membership.number, committed=committed, median_s=0.2, spent=(block,)
        ),
    )


def train(desk, blocks, own_s, first=0):
    """Blocks of steps; own_s: by worker, else 0.1 s."""
    for number in range(blocks):
        step = first + number * BLOCK_STEPS
        for worker in desk.members():
            block = spent(step, own_s.get(worker, 0.1))
            spends(desk, worker, block)


def running(nodes=3, slots=1, **spec):
    desk = Desk(nodes=nodes, nproc=slots, **spec)
    for n in range(nodes):
        desk.node(f"n{n}", slots=slots)
    for worker in list(desk.state.membership.workers):
        desk.ready(worker)
    for worker in desk.members():
        desk.says(worker, m.Joined(1, 0.01))
    return desk


def findings(desk):
    return [a.fields for a in desk.actions if getattr(a, "kind", "") == "finding"]


def test_a_slow_rank_is_written_down_with_figures():
    desk = running()
    slow = desk.members()[1]
    train(desk, 20, {slow: 0.15})
    (found,) = findings(desk)
    assert found["rule"] == "slow-rank"
    assert found["subject"] == "rank 1"
    assert found["worker"] == slow
    assert found["remedy"] == "watch"
    assert (
        "1.50 times as long as its peers, 50 ms more a step, mostly in the forward pass" in found["evidence"]
    )
    assert "0.75 worker-hours an hour" in found["evidence"]
    (shown,) = build_status(desk.state, desk.now).slow
    assert (shown.rank, shown.ratio, shown.since_step) == (1, 1.5, 0)
    train(desk, 20, {}, first=100)
    assert findings(desk)[-1]["condition"] == "healthy"
    assert build_status(desk.state, desk.now).slow == []
    assert build_report(desk.state, StepSummary(), desk.now).slow[0].until_step is not None


def test_that_a_rank_was_slow_does_not_explain_its_end():
    desk = running()
    slow = desk.members()[1]
    train(desk, 20, {slow: 0.15})
    assert findings(desk)[-1]["rule"] == "slow-rank"
    desk.exits(slow, 1)
    (incident,) = desk.incidents()
    assert incident.rule == ""
    assert incident.cause == causes.ProcessEnded(1)


def test_that_a_rank_is_slow_does_not_explain_what_it_did_before():
    desk = running()
    slow = desk.members()[1]
    train(desk, 20, {})
    desk.exits(slow, 1)
    (incident,) = desk.incidents()
    found = Finding(
        rule="slow-rank", severity=Severity.WARNING, remedy=Remedy.WATCH, source="peers", worker=slow
    )
    desk.do(e.NodeSays("n1", m.FindingsReported((found,))))
    assert incident.rule == ""


def test_a_slow_rank_of_an_unmodified_script_is_told_of_and_stays():
    """By the time of its training thread, for there are no phases; and a restart of all would be no remedy."""
    desk = Desk(nodes=3, nproc=1, health=HealthSpec(replace_slow=1.2))
    for n in range(3):
        desk.node(f"n{n}", slots=1)
    first, slow, last = (w.name for w in desk.state.membership.workers.values())
    for block in range(200):
        for worker in (first, slow, last):
            own_s = 0.15 if worker == slow else 0.1
            spends(desk, worker, replace(spent(5 * block, 0.0), wait_s=0.2 - own_s, thread_s=own_s))
    (found,) = findings(desk)
    assert (found["rule"], found["remedy"], found["worker"]) == ("slow-rank", "watch", slow)
    assert (
        "1.50 times as long as its peers, 50 ms more a step, mostly in the training thread"
        in found["evidence"]
    )
    (shown,) = build_status(desk.state, desk.now).slow
    assert shown.lost_s > 40
    assert desk.state.membership.number == 1


def test_all_ranks_of_a_node_are_the_node():
    desk = running(nodes=3, slots=2)
    ours = [w for w in desk.members() if w.startswith("n1")]
    train(desk, 20, dict.fromkeys(ours, 0.15))
    assert [f["rule"] for f in findings(desk)] == ["slow-rank", "slow-node"]
    assert findings(desk)[-1]["node"] == "n1"


def test_a_policy_replaces_what_has_cost_more_than_a_replacement():
    desk = running(health=HealthSpec(replace_slow=1.3))
    slow = desk.members()[1]
    train(desk, 30, {slow: 0.15})
    assert [f["remedy"] for f in findings(desk)] == ["watch"]
    train(desk, 20, {slow: 0.15}, first=150)
    assert [f["remedy"] for f in findings(desk)] == ["watch", "replace"]
    train(desk, 25, {slow: 0.15}, first=250)
    assert desk.state.health.slow[0].asked_s < 11.0
    train(desk, 20, {slow: 0.15}, first=375)
    assert desk.state.health.slow[0].asked_s > 20.0  # once more: it is still there


@pytest.mark.parametrize("trial", ["*", "slow-rank"])
def test_on_trial_it_is_only_written_down(trial):
    desk = running(health=HealthSpec(dry_run=(trial,)))
    train(desk, 20, {desk.members()[1]: 0.15})
    assert findings(desk)[0]["dry_run"]


def test_nobody_looks_where_nobody_is_to():
    desk = running(health=HealthSpec(watch=False))
    train(desk, 20, {desk.members()[1]: 0.15})
    assert findings(desk) == []


def test_shares_of_different_sizes_are_not_compared():
    desk = running()
    for number in range(20):
        step = number * BLOCK_STEPS
        for rank, worker in enumerate(desk.members()):
            block = spent(step, 0.15 if rank == 0 else 0.1, micros=3 if rank == 0 else 2)
            spends(desk, worker, block)
    assert findings(desk) == []


def test_a_member_that_says_nothing_holds_nobody_up():
    desk = running(nodes=4)
    silent = desk.members()[3]
    for number in range(20):
        step = number * BLOCK_STEPS
        for worker in desk.members()[:3]:
            block = spent(step, 0.15 if worker == desk.members()[1] else 0.1)
            spends(desk, worker, block)
    assert [f["subject"] for f in findings(desk)] == ["rank 1"]
    assert silent not in desk.core.transient(Peers).blocks
    assert len(desk.core.transient(Peers).blocks) <= 4


def test_the_slow_node_leaves_at_a_steps_edge_when_its_replacement_is_ready():
    desk = running(nodes=4, max_nodes=3, spares=1, health=HealthSpec(replace_slow=1.3))
    slow = desk.members()[1]
    node = desk.state.membership.workers[slow].node
    train(desk, 60, {slow: 0.15})
    desk.wait(5.0)
    verdicts = [a.fields for a in desk.actions if getattr(a, "kind", "") == "verdict"]
    assert [(v["node"], v["does"]) for v in verdicts] == [(node, "replace")]
    (incident,) = desk.state.incidents
    assert incident.quiet
    assert str(incident.cause).startswith("slow-rank: computes 1.50 times as long as its peers")
    assert desk.state.membership.nodes[node].leaving is not None
