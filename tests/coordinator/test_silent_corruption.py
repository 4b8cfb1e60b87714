"""Jumps of the loss and wrong parts of it, through the core."""

import math

import desk as desks
import msgspec
import pytest
from test_straggler_cases import findings, running, spends, spent

from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.protocol import messages as m
from holdfast.protocol.causes import GradientsDiffer, StatesDiffer
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.phases import BLOCK_STEPS, Phase


def lose(desk, first, losses, skipped=None):
    for step, loss in enumerate(losses, first):
        entry = (m.ReportedStep(step, loss, 0.1, skipped=skipped),)
        desk.says(
            desk.members()[0],
            m.Progress(
                generation=desk.state.membership.number, committed=step + 1, median_s=0.1, losses=entry
            ),
        )


def test_a_jump_of_the_loss_is_written_down_and_blames_nobody():
    desk = running()
    lose(desk, 0, [2.0 + step % 3 / 100 for step in range(40)])
    lose(desk, 40, [math.inf], skipped=True)  # a scaled loss that overflowed
    assert findings(desk) == []
    lose(desk, 41, [math.nan, 2.0, 2.0])
    (found,) = findings(desk)
    assert (found["rule"], found["shared"], found["remedy"]) == ("loss-jump", True, "watch")
    assert found["evidence"] == "the loss of step 41 is nan, compared with 2.01 in the steps before it"
    assert desk.state.incidents == []


def not_finite(desk, rank, step):
    """One rank's own gradient is not finite; the step is tried again and counts."""
    number = desk.state.membership.number
    worker = desk.members()[rank]
    desk.says(
        worker,
        m.Failed(
            generation=number,
            step=step,
            phase=int(Phase.BACKWARD),
            error="NonFiniteGradient",
            message=f"own of {step}",
            where="step.py:1",
            own=True,
        ),
    )
    for name in desk.members():
        desk.says(name, m.Parked(generation=number, committed=step))
    for name in desk.members():
        desk.says(name, m.Joined(desk.state.membership.number, 0.01))
    desk.commit(step + 1)


def asked(desk):
    return [(f["node"], f["remedy"]) for f in findings(desk) if f["rule"] == "part-not-finite"]


def test_a_node_that_alone_brings_what_is_not_finite_is_for_a_person_to_look_at():
    desk = running()
    node = desk.state.membership.workers[desk.members()[1]].node
    for step in (5, 9, 30):
        not_finite(desk, 1, step)
    assert asked(desk) == [(node, "watch"), (node, "watch"), (node, "ask")]
    assert "holdfast check --deep" in findings(desk)[-1]["evidence"]


def test_it_is_replaced_where_that_is_wanted():
    desk = running(health=HealthSpec(replace_suspect=True))
    for step in (5, 9, 30):
        not_finite(desk, 1, step)
    assert asked(desk)[-1][1] == "replace"


def test_what_several_nodes_bring_is_the_datas_or_the_scripts():
    desk = running()
    for rank, step in ((1, 5), (2, 9), (1, 30), (1, 40)):
        not_finite(desk, rank, step)
    assert {remedy for _, remedy in asked(desk)} == {"watch"}


@pytest.mark.parametrize("replace", [False, True])
def test_a_part_of_the_loss_that_is_off_again_and_again_is_its_nodes(replace):
    desk = running(nodes=4, health=HealthSpec(replace_suspect=replace))
    for number in range(60):
        step = number * BLOCK_STEPS
        for rank, worker in enumerate(desk.members()):
            off = rank == 2 and number in (30, 40, 50)
            block = spent(step, 0.1, loss=50.0 if off else 2.0 + (rank + number) % 5 / 100)
            spends(desk, worker, block)
    found = [f for f in findings(desk) if f["rule"] == "part-apart"]
    assert [(f["subject"], f["remedy"]) for f in found] == [("rank 2", "replace" if replace else "ask")]


def tells_states(desk, first, states):
    for worker, state in zip(desk.members(), states, strict=True):
        spends(desk, worker, msgspec.structs.replace(spent(first, 0.1), state=state))


def test_a_replica_with_other_bits_is_named_and_replaced():
    desk = running(nodes=3)
    odd = desk.members()[1]
    tells_states(desk, 0, [5, 5, 5])
    tells_states(desk, 5, [6, None, 6])
    assert findings(desk) == []
    tells_states(desk, 10, [7, 8, 7])
    assert findings(desk) == []
    assert "holdfast check --deep n1" in str(desk.actions)  # a person is asked to look at the node
    causes_ = [i.cause for i in desk.state.incidents if not i.rule]
    assert causes_ == [StatesDiffer(step=15, workers=(odd,), agree=2)]
    assert "silent data corruption" in str(causes_[0])
    assert desk.state.membership.workers[odd].phase is not WorkerPhase.MEMBER


