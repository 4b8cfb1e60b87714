"""The content of each panel of the page, and the cost of fault tolerance for the job, as plain values: from the job's
status and the timeline of its ledger. Pure.

The status is a dict that `coordinator.service.job_view` makes of the core's state. Unknown is None, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from holdfast import formulas
from holdfast.observe.dashboard import job_word
from holdfast.observe.event_text import event_line
from holdfast.observe.goodput import WORDS, goodput_words, losses
from holdfast.observe.printable import printable
from holdfast.protocol import units
from holdfast.protocol.health import remedy_text, severity_text
from holdfast.protocol.ledger import PHASES
from holdfast.protocol.phases import TimeClass
from holdfast.protocol.verified import ReadBack
from holdfast.web.timeline import FINDINGS_KEPT, STATES, JobTimeline

Status = Mapping[str, Any]

BARS = 400
"""The most bars of the timeline; if there are more, neighbouring ones are merged into one with a count."""
ROWS = 60
"""Rows of the strip; the other nodes share one row."""
SHOWN = 50
BEGINS_S = 600.0
"""How long the first generation may take, in seconds, before a person is asked for nodes."""
MARKS = 300
_ORDER = {name: number for number, name in enumerate(STATES)}
_SHOWN_OF_INCIDENT = (
    "id", "t_s", "first_t_s", "cause", "cause_kind", "fault", "injected", "node", "ranks", "at_step", "stall_s",
    "full_strength_s", "lost_steps", "rung", "rule", "quiet", "verdict", "open", "earlier_stalls", "earlier_stall_s",
    "where", *PHASES,
)  # fmt: skip
_SHOWN_OF_FINDING = (
    "seq", "t_s", "node", "incident", "rule", "severity", "remedy", "source", "condition", "subject", "count", "dry_run",
    "shared", "at_step",
)  # fmt: skip
FINDING_MARKS = 100
"""Number of findings that are marked on curves, the newest."""


def headline(status: Status) -> dict[str, Any]:
    """The first line: the state of the job in words, and since when. tone: good, busy, bad or over, which selects a
    shape and a colour."""
    state = job_word(status["phase"], status["outcome"])
    parts = [f"{units.count(status['world'])} of {units.plural(status['target'], 'worker')}"]
    if status["step"] is not None:
        parts.insert(0, f"step {units.count(status['step'])}")
    why = _why_not(status)
    return {"word": state, "tone": _tone(status), "text": ", ".join(parts), "why": why}


def _tone(status: Status) -> str:
    if status["phase"] == "ended":
        return "over" if status["outcome"] in ("finished", "stopped") else "bad"
    if status["phase"] == "running":
        return "good" if status["world"] >= status["target"] else "busy"
    return "busy"


def _why_not(status: Status) -> str:
    """Why the job does not train, or not at full strength; empty: it does, or has ended as intended."""
    if status["phase"] == "ended":
        return status["reason"] or ""
    # A quiet incident costs no training, so it does not explain the state that a person sees.
    standing = [i for i in status["incidents"] if not i["quiet"]]
    if standing:
        newest = standing[-1]
        return f"incident {newest['id']}: {newest['cause']}"
    if status["phase"] == "gathering":
        return f"{units.plural(status['ready'], 'worker')} of {status['target']} are ready"
    if status["phase"] == "running" and status["world"] < status["target"]:
        return f"{units.plural(status['target'] - status['world'], 'worker')} fewer than wanted"
    return status["reason"] or ""


def todo(status: Status, timeline: JobTimeline) -> list[dict[str, Any]]:
    """Things that a person has to do, the most urgent first; empty: nothing. urgent: the job is impaired until it is
    done."""
    found: list[dict[str, Any]] = []

    def add(urgent: bool, text: str, how: str = "") -> None:
        found.append({"urgent": urgent, "text": text, "how": how})

    job = status["job"]
    if status["phase"] == "ended":
        if status["outcome"] not in ("finished", "stopped"):
            cause = (
                status["blame"]["cause"]
                if status["blame"]
                else status["reason"] or "its coordinator was killed"
            )
            add(True, f"The job {status['outcome']}: {cause}", f"holdfast report --job {job}")
        return found
    if status["ledger_trouble"]:
        add(True, f"Make room for the ledger, or make it writable: {status['ledger_trouble']}", "df -h")
    for tier in status["saving"]["tiers"]:
        if tier["failing"]:
            why = timeline.tier_trouble.get(tier["url"], "")
            add(
                True,
                f"Checkpoints do not reach {tier['url']}{': ' + why if why else ''}",
                "holdfast checkpoint ls",
            )
        elif tier["slow"]:
            add(
                True,
                f"{tier['url']} takes nothing any more: a checkpoint stands still",
                f"holdfast status --job {job}",
            )
    # Nodes of a job that has only just begun are on their way, whether or not anybody has ordered them.
    begins = status["generation"] == 0 and status["t_s"] < BEGINS_S
    # Not while a node is on its way: a person who adds another one would pay for one too many.
    short = status["phase"] == "gathering" and status["ready"] < status["target"]
    if short and not status["coming"] and not begins:
        missing = status["target"] - status["ready"]
        add(True, f"Add nodes: {units.plural(missing, 'worker')} are missing, and no node is on its way", "")
    for ask in status["health"]["asks"]:
        where = f"holdfast why {ask['incident']} --job {job}" if ask["incident"] else "holdfast node ls"
        add(False, f"Inspect {ask['node']}: {ask['text']}", where)
    # Only for a job that was started with spares: in any other job none are expected.
    if status["wants_spares"] and not status["spares"] and not begins:
        add(False, "Add a node: no spare is left, so the next lost node costs strength", "")
    for slow in status["slow"]:
        add(
            False,
            f"Look at rank {units.text(slow['rank'])} on {slow['node']}: it takes {slow['ratio']:.2f} times its peers' time, "
            f"and they wait {units.share(slow['share'])} of the time",
            f"holdfast status --job {job}",
        )
    for loss in _losses(status):
        add(False, loss["text"], loss["how"])
    # The sort is stable, so each group keeps the order in which the items were added above.
    return sorted(found, key=lambda one: not one["urgent"])


def _losses(status: Status) -> list[dict[str, Any]]:
    """See `goodput.losses`. Of the last hour, so that a loss disappears after it was fixed; for a younger job, of its
    whole time."""
    whole = status["goodput"]
    recent = whole.get("recent") or {}
    return losses(recent if recent.get("wall_s") else whole, status["micro_batches"])


def nothing(status: Status) -> str:
    """The text for an empty list of things to do."""
    if status["phase"] == "ended":
        return "Nothing: the job is over."
    if any(not i["quiet"] for i in status["incidents"]):
        return "Nothing: the job recovers by itself."
    return "Nothing."


def now(status: Status, timeline: JobTimeline) -> dict[str, Any]:
    """The panel at the top, and everything that changes with every step. simulated: for a job in a simulated cluster,
    its size and the speed of its time; None for every other job."""
    median = typical(timeline)
    opened = [
        {k: i.get(k) for k in _SHOWN_OF_INCIDENT} | {"usual_s": median.get(str(i.get("cause_kind")))}
        for i in status["incidents"]
        if not i["quiet"]
    ]
    return {
        **{
            k: status[k]
            for k in ("job", "engine", "phase", "outcome", "level", "generation", "world", "target", "step")
        },
        **{
            k: status[k]
            for k in ("t_s", "loss", "pace", "weight_per_s", "last_step_t_s", "ledger_seq", "live")
        },
        "ledger": status["ledger"],
        "headline": headline(status),
        "todo": todo(status, timeline),
        "nothing": nothing(status),
        "open": opened,
        "tiers": tiers(status, timeline),
        # For a job that has ended nothing has to be done now: a setting only improves its next start.
        "goodput": waterfall(status["goodput"])
        | {
            "losses": losses(status["goodput"], status["micro_batches"])
            if status["phase"] == "ended"
            else _losses(status)
        },
        "began_utc_s": status["began_utc_s"],
        "nodes": status["nodes"],
        "spares": status["spares"],
        "least": status["least"],
        "phases": status["phases"],
        "steps": status["steps"],
        "figures": status["figures"],
        "slow": status["slow"],
        "leave": status["leave"],
        "simulated": status.get("simulated"),
    }


def tiers(status: Status, timeline: JobTimeline) -> list[dict[str, Any]]:
    """The places where the state is saved, the nearest first; for each, how much work is lost if all nearer ones are
    lost as well."""
    rows: list[dict[str, Any]] = []
    step, rate, ended = status["step"], status["pace"]["steps_per_s"], status["phase"] == "ended"
    # The final save comes after the core has decided everything, so only the ledger has it. Until then both
    # have the same.
    saved = {one["url"]: one for one in timeline.checkpoints} if ended else {}
    # The agents of a job that has ended have released their memory.
    if (snapshot := status["saving"]["snapshot"]) and not ended:
        copies = snapshot["nodes"]
        rows.append(
            {
                "name": "memory of the nodes",
                "step": snapshot["step"],
                "age_s": snapshot["age_s"],
                "copies": copies,
                "state": "good" if copies > 1 else "one copy",
                "nbytes": snapshot["nbytes"],
                "note": f"in the memory of {units.plural(copies, 'node')}",
            }
        )
    for tier in status["saving"]["tiers"]:
        state = "fails" if tier["failing"] else "stands still" if tier["slow"] else "good"
        if last := saved.get(tier["url"]):
            age_s = round(status["t_s"] - last["t_s"], 3)
            tier = {**tier, "step": last["step"], "age_s": age_s, "under_way": None}
        note = "" if tier["under_way"] is None else f"step {units.count(tier['under_way'])} is on its way"
        # A tier with nothing in it is not good: nothing could be loaded from it.
        if tier["step"] is None and state == "good":
            state = "nothing yet"
        rows.append(
            {
                "name": tier["url"],
                "step": tier["step"],
                "age_s": tier["age_s"],
                "copies": None,
                "state": state,
                "nbytes": None,
                "note": note,
            }
        )
    for row in rows:
        # A job that went back may be behind its own save. A negative lag would read like an error.
        lag = None if step is None or row["step"] is None else max(0, step - row["step"])
        row["lag_steps"] = lag
        row["lag_s"] = None if lag is None or not rate else round(lag / rate, 3)
    return rows


def waterfall(goodput: Mapping[str, Any]) -> dict[str, Any]:
    """The wall time of the newest `holdfast run`, with every second in exactly one class, and that of its last hour, in
    the order of the classes."""

    def bars(part: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {"class": str(kind), "name": str(kind).replace("_", " "), "s": s, "what": WORDS.get(kind, "")}
            for kind, s in (part.get("classes") or {}).items()
        ]

    recent = goodput.get("recent") or {}
    return {
        "words": goodput_words(goodput) if goodput.get("classes") else "not known",
        "wall_s": goodput.get("wall_s"),
        "share": goodput.get("share"),
        "bars": bars(goodput),
        "recent": {"wall_s": recent.get("wall_s"), "share": recent.get("share"), "bars": bars(recent)},
    }


def typical(timeline: JobTimeline) -> dict[str, float]:
    """Kind of a cause to the median seconds from fault to full strength, over the newest incidents of that kind."""
    kinds: dict[str, list[float]] = {}
    # A list first, made in one operation: another thread may be adding entries.
    for incident in list(timeline.incidents.values())[-200:]:
        took = incident.get("full_strength_s")
        if took is not None and not incident.get("quiet"):
            kinds.setdefault(str(incident.get("cause_kind")), []).append(took)
    return {kind: sorted(times)[len(times) // 2] for kind, times in kinds.items()}


def incidents(
    timeline: JobTimeline,
    before: int | None = None,
    count: int = SHOWN,
    older: Mapping[int, Mapping[str, Any]] = {},
) -> dict[str, Any]:
    """The newest incidents, or those before a number, newest first. older: incidents that the timeline has dropped, as
    listed by `wanted`."""
    there = {**older, **timeline.incidents}
    numbers = sorted((n for n in there if before is None or n < before), reverse=True)
    shown = numbers[:count]
    known = [*numbers[count:], *wanted(timeline, shown[-1] if shown else before, 1)]
    return {
        "incidents": [_shown(there[n]) for n in shown],
        "all": timeline.forgotten + len(timeline.incidents),
        "more": bool(shown and known),
    }


def wanted(timeline: JobTimeline, before: int | None, count: int) -> list[int]:
    """Of the `count` incidents before a number, those that the timeline has dropped, ascending. before: None: the
    newest."""
    last = timeline.newest if before is None else min(before - 1, timeline.newest)
    first = max(1, last - count + 1)
    return [n for n in range(first, last + 1) if n not in timeline.incidents] if timeline.forgotten else []


def findings(timeline: JobTimeline, before: int | None = None, count: int = SHOWN) -> dict[str, Any]:
    """The findings of health rules, newest first; `before`: the number of an entry."""
    there = [f for f in reversed(timeline.findings) if before is None or f["seq"] < before]
    return {
        "findings": [finding(f) for f in there[:count]],
        "more": len(there) > count,
        "older": len(timeline.findings) == FINDINGS_KEPT,
    }


def finding(one: Mapping[str, Any]) -> dict[str, Any]:
    """A finding as it is shown. severity_what, remedy_what: descriptions of the two values."""
    shown = {k: one.get(k) for k in _SHOWN_OF_FINDING}
    return shown | {
        "evidence": printable(str(one.get("evidence") or "")),
        "severity_what": severity_text(str(one.get("severity") or "")),
        "remedy_what": remedy_text(str(one.get("remedy") or "")),
    }


def _shown(incident: Mapping[str, Any]) -> dict[str, Any]:
    return {k: incident.get(k) for k in _SHOWN_OF_INCIDENT} | {"also": incident.get("also") or []}


def incident_timeline(
    timeline: JobTimeline, until_s: float, first_s: float = 0.0, bars: int = BARS
) -> dict[str, Any]:
    """Bars from fault to full strength, with stall and phases; where there are too many, groups with a count."""
    there = [i for i in timeline.incidents.values() if first_s <= (i.get("first_t_s") or 0.0) <= until_s]
    if len(there) <= bars:
        shown = [_bar(i, until_s) for i in there]
    else:
        shown = _grouped(there, first_s, until_s, bars)
    return {
        "from_s": first_s,
        "to_s": until_s,
        "bars": shown,
        "count": len(there),
        "older": timeline.forgotten,
    }


def _bar(incident: Mapping[str, Any], until_s: float) -> dict[str, Any]:
    begun = incident.get("first_t_s") or 0.0
    full = incident.get("full_strength_s")
    return {
        "id": incident["id"],
        "n": 1,
        "t_s": begun,
        "kind": _kind(incident),
        "stall_s": incident.get("stall_s"),
        "full_s": full,
        # Durations count from `t_s`, the newest occurrence, and `begun` is the first.
        "end_s": (incident.get("t_s") or begun) + full if full is not None else until_s,
        "open": bool(incident.get("open")),
        "quiet": bool(incident.get("quiet")),
        "cause": units.clip(str(incident.get("cause") or ""), 120),
        "node": incident.get("node"),
        "phases": [[p.removesuffix("_s"), incident[p]] for p in PHASES if incident.get(p)],
    }


def _grouped(
    there: Sequence[Mapping[str, Any]], first_s: float, until_s: float, bars: int
) -> list[dict[str, Any]]:
    # The range of a job that has just begun is empty, and dividing by it would fail.
    width = max(1e-9, (until_s - first_s) / bars)
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for incident in there:
        place = int(((incident.get("first_t_s") or 0.0) - first_s) / width)
        # Groups never mix kinds: a group of two kinds would hide the rarer one behind the worse one.
        groups.setdefault((place, _kind(incident)), []).append(incident)
    shown = []
    for members in groups.values():
        worst = max(members, key=lambda i: i.get("stall_s") or 0.0)
        shown.append({**_bar(worst, until_s), "n": len(members), "open": any(i.get("open") for i in members)})
    # The kinds share the space: of those with the most bars, the longest stalls are kept.
    return sorted(shown, key=lambda b: (-(b["stall_s"] or 0.0), b["t_s"]))[: 2 * bars]


def _kind(incident: Mapping[str, Any]) -> str:
    if incident.get("fault"):
        return str(incident["fault"]).partition(":")[0]
    return "health" if incident.get("rule") else str(incident.get("cause_kind") or "other")


def decisions(timeline: JobTimeline, before: int | None = None, count: int = SHOWN) -> dict[str, Any]:
    """The newest decisions with their reasons, newest first."""
    there = (e for e in reversed(timeline.decisions) if before is None or e["seq"] < before)
    readable = (d for e in there if (d := _decision(e)) is not None)
    # Sentences are made one by one as they are needed, so an answer costs as much as it shows and not as much
    # as is kept.
    shown = list(islice(readable, count))
    return {"decisions": shown, "more": next(readable, None) is not None}


def _decision(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """A decision as it is shown; None: it is of no interest to a person."""
    line, fields = event_line(entry, width=400), entry["fields"]
    if not line:
        return None
    shown: dict[str, Any] = {k: entry[k] for k in ("seq", "t_s", "kind", "reason")} | {"text": line}
    if entry["kind"] == "verdict":
        shown |= {
            "incident": fields.get("incident"),
            "node": fields.get("node"),
            "text": remedy_text(fields["does"]),
            "reason": fields.get("reason") or "",
            "against": fields.get("against") or "",
            "would": remedy_text(fields["would"]) if fields.get("would") != fields["does"] else "",
            "weighed": fields.get("weighed") or [],
        }
    return shown


def lines(timeline: JobTimeline) -> dict[str, Any]:
    """The newest entries that are of interest to people, newest first: [seq, t_s, kind, sentence]."""
    sentences = ((e, event_line(e, width=400)) for e in reversed(timeline.entries))
    return {"lines": [[e["seq"], e["t_s"], e["kind"], line] for e, line in sentences if line]}


def strip(timeline: JobTimeline, until_s: float, rows: int = ROWS) -> dict[str, Any]:
    """The states of each node over time, the worst first. Nodes that trained all the time share one row.

    A row: [node, incidents, runs], a run: [since, number of its state]. stops: when training stood still.
    """
    plain, others = 0, []
    for node, runs in timeline.runs.items():
        states = {number for _, number in runs}
        # It waited and then trained. This is true of nearly every node of a large job, and their rows would
        # hide the others.
        if states <= {_ORDER["trains"], _ORDER["waits"]} and len(runs) <= 2 and node not in timeline.troubles:
            plain += 1
        else:
            others.append((node, runs))

    def badness(one: tuple[str, Any]) -> tuple[int, int, str]:
        node, runs = one
        return (-timeline.troubles.get(node, 0), -runs[-1][1], node)

    others.sort(key=badness)
    # A small job fits completely, and a person wants to see all of its nodes.
    if len(timeline.runs) <= rows:
        others = sorted(timeline.runs.items(), key=badness)
        plain = 0
    stops = [
        [i["first_t_s"], i["first_t_s"] + (i.get("stall_s") or 0.0), i["id"]]
        for i in list(timeline.incidents.values())[-MARKS:]
        if not i.get("quiet") and i.get("first_t_s") is not None
    ]
    return {
        "states": list(STATES),
        "to_s": until_s,
        "rows": [
            [node, timeline.troubles.get(node, 0), [list(r) for r in runs]] for node, runs in others[:rows]
        ],
        "plain": plain,
        "hidden": max(0, len(others) - rows),
        "stops": stops,
    }


def checkpoints(
    timeline: JobTimeline,
    status: Status,
    there: Sequence[Mapping[str, Any]],
    read_back: ReadBack,
    count: int = SHOWN,
) -> dict[str, Any]:
    """Checkpoints that durable tiers still have, the newest first, and the snapshot in memory.

    there: those of `timeline.checkpoints` that tiers still have, the newest first. read_back: the newest verification
    of each, as `holdfast checkpoint verify` stored it. `whole` and `verified_utc` are None if a checkpoint has not been
    verified since it was saved.
    """
    shown = []
    for one in there[:count]:
        note = read_back.get((one["url"], one["step"]))
        # The step may have been saved again since. Both times are in UTC and in one format, so they compare
        # as text.
        if note is not None and note.utc < one["utc"]:
            note = None
        found = {"whole": note.whole, "verified_utc": note.utc, "why": note.why} if note else _NOT_READ_BACK
        shown.append({**one, **found})
    return {"checkpoints": shown, "tiers": tiers(status, timeline)}


_NOT_READ_BACK = {"whole": None, "verified_utc": None, "why": ""}


def stall(timeline: JobTimeline) -> dict[str, Any]:
    """The newest hang: the ranks that held up the others, where each rank stood, which ranks waited for which, and its
    incident."""
    found = timeline.stall
    if found is None:
        return {"stall": None}
    # The verdict opens its incident, so that is the first one that began after it.
    opened = (n for n, i in timeline.incidents.items() if i["seqs"][0] >= found["seq"])
    return {
        "stall": {
            "t_s": found["t_s"],
            "workers": found["workers"],
            "reason": found["reason"],
            "where": found["where"],
            "lines": found.get("evidence") or [],
            "incident": min(opened, default=None) if found["workers"] else None,
        }
    }


def marks(timeline: JobTimeline) -> list[dict[str, Any]]:
    """The marks on the curves: incidents, if there are many those with the longest stalls; changes of the size; and
    findings of health rules whose `at_step` is known."""
    found = [
        {
            "step": i["at_step"],
            "what": "incident",
            "id": i["id"],
            "stall_s": i.get("stall_s"),
            "lost": i.get("lost_steps") or 0,
            "text": units.clip(str(i.get("cause") or ""), 120),
        }
        for i in timeline.incidents.values()
        if i.get("at_step") is not None and not i.get("quiet")
    ]
    if len(found) > MARKS:
        found = sorted(sorted(found, key=lambda m: -(m["stall_s"] or 0.0))[:MARKS], key=lambda m: m["step"])
    found += [
        {
            "step": c["at_step"],
            "what": "change",
            "id": c["id"],
            "stall_s": c.get("stall_s"),
            "lost": 0,
            "text": f"{c['from_world']} to {units.plural(c['to_world'], 'worker')}: {c['reason']}",
        }
        for c in timeline.changes
    ]
    found += [
        {
            "step": f["at_step"],
            "what": "finding",
            "id": f.get("incident"),
            "stall_s": None,
            "lost": 0,
            "text": units.clip(
                f"{f.get('node') or ''} {f['rule']}: {printable(str(f.get('evidence') or ''))}".strip(), 120
            ),
        }
        for f in list(timeline.findings)[-FINDING_MARKS:]
        if f.get("at_step") is not None and marks_curves(f)
    ]
    return found


def marks_curves(finding: Mapping[str, Any]) -> bool:
    """Whether a finding is marked. One of a rule on trial, or one whose condition is unknown, says nothing about the
    loss."""
    return not finding.get("dry_run") and finding.get("condition") in (None, "faulty")


def ranks(
    rows: Sequence[Mapping[str, Any]], chosen: str = "", first: int = 0, count: int = 60
) -> dict[str, Any]:
    """A window of the table of ranks. chosen: filters that must all match: `node:NAME`, `slow`, `waits`, or part of a
    row."""
    # Each filter is looked for in thousands of rows, on a thread that others wait for.
    filters = chosen.lower().split()[:8]
    there = [row for row in rows if all(_matches(row, one) for one in filters)] if filters else rows
    return {
        "ranks": list(there[first : first + count]),
        "count": len(there),
        "all": len(rows),
        "first": first,
    }


def _matches(row: Mapping[str, Any], wanted: str) -> bool:
    if wanted.startswith("node:"):
        return str(row["node"]).lower() == wanted.removeprefix("node:")
    if wanted == "slow":
        return bool(row["ratio"])
    if wanted == "waits":
        return str(row["state"]) not in ("training",)
    text = f"{row['rank']} {row['worker']} {row['node']} {row['state']}".lower()
    return wanted in text


RECOVERY = (
    TimeClass.DETECT, TimeClass.DECIDE, TimeClass.REPLACE, TimeClass.JOIN, TimeClass.RESTORE, TimeClass.FIRST_STEP,
)  # fmt: skip
"""Classes of time that failures take, in addition to the steps that are repeated."""


# ---------------------------------------------------------------- cost
# The cost of fault tolerance for this job, from its own figures, and the cost of another interval between
# snapshots.
#
# The formulas are those of `holdfast plan`; only figures of this job go into them.


def cost(timeline: JobTimeline, goodput: Mapping[str, Any]) -> dict[str, Any]:
    """incidents; mtbf_s; each_s: the time that one takes; went_back: the number of those that lost steps; snapshots:
    their number; every_s; snapshot_s; now, best: an interval, and the share of time that is kept with it; words.
    Unknown is None."""
    classes, wall_s = goodput.get("classes") or {}, goodput.get("wall_s")
    there = [i for i in list(timeline.incidents.values()) if not i.get("quiet")]
    failures = len(there) + timeline.forgotten_failures
    went_back = sum(bool(i.get("lost_steps")) for i in there) + timeline.forgotten_went_back
    count, begun_s, newest_s = timeline.snapshots
    found: dict[str, Any] = {
        "incidents": failures,
        "mtbf_s": wall_s / failures if wall_s and failures else None,
        "each_s": sum(classes.get(kind, 0.0) for kind in (*RECOVERY, TimeClass.RECOMPUTED)) / failures
        if failures
        else None,
        "went_back": went_back,
        "snapshots": count,
        "every_s": (newest_s - begun_s) / (count - 1) if count > 1 and newest_s > begun_s else None,
        "snapshot_s": classes.get(TimeClass.SNAPSHOT_STALL, 0.0) / count if count else None,
        "now": None,
        "best": None,
    }
    if went_back and wall_s:
        recovery_s = sum(classes.get(kind, 0.0) for kind in RECOVERY) / failures
        found |= _expected(wall_s / went_back, recovery_s, found["every_s"], found["snapshot_s"])
    found["words"] = _summary(found)
    return found


def _expected(
    mtbf_s: float, recovery_s: float, every_s: float | None, save_s: float | None
) -> dict[str, Any]:
    """The present and the best interval, both evaluated by the same formula: the share that was measured in the job
    depends on chance, and could not be compared.

    mtbf_s: between failures that went back to a snapshot. The interval makes no difference to failures that lost no
    step.
    """
    if every_s is None or not save_s:
        return {}
    best_s = max(formulas.daly_interval_s(save_s, mtbf_s), save_s)

    def share(interval_s: float) -> dict[str, float]:
        kept = formulas.goodput(mtbf_s, interval_s, save_s, recovery_s)
        return {"every_s": round(interval_s, 3), "share": round(kept, 6)}

    return {"now": share(every_s), "best": share(best_s)}


def _summary(found: Mapping[str, Any]) -> str:
    if not found["incidents"]:
        return "No failure so far: snapshots are all that safety has cost."
    text = (
        f"{units.plural(found['incidents'], 'failure')}, one in {units.seconds(found['mtbf_s'])}, "
        f"each took {units.seconds(found['each_s'])}."
    )
    if not found["went_back"]:
        return f"{text} None of them went back to a snapshot, so another interval between snapshots would have kept no more."
    text += f" {found['went_back']} went back to a snapshot."
    if found["best"] is None:
        return text
    now, best = found["now"], found["best"]
    same = abs(best["share"] - now["share"]) < 0.001
    text += f" With a snapshot every {units.seconds(now['every_s'])}, {units.share(now['share'])} of the time is kept at this rate"
    if same:
        return f"{text}; no other interval keeps noticeably more."
    return f"{text}; every {units.seconds(best['every_s'])}, {units.share(best['share'])} would be."
