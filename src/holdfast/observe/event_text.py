"""Events of the ledger in words: one sentence each, for a person who has not read the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.observe.units import clip, clip_path, plural, ranks, seconds, size
from holdfast.protocol import ledger

Fields = Mapping[str, Any]

DROPPED = frozenset({"worker-started", "worker-done", "collective-error", "level", "snapshot"})
"""Kinds that people need not read as they happen; `holdfast events --all` shows them."""

LINE_WIDTH = 77
"""What is left of 100 columns after `[holdfast]` and the time."""

_ORDINARY_ENDS = frozenset({0, -9, -15})
"""Exit codes of workers that finished or were ended on purpose. If nobody meant it, an incident says so."""

PHASES = ("detect_s", "decide_s", "replace_s", "join_s", "restore_s", "first_step_s")
"""An incident's phases in their order."""


def event_line(entry: Mapping[str, Any], everything: bool = False, width: int = LINE_WIDTH) -> str:
    """One line of at most `width` characters; '' for what is of no interest to a person.

    everything: kinds that are usually dropped get a line too.
    """
    kind, fields = entry["kind"], entry["fields"]
    line = "" if kind in DROPPED and not everything else _sentence(kind, fields)
    return clip(line or (_as_written(kind, fields) if everything else ""), width)


def phases(incident: Fields, names: Sequence[str] = PHASES) -> str:
    """`detect 0.17 s, decide 26 ms, ...`: the phases that are known."""
    known = [(name, incident.get(name)) for name in names]
    return ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {seconds(v)}" for name, v in known if v is not None
    )


def exit_words(code: int) -> str:
    """How a process ended."""
    names = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
    return (
        f"ended with exit code {code}" if code >= 0 else f"was ended by {names.get(-code, f'signal {-code}')}"
    )


def _sentence(kind: str, fields: Fields) -> str:
    """The kind's sentence. What another version wrote with other fields is shown as it was written."""
    event = ledger.read(kind, fields)
    if event is None:
        return _as_written(kind, fields)
    sentence = _SENTENCES.get(kind)
    return sentence(event) if sentence is not None else ""


def _as_written(kind: str, fields: Fields) -> str:
    known = ", ".join(f"{k}={v}" for k, v in fields.items() if v not in (None, [], ""))
    return f"{kind}: {known}"


def _node_joined(f: ledger.NodeJoined) -> str:
    return f"{f.node} joined with {plural(f.slots, 'slot')}"


def _node_lost(f: ledger.NodeLost) -> str:
    return f"{f.node} is lost: {f.cause}"


def _finding(f: ledger.Finding) -> str:
    about = f"{f.node} {f.subject}".strip()
    trial = " (on trial)" if f.dry_run else ""
    return f"{about}: {f.rule}{trial}: {f.evidence}"


_DOES = {
    "watch": "nothing is done",
    "restart-worker": "its workers start again",
    "reset-device": "the device is reset",
    "reboot": "it is rebooted",
    "replace": "it is replaced",
    "ask": "a person is asked",
}


def does(remedy: str) -> str:
    """What is done about a finding, in words."""
    return _DOES.get(remedy, remedy)


def _verdict(f: ledger.Verdict) -> str:
    number = f"incident {f.incident}: " if f.incident else ""
    again = "" if f.again_s is None else f" (again in {seconds(f.again_s)})"
    return f"{number}{f.node}: {does(f.does)}: {f.reason}{again}"


def _storm(f: ledger.Storm) -> str:
    seen = f"{f.nodes} of {plural(f.of, 'node')} report {f.rule} within {seconds(f.within_s)}"
    return f"{seen}: this looks like the network or the script, nothing is replaced"


def _blast_limit(f: ledger.BlastLimit) -> str:
    window = f"{f.nodes} of {plural(f.of, 'node')} acted on within {seconds(f.within_s)}"
    return f"{window}, the limit: {f.node} and others are left alone for now"


def _asked(f: ledger.Asked) -> str:
    return f"to be looked at: {f.node}: {f.text}"


def _node_held(f: ledger.NodeHeld) -> str:
    return f"{f.node} is held: {f.reason}"


def _node_trains_on(f: ledger.NodeTrainsOn) -> str:
    return f"{f.node} trains on as long as there is no other: {f.reason}"


def _repairing(f: ledger.Repairing) -> str:
    device = f" of {f.device}" if f.device else ""
    return f"{f.node}: {f.remedy}{device} begins"


