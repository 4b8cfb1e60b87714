"""The report of one incident, from the ledger: what was observed, considered and done, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.observe.event_text import event_line
from holdfast.protocol import units
from holdfast.protocol.health import remedy_text, severity_text
from holdfast.protocol.ledger import FACTS, add_incident, phases_text

Entry = Mapping[str, Any]

COORDINATOR = "coordinator"
"""The recovery action of an incident in which only the coordinator was lost, see `coordinator.kernel.incidents`."""
RUNGS = {
    "spare": "workers of other nodes, which waited, took the places of those that were lost",
    "restart": "new workers were started on the same node",
    "go on smaller": "training went on with fewer workers",
    "retry in process": "the same workers went on, and no process was started",
    COORDINATOR: "another coordinator took over, and training went on meanwhile",
}
"""How an incident was repaired, by `IncidentFacts.rung`: a description of each value."""
INJECTED = "put in on purpose, by --fault or `holdfast fault`: no machine and no script is to blame"

_OF_AN_INCIDENT = frozenset(
    f"incident-{what}" for what in ("opened", "joined", "explained", "resumed", "closed", "settled")
)
_BEGINS = frozenset({"started", "formed"})
"""Events that begin a generation."""


def incident_lines(number: int, entries: Sequence[Entry]) -> list[str]:
    """The report as lines for a person. Empty: the ledger has no such incident."""
    mine = belonging(number, entries)
    opened = next((e for e in mine if e["kind"] == "incident-opened"), None)
    if opened is None:
        return []
    found: dict[int, dict[str, Any]] = {}
    for entry in mine:
        add_incident(found, entry["kind"], entry["fields"])
    incident = found[number]
    # An incident that is opened again reports the time of its newest disturbance. Its report begins at the
    # first.
    began_s = opened["fields"]["t_s"] if incident.get("earlier_stalls") else incident["t_s"]
    lines = [
        _headline(number, incident),
        *([f"  injected: {INJECTED}"] if incident.get("injected") else []),
        "",
    ]
    lines += _seen(mine)
    lines += _stood(incident)
    lines += _weighed(mine)
    lines += _happened(mine, began_s)
    lines += _cost(incident)
    return lines


def unheeded(entries: Sequence[Entry]) -> list[str]:
    """Decisions about rules on trial, which belong to no incident."""
    return [
        f"{units.clock(e['t_s'])}  {event_line(e, everything=True, width=1000)}"
        for e in entries
        if e["kind"] == "verdict" and e["fields"].get("incident") is None
    ]


def belonging(number: int, entries: Sequence[Entry]) -> list[Entry]:
    """The entries that belong to an incident, in their order. They are found by what they name: its number, its
    workers, the generation that it disturbed, the inspection that found it, the fault that was injected."""
    named = [e for e in entries if _names(e, number)]
    facts = [e["fields"] for e in named if e["kind"] in _OF_AN_INCIDENT]
    workers = {name for f in facts for name in f.get("workers") or []}
    inspections = {e["fields"].get("inspection") for e in named if e["kind"] == "stall-judged"} - {None, 0}
    injections = _injections(facts, entries)
    newest = _newest_of_each_worker(entries)
    during = _generations(entries)
    struck = _struck(named, entries, during)

    def mine(entry: Entry) -> bool:
        kind, fields = entry["kind"], entry["fields"]
        in_it = during[entry["seq"]] in struck
        # An entry that names other incidents belongs to them only, except for the end of a generation, which
        # several incidents may have caused. A worker that is not restarted may fail repeatedly, each time in
        # another incident.
        others = bool(fields.get("incidents"))
        return (
            _names(entry, number)
            or (kind == "failed" and fields.get("worker") in workers and in_it and not others)
            or (kind == "worker-exited" and newest.get(fields.get("worker")) == number and not others)
            or (kind == "broke" and in_it)
            or (kind == "stalled" and fields.get("inspection") in inspections)
            or entry["seq"] in injections
        )

    return [e for e in entries if mine(e)]


def _generations(entries: Sequence[Entry]) -> dict[int, int]:
    """For each entry's `seq`, the `seq` of the entry that began the generation in which it was written; 0: that one is
    not among the entries. Numbers of generations would not do: at another level they are counted anew."""
    begun, during = 0, {}
    for entry in entries:
        if entry["kind"] in _BEGINS:
            begun = entry["seq"]
        during[entry["seq"]] = begun
    return during


def _struck(named: Sequence[Entry], entries: Sequence[Entry], during: Mapping[int, int]) -> set[int]:
    """The generations that an incident disturbed, in the numbering of `_generations`: the one in which it was opened,
    and those that its later facts name, if it occurred again. Empty for an incident during which training went on,
    whatever ends that generation later."""
    begins = [e for e in entries if e["kind"] in _BEGINS]
    found = set()
    for entry in named:
        f = entry["fields"]
        if entry["kind"] not in FACTS or f.get("quiet") or f.get("rung") == COORDINATOR:
            continue
        if entry["kind"] == "incident-opened":
            found.add(during[entry["seq"]])
        of_it = (
            b for b in begins if b["fields"]["generation"] == f.get("generation") and b["seq"] < entry["seq"]
        )
        found |= {b["seq"] for b in list(of_it)[-1:]}
    return found


def _newest_of_each_worker(entries: Sequence[Entry]) -> dict[str | None, int]:
    """The newest incident of each worker: a worker's process ends only once, so its end belongs to no other incident."""
    facts = [e["fields"] for e in entries if e["kind"] in _OF_AN_INCIDENT]
    return {name: f["id"] for f in sorted(facts, key=lambda f: f["id"]) for name in f.get("workers") or []}


