"""Users' rules: they add to the catalogue, override and switch off; an error names its line and changes nothing."""

import pytest

from holdfast.errors import UsageError
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import catalogue, load_rules
from holdfast.health.samples import LogLine
from holdfast.protocol.health import Remedy, Severity

XID_43 = "NVRM: Xid (PCI:0000:05:00): 43, pid=1, name=python, Ch 00000010"
GOOD = """\
# ours
[[rule]]
id = "our-driver"
source = "kmsg"
pattern = '^ourdrv (?P<port>\\d+): wedged'
subject = "port {port}"
count = 2
window = "1m"
severity = "fatal"
remedy = "replace"

[[rule]]
id = "xid-63"
remedy = "replace"
severity = "error"

[[rule]]
id = "xid-43"
enabled = false
"""


def write(tmp_path, text):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    return str(path)


def found(rules, *texts):
    engine = RuleEngine(rules)
    return [f for i, text in enumerate(texts) for f in engine.on_line(LogLine("kmsg", text), float(i))]


def test_they_add_override_and_switch_off(tmp_path):
    rules = load_rules([write(tmp_path, GOOD)])
    (finding,) = found(rules, "ourdrv 3: wedged", "ourdrv 3: wedged")
    assert (finding.rule, finding.subject, finding.count) == ("our-driver", "port 3", 2)
    (finding,) = found(rules, "NVRM: Xid (PCI:0000:05:00): 63, Row Remapper")
    assert (finding.severity, finding.remedy) == (Severity.ERROR, Remedy.REPLACE)
    assert rules.get("xid-63").reference == catalogue().get("xid-63").reference
    assert found(rules, XID_43) == []  # and it is not an unknown one either
    assert rules.origin("xid-63").endswith("ours.toml")


def test_new_codes_and_new_families(tmp_path):
    text = """
[family.xid.code]
200 = { class = "reset", name = "Something new" }

[family.oam]
source = "kmsg"
pattern = '^oam(?P<card>\\d): fault (?P<code>\\d+)'
subject = "card {card}"

[family.oam.class.bad]
severity = "fatal"
remedy = "replace"

[family.oam.code]
7 = { class = "bad", name = "Burnt" }
unknown = { class = "bad", name = "New" , severity = "warning"}
"""
    rules = load_rules([write(tmp_path, text)])
    assert [f.rule for f in found(rules, "NVRM: Xid (PCI:0000:05:00): 200, new")] == ["xid-200"]
    assert [f.rule for f in found(rules, "oam1: fault 7", "oam2: fault 8")] == ["oam-7", "oam-unknown"]