def _repaired(f: ledger.Repaired) -> str:
    if f.error:
        return f"{f.node}: {f.remedy} did not work: {f.error}"
    return f"{f.node}: {f.remedy} done after {seconds(f.took_s)}"


def _rebooting(f: ledger.Rebooting) -> str:
    return f"{f.node} is rebooted: {f.reason}"


def _readmitted(f: ledger.Readmitted) -> str:
    checks = f.checks
    how = f"passed {plural(len(checks), 'deep check')}" if checks else f.was or "cleared"
    return f"{f.node} may be used again: {how}"


def _lemon(f: ledger.Lemon) -> str:
    return f"{f.node} is used only if there is no other: {f.reason}"


def _lemon_leaves(f: ledger.LemonLeaves) -> str:
    return f"{f.node} leaves at a step's edge, {f.instead} takes its place: {f.reason}"


def _rebooted(f: ledger.Rebooted) -> str:
    return f"{f.node} is back, {seconds(f.took_s)} after its reboot was ordered"


def _rebuild(f: ledger.Rebuild) -> str:
    return f"{f.worker} rebuilding as shard {f.shard_index} (was {f.before}), which is missing"


def _checks_unknown(f: ledger.ChecksUnknown) -> str:
    return f"{f.node} joins though these checks could not tell: {', '.join(f.checks)}"


def _history(f: ledger.History) -> str:
    return f"the nodes' history is not used: {f.reason}"


def _ledger_failed(f: ledger.LedgerFailed) -> str:
    return f"the ledger cannot be written, training goes on: {f.reason}"


def _ledger_back(f: ledger.LedgerBack) -> str:
    return f"the ledger is written again, after {f.failed_s:.0f} s"


def _incident_joined(f: ledger.IncidentJoined) -> str:
    where = f"{f.node}: " if f.node else ""
    return f"incident {f.id}: and then {where}{f.cause}"


def _incident_explained(f: ledger.IncidentExplained) -> str:
    return f"incident {f.id}: the cause is {f.cause}"


def _incident_settled(f: ledger.IncidentSettled) -> str:
    took = f.full_strength_s
    after = "" if took is None else f" after {seconds(took)}"
    return f"incident {f.id}: settled{after}, training was not disturbed"


def _node_refused(f: ledger.NodeRefused) -> str:
    return f"{f.node} was refused: {f.reason}"


def _node_unavailable(f: ledger.NodeUnavailable) -> str:
    return f"no further node to be had: {f.reason}"


def _node_leaving(f: ledger.NodeLeaving) -> str:
    time = "" if f.within_s is None else f" within {seconds(f.within_s)}"
    return f"{f.node} is to leave{time}: {f.reason}"


def _node_stays(f: ledger.NodeStays) -> str:
    return f"{f.node} stays after all"


def _node_left(f: ledger.NodeLeft) -> str:
    return f"{f.node} has left: {f.reason}"


def _node_taken(f: ledger.NodeTaken) -> str:
    return f"{f.node} does not belong to the job any more: {f.reason}"


def _resize(f: ledger.Resize) -> str:
    return f"from {f.before} to {plural(f.nodes, 'node')}: {f.reason}"


def _capacity(f: ledger.Capacity) -> str:
    limit = "no limit of nodes" if f.nodes is None else f"no more than {plural(f.nodes, 'node')}"
    return f"there may be {limit}: {f.reason}"


def _changed(f: ledger.Changed) -> str:
    return f"{f.from_world} \u2192 {plural(f.to_world, 'worker')} at step {f.at_step}: stall {seconds(f.stall_s)}"


def _worker_ready(f: ledger.WorkerReady) -> str:
    return f"{f.worker} is ready"


def _started(f: ledger.Started) -> str:
    again = " again, from warm processes" if f.generation > 1 else ""
    return f"{plural(f.world, 'worker')} started{again}"


_SAVED_IN = {"disk": "the checkpoint on disk", "memory": "a snapshot in memory"}


def _formed(f: ledger.Formed) -> str:
    line = f"generation {f.generation}: {plural(f.world, 'worker')} from step {f.start}"
    if f.applied:
        line += ", the step in flight counts"
    restored = f.restore or []
    if f.source in ("disk", "memory"):
        return f"{line}, state from {_SAVED_IN[f.source]}"
    if restored:
        names = ", ".join(restored) if len(restored) <= 2 else plural(len(restored), "worker")
        return f"{line}, {names} restored from peers"
    return line


def _broke(f: ledger.Broke) -> str:
    return f"generation {f.generation} broke at step {f.step}: {f.reason}"


def _yield(f: ledger.Yield) -> str:
    return f"generation {f.generation} ends at its next commit: {f.reason}"


