"""Rules over workers' logs: what must come, how often, and numbers that must not be too low or too high."""

import pytest

from holdfast.health.rule_engine import RuleEngine
from holdfast.health.rules import make_rule
from holdfast.health.samples import LogLine
from holdfast.protocol.health import Remedy, Severity


def make(**fields):
    return make_rule({"id": "r", "source": "log", **fields})


def say(engine, text, at, worker="node0.0#1"):
    return engine.on_line(LogLine("log", text, worker), at)


def test_fault_on_match_ends_the_worker_that_said_it():
    engine = RuleEngine([make(pattern="uncorrectable ECC error", fault_on_match=True)])
    assert say(engine, "all is well", 0.0) == []
    (finding,) = say(engine, "CUDA error: uncorrectable ECC error encountered", 1.0)
    assert (finding.severity, finding.remedy) == (Severity.ERROR, Remedy.RESTART_WORKER)
    assert finding.worker == finding.subject == "node0.0#1"


def test_a_number_beyond_its_threshold_so_many_times_in_a_row():
    engine = RuleEngine([make(pattern=r"samples/s: (?P<value>[\d.]+)", below=80.5, count=3)])
    values = [70, 70, 90, 70, 80.4, 80.6, 10, 10, 10]
    assert [len(say(engine, f"samples/s: {v}", float(i))) for i, v in enumerate(values)] == [0] * 8 + [1]


def test_numbers_of_two_workers_are_apart():
    engine = RuleEngine([make(pattern=r"speed=(\S+)", below=1.0, count=2)])
    assert say(engine, "speed=0.5", 0.0, "a") == say(engine, "speed=0.5", 1.0, "b") == []
    assert say(engine, "speed=nan", 2.0, "a") == say(engine, "speed=fast", 2.0, "a") == []


def test_a_first_line_by_its_time():
    engine = RuleEngine([make(pattern="epoch 0", start_within=2.5)])
    assert engine.next_due_s() is None
    engine.on_training_started("w", 0, 10.0)
    engine.on_training_started("other", 1, 10.0)  # prints nothing: absence is looked for on rank 0
    assert engine.next_due_s() == 12.5
    assert engine.overdue(12.4) == []
    (finding,) = engine.overdue(12.5)
    assert finding.worker == "w"
    assert "within 2.5 s of the start" in finding.evidence
    assert engine.overdue(20.0) == []
    assert engine.next_due_s() is None


def test_a_line_that_must_come_again_and_again():
    engine = RuleEngine([make(pattern="step", every=5, start_within=60)])
    engine.on_training_started("w", 0, 0.0)
    assert engine.next_due_s() == 60.0
    say(engine, "step 1", 30.0, "w")
    assert engine.next_due_s() == 35.0
    say(engine, "step 2", 34.0, "w")
    assert engine.overdue(38.9) == []
    assert len(engine.overdue(39.0)) == 1
    say(engine, "step 3", 50.0, "w")
    assert engine.next_due_s() == 55.0
    engine.on_training_paused("w")  # between two generations nobody prints
    assert engine.next_due_s() is None
    engine.on_training_started("w", 0, 100.0)
    assert engine.next_due_s() == 160.0


def test_ranks_and_the_first_seconds():
    engine = RuleEngine([make(pattern="lost", ranks=[1], start_after=10.0)])
    engine.on_training_started("a", 0, 0.0)
    engine.on_training_started("b", 1, 0.0)
    assert say(engine, "lost", 20.0, "a") == []
    assert say(engine, "lost", 9.0, "b") == []
    assert len(say(engine, "lost", 20.0, "b")) == 1


def test_times_begin_after_the_first_seconds():
    engine = RuleEngine([make(pattern="step", every=5, start_after=120)])
    engine.on_training_started("w", 0, 0.0)
    assert engine.next_due_s() == 125.0
    say(engine, "step 1", 30.0, "w")
    assert engine.next_due_s() == 125.0
    say(engine, "step 2", 124.0, "w")
    assert engine.next_due_s() == 129.0


@pytest.mark.parametrize(
    ("fields", "firm"),
    [
        ({}, False),
        ({"fault_on_match": True}, True),
        ({"count": 2}, True),
        ({"pattern": r"speed (\S+)", "below": 0.5}, True),
        ({"pattern": r"speed (\S+)", "above": 0}, True),
        ({"start_within": 0.5}, True),
        ({"every": "1.5s"}, True),
        ({"source": "kmsg", "count": 2, "window": 60}, False),  # the kernel is believed anyway
    ],
)
def test_rules_that_say_how_much_is_a_fault_are_firm(fields, firm):
    assert make(**{"pattern": "lost"} | fields).firm is firm


def test_findings_say_whether_they_are_firm():
    engine = RuleEngine([make(pattern="lost", fault_on_match=True)])
    assert say(engine, "lost", 0.0)[0].firm
    engine.set_rules([make(pattern="lost")])
    assert not say(engine, "lost", 500.0)[0].firm


def test_rules_changed_at_run_time():
    engine = RuleEngine([make(pattern="step", every=5)])
    engine.on_training_started("w", 0, 0.0)
    assert engine.next_due_s() == 5.0
    engine.set_rules([make(pattern="step", every="7.5s")])
    assert engine.next_due_s() == 7.5
    assert engine.reads_logs
    engine.set_rules([])
    assert engine.next_due_s() is None
    assert not engine.reads_logs