def test_of_sharded_replicas_those_of_one_shard_are_compared():
    """Three replicas of two workers, whose halves of the state never are the same."""
    desk = desks.running(6, shape=(2, 1))
    assert [desk.state.membership.generation.members[r].shard_index for r in range(6)] == [0, 1] * 3
    odd = desk.members()[3]
    first = 20
    tells_states(desk, first, [7, 8] * 3)
    assert [i for i in desk.state.incidents if not i.rule] == []
    tells_states(desk, first + BLOCK_STEPS, [7, 8, 7, 7, 7, 8])
    causes_ = [i.cause for i in desk.state.incidents if not i.rule]
    assert [(cause.workers, cause.agree) for cause in causes_] == [((odd,), 2)]
    assert desk.state.membership.workers[odd].phase is not WorkerPhase.MEMBER


def test_two_that_differ_are_both_named_and_nobody_is_taken_out():
    desk = running(nodes=2)
    for first in (0, 5, 10):
        tells_states(desk, first, [7, 8])
    assert [f["subject"] for f in findings(desk)] == ["rank 0", "rank 1"]  # once in a generation
    assert [i for i in desk.state.incidents if not i.rule] == []
    assert all(desk.state.membership.workers[w].phase is WorkerPhase.MEMBER for w in desk.members())


def test_a_rule_on_trial_takes_nobody_out():
    desk = running(nodes=3, health=HealthSpec(dry_run=("state-*",)))
    tells_states(desk, 0, [7, 8, 7])
    assert [f["dry_run"] for f in findings(desk)] == [True]
    assert [i for i in desk.state.incidents if not i.rule] == []


def computes_otherwise(desk, digests, step=7):
    """Every member says what all of them saw."""
    number = desk.state.membership.number
    for worker in desk.members():
        told = m.GradientsDiffer(generation=number, step=step, micro=3, digests=digests)
        desk.says(worker, told)


def test_who_computed_another_gradient_than_two_others_is_taken_out():
    desk = running(nodes=3)
    first, odd, last = desk.members()
    computes_otherwise(desk, {first: 5, odd: 6, last: 5})
    (incident,) = desk.state.incidents
    assert incident.cause == GradientsDiffer(step=7, micro=3, workers=(odd,), agree=(first, last))
    assert "micro-batch 3 of step 7" in str(incident.cause)
    assert desk.killed() == {odd}
    (ask,) = desk.state.health.asks
    assert (ask.node, ask.rule) == (desk.state.membership.workers[odd].node, "gradient-apart")
    assert "holdfast check --deep" in ask.text


def test_the_node_of_a_wrong_gradient_is_replaced_where_that_is_wanted():
    desk = running(nodes=3, health=HealthSpec(replace_suspect=True))
    first, odd, last = desk.members()
    computes_otherwise(desk, {first: 5, odd: 6, last: 5})
    (found,) = findings(desk)
    assert (found["rule"], found["remedy"], found["node"]) == (
        "gradient-apart",
        "replace",
        desk.state.membership.workers[odd].node,
    )


@pytest.mark.parametrize("nodes", [2, 3])
def test_without_a_majority_nobody_is_taken_out(nodes):
    desk = running(nodes=nodes)
    computes_otherwise(desk, {worker: 5 + n for n, worker in enumerate(desk.members())})
    (incident,) = desk.state.incidents
    assert incident.cause.agree == ()
    assert set(incident.cause.workers) == set(desk.members())
    assert "no two agree" in str(incident.cause)
    assert desk.killed() == set()
    assert desk.state.membership.phase is not JobPhase.RUNNING  # the step is computed again


def test_a_step_that_differs_twice_without_a_majority_ends_the_job():
    desk = running(nodes=2)
    for _ in range(2):
        computes_otherwise(desk, {worker: 5 + n for n, worker in enumerate(desk.members())})
        number = desk.state.membership.number
        for worker in desk.members():
            desk.says(worker, m.Parked(generation=number, committed=7))
        for worker in desk.members():
            desk.says(worker, m.Joined(desk.state.membership.number, 0.01))
    assert "twice in a row" in (desk.state.membership.stop_reason or "")
