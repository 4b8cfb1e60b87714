"""`holdfast health`: rules in tables of at most 100 columns, what one means, files of rules with the line that is wrong."""

import json

import pytest


def test_every_rule_fits_into_100_columns(holdfast):
    said = holdfast("health", "rules")
    assert said.code == 0
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 100
    for rule in (
        "xid-79",
        "sxid-20034",
        "filesystem-read-only",
        "edac-ue",
        "rdma-down",
        "gpu-lost",
        "source-silent",
    ):
        assert any(line.startswith(f"{rule} ") for line in lines), rule


def test_rules_of_a_source_and_with_a_remedy(holdfast):
    said = holdfast("health", "rules", "--source", "kmsg", "--remedy", "reset-device", "--json")
    rules = json.loads(said.out)
    assert {"xid-48", "xid-119", "xid-154-1"} <= {r["id"] for r in rules}
    assert {(r["source"], r["remedy"]) for r in rules} == {("kmsg", "reset-device")}


@pytest.mark.parametrize("name", ["79", "xid-79", "xid 79", "XID=79"])
def test_an_xid_by_any_of_its_names(holdfast, name):
    said = holdfast("health", "explain", name)
    assert said.code == 0
    assert "fallen off the bus" in said.out
    assert "replace" in said.out
    assert "docs.nvidia.com" in said.out


def test_a_code_with_its_variants(holdfast):
    out = holdfast("health", "explain", "154").out
    assert "xid-154-2\n" in out
    assert "xid-145-nonfatal\n" in holdfast("health", "explain", "145").out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["explain", "soft-lokup"], "did you mean soft-lockup"),
        (["explain", "xid-800"], "judged by the rule xid-unknown"),
        (["explain", "99999"], "judged by the rule sxid-unknown"),
        (["rules", "--source", "moon"], "--source 'moon': there are"),
        (["rules", "--remedy", "pray"], "--remedy 'pray': there are watch, restart-worker"),
        (["rules", "--rules", "nowhere.toml"], "the rule file nowhere.toml cannot be read"),
        (["check", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_bad_input_says_what_there_is(holdfast, args, words):
    said = holdfast("health", *args)
    assert said.code == 2
    assert words in said.err


def test_a_file_of_rules(holdfast, tmp_path):
    (tmp_path / "ours.toml").write_text(
        '[[rule]]\nid = "xid-79"\nremedy = "reboot"\n\n[[rule]]\nid = "xid-43"\nenabled = false\n\n'
        '[[rule]]\nid = "ours"\nsource = "log"\npattern = "x"\n'
    )
    said = holdfast("health", "check", "ours.toml")
    assert said.code == 0
    assert said.out.splitlines() == [
        "changes      xid-79: fatal, asks for reboot",
        "switches off xid-43: info, asks for watch",
        "adds         ours: warning, asks for watch",
        "ours.toml is valid",
    ]
    assert "(off)" in holdfast("health", "rules", "--rules", "ours.toml").out
    assert "ours.toml" in holdfast("health", "explain", "ours", "--rules", "ours.toml").out


def test_a_file_with_an_error(holdfast, tmp_path):
    (tmp_path / "ours.toml").write_text('[[rule]]\nid = "ours"\nsource = "log"\npattern = "("\n')
    said = holdfast("health", "check", "ours.toml")
    assert said.code == 2
    assert "ours.toml, line 4: ours: the pattern is no regular expression" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["xid"], "say which Xid, for example --fault xid=79,node=2"),
        (["xid=fallen"], "code='fallen' is not a whole number"),
        (["xid=0", "node=1"], "an Xid is a number from 1 to 999"),
        (["xid=79", "code=80"], "code is given twice"),
        (["ecc:code=3"], "only xid has a code"),
        (["link-down:phase=vote"], "a machine knows nothing of phases"),
        (["readonly-fs", "disk=sda"], "'disk=sda' is not one of"),
        (["xid=79", "node=1", "rank=1"], "give rank= or node=, not both"),
    ],
)
def test_faults_of_a_machine_that_cannot_be(holdfast, words, said):
    refused = holdfast("fault", *words)
    assert refused.code == 2
    assert said in " ".join(refused.err.split())
