"""Xids and SXids as drivers write them: which number counts, what is fatal, and what belongs to one burst."""

import pytest

from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import LogLine
from holdfast.protocol.health import Remedy, Severity

RULES = list(catalogue())
OFF_THE_BUS = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def engine():
    return RuleEngine(RULES)


def say(engine, *texts, at=0.0, source="kmsg"):
    return [f for text in texts for f in engine.on_line(LogLine(source, text), at)]


def rules(findings):
    return [f.rule for f in findings]


def test_off_the_bus(engine):
    (finding,) = say(engine, OFF_THE_BUS)
    assert (finding.rule, finding.severity, finding.remedy) == ("xid-79", Severity.FATAL, Remedy.REPLACE)
    assert finding.subject == "gpu 0000:05:00"
    assert finding.evidence == OFF_THE_BUS


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "xid-14"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, pid=1234, name=python, Ch 00000008", "xid-43"),
        (
            "NVRM: Xid (PCI:00000000:18:00): 94, pid=2345, name=python, Contained: SM (0x1). RST: No, D-RST: No",
            "xid-94",
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 45, pid=79, name=119, Ch 00000048", "xid-45"),
        ("NVRM: Xid (PCI:0000:05:00): 99999, unknown error", "xid-unknown"),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 11111, Non-fatal, Link 30 something new",
            "sxid-unknown",
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 11111, Fatal, Link 30 something new",
            "sxid-unknown-fatal",
        ),
        ("nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "sxid-20034"),
    ],
)
def test_the_number_after_the_parenthesis_counts(engine, text, rule):
    assert rules(say(engine, text)) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (invalid): some error",
        "NVRM: Xid error: 79, invalid data",
        f"python[1234]: I have seen {OFF_THE_BUS}",
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030}",
        "NVRM: GPU at PCI:0000:05:00: GPU-f6a1e7c4-0000-1111-2222-333344445555",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.161.08  79",
    ],
)
def test_numbers_elsewhere_do_not(engine, text):
    assert say(engine, text) == []


def test_the_same_line_in_another_log_is_nothing(engine):
    assert say(engine, OFF_THE_BUS, source="log") == []


@pytest.mark.parametrize("pid", ["", "pid=876767, name=ray::WorkerDict, "])
def test_nvlink_lines_are_as_bad_as_they_say(engine, pid):
    text = "NVRM: Xid (PCI:0018:01:00): 145, {}RLW_RXPIPE {}   XC0 i0 Link 13 (0x0409a0c2 0x00000008)"
    (mild,) = say(engine, text.format(pid, "Nonfatal"))
    assert (mild.rule, mild.severity, mild.remedy) == ("xid-145-nonfatal", Severity.WARNING, Remedy.WATCH)
    (bad,) = say(engine, text.format(pid, "Fatal"), at=1.0)
    assert (bad.rule, bad.severity, bad.remedy) == ("xid-145", Severity.FATAL, Remedy.RESET_DEVICE)


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 14 (0x0215c5c6 0x0", "xid-149", Remedy.RESET_DEVICE),
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 14 (0x0265c5c6 0x0", "xid-149-intended", Remedy.ASK),
        ("149, NETIR_LINK_DOWN Fatal   XC0 i0 Link 14 (0x02800011 0x0", "xid-149-intended", Remedy.ASK),
        ("149, NETIR_LINK_DOWN Fatal   XC0 i0 Link 14 (0x01600011 0x0", "xid-149", Remedy.RESET_DEVICE),
        (
            "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 1 (0x00000226 0x00000001",
            "xid-149-nonfatal",
            Remedy.WATCH,
        ),
        (
            "145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a4c2 0x00000002",
            "xid-145-lossy",
            Remedy.RESET_DEVICE,
        ),
        (
            "145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04000086 0x00000004",
            "xid-145-lossy",
            Remedy.RESET_DEVICE,
        ),
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04000006 0x00000004", "xid-145-nonfatal", Remedy.WATCH),
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04000086 0x00000008", "xid-145-nonfatal", Remedy.WATCH),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 13 (0x00000004 0x00000001", "xid-145-nonfatal", Remedy.WATCH),
    ],
)
def test_subcodes_of_nvlink_5(engine, text, rule, remedy):
    (finding,) = say(engine, f"NVRM: Xid (PCI:0018:01:00): {text} 0x00000000 0x00000000 0x00000000)")
    assert (finding.rule, finding.remedy) == (rule, remedy)


@pytest.mark.parametrize(
    ("action", "severity", "remedy"),
    [
        ("0x0 (None)", Severity.INFO, Remedy.WATCH),
        ("0x1 (GPU Reset Required)", Severity.FATAL, Remedy.RESET_DEVICE),
        ("0x2 (Node Reboot Required)", Severity.FATAL, Remedy.REBOOT),
        ("0x3 (Drain P2P)", Severity.ERROR, Remedy.ASK),
        ("0x4 (Drain and Reset)", Severity.ERROR, Remedy.RESET_DEVICE),
    ],
)
def test_154_says_what_to_do(engine, action, severity, remedy):
    text = f"NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to {action}"
    (finding,) = say(engine, text)
    assert (finding.severity, finding.remedy) == (severity, remedy)


def test_45_alone_is_never_acted_on(engine):
    lines = [f"NVRM: Xid (PCI:0000:3b:00): 45, pid={i}, name=python, Ch 000000{i}" for i in range(10, 40)]
    (finding,) = say(engine, *lines)
    assert (finding.severity, finding.remedy) == (Severity.INFO, Remedy.WATCH)


def test_a_burst_is_told_once_and_again_when_it_gets_worse(engine):
    others = [
        "NVRM: Xid (PCI:0000:05:00): 63, pid=1, name=python, Row Remapper: New row marked for remapping",
        OFF_THE_BUS,
        "NVRM: Xid (PCI:0000:05:00): 45, pid=1, name=python, Ch 00000010",
        "NVRM: Xid (PCI:0000:05:00): 119, pid=1, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
        OFF_THE_BUS,
    ]
    assert rules(say(engine, *others)) == ["xid-63", "xid-79"]
    elsewhere = OFF_THE_BUS.replace("0000:05:00", "0000:06:00")
    assert rules(say(engine, elsewhere, at=1.0)) == ["xid-79"]


def test_a_burst_ends_after_three_minutes_of_silence(engine):
    for at in (0.0, 100.0, 270.0, 449.0):
        assert len(say(engine, OFF_THE_BUS, at=at)) == (at == 0.0)
    assert rules(say(engine, OFF_THE_BUS, at=449.0 + 181.0)) == ["xid-79"]


@pytest.mark.parametrize("code", [13, 31])
def test_an_application_error_twice_on_one_gpu_suspects_the_gpu(engine, code):
    text = f"NVRM: Xid (PCI:0000:{{}}:00): {code}, pid=1, name=python, Graphics Exception"
    crash = [text.format("05")] * 8  # one crash writes many lines
    assert rules(say(engine, *crash)) == [f"xid-{code}"]
    assert rules(say(engine, *crash, at=4 * 3600.0)) == [f"xid-{code}", f"xid-{code}-repeated"]
    assert rules(say(engine, text.format("06"), at=4 * 3600.0)) == [f"xid-{code}"]
    assert rules(say(engine, text.format("06"), at=30 * 3600.0)) == [f"xid-{code}"]  # not within a day


def test_old_lines_are_as_old_as_they_are(engine):
    (finding,) = engine.on_line(LogLine("kmsg", OFF_THE_BUS, age_s=2.5), 100.0)
    assert finding.age_s == 2.5
