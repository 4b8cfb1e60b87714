"""What must hold for any line and any order of them."""

import string

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.health import rule_engine
from holdfast.health.log_matching import Matchers, literals
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.rules import make_rule
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import LogLine, Reading
from holdfast.protocol.health import EVIDENCE_CHARS, Condition

RULES = list(catalogue())
EXAMPLES = [(r.source, line) for r in RULES if r.pattern for line in (*r.examples, *r.others)]
text = st.text(alphabet=string.printable, max_size=200)
times = st.floats(0, 1e5, allow_nan=False)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(EXAMPLES), text, st.integers(0, 200))
def test_no_line_is_too_strange(example, noise, at):
    """Cut, spliced and mangled lines of real ones: nothing raises, and evidence has its bound."""
    source, line = example
    engine = RuleEngine(RULES)
    for mangled in (line[:at] + noise + line[at:], line[at:], noise, line * 40, noise + line):
        for finding in engine.on_line(LogLine(source, mangled), 0.0):
            assert len(finding.evidence) <= EVIDENCE_CHARS


def test_the_fixed_part_of_a_pattern_is_in_every_line_that_matches():
    """Looking for it first must never hide a line."""
    for rule in RULES:
        for line in rule.examples if rule.pattern else ():
            assert any(part in line for part in literals(rule.pattern)), rule.id


@settings(max_examples=300, deadline=None)
@example("{?|}2", "")
@example("[^]a]b", "cb")
@example(r"[\]a]", "a")
@given(st.from_regex(r"[a-c.+*?()|{}\[\]^$2]{1,12}", fullmatch=True), st.text("abc2", max_size=12))
def test_the_fixed_part_of_any_pattern(pattern, line):
    import re
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = re.search(pattern, line)
        except re.error:
            return
    assert found is None or any(part in line for part in literals(pattern)), (pattern, line)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 400)), max_size=60))
def test_one_finding_for_each_burst(events):
    """Against the definition: a burst begins after more than three minutes without a line about this GPU."""
    engine = RuleEngine(RULES)
    now, last, expected, found = 0.0, {}, 0, 0
    for gpu, gap in events:
        now += gap
        expected += now - last.get(gpu, -1e9) > 180.0
        last[gpu] = now
        line = f"NVRM: Xid (PCI:0000:0{gpu}:00): 79, pid=1, name=x, GPU has fallen off the bus."
        found += len(engine.on_line(LogLine("kmsg", line), now))
    assert found == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(times, min_size=1, max_size=50, unique=True), st.integers(1, 6), st.floats(1, 1e4))
def test_counts_are_those_of_the_window(events, count, window):
    rule = make_rule(
        {"id": "r", "source": "kmsg", "pattern": "x", "count": count, "window": window, "quiet": 0}
    )
    engine = RuleEngine([rule])
    for i, at in enumerate(ordered := sorted(events)):
        within = sum(at - before <= window for before in ordered[: i + 1])
        assert bool(engine.on_line(LogLine("kmsg", "x"), at)) == (within >= count)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=False), st.sampled_from(["up", "down"])), max_size=40)
)
def test_conditions_take_turns(values):
    """Faulty and healthy alternate for one subject, whatever is read."""
    rules = [
        make_rule({"id": "high", "source": "m", "reading": "v", "above": 10, "quiet": 0}),
        make_rule({"id": "gone", "source": "m", "reading": "v", "leaves": "up", "quiet": 0}),
        make_rule({"id": "silent", "source": "m", "unknown": True, "holds": 2, "quiet": 0}),
    ]
    engine = RuleEngine(rules)
    state: dict[str, bool] = {}
    for i, value in enumerate(values):
        for finding in engine.on_reading(Reading(source="m", name="v", value=value, subject="it"), 10.0 * i):
            bad = finding.condition is not Condition.HEALTHY
            assert state.get(finding.rule, False) != bad
            state[finding.rule] = bad


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(rule_engine, "KEYS_KEPT", 50)
    engine = RuleEngine(
        [
            make_rule(
                {
                    "id": "r",
                    "source": "kmsg",
                    "pattern": r"x(?P<n>\d+)",
                    "subject": "{n}",
                    "count": 2,
                    "window": 9,
                }
            )
        ]
    )
    for i in range(5000):
        engine.on_line(LogLine("kmsg", f"x{i}"), float(i))
    assert len(engine._bursts) <= 50
    assert len(engine._matches) <= 50


def test_a_flood_of_lines_costs_little():
    """Not a timing: of the catalogue's patterns hardly any is tried on a line that is none of theirs."""
    matchers = Matchers(RULES)
    line = "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready"
    tried = [m for m in matchers._by_source["kmsg"] if m.may_match(line)]
    assert len(tried) <= 3, [m.pattern.pattern for m in tried]
