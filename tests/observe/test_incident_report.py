"""An incident told from its ledger."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from holdfast.coordinator.kernel.incidents import COORDINATOR
from holdfast.observe.incident_report import RUNGS, belonging, incident_lines, unheeded

SOURCES = "".join(
    p.read_text() for p in (Path(holdfast.__file__).parent / "coordinator/membership").glob("*.py")
)

INCIDENT = {
    "id": 1, "fault": None, "injected": False, "node": "n1", "ranks": [1], "at_step": 12, "t_s": 4.0, "detect_s": None,
    "decide_s": None, "replace_s": None, "join_s": None, "restore_s": None, "first_step_s": None, "stall_s": None,
    "full_strength_s": None, "lost_steps": None, "rung": None, "cause": "xid-79: fallen off the bus",
    "rule": "xid-79", "quiet": False, "verdict": None,
}  # fmt: skip
FINDING = {
    "node": "n1", "incident": 1, "rule": "xid-79", "severity": "fatal", "remedy": "reboot", "source": "kmsg",
    "subject": "gpu 0", "evidence": "Xid (PCI:0000:18:00): 79", "dry_run": False,
}  # fmt: skip
VERDICT = {
    "incident": 1, "node": "n1", "rule": "xid-79", "asked": "reboot", "does": "replace", "would": "replace",
    "against": "", "reason": "xid-79 asks for reboot, which was done before: reboot, reboot",
    "weighed": ["done before for xid-79 on M1: reboot, reboot", "nodes acted on in 600 s: 0 of 1 (4 in all)"],
}  # fmt: skip


def ledger(*told: tuple[float, str, dict[str, object]]) -> list[dict[str, object]]:
    return [{"seq": i, "t_s": t, "kind": kind, "fields": fields} for i, (t, kind, fields) in enumerate(told)]


def test_a_finding_and_what_came_of_it():
    entries = ledger(
        (4.0, "incident-opened", INCIDENT | {"workers": ["n1.0#2"]}),
        (4.0, "finding", FINDING),
        (4.0, "verdict", VERDICT),
        (3.9, "worker-exited", {"node": "n1", "worker": "n1.0#2", "code": -9, "log": "w2.log"}),
        (3.9, "worker-exited", {"node": "n1", "worker": "n1.1#3", "code": -9, "log": "w3.log"}),
        (4.0, "node-lost", {"node": "n1", "cause": "xid-79: fallen off the bus", "incidents": [1]}),
        (4.0, "node-lost", {"node": "n7", "cause": "another", "incidents": [2]}),
        (4.1, "incident-joined", {"id": 1, "node": "n1", "cause": "killed by signal 9 (SIGKILL)"}),
        (5.0, "incident-closed", INCIDENT | {"stall_s": 0.9, "full_strength_s": 1.0, "rung": "spare", "lost_steps": 0,
                                             "detect_s": 0.1, "decide_s": 0.2}),
    )  # fmt: skip
    text = "\n".join(incident_lines(1, entries))
    assert text.startswith("Incident 1 on n1, rank 1, at step 12: xid-79: fallen off the bus")
    assert "the rule xid-79 (gpu 0) by kmsg: Xid (PCI:0000:18:00): 79 [fatal, asks for reboot]" in text
    assert "it is replaced, because xid-79 asks for reboot, which was done before: reboot, reboot" in text
    assert "considered: nodes acted on in 600 s: 0 of 1 (4 in all)" in text
    assert "and then, on n1: killed by signal 9" in text
    assert "n1 is lost" in text
    # At the same moment and even on the same node, but it is not part of it.
    assert "n7" not in text
    assert "n1.0#2" in text
    assert "n1.1#3" not in text
    assert "training stalled for 0.90 s; 0 steps to be repeated" in text
    assert "full strength after 1.00 s (spare)" in text
    # What is in brackets is explained where it stands.
    assert (
        "\n    spare: workers of other nodes, which waited, took the places of those that were lost\n" in text
    )
    assert (
        "\n    fatal: what runs on the device or node is lost, or cannot be trusted; reboot: it is rebooted\n"
        in text
    )
    assert "  injected: " not in text
    assert "of which detect 0.10 s, decide 0.20 s" in text


def test_one_worker_that_fails_again_and_again_has_each_failure_in_its_own_incident():
    """Nothing is started anew at level 2: the same worker fails, is injected the same fault, and at last is killed."""
    worker, fault = "n1.0#2", "raise:every=2s"
    entries = [(0.0, "formed", {"generation": 1, "start": 0, "world": 2, "workers": [worker], "restore": [], "applied": False, "source": "live"})]  # fmt: skip
    for number in (1, 2, 3):
        at_s = 2.0 * number
        struck = INCIDENT | {"id": number, "workers": [worker], "generation": number, "t_s": at_s, "rule": None, "fault": fault, "injected": True}  # fmt: skip
        entries += [
            (at_s, "fault-injected", {"fault": fault, "fault_kind": "raise", "node": "n1", "worker": worker, "rank": 1, "step": number}),
            (at_s, "failed", {"worker": worker, "rank": 1, "node": "n1", "step": number, "cause": f"failure {number}"} | ({"incidents": [1]} if number == 1 else {})),
            (at_s, "broke", {"generation": number, "step": number, "reason": f"break {number}"}),
            (at_s, "incident-opened", struck),
            (at_s + 0.1, "formed", entries[0][2] | {"generation": number + 1, "incidents": [number]}),
            (at_s + 0.1, "incident-closed", struck),
        ]  # fmt: skip
    entries.append((6.2, "worker-exited", {"node": "n1", "worker": worker, "code": -9, "log": ""}))
    for number in (1, 2, 3):
        found = belonging(number, ledger(*entries))
        first = 1 + 6 * (number - 1)
        assert [e["seq"] for e in found] == [*range(first, first + 6), *([19] if number == 3 else [])]


def test_an_injection_belongs_to_its_incident_whomever_it_struck_first():
    """A gradient that is not finite is noticed by another worker than the one that it was injected into."""
    injected = {
        "fault": "nan:rank=0",
        "fault_kind": "nan",
        "node": "n0",
        "worker": "n0.0#1",
        "rank": 0,
        "step": 3,
    }
    incident = INCIDENT | {"injected": True, "fault": "nan:rank=0", "workers": ["n1.0#2"]}
    entries = ledger((4.0, "fault-injected", injected), (4.0, "incident-opened", incident))
    assert belonging(1, entries) == entries


def test_an_incident_that_no_rule_found():
    entries = ledger(
        (4.0, "incident-opened", INCIDENT | {"rule": None, "cause": "killed by signal 9 (SIGKILL)"})
    )
    text = "\n".join(incident_lines(1, entries))
    assert "No health rule matched" in text
    assert "Not known: no step was committed after it." in text


def test_an_injected_fault_is_said_to_be_nobodys() -> None:
    injected = INCIDENT | {"injected": True, "fault": "kill-worker", "cause": "killed"}
    first, second, *_ = incident_lines(1, ledger((4.0, "incident-opened", injected)))
    assert first.endswith("(injected: kill-worker)")
    assert (
        second
        == "  injected: put in on purpose, by --fault or `holdfast fault`: no machine and no script is to blame"
    )


@pytest.mark.parametrize(
    "rung",
    [
        *re.findall(r'rung=(?:None if again else )?"(.*?)"', SOURCES),
        "spare",
        "restart",
        "go on smaller",
        COORDINATOR,
    ],
)
def test_every_way_of_repair_has_words(rung: str) -> None:
    assert rung in RUNGS


def test_a_hang_says_where_its_ranks_stood_as_far_as_that_is_known():
    hang = INCIDENT | {"rule": None, "cause": "hang: has not entered all_reduce 41 of default_pg, ..."}
    known = {
        "collective": "all_reduce 41 of default_pg",
        "stood_at_step": 20,
        "where": "2 ranks in all_reduce",
    }
    text = "\n".join(incident_lines(1, ledger((4.0, "incident-opened", hang | known))))
    assert "its ranks had done 20 optimizer steps since the start" in text
    assert "they had not entered all_reduce 41 of default_pg, in which others waited" in text
    assert "all ranks: 2 ranks in all_reduce" in text
    unknown = dict.fromkeys(known)
    assert "Where the ranks were" not in "\n".join(
        incident_lines(1, ledger((4.0, "incident-opened", hang | unknown)))
    )


def test_a_decision_not_to_act():
    withheld = VERDICT | {
        "does": "watch",
        "would": "replace",
        "against": "blast",
        "reason": "2 of 8 nodes were acted on",
    }
    entries = ledger((4.0, "incident-opened", INCIDENT | {"quiet": True}), (4.0, "verdict", withheld))
    text = "\n".join(incident_lines(1, entries))
    assert "nothing is done, because 2 of 8 nodes were acted on" in text
    assert "otherwise: it is replaced" in text
    assert "Nothing: training was not disturbed." in text


def test_there_is_no_such_incident():
    assert incident_lines(7, ledger((4.0, "incident-opened", INCIDENT))) == []


def test_rules_on_trial_are_told_apart():
    trial = VERDICT | {
        "incident": None,
        "does": "watch",
        "against": "trial",
        "reason": "the rule is on trial",
    }
    [line] = unheeded(ledger((65.0, "verdict", trial)))
    assert line == "1:05  n1: nothing is done: the rule is on trial"
