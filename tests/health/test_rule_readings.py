"""Conditions over readings: when they become true, when that is told, and when it is over."""

import pytest

from holdfast.health.rule_engine import RuleEngine
from holdfast.health.rules import make_rule
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import Reading
from holdfast.protocol.health import Condition, Remedy, Severity


def judge(values, step_s=1.0, name="m.v", **condition):
    """(time, condition) of every finding about a series of values, one every `step_s`."""
    rule = make_rule({"id": "r", "source": "m", "reading": name, **condition})
    engine = RuleEngine([rule])
    told = []
    for i, value in enumerate(values):
        for finding in engine.on_reading(
            Reading(source="m", name=name, value=value, subject="it"), i * step_s
        ):
            told.append((i * step_s, finding.condition.value))
    return told


FAULTY, HEALTHY = "faulty", "healthy"


@pytest.mark.parametrize(
    ("condition", "values", "told"),
    [
        ({"above": 1.5}, [1, 2, 3, 1, 1], [(1, FAULTY), (3, HEALTHY)]),
        ({"below": 0.5}, [1, 0.5, 0.4], [(2, FAULTY)]),
        ({"equals": "dead"}, ["live", "dead", "live"], [(1, FAULTY), (2, HEALTHY)]),
        ({"differs": "live"}, ["live", "dead"], [(1, FAULTY)]),
        ({"any_bits": 0x48}, [0x4, 0x44, 0x4], [(1, FAULTY), (2, HEALTHY)]),
        ({"leaves": "up"}, ["down", "down", "up", "down", "up"], [(3, FAULTY), (4, HEALTHY)]),
        ({"rises": 1}, [7, 7, 8, 8], [(2, FAULTY)]),
        ({"falls": 2}, [9, 8, 6, 6], [(2, FAULTY)]),
        ({"above": 1, "holds": 3}, [2, 2, 0, 2, 2, 2, 2], [(6, FAULTY)]),
        ({"rises": 5, "window": 3}, [0, 1, 2, 3, 4, 5, 6], []),
        ({"rises": 5, "window": 3}, [0, 1, 2, 3, 6, 7], [(4, FAULTY)]),
        ({"rate_above": 2, "window": 2}, [0, 1, 2, 3, 7], [(4, FAULTY)]),
        ({"above": 0, "share": 0.6, "window": 5}, [0, 1, 1, 0, 1, 1, 1], [(5, FAULTY)]),
        ({"above": 0, "count": 3, "window": 20}, [0, 1, 0, 1, 0, 1, 0], [(5, FAULTY)]),
        ({"above": 0, "count": 3, "window": 3}, [0, 1, 0, 1, 0, 1, 0], []),
    ],
)
def test_conditions(condition, values, told):
    assert judge(values, **condition) == told


def test_a_counter_that_begins_anew_has_not_risen():
    assert judge([100, 0, 0, 1], rises=1) == [(3, FAULTY)]
    assert judge([100, 0, 90], rises=95, window=10) == []


def test_a_first_value_is_no_change():
    assert judge([5], rises=1) == []


def test_subjects_are_apart():
    engine = RuleEngine([make_rule({"id": "r", "source": "m", "reading": "m.v", "rises": 1})])
    for subject, value, count in (("a", 1, 0), ("b", 5, 0), ("a", 1, 0), ("b", 6, 1)):
        assert (
            len(engine.on_reading(Reading(source="m", name="m.v", value=value, subject=subject), 1.0))
            == count
        )


def test_one_reading_against_another_of_the_same_subject():
    rule = make_rule({"id": "r", "source": "m", "reading": "width", "below_reading": "max_width"})
    engine = RuleEngine([rule])

    def read(subject, width, most):
        engine.on_reading(Reading(source="m", name="max_width", value=most, subject=subject), 0.0)
        return len(engine.on_reading(Reading(source="m", name="width", value=width, subject=subject), 0.0))

    assert read("a", 16, 16) == 0
    assert read("b", 8, 16) == 1
    assert read("c", 8, 8) == 0


def test_unknown_is_its_own_condition_and_told_once_for_a_source_when_it_lasts():
    engine = RuleEngine(catalogue())
    names = ("disk.free_share", "mount.read_only")

    def hang(at):
        return [
            f
            for name in names
            for f in engine.on_reading(
                Reading(source="disk", name=name, value=None, why="no answer for 9 s"), at
            )
        ]

    assert hang(0.0) == hang(15.0) == hang(30.0) == []
    (finding,) = hang(46.0)
    assert finding.rule == "source-silent"
    assert finding.condition is Condition.UNKNOWN
    assert (finding.severity, finding.remedy) == (Severity.WARNING, Remedy.WATCH)
    assert "no answer for 9 s" in finding.evidence
    assert hang(60.0) == []
    (again,) = hang(700.0)  # still: the core asks a person
    assert again.condition is Condition.UNKNOWN
    (over,) = engine.on_reading(Reading(source="disk", name="disk.free_share", value=0.5), 775.0)
    assert over.condition is Condition.HEALTHY
    assert hang(780.0) == []


def test_a_source_that_answers_now_and_then_is_not_unknown():
    engine = RuleEngine(catalogue())
    for i in range(20):
        value = None if i % 2 else 0.5
        assert (
            engine.on_reading(
                Reading(source="disk", name="disk.free_share", value=value, why="slow"), 30.0 * i
            )
            == []
        )


def test_a_memory_error_is_fatal_and_a_known_one_is_not():
    engine = RuleEngine(catalogue())

    def read(count, at):
        return engine.on_reading(
            Reading(source="edac", name="edac.ue_count", value=float(count), subject="memory controller 0"),
            at,
        )

    assert read(3, 0.0) == []  # from before this job
    (finding,) = read(4, 15.0)
    assert (finding.rule, finding.severity, finding.remedy) == ("edac-ue", Severity.FATAL, Remedy.REPLACE)
    assert finding.subject == "memory controller 0"


def test_new_rules_keep_what_the_old_ones_remember():
    def rule(**more):
        return make_rule({"id": "r", "source": "m", "reading": "m.v", "above": 1, "holds": 10, **more})

    engine = RuleEngine([rule()])
    assert engine.on_reading(Reading(source="m", name="m.v", value=2.0), 0.0) == []
    engine.set_rules([rule(severity="fatal")])
    (finding,) = engine.on_reading(Reading(source="m", name="m.v", value=2.0), 10.0)
    assert finding.severity is Severity.FATAL