def _injections(facts: Sequence[Entry], entries: Sequence[Entry]) -> set[int]:
    """`seq` of the injections that caused an incident. A fault may be injected repeatedly into the same worker; the
    incident's time is that of its own injection."""
    there = [e for e in entries if e["kind"] == "fault-injected"]
    found = set()
    for f in facts:
        same = [e for e in there if f.get("injected") and e["fields"].get("fault") == f["fault"]]
        if same:
            found.add(min(same, key=lambda e: abs(e["t_s"] - f["t_s"]))["seq"])
    return found


def _names(entry: Entry, number: int) -> bool:
    fields = entry["fields"]
    if entry["kind"] in _OF_AN_INCIDENT:
        return bool(fields.get("id") == number)
    return fields.get("incident") == number or number in (fields.get("incidents") or ())


def _headline(number: int, incident: Entry) -> str:
    where = [incident["node"]] if incident.get("node") else []
    where += [f"rank {units.ranks(incident['ranks'])}"] if incident.get("ranks") else []
    place = f" on {', '.join(where)}" if where else ""
    injected = f" (injected: {incident['fault']})" if incident.get("injected") else ""
    step = "" if incident.get("at_step") is None else f", at step {incident['at_step']}"
    return f"Incident {number}{place}{step}: {incident['cause']}{injected}"


def _seen(mine: Sequence[Entry]) -> list[str]:
    lines = []
    for entry in mine:
        f = entry["fields"]
        if entry["kind"] == "finding":
            about = f" ({f['subject']})" if f.get("subject") else ""
            asks = f"{f['severity']}, asks for {f['remedy']}"
            lines.append(
                f"  the rule {f['rule']}{about} by {f['source']}: {f['evidence'] or 'no text'} [{asks}]"
            )
            if meaning := severity_text(f["severity"]):
                lines.append(f"    {f['severity']}: {meaning}; {f['remedy']}: {remedy_text(f['remedy'])}")
        elif entry["kind"] == "incident-joined":
            lines.append(f"  and then, on {f['node'] or 'some node'}: {f['cause']}")
        elif entry["kind"] == "incident-explained":
            lines.append(f"  first symptom: {f['was']}")
    if not lines:
        return ["No health rule matched: the fault was noticed only by its effect."]
    return ["What was seen:", *lines]


def _stood(incident: Entry) -> list[str]:
    """For a hang: where its ranks stood, as far as that is known."""
    lines = []
    if (steps := incident.get("stood_at_step")) is not None:
        lines.append(f"  its ranks had done {units.plural(steps, 'optimizer step')} since the start")
    if incident.get("collective"):
        lines.append(f"  they had not entered {incident['collective']}, in which others waited")
    if incident.get("where"):
        lines.append(f"  all ranks: {incident['where']}")
    return ["", "Where the ranks were:", *lines] if lines else []


def _weighed(mine: Sequence[Entry]) -> list[str]:
    lines = []
    for entry in mine:
        if entry["kind"] != "verdict":
            continue
        f = entry["fields"]
        lines.append(f"  {remedy_text(f['does'])}, because {f['reason']}")
        if f.get("against") and f["would"] != f["does"]:
            lines.append(f"    otherwise: {remedy_text(f['would'])}")
        if f.get("again_s") is not None:
            lines.append(f"    decided again after {units.seconds(f['again_s'])}, if the finding still holds")
        lines += [f"    considered: {w}" for w in f.get("weighed") or []]
    return ["", "What was decided:", *lines] if lines else []


def _happened(entries: Sequence[Entry], began_s: float) -> list[str]:
    lines = []
    for entry in sorted(entries, key=lambda e: e["seq"]):
        if entry["kind"] in ("finding", "verdict"):
            continue
        line = event_line(entry, width=1000)
        if line:
            lines.append(f"  {entry['t_s'] - began_s:+9.3f} s  {line}")
    return ["", "What happened:", *lines] if lines else []


def _cost(incident: Entry) -> list[str]:
    lines = ["", "What it cost:"]
    if incident.get("quiet"):
        took = incident.get("full_strength_s")
        settled = f" The incident was settled after {units.seconds(took)}." if took is not None else ""
        return [*lines, f"  Nothing: training was not disturbed.{settled}"]
    if before := incident.get("earlier_stalls"):
        stood = units.seconds(incident["earlier_stall_s"])
        lines.append(f"  training had stalled for {stood} before that, in {units.plural(before, 'stall')}")
    if incident.get("stall_s") is None:
        return [*lines, "  Not known: no step was committed after it."]
    lost = incident.get("lost_steps")
    again = "how many steps have to be repeated is not known"
    if lost is not None:
        again = f"{units.plural(lost, 'step')} to be repeated"
    lines.append(f"  training stalled for {units.seconds(incident['stall_s'])}; {again}")
    if own := incident.get("paused_s"):
        lines.append(
            f"  not counting {units.seconds(own)} of the script's own work between two steps, which the fault did "
            "not cause"
        )
    if incident.get("full_strength_s") is not None:
        action = incident.get("rung") or "by itself"
        lines.append(f"  full strength after {units.seconds(incident['full_strength_s'])} ({action})")
        if action in RUNGS:
            lines.append(f"    {action}: {RUNGS[action]}")
    if known := phases_text(incident):
        lines.append(f"  of which {known}")
    return lines
