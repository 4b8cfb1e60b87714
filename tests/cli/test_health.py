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
        (["explain", "xid-800"], "the rule xid-unknown applies to such codes"),
        (["explain", "99999"], "the rule sxid-unknown applies to such codes"),
        (["rules", "--source", "moon"], "--source 'moon': there is no such source; choose one of"),
        (
            ["rules", "--remedy", "pray"],
            "--remedy 'pray': there is no such remedy; choose one of watch, restart-worker",
        ),
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
    assert "ours.toml, line 4: ours: the pattern is not a regular expression" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["xid"], "specify the number of the Xid, for example --fault xid=79,node=2"),
        (["xid=fallen"], "code='fallen' is not a whole number"),
        (["xid=0", "node=1"], "an Xid must be a number from 1 to 999"),
        (["xid=79", "code=80"], "code is given twice"),
        (["ecc:code=3"], "only a fault xid takes a code"),
        (["link-down:phase=vote"], "faults of a machine do not depend on the phase of a step"),
        (["readonly-fs", "disk=sda"], "'disk=sda' must be KEY=VALUE"),
        (["xid=79", "node=1", "rank=1"], "rank= and node= cannot be combined"),
    ],
)
def test_faults_of_a_machine_that_cannot_be(holdfast, words, said):
    refused = holdfast("fault", *words)
    assert refused.code == 2
    assert said in " ".join(refused.err.split())


# ---------------------------------------------------------------- judging lines

DEAD_CARD = "[   17.982092] mlx5_core 0000:41:00.0: poll_health:852:(pid 0): device's health compromised - reached miss count"
LOST_GPU = """\
[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:26b5) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
[ 1843.439669] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01
"""


def test_a_line_is_judged(holdfast):
    said = holdfast("health", "judge", DEAD_CARD)
    assert said.code == 0
    for words in (
        "mlx5-dead, about network card 0000:41:00.0",
        "the node is replaced at once",
        "kernel.toml",
    ):
        assert words in said.out
    assert "no rule matches it" in holdfast("health", "judge", "eth0: link becomes ready").out
    assert max(map(len, said.out.splitlines())) <= 100


def test_a_log_is_judged_by_record(holdfast, tmp_path):
    (tmp_path / "dmesg.txt").write_text(LOST_GPU)
    said = holdfast("health", "judge", str(tmp_path / "dmesg.txt"))
    assert "gpu-off-the-bus, about gpu 0000:b3:00" in said.out
    assert said.out.endswith("2 records, 1 of them matched a rule\n")
    told = json.loads(holdfast("health", "judge", str(tmp_path / "dmesg.txt"), "--json").out)
    assert [[rule["id"] for rule in record["rules"]] for record in told] == [["gpu-off-the-bus"], []]
    assert told[0]["rules"][0]["done"] == "the node is replaced at once"


def test_a_line_is_judged_by_own_rules_and_as_a_workers_log(holdfast, tmp_path):
    (tmp_path / "ours.toml").write_text(
        '[[rule]]\nid = "ours"\nsource = "log"\npattern = "wedged"\nfault_on_match = true\n'
    )
    said = holdfast(
        "health", "judge", "it is wedged", "--source", "log", "--rules", str(tmp_path / "ours.toml")
    )
    assert "ours" in said.out
    assert "its workers are restarted at once" in said.out
    said = holdfast("health", "judge", "it is wedged", "--source", "moon")
    assert said.code == 2
    assert "--source 'moon'" in said.err


def test_what_a_line_holds_does_not_reach_the_terminal(holdfast):
    said = holdfast("health", "judge", "a \x1b]0;title\x07 b")
    assert "\x1b" not in said.out