def _fault_not_fired(f: ledger.FaultNotFired) -> str:
    return f"{f.fault} never happened: what it waits for did not come"


def _fault_injected(f: ledger.FaultInjected) -> str:
    who = f.worker or f.node or "the coordinator"
    rank = "" if f.rank is None else f" (rank {f.rank})"
    return f"injecting {f.fault} into {who}{rank} at step {f.step}"


def _incident_opened(f: ledger.IncidentOpened) -> str:
    where = [f.node] if f.node else []
    where += [f"rank {ranks(f.ranks)}"] if f.ranks else []
    where += [] if f.detect_s is None else [f"found after {seconds(f.detect_s)}"]
    if not where and f.at_step is not None:
        where = [f"step {f.at_step}"]
    return f"incident {f.id}: {''.join(f'{x}: ' for x in [', '.join(where)] if x)}{f.cause}"


def _incident_resumed(f: ledger.IncidentResumed) -> str:
    lost = f.lost_steps
    cost = f", {plural(lost, 'step')} lost" if lost else ""
    known = phases(msgspec.structs.asdict(f), ("detect_s", "decide_s"))
    return f"incident {f.id}: training again after {seconds(f.stall_s)}{cost}{_within(known)}"


def _incident_closed(f: ledger.IncidentClosed) -> str:
    rung = f", {f.rung}" if f.rung else ""
    known = phases(msgspec.structs.asdict(f), ("replace_s", "restore_s"))
    return f"incident {f.id}: full strength after {seconds(f.full_strength_s)}{rung}{_within(known)}"


def _within(words: str) -> str:
    return f" ({words})" if words else ""


def _failed(f: ledger.Failed) -> str:
    step = "before the first step" if f.step is None else f"at step {f.step}"
    return f"{_rank(f)} on {f.node} failed {step}: {f.cause}"


def _rank(f: ledger.Failed) -> str:
    return str(f.worker) if f.rank is None else f"rank {f.rank}"


def _worker_exited(f: ledger.WorkerExited) -> str:
    if f.code in _ORDINARY_ENDS:
        return ""
    line = f"{f.worker} {exit_words(f.code)}"
    room = LINE_WIDTH - len(line) - len("; log ")
    return f"{line}; log {clip_path(f.log, room)}" if f.log and room > 20 else line


def _worker_ended(f: ledger.WorkerEnded) -> str:
    return f"{', '.join(f.workers)} taken out: {f.cause}"


def _stalled(f: ledger.Stalled) -> str:
    step = "" if f.step is None else f" at step {f.step}"
    return f"{f.worker} stands still{step}: looking at the stacks of every rank"


def _stall_judged(f: ledger.StallJudged) -> str:
    where = f"; {f.where}" if f.where else ""
    if not f.workers:
        return f"no rank is found to be at fault: {f.reason}{where}"
    return f"held up by {', '.join(f.workers)}: {f.reason}{where}"


def _saved(f: ledger.Saved) -> str:
    line = f"step {f.step} is saved in "
    skipped = f.skipped
    more = f" ({plural(skipped, 'checkpoint')} skipped meanwhile)" if skipped else ""
    return line + clip_path(f.url, LINE_WIDTH - len(line) - len(more)) + more


def _saving_last(f: ledger.SavingLast) -> str:
    line = f"the last state, step {f.step}, goes to "
    there = "" if f.there is None else f" (step {f.there} is there)"
    return line + clip_path(f.url, max(20, LINE_WIDTH - len(line) - len(there))) + there


def _only_in_memory(f: ledger.OnlyInMemory) -> str:
    if f.kept:
        return f"step {f.step} is only in memory; it stays there for the next start of this job"
    saved = "nothing is saved" if f.saved is None else f"step {f.saved} is the newest that is saved"
    return f"step {f.step} was only in the memory of the nodes, which goes with them: {saved}"


def _snapshot(f: ledger.Snapshot) -> str:
    took = f"{size(f.nbytes)} after {seconds(f.took_s)}"
    return f"snapshot of step {f.step}: in the memory of {plural(f.nodes, 'node')}, {took}"


def _snapshot_skipped(f: ledger.SnapshotSkipped) -> str:
    return f"no snapshot of step {f.step} on {f.node}: {f.reason}"


def _snapshot_unreadable(f: ledger.SnapshotUnreadable) -> str:
    return f"the snapshot of step {f.step} could not be read from any node: an older one is taken"


def _snapshot_back(f: ledger.SnapshotBack) -> str:
    return f"snapshot of step {f.step}: whole again, a node came back with its part"


