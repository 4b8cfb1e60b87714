"""Every event has a sentence, and every sentence fits."""

import pytest

from holdfast.observe.event_text import event_line
from holdfast.protocol import ledger
from holdfast.protocol.ledger import LINE_WIDTH

DROPPED = {kind for kind, event in ledger.EVENTS.items() if event.ROUTINE}

INCIDENT = {
    "id": 3, "fault": "kill-node:rank=1", "injected": True, "node": "node1", "ranks": [1], "at_step": 120,
    "t_s": 41.2, "detect_s": 2.161, "decide_s": 0.0143, "replace_s": 0.48, "join_s": 0.057, "restore_s": 0.048,
    "first_step_s": 0.21, "stall_s": 2.93, "full_strength_s": 3.2, "lost_steps": 0, "rung": "spare",
    "cause": "its agent's connection closed", "cause_kind": "node", "earlier_stalls": 0, "earlier_stall_s": 0.0,
    "rule": None, "quiet": False, "verdict": None, "where": None,
}  # fmt: skip
LONG = (
    "/a/rather/long/home/of/someone/who/likes/folders/jobs/train-1121-093015-ab12/logs/node12/node12.0-34.log"
)
SAMPLES = {
    "node-joined": {"node": "node1", "host": "127.0.0.1", "slots": 1},
    "node-lost": {"node": "node1", "cause": "its agent's connection closed"},
    "node-refused": {"node": "node1", "reason": "protocol version 7"},
    "node-unavailable": {"reason": "the engine has none"},
    "order-failed": {"order": "release-node", "node": "n2", "error": "Slurm does not answer"},
    "node-leaving": {"node": "node1", "reason": "spot interruption", "within_s": 120.0},
    "node-left": {"node": "node1", "reason": "spot interruption"},
    "node-taken": {"node": "n7", "reason": "Slurm took it away"},
    "node-stays": {"node": "node1"},
    "handed-over": {"away_s": 0.4},
    "job-going": {"reason": "the time limit", "within_s": 120.0},
    "job-stays": {"reason": "Slurm gives the job more time"},
    "resize": {"nodes": 2, "before": 4, "reason": "holdfast resize"},
    "few-micro-batches": {"micro_batches": 2, "workers": 2, "wanted": 3},
    "capacity": {"nodes": 2, "before": 4, "reason": "preempted by job 17, priority 100", "within_s": 30.0},
    "changed": {"id": 2, "reason": "a newcomer is ready", "t_s": 41.2, "at_step": 120, "from_world": 3,
                "to_world": 4, "newcomers": 1, "join_s": 0.057, "restore_s": 0.048, "stall_s": 0.021},
    "worker-ready": {"worker": "node1.0#1", "node": "node1"},
    "began-anew": {"generation": 2, "steps": 80},
    "started": {"generation": 2, "world": 4, "workers": ["node1.0#1"]},
    "formed": {"generation": 3, "start": 120, "world": 4, "workers": ["node1.0#1"], "restore": ["node1.0#1"],
               "applied": True, "source": "live"},
    "broke": {"generation": 2, "step": 120, "reason": "hang: makes no progress in backward while others wait for it"},
    "yield": {"generation": 2, "reason": "a newcomer is ready"},
    "fault-not-fired": {"fault": "kill-node:rank=1,step=120"},
    "fault-injected": {"fault": "kill-node:rank=1,step=120", "fault_kind": "kill-node", "node": "node1",
                       "worker": None, "rank": None, "step": 120},
    "incident-opened": INCIDENT | {"decide_s": None, "stall_s": None, "full_strength_s": None},
    "incident-resumed": INCIDENT | {"full_strength_s": None},
    "incident-closed": INCIDENT,
    "failed": {"worker": "node1.0#1", "rank": 1, "node": "node1", "step": 12, "cause": "ValueError: " + "x" * 200},
    "worker-exited": {"worker": "node1.0#1", "node": "node1", "code": 3, "log": LONG},
    "worker-ended": {"workers": ["node1.0#1"], "cause": "not ready within 300 s"},
    "stalled": {"worker": "node1.0#1", "node": "node1", "step": 120},
    "stall-judged": {"workers": ["node1.0#1"], "reason": "its process is stopped", "where": ""},
    "saved": {"step": 120, "url": LONG, "worker": "node1.0#1"},
    "saving-last": {"step": 120, "url": LONG, "there": 80},
    "last-not-saved": {"step": 120, "saved": 100},
    "only-in-memory": {"step": 120, "kept": True, "saved": None},
    "snapshot-skipped": {"step": 120, "node": "node1", "rank": 0, "reason": "no memory for a snapshot of 90 MiB"},
    "few-copies": {"nodes": 1, "wanted": 2},
    "checkpoint-unread": {"step": 120, "url": LONG, "reason": f"{LONG}: bytes 0 to 32768 do not match their checksums",
                          "instead": f"{LONG}/step-80"},
    "snapshot-spoiled": {"step": 120, "rank": 3, "node": "node1", "reason": "bytes 0 to 32768 changed in memory"},
    "snapshot-unreadable": {"step": 120, "generation": 3},
    "snapshot-back": {"step": 120, "generation": 3},
    "checkpoint-skipped": {"step": 140, "url": LONG, "older": 120},
    "tier-slow": {"step": 120, "url": LONG, "silent_s": 30.0, "nbytes": 3 << 28, "total_bytes": 3 << 30},
    "tier-failed": {"step": 120, "url": LONG, "reason": "the disk is full: free some space"},
    "waiting": {"workers": 1, "target": 4},
    "restart": {"generation": 2, "reason": "killed by signal 9 (SIGKILL)"},
    "finding": {"node": "node2", "subject": "gpu 0", "rule": "xid-79", "dry_run": False, "evidence": "Xid 79",
                "incident": 3, "severity": "fatal", "remedy": "reboot", "source": "kmsg", "condition": "faulty", "device": "",
                "worker": "", "count": 1, "shared": False, "age_s": 0.0, "firm": False},
    "verdict": {"incident": 3, "node": "node2", "rule": "xid-79", "asked": "reboot", "does": "replace",
                "would": "replace", "against": "", "reason": "xid-79 asks for reboot, which was done before: reboot, reboot",
                "weighed": ["done before"]},
    "storm": {"rule": "link-down", "nodes": 5, "of": 8, "within_s": 9.8},
    "blast-limit": {"node": "node5", "nodes": 2, "of": 8, "limit": 2, "within_s": 600.0},
    "asked": {"node": "node2", "rule": "xid-142", "text": "xid-142: unknown error", "incident": 3},
    "node-held": {"node": "node2", "reason": "deep checks: it was replaced for xid-79"},
    "node-trains-on": {"node": "node2", "reason": "replace for ecc: 3 errors"},
    "repairing": {"node": "node2", "remedy": "reset-device", "device": "GPU-1", "incident": 3},
    "repaired": {"node": "node2", "remedy": "reset-device", "error": "the driver is busy", "took_s": 4.0, "incident": 3},
    "rebooting": {"node": "node2", "reason": "xid-79: fallen off the bus"},
    "readmitted": {"node": "node2", "checks": ["memory", "disk"], "was": "xid-79"},
    "lemon": {"node": "node2", "reason": "4 incidents in 3 jobs within 30 days"},
    "lemon-leaves": {"node": "node2", "reason": "4 incidents in 3 jobs within 30 days", "instead": "node7"},
    "rebooted": {"node": "node2", "took_s": 412.5},
    "rebuild": {"worker": "node4.0#5", "shard_index": 1, "before": 0},
    "checks-unknown": {"node": "node2", "checks": ["nvml"]},
    "ledger-failed": {"reason": "database or disk is full"},
    "ledger-back": {"failed_s": 61.5},
    "history": {"reason": "postgresql://h/db: connection refused"},
    "incident-joined": {"id": 3, "node": "node2", "cause": "killed by signal 9 (SIGKILL)"},
    "incident-explained": {"id": 3, "node": "node2", "cause": "xid-79: Xid 79", "was": "killed by signal 9"},
    "incident-settled": INCIDENT,
    "stop-requested": {"reason": "interrupted", "outcome": "stopped"},
    "ended": {"outcome": "finished", "reason": None, "step": 200},
}  # fmt: skip


