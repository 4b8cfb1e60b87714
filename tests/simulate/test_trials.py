"""The simulator around the coordinator's own core."""

import msgspec
import pytest

from holdfast.coordinator.membership import wall_time
from holdfast.errors import UsageError
from holdfast.protocol.phases import TimeClass
from holdfast.tools.simulate import trial as trials
from holdfast.tools.simulate.cluster import BEGIN_S, Cluster
from holdfast.tools.simulate.scenario import Scenario, check, read
from holdfast.tools.simulate.trial import run

MIXED = [
    {"name": "gpu", "scope": "node", "rate": "0.2%"},
    {"name": "software", "scope": "worker", "rate": "0.1%"},
    {"name": "hang", "scope": "hang", "rate": "0.05%"},
    {"name": "throttled", "scope": "slow", "rate": "0.05%", "factor": 1.5, "lasts": "1h"},
    {
        "name": "flaky",
        "scope": "node",
        "rate": "0.05%",
        "shape": 0.6,
        "burst": 1,
        "burst_within": "2m",
        "size": 8,
    },
    {"name": "switch", "scope": "rack", "rate": "0.001%", "size": 8, "lasts": "2h"},
]
ALL_AT_ONCE = {"name": "network", "scope": "job", "rate": "0.05%"}


def scenario(nodes=128, days=3, **fields) -> Scenario:
    return read(
        {"nodes": nodes, "days": days, "failures": MIXED, "spares": 4, "min_nodes": nodes - 40} | fields
    )


def accounted(found):
    return sum(msgspec.structs.astuple(found.spent))


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_names_that_machines_take_turns_in_and_messages_heard_together_change_nothing(seed):
    asked = scenario(detection="10s", days=1.5)
    folded = run(asked, seed)
    assert folded.incidents > 5
    assert folded == run(asked, seed, fold=False) == run(asked, seed, one_by_one=True)


def test_when_all_end_at_once_machines_may_take_turns_in_names_too():
    asked = scenario(detection="10s", failures=[*MIXED, ALL_AT_ONCE], days=2)
    folded = run(asked, 0)
    assert folded.failures["network"] > 0
    assert folded.lost_steps > 0
    assert folded == run(asked, 0, fold=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fields",
    [
        {"detection": "10s"},
        {"cloud": False, "repair": "4h", "min_nodes": 24},
        {"min_nodes": 32, "spares": 0},
        {"lemons": "10%", "scarce": "50%", "min_nodes": 16, "micro_batches": 64},
    ],
)
def test_every_second_is_accounted_for(seed, fields):
    found = run(scenario(**({"nodes": 32, "min_nodes": 32, "days": 5} | fields)), seed)
    assert accounted(found) == pytest.approx(found.wall_s, rel=1e-6)
    assert found.spent.training == pytest.approx(5 * 86400, rel=1e-4)
    assert found.done == 1.0
    assert 0 < found.goodput <= 1
    assert all(part >= -1e-6 for part in msgspec.structs.astuple(found.spent))


@pytest.mark.parametrize("fields", [{"detection": "10s"}, {"failures": [*MIXED, ALL_AT_ONCE]}])
def test_the_coordinator_counts_as_the_simulator_does(fields):
    """Two books of one trial: of what the core was told, and of what happened. Nobody tells the core who is slow, nor how
    much of a stall its first step is."""
    kept: list[Cluster] = []
    found = run(scenario(days=1.5, **fields), 0, keep=kept.append)
    (cluster,) = kept
    counted = wall_time.classes(cluster.core.state, BEGIN_S + found.wall_s)
    assert sum(counted.values()) == pytest.approx(found.wall_s, abs=1e-3)
    assert TimeClass.UNEXPLAINED not in counted
    steps_s = counted[TimeClass.PRODUCTIVE] + counted[TimeClass.FIRST_STEP]
    assert steps_s == pytest.approx(found.spent.training + found.spent.slow, rel=3e-3)
    lost_s = counted.get(TimeClass.RECOMPUTED, 0.0)
    assert lost_s == pytest.approx(found.lost_steps * cluster.steps.ideal_s, rel=0.1)


def test_without_failures_nothing_is_lost():
    found = run(read({"nodes": 8, "days": 1, "rate": 0}), 0)
    assert found.incidents == 0
    assert found.wall_s == pytest.approx(86400 + 61)