def _snapshot_spoiled(f: ledger.SnapshotSpoiled) -> str:
    return f"the copy of step {f.step}, rank {f.rank} on {f.node} went bad: {f.reason}"


def _checkpoint_unread(f: ledger.CheckpointUnread) -> str:
    then = f"{clip_path(f.instead, 30)} is taken" if f.instead else "there is no other"
    return f"step {f.step} cannot be loaded, {then}: {f.reason}"


def _few_copies(f: ledger.FewCopies) -> str:
    return f"snapshots are in the memory of {plural(f.nodes, 'node')} only, not {f.wanted}: there are no more"


def _checkpoint_skipped(f: ledger.CheckpointSkipped) -> str:
    line = f"step {f.step} is not saved: step {f.older} is still on its way to "
    return line + clip_path(f.url, max(20, LINE_WIDTH - len(line)))


def _tier_slow(f: ledger.TierSlow) -> str:
    far = "" if f.nbytes is None else f" ({size(f.nbytes)} of {size(f.total_bytes)})"
    line = f"for {seconds(f.silent_s)} nothing of step {f.step} came to "
    return line + clip_path(f.url, max(20, LINE_WIDTH - len(line) - len(far))) + far


def _tier_failed(f: ledger.TierFailed) -> str:
    return f"step {f.step} was not saved: {f.reason}"


def _waiting(f: ledger.Waiting) -> str:
    return f"waiting for nodes: {f.workers} of {plural(f.target, 'worker')}"


def _restart(f: ledger.Restart) -> str:
    return f"all workers start again: {f.reason}"


def _stop_requested(f: ledger.StopRequested) -> str:
    return f"{'giving up' if f.outcome == 'failed' else 'stopping'}: {f.reason}"


def _ended(f: ledger.Ended) -> str:
    reason = f": {f.reason}" if f.reason else ""
    step = "" if f.step is None else f" at step {f.step}"
    return f"{f.outcome}{step}{reason}"


_SENTENCES: dict[str, Callable[[Any], str]] = {
    "node-joined": _node_joined,
    "node-lost": _node_lost,
    "node-refused": _node_refused,
    "node-unavailable": _node_unavailable,
    "finding": _finding,
    "verdict": _verdict,
    "storm": _storm,
    "blast-limit": _blast_limit,
    "asked": _asked,
    "node-held": _node_held,
    "node-trains-on": _node_trains_on,
    "repairing": _repairing,
    "repaired": _repaired,
    "rebooting": _rebooting,
    "readmitted": _readmitted,
    "lemon": _lemon,
    "lemon-leaves": _lemon_leaves,
    "rebooted": _rebooted,
    "rebuild": _rebuild,
    "checks-unknown": _checks_unknown,
    "history": _history,
    "ledger-failed": _ledger_failed,
    "ledger-back": _ledger_back,
    "incident-joined": _incident_joined,
    "incident-explained": _incident_explained,
    "incident-settled": _incident_settled,
    "node-leaving": _node_leaving,
    "node-left": _node_left,
    "node-taken": _node_taken,
    "node-stays": _node_stays,
    "resize": _resize,
    "capacity": _capacity,
    "changed": _changed,
    "worker-ready": _worker_ready,
    "started": _started,
    "formed": _formed,
    "broke": _broke,
    "yield": _yield,
    "fault-injected": _fault_injected,
    "fault-not-fired": _fault_not_fired,
    "incident-opened": _incident_opened,
    "incident-resumed": _incident_resumed,
    "incident-closed": _incident_closed,
    "failed": _failed,
    "worker-exited": _worker_exited,
    "worker-ended": _worker_ended,
    "stalled": _stalled,
    "stall-judged": _stall_judged,
    "saved": _saved,
    "saving-last": _saving_last,
    "only-in-memory": _only_in_memory,
    "snapshot": _snapshot,
    "snapshot-skipped": _snapshot_skipped,
    "snapshot-unreadable": _snapshot_unreadable,
    "snapshot-back": _snapshot_back,
    "checkpoint-unread": _checkpoint_unread,
    "snapshot-spoiled": _snapshot_spoiled,
    "few-copies": _few_copies,
    "checkpoint-skipped": _checkpoint_skipped,
    "tier-slow": _tier_slow,
    "tier-failed": _tier_failed,
    "waiting": _waiting,
    "restart": _restart,
    "stop-requested": _stop_requested,
    "ended": _ended,
}

KINDS = frozenset(_SENTENCES) | DROPPED
"""Every kind of event."""
