"""The catalogue: every rule says where it comes from, and finds the lines that somebody published."""

import pytest

from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import LogLine
from holdfast.protocol.health import Remedy, Severity

RULES = catalogue()
LINES = [(rule, line) for rule in RULES if not rule.family for line in rule.examples]


def codes(*ranges):
    found = []
    for text in ranges:
        first, _, last = str(text).partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_every_rule_has_its_provenance_and_words():
    for rule in RULES:
        assert rule.reference.startswith("https://"), rule.id
        assert rule.wording, rule.id
        assert rule.enabled, rule.id
        assert not rule.dry_run, rule.id


@pytest.mark.parametrize(("rule", "line"), LINES, ids=[rule.id for rule, _ in LINES])
def test_a_published_line_is_found_by_its_rule_and_no_other(rule, line):
    """As often as the rule asks for; of other rules only the milder one on the same matter speaks."""
    engine = RuleEngine(RULES)
    found = {
        f.rule
        for i in range(rule.count)
        for f in engine.on_line(LogLine(rule.source, line), 1.0 + i * rule.apart)
    }
    assert rule.id in found
    family = rule.id.removesuffix("-repeated")
    assert found <= {family, f"{family}-repeated"}


def test_every_xid_is_in_a_class():
    assert {RULES.get(f"xid-{code}").code for code in codes("1-173")} == {str(c) for c in codes("1-173")}
    assert RULES.get("xid-unknown").remedy is Remedy.ASK


@pytest.mark.parametrize(
    ("ranges", "severity", "remedy"),
    [
        (
            "8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139",
            Severity.ERROR,
            Remedy.RESTART_WORKER,
        ),
        ("14 37 38 43 44 66 67 93 106 107 137 141 152 153 160 161", Severity.INFO, Remedy.WATCH),
        ("63 92 121 157", Severity.WARNING, Remedy.WATCH),
        (
            "46 48 62 64 74 95 109 110 119 120 136 140 143-150 155 156 158",
            Severity.FATAL,
            Remedy.RESET_DEVICE,
        ),
        ("151", Severity.FATAL, Remedy.REBOOT),
        ("54 79", Severity.FATAL, Remedy.REPLACE),
        ("1-7 9 10 12 15-24 26-30 33-36 42 47 49-53 55-59 65 73 81 87 90", Severity.WARNING, Remedy.ASK),
    ],
)
def test_xid_classes_are_those_of_nvidias_catalogue(ranges, severity, remedy):
    for code in codes(*ranges.split()):
        rule = RULES.get(f"xid-{code}")
        assert (rule.severity, rule.remedy) == (severity, remedy), code


@pytest.mark.parametrize(
    ("ranges", "severity"),
    [
        (
            "11001 11009 11013 11018-11020 12001 12002 12020 12022 12024-12027 12031 12032 14017 15001 15006 15009 15010 "
            "15012 15013 19047 19048 20034 22003 22011 23001-23017 24004-24007",
            Severity.FATAL,
        ),
        ("11012 11021-11023 12021 12023 15008 15011 19049 24001-24003 20001 20012 22013", Severity.WARNING),
    ],
)
def test_sxid_classes(ranges, severity):
    for code in codes(*ranges.split()):
        assert RULES.get(f"sxid-{code}").severity is severity, code