def test_a_job_that_gives_up_is_started_again_from_what_it_saved():
    """One size only, no spare, and a new node takes longer than the job waits for one."""
    found = run(read({"nodes": 8, "days": 2, "rate": "2%", "replace": "30m"}), 1)
    assert any("too few workers" in reason for reason in found.given_up)
    assert found.spent.given_up > 0
    assert found.done == 1.0


def test_many_faults_of_a_job_that_comes_further_do_not_end_it():
    asked = {"nodes": 64, "days": 10, "rate": "0.5%", "max_restarts": 5, "spares": 4, "min_nodes": 50}
    found = run(read(asked), 1)
    assert found.incidents > 40
    assert found.given_up == []


def test_all_nodes_at_once_costs_what_was_not_saved():
    classes = [{"name": "power", "scope": "rack", "size": 8, "rate": "0.5%", "lasts": "10m"}]
    asked = {"nodes": 8, "days": 4, "failures": classes, "cloud": False, "replace": 30, "detection": "20s"}
    often = run(read(asked | {"durable_every": "5m"}), 2)
    seldom = run(read(asked | {"durable_every": "3h"}), 2)
    assert often.failures["power"] > 2
    assert 0 < often.lost_steps < seldom.lost_steps


def test_slow_nodes_hold_up_all():
    classes = [{"name": "slow", "scope": "slow", "rate": "0.1%", "factor": 2, "lasts": "2h"}]
    found = run(read({"nodes": 16, "days": 4, "failures": classes}), 3)
    assert found.spent.slow == pytest.approx(3600.0 * found.failures["slow"], rel=0.15)


def test_slow_nodes_that_are_found_are_replaced_by_the_coordinators_own_verdict():
    classes = [{"name": "slow", "scope": "slow", "rate": "0.1%", "factor": 2, "lasts": "6h", "found": "10m"}]
    found = run(read({"nodes": 16, "days": 4, "spares": 2, "failures": classes}), 3)
    assert found.new_nodes > 0
    assert found.spent.slow < 0.2 * 3 * 3600 * found.failures["slow"]


def test_lemons_fail_more_often():
    few = run(read({"nodes": 64, "days": 4, "rate": "0.05%", "min_nodes": 32}), 1)
    many = run(read({"nodes": 64, "days": 4, "rate": "0.05%", "min_nodes": 32, "lemons": "20%"}), 1)
    assert sum(many.failures.values()) > 1.5 * sum(few.failures.values())


def test_too_few_names_is_tried_again_with_more(monkeypatch):
    asked = scenario(detection="10s")
    usual = run(asked, 0)
    monkeypatch.setattr(trials, "NAMES", 3)
    assert run(asked, 0) == usual


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_nodes": 99}, "min_nodes: 99 is more than nodes: 16"),
        (
            {"start": "6m"},
            "start: the coordinator ends workers that are not ready within 150 x detection = 300 s",
        ),
        ({"step": "9d"}, "step: 777600 s is longer than the whole run"),
        ({"rate": "2%", "peer": "4h"}, "the run does not finish: 16 nodes fail every 11250 s"),
        ({"lemons": 2}, "lemons: 2 is more than all"),
        ({"cloud": "perhaps"}, "cloud: 'perhaps' is neither true nor false"),
        ({"sparse": 2}, "unknown field 'sparse': did you mean 'spares'?"),
        ({"failures": [{"scope": "gpu", "rate": 0}]}, "rate and failures"),
    ],
)
def test_what_cannot_be_is_refused(fields, said):
    with pytest.raises(UsageError) as refused:
        read({"nodes": 16, "days": 8, "rate": "0.1%"} | fields)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"scope": "gpu", "rate": 0}, "failures[0].scope: 'gpu' is none of worker, node, hang"),
        ({"scope": "node"}, "failures[0].rate is missing"),
        (
            {"scope": "node", "rate": 0, "sizes": 3},
            "unknown field in failures[0] 'sizes': did you mean 'size'?",
        ),
        ({"scope": "node", "rate": 0, "shape": -1}, "failures[0].shape: -1 is negative; for example 0.7"),
    ],
)
def test_a_class_that_cannot_be_is_refused(kind, said):
    with pytest.raises(UsageError) as refused:
        read({"nodes": 16, "days": 8, "failures": [kind]})
    assert said in str(refused.value)


def test_a_scenario_made_in_code_can_be_checked():
    check(Scenario(nodes=4, work_s=86400.0))