def line(kind, fields=None, **more):
    return event_line({"kind": kind, "fields": SAMPLES.get(kind, {}) if fields is None else fields}, **more)


@pytest.mark.parametrize("kind", sorted(ledger.EVENTS))
def test_every_event_is_worded_by_its_own_struct(kind):
    assert "sentence" in vars(ledger.EVENTS[kind]), "give a new event a sentence beside its fields"


def test_only_these_events_are_routine():
    assert {"worker-started", "worker-done", "collective-error", "level", "snapshot"} == DROPPED


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_samples_are_events_as_they_are_written(kind):
    event = ledger.read(kind, SAMPLES[kind])
    assert event is not None
    assert event.kind == kind


def test_there_is_a_sample_of_every_sentence():
    assert set(SAMPLES) == set(ledger.EVENTS) - DROPPED


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_a_sentence_fits_and_holds_no_raw_field(kind):
    said = line(kind)
    assert said
    words = said
    for path in sorted(ledger.read(kind, SAMPLES[kind]).paths(), key=len, reverse=True):
        words = words.replace(path, "") if path else words
    assert len(words) <= LINE_WIDTH
    assert "None" not in said
    assert "=" not in said or "kill-node:rank=1" in said


def test_incidents_tell_their_times():
    assert line("incident-opened").endswith("found after 2.16 s: its agent's connection closed")
    assert "training again after 2.93 s (detect 2.16 s, decide 14 ms)" in line("incident-resumed")
    assert "full strength after 3.20 s, spare (replace 0.48 s, restore 48 ms)" in line("incident-closed")


