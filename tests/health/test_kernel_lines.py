"""Lines as other people's kernels and drivers wrote them, and the verdict that each must get."""

import json
import re
from pathlib import Path

import pytest

from holdfast.health.kmsg import format_record, parse_record, printed_lines
from holdfast.health.log_matching import Matchers
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import LogLine

RULES = catalogue()
MATCHERS = Matchers(RULES)
CORPUS = (Path(__file__).parent / "corpus" / "kernel_lines.txt").read_text()
LEAST = 200
EXPECTED = re.compile(r"(\S+) (\S+) \| (.+)")


def expectations() -> list[tuple[str, str, str]]:
    found = []
    for line in CORPUS.splitlines():
        if line and not line.startswith("#"):
            match = EXPECTED.fullmatch(line)
            assert match is not None, line
            # Within JSON the newline of a message is written so anyway.
            text = match[3] if match[3].startswith("{") else match[3].replace("\\n", "\n")
            found.append((match[1], match[2], text))
    return found


LINES = expectations()


def judged(text: str) -> set[tuple[str, str]]:
    """Remedies and rules of a printed record; of a rule that counts repetitions only the one of a first occurrence."""
    found = [rule for record in printed_lines(text) for rule, _ in MATCHERS.find(LogLine("kmsg", record))]
    ids = {rule.id for rule in found}
    milder = [r for r in found if not (r.id.endswith("-repeated") and r.id.removesuffix("-repeated") in ids)]
    return {(r.remedy.value, r.id) for r in milder}


@pytest.mark.parametrize(
    ("action", "rule", "text"), LINES, ids=[f"{r}-{i}" for i, (_, r, _) in enumerate(LINES)]
)
def test_a_line_gets_its_verdict(action, rule, text):
    assert judged(text) == (set() if action == "none" else {(action, rule)})


def test_there_are_enough_of_them_and_harmless_ones_too():
    assert len(set(LINES)) == len(LINES) >= LEAST
    assert sum(action == "none" for action, _, _ in LINES) > len(LINES) / 4


@pytest.mark.parametrize(
    ("action", "rule", "text"), LINES, ids=[f"{r}-{i}" for i, (_, r, _) in enumerate(LINES)]
)
def test_the_device_and_the_journal_give_the_same_verdict(action, rule, text):
    """What a person copies is judged as what the agent reads: /dev/kmsg's escapes, and the journal's JSON."""
    for record in printed_lines(text):
        kernel = parse_record(format_record(1, record))
        assert kernel is not None
        assert kernel.text == record
        entry = {"_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "MESSAGE": record}
        assert printed_lines(json.dumps(entry)) == [record]


def test_a_record_of_three_lines_is_one_finding_and_names_its_gpu():
    from holdfast.health.rule_engine import RuleEngine

    text = next(t for _, rule, t in LINES if rule == "gpu-off-the-bus")
    (record,) = printed_lines(text)
    found = RuleEngine(RULES).on_line(LogLine("kmsg", record), 0.0)
    assert [(f.rule, f.subject) for f in found] == [("gpu-off-the-bus", "gpu 0000:b3:00")]


def test_a_later_line_acts_only_where_one_driver_speaks_throughout():
    said = "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus."
    for first in ("NVRM: something else", "NVRM: GPU at PCI:0000:29:00: GPU-1"):
        assert judged(f"{first}\n  {said}") == {("replace", "gpu-off-the-bus")}
    for first in (
        "overlayfs: x",
        "no speaker at all",
        "NVRM",
        "nvme nvme0: x",
        "NVRM: API mismatch: x",
        "a[1]: y",
    ):
        record = f"{first}\n{said}"
        assert not list(MATCHERS.find(LogLine("kmsg", record))), record
    between = f"NVRM: a\nsomebody else\n{said}"
    assert not list(MATCHERS.find(LogLine("kmsg", between)))