def test_a_later_file_overrides_an_earlier_one(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('[[rule]]\nid = "xid-79"\nremedy = "reboot"\n')
    second.write_text('[[rule]]\nid = "xid-79"\nseverity = "error"\n')
    rule = load_rules([str(first), str(second)]).get("xid-79")
    assert (rule.severity, rule.remedy) == (Severity.ERROR, Remedy.REBOOT)


def test_rules_on_trial(tmp_path):
    rules = load_rules([], ["xid-*", "soft-lockup"])
    (finding,) = found(rules, XID_43)
    assert finding.dry_run
    assert rules.get("soft-lockup").dry_run
    assert not rules.get("sxid-20034").dry_run
    assert all(r.dry_run for r in load_rules([], ["*"]))
    with pytest.raises(UsageError, match="there is no rule named 'xid-9999'"):
        load_rules([], ["xid-9999"])


def test_one_on_trial_hides_none_that_is_not(tmp_path):
    path = write(tmp_path, '[[rule]]\nid = "xid-79"\ndry_run = true\n')
    off = "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
    reset = "NVRM: Xid (PCI:0000:05:00): 119, Timeout"
    assert [(f.rule, f.dry_run) for f in found(load_rules([path]), off, reset)] == [
        ("xid-79", True),
        ("xid-119", False),
    ]


def test_a_pattern_of_a_user_takes_linear_time(tmp_path):
    """Python's own would try each of 2 ** 2000 ways to divide the letters."""
    rules = load_rules([write(tmp_path, "[[rule]]\nid = 'ours'\nsource = 'kmsg'\npattern = '^(a+)+$'\n")])
    assert found(rules, "a" * 1999 + "!") == []
    assert [f.rule for f in found(rules, "a" * 1999)] == ["ours"]


def test_lines_that_are_no_unicode_are_searched(tmp_path):
    rules = load_rules([write(tmp_path, "[[rule]]\nid = 'ours'\nsource = 'kmsg'\npattern = 'broke: .'\n")])
    assert [f.rule for f in found(rules, "\ud800", "it broke: \udcff")] == ["ours"]


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", r"a\Z", "(?x) a", "a{1001}"])
def test_what_linear_time_excludes_is_refused_with_its_line(tmp_path, pattern):
    path = write(tmp_path, f"[[rule]]\nid = 'ours'\nsource = 'kmsg'\npattern = '{pattern}'\n")
    with pytest.raises(UsageError, match=r"line 4: ours: the pattern is not a regular expression of RE2"):
        load_rules([path])


def test_a_pattern_of_the_catalogue_stays_its_own_until_a_user_writes_another(tmp_path):
    changed = write(tmp_path, "[[rule]]\nid = 'xid-79'\nseverity = 'warning'\n")
    assert load_rules([changed]).get("xid-79").own
    other = write(tmp_path, "[[rule]]\nid = 'xid-79'\nfamily = ''\npattern = '^NVRM: (?!Xid)'\n")
    with pytest.raises(UsageError, match="line 4: xid-79: the pattern is not a regular expression of RE2"):
        load_rules([other])
    with pytest.raises(UsageError, match="'own' is not a field of a rule"):
        load_rules([write(tmp_path, "[[rule]]\nid = 'xid-79'\nown = true\n")])


WRONG = {
    "no TOML": ("[[rule]\nid = 1", "line 1"),
    "a misspelt field": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npatern = "x"\n',
        "line 4: 'patern' is not a field",
    ),
    "a bad expression": (
        '\n[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "("\n',
        "line 5: a: the pattern is not a regular",
    ),
    "a remedy that is none": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\nremedy = "pray"\n',
        "line 5: Invalid enum value 'pray'",
    ),
    "no id": ('[[rule]]\nsource = "kmsg"\n', "line 1: this rule does not have an id"),
    "no source": ('[[rule]]\nid = "a"\npattern = "x"\n', "line 1: a: source is missing"),
    "nothing to look at": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\n',
        "must have exactly one of pattern, reading and unknown",
    ),
    "a count without a window": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\ncount = 3\n',
        "line 5: a: a count needs a window",
    ),
    "no time": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\nwindow = "soon"\n',
        "line 5: window='soon' is not a",
    ),
    "a subject from nowhere": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\nsubject = "gpu {pci}"\n',
        "line 5: a: subject names 'pci'",
    ),
    "a subject that is no template": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\nsubject = "gpu {"\n',
        "line 5: a: subject 'gpu {'",
    ),
    "lines from nowhere": (
        '[[rule]]\nid = "a"\nsource = "kmesg"\npattern = "x"\n',
        "line 3: a: the source of lines must be kmsg or log, not 'kmesg'",
    ),
    "a family without codes": (
        '[family.oam]\nsource = "kmsg"\npattern = "x"\n[family.oam.class.bad]\n[family.oam.code]\n7 = { class = "bad" }\n',
        "needs a group (?P<code>...)",
    ),
    "an example that is none": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\nexamples = ["y"]\n',
        "line 5: a: the pattern does not match its example 'y'",
    ),
    "two conditions": (
        '[[rule]]\nid = "a"\nsource = "x"\nreading = "x.y"\nabove = 1\nbelow = 0\n',
        "a: a reading needs one of above",
    ),
    "twice": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\n[[rule]]\nid = "a"\n',
        "line 5: rule 'a' is in this file twice",
    ),
    "another table": ('[rules]\nid = "a"\n', "line 1: 'rules' is not a table of a rule file"),
    "one bracket": ('[rule]\nid = "a"\n', "line 1: write [[rule]]"),
    "a class that is none": (
        '[family.xid.code]\n7 = { class = "odd" }\n',
        "line 2: code 7 of xid needs one of the classes",
    ),
    "an error in the second rule": (
        '[[rule]]\nid = "a"\nsource = "kmsg"\npattern = "x"\n\n[[rule]]\nid = "b"\nsource = "kmsg"\npattern = "x"\nshare = 2\n',
        "line 10: b: share must be between 0 and 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_its_line(name, tmp_path):
    text, words = WRONG[name]
    rules = catalogue()
    before = list(rules)
    with pytest.raises(UsageError) as error:
        rules.read(text, "ours.toml")
    assert "ours.toml" in str(error.value)
    assert words in str(error.value)
    assert list(rules) == before


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"the rule file .*nowhere.toml cannot be read: .*No such file"):
        load_rules([str(tmp_path / "nowhere.toml")])


def test_a_rule_that_says_more_where_it_comes_again(tmp_path):
    text = GOOD.split("[[rule]]")[1]
    text = "[[rule]]" + text.replace('count = 2\nwindow = "1m"\n', "").replace('"fatal"', '"warning"')
    text = (
        text.replace('"replace"', '"watch"')
        + '[rule.repeat]\ncount = 3\nwindow = "1m"\nremedy = "reboot"\nseverity = "error"\n'
    )
    rules = load_rules([write(tmp_path, text)])
    said = found(rules, *["ourdrv 3: wedged"] * 3)
    assert [(f.rule, f.remedy) for f in said] == [
        ("our-driver", Remedy.WATCH),
        ("our-driver-repeated", Remedy.REBOOT),
    ]
    # Of a rule that is there already: it inherits that one's fields.
    text = '[[rule]]\nid = "nvme-no-path"\n[rule.repeat]\ncount = 2\nwindow = "1h"\nseverity = "fatal"\n'
    again = load_rules([write(tmp_path, text)]).get("nvme-no-path-repeated")
    assert (again.pattern, again.count) == (catalogue().get("nvme-no-path").pattern, 2)


@pytest.mark.parametrize(
    ("repeat", "said"),
    [
        ("repeat = 3", "'repeat' is not a field of a rule"),
        ("repeat = {counts = 3}", "'counts' is not a field of a rule"),
    ],
)
def test_a_repeat_that_cannot_be_is_refused_with_its_line(tmp_path, repeat, said):
    text = f'[[rule]]\nid = "nvme-no-path"\n{repeat}\n'
    with pytest.raises(UsageError, match=rf"ours.toml, line \d: {said}"):
        load_rules([write(tmp_path, text)])