def test_unknown_phases_are_left_out():
    quick = {k: None if k in ("detect_s", "decide_s") else v for k, v in INCIDENT.items()}
    assert line("incident-resumed", quick) == "incident 3: training again after 2.93 s"


def test_lost_steps_are_told():
    assert ", 2 steps lost" in line("incident-resumed", INCIDENT | {"lost_steps": 2})


def test_workers_that_were_ended_on_purpose_say_nothing():
    fields = SAMPLES["worker-exited"]
    assert line("worker-exited", fields | {"code": 0}) == ""
    assert line("worker-exited", fields | {"code": -9}) == ""
    assert "ended with exit code 3" in line("worker-exited")
    assert line("worker-exited", fields | {"code": -11}).startswith("node1.0#1 was ended by SIGSEGV")


def test_a_path_is_never_cut():
    assert line("worker-exited") == f"node1.0#1 ended with exit code 3; log {LONG}"
    assert line("saved", SAMPLES["saved"] | {"skipped": 2}).endswith(
        f" {LONG} (2 checkpoints skipped meanwhile)"
    )
    for kind in ("saving-last", "checkpoint-skipped", "tier-slow"):
        assert LONG in line(kind), kind


def test_the_words_beside_a_path_are_cut():
    name = "node-with-a-long-name" * 4
    said = line("worker-exited", SAMPLES["worker-exited"] | {"worker": name})
    assert said == f"{name[:76]}…{LONG}"
    reason = f"{LONG}: " + "many words " * 20
    said = line("checkpoint-unread", SAMPLES["checkpoint-unread"] | {"reason": reason})
    assert said.startswith(f"step 120 cannot be loaded, using {LONG}/step-80: {LONG}: many words")
    assert said.endswith("…")


def test_what_is_dropped_is_there_for_who_wants_everything():
    for kind in DROPPED:
        assert line(kind, {"worker": "node1.0#1"}) == ""
        assert "node1.0#1" in line(kind, {"worker": "node1.0#1"}, everything=True)


def test_a_snapshot_is_told_to_who_wants_everything():
    fields = {"step": 40, "generation": 3, "world": 2, "nbytes": 5 << 20, "nodes": 2, "took_s": 0.02}
    said = line("snapshot", fields, everything=True)
    assert said == "snapshot of step 40: in the memory of 2 nodes, 5.24 MB after 20 ms"


def test_a_ledger_of_another_version_is_shown_as_it_is():
    assert line("quantum-leap", {"where": "node1"}) == "quantum-leap: where=node1"
    assert line("formed", {"world": 4}) == "formed: world=4"


def test_newlines_in_a_cause_stay_on_one_line():
    assert "\n" not in line("failed", SAMPLES["failed"] | {"cause": "ValueError: a\nb\nc"})
