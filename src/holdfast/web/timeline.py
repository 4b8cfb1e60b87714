"""A job's ledger in the form that the page shows, read entry by entry: incidents, decisions, the states of each node,
checkpoints.

Pure. A timeline is updated from `seq` on, so an update costs as much as has happened since the last one, and not the
length of the ledger. All lists are bounded. `bookmarks` say where the ledger reports incidents that were dropped.
"""

from __future__ import annotations

from collections import deque
from functools import cache, partial
from typing import Any

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol import ledger
from holdfast.protocol.ledger import FACTS, add_facts
from holdfast.protocol.wire.decoding import decode

DECISIONS_KEPT = 2000
INCIDENTS_KEPT = 2048
"""Number of incidents that are kept: the newest, and those that are open. Each takes a kilobyte or two, and a job may
have ten thousand."""
BOOKMARK_EVERY = 64
"""Number of incidents between two bookmarks; doubled whenever there are `BOOKMARKS_KEPT`."""
BOOKMARKS_KEPT = 512
FINDINGS_KEPT = 500
CHECKPOINTS_KEPT = 500
RUNS_KEPT = 200
"""States kept of one node; the oldest are dropped."""
LINES_KEPT = 200
_DECISION = frozenset(
    {
        "verdict",
        "formed",
        "started",
        "restart",
        "resize",
        "capacity",
        "changed",
        "storm",
        "blast-limit",
        "node-held",
    }
    | {
        "node-refused",
        "lemon-leaves",
        "stop-requested",
        "stall-judged",
        "asked",
        "readmitted",
        "checkpoint-unread",
    }
)
# `views.strip` shows nodes with a larger number first, so a new state belongs where its urgency is, and not
# at the end.
STATES = ("trains", "waits", "held", "leaving", "sick", "lost", "gone")
"""The states of a node, by number."""
_NODE_STATES = {
    "node-joined": "waits",
    "node-held": "held",
    "node-leaving": "leaving",
    "node-trains-on": "leaving",
    "node-lost": "lost",
    "node-refused": "gone",
    "node-left": "gone",
    "node-taken": "gone",
    "readmitted": "waits",
    "rebooting": "sick",
    "repairing": "sick",
}
_NEEDED = {
    **dict.fromkeys(FACTS, ("id",)),
    "finding": ("rule",),
    "incident-joined": ("id", "cause"),
    "incident-explained": ("id", "cause"),
    **dict.fromkeys(("formed", "started"), ("world",)),
    "changed": ("id", "at_step", "from_world", "to_world", "reason"),
    "stall-judged": ("workers", "reason", "where"),
    "verdict": ("does", "would"),
    "saved": ("url",),
    "tier-failed": ("url", "reason"),
}
"""Fields without which an entry of the kind cannot be used. Others may be missing, because an older version did not
have them."""
_WORKERS = '"workers":['
_UNNAMED = '"unnamed":true'


_fields: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class JobTimeline:
    """The content of a ledger as the page shows it. `add` takes the entries in their order, each once."""

    def __init__(self, kept: int | None = None) -> None:
        """kept: number of incidents, instead of `INCIDENTS_KEPT`."""
        self._kept = INCIDENTS_KEPT if kept is None else kept
        self.seq = 0
        """Number of the newest entry that was read."""
        self.t_s = 0.0
        """The time of that entry, in seconds since the job's start."""
        self.began_utc = ""
        """When the ledger's first entry was written: its name, as for `Store.news`."""
        self.began_t_s = 0.0
        self.incidents: dict[int, dict[str, Any]] = {}
        """Facts by number, with `seqs`: the first and the last entry about the incident. The newest, see
        `INCIDENTS_KEPT`."""
        self.newest = 0
        """The largest number of an incident."""
        self.forgotten = 0
        """Number of incidents that were dropped; `forgotten_failures` of them disturbed training, and
        `forgotten_went_back` lost steps."""
        self.forgotten_failures = self.forgotten_went_back = 0
        self.bookmarks: list[tuple[int, int]] = []
        """(number, entry that opened it) of incidents at regular distances, ascending, so that reading a part of the
        ledger is enough to show old ones."""
        self.findings: deque[dict[str, Any]] = deque(maxlen=FINDINGS_KEPT)
        """Findings of health rules, oldest first: the fields, with `seq` and `t_s`."""
        self.decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_KEPT)
        """Entries, in the form of those in `entries`, whose kinds are decisions; more of them are kept."""
        self.checkpoints: deque[dict[str, Any]] = deque(maxlen=CHECKPOINTS_KEPT)
        self.entries: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        """The newest entries: seq, t_s, kind, fields, and a reason if an earlier entry gives one."""
        self.changes: deque[dict[str, Any]] = deque(maxlen=RUNS_KEPT)
        self.worlds: deque[tuple[float, int, int]] = deque(maxlen=DECISIONS_KEPT)
        """(t_s, step, workers) of each generation."""
        self.runs: dict[str, deque[tuple[float, int]]] = {}
        """Node to (time of the change, number of the state in STATES), oldest first."""
        self.troubles: dict[str, int] = {}
        """Node to the number of incidents that occurred on it."""
        self.tier_trouble: dict[str, str] = {}
        self.stall: dict[str, Any] | None = None
        """The newest verdict about a hang, with `seq` and `t_s`; None: there was none."""
        self.snapshots = (0, 0.0, 0.0)
        """Number of complete snapshots, and the times of the first and the newest one."""
        self.ended: dict[str, Any] | None = None
        self._members = _Members()
        self._broke = ""
        self._every = BOOKMARK_EVERY

    def add(self, seq: int, t_s: float, utc: str, kind: str, text: str) -> None:
        """text: the fields as JSON, as they are in the ledger."""
        # An entry that is read twice must not count twice: `troubles` and the members are sums.
        if seq <= self.seq:
            return
        if not self.began_utc:
            self.began_utc, self.began_t_s = utc, t_s
        # Entries are ordered by their numbers. If a later one has an earlier time, the page's time still
        # never goes back.
        self.seq, self.t_s = seq, max(self.t_s, t_s)
        # Before the fields are decoded: the names of all workers make up nearly all of such an entry.
        if kind in ("formed", "started"):
            text, came, left = self._members.changed(text)
            self._formed(t_s, came, left)
        try:
            fields = decode(_fields.decode, text, kind)
        except Damaged:
            return  # a damaged row is skipped
        if not _fits(kind, fields):
            return
        if kind in FACTS:
            self._incident(seq, kind, fields)
        elif kind in ("incident-joined", "incident-explained"):
            self._more_of_incident(seq, kind, fields)
        elif kind == "finding":
            self.findings.append({"seq": seq, "t_s": t_s, **fields})
        elif kind in ("formed", "started"):
            self.worlds.append((t_s, int(fields.get("start") or 0), int(fields["world"])))
        self._storage(t_s, utc, kind, fields)
        self._node(t_s, kind, fields)
        if kind == "stall-judged":
            self.stall = {"seq": seq, "t_s": t_s, **fields}
        if kind == "changed":
            self.changes.append({"seq": seq, **fields})
        if kind == "ended":
            self.ended = fields
        self._add_entry(seq, t_s, kind, fields)

    def _add_entry(self, seq: int, t_s: float, kind: str, fields: dict[str, Any]) -> None:
        # Sentences are made only when they are shown, and not for every entry that is read: a sentence costs
        # ten times as much as an entry.
        if kind in ("broke", "yield"):
            self._broke = fields.get("reason") or ""
        entry = {"seq": seq, "t_s": t_s, "kind": kind, "fields": fields, "reason": ""}
        self.entries.append(entry)
        if kind in _DECISION:
            if kind == "formed":
                # A generation is a consequence of the event that ended the one before it.
                entry["reason"], self._broke = self._broke, ""
            self.decisions.append(entry)

    def _incident(self, seq: int, kind: str, fields: dict[str, Any]) -> None:
        if fields["id"] not in self.incidents:
            # A late event of an incident that was dropped: it would come back as a new one, and count twice.
            if self.forgotten and kind != "incident-opened" and fields["id"] <= self.newest:
                return
            self._entered(fields["id"], seq)
        known = self.incidents[fields["id"]]
        # Later kinds have more facts. `first_t_s` stays: an incident that strikes again has a later time.
        known.setdefault("first_t_s", fields.get("t_s"))
        add_facts(known, kind, fields)
        known["seqs"][1] = seq
        known["open"] = kind in ("incident-opened", "incident-resumed")
        # Counted only when it opens: later events are about the same incident.
        if kind == "incident-opened" and fields.get("node"):
            self.troubles[fields["node"]] = self.troubles.get(fields["node"], 0) + 1

    def _entered(self, number: int, seq: int) -> None:
        self.incidents[number] = {"seqs": [seq, seq], "also": [], "open": True}
        self.newest = max(self.newest, number)
        if not self.bookmarks or number - self.bookmarks[-1][0] >= self._every:
            self.bookmarks.append((number, seq))
        if len(self.bookmarks) > BOOKMARKS_KEPT:
            self.bookmarks, self._every = self.bookmarks[::2], 2 * self._every
        if len(self.incidents) > self._kept:
            # More events of an open incident will follow, and must find it here.
            gone = next((n for n, one in self.incidents.items() if not one["open"] and n != number), None)
            if gone is not None:
                one = self.incidents.pop(gone)
                self.forgotten += 1
                self.forgotten_failures += not one.get("quiet")
                self.forgotten_went_back += not one.get("quiet") and bool(one.get("lost_steps"))

    def before(self, number: int) -> JobTimeline:
        """A timeline that begins no later than the first entry about this incident. It is for reading that part of the
        ledger, so it keeps all incidents."""
        found = JobTimeline(kept=self.newest)
        _, seq = max((one for one in self.bookmarks if one[0] <= number), default=(0, 1))
        found.seq = seq - 1
        return found

    def _more_of_incident(self, seq: int, kind: str, fields: dict[str, Any]) -> None:
        known = self.incidents.get(fields["id"])
        if known is None:
            return
        known["seqs"][1] = seq
        if kind == "incident-joined":
            known["also"] = [*known["also"][-7:], fields["cause"]]
            return
        add_facts(known, kind, fields)

    def _storage(self, t_s: float, utc: str, kind: str, fields: dict[str, Any]) -> None:
        if kind == "snapshot":
            count, begun_s, _ = self.snapshots
            self.snapshots = count + 1, begun_s if count else t_s, t_s
        elif kind == "saved":
            found = {k: fields.get(k) for k in ("step", "url", "took_s", "skipped")}
            self.checkpoints.append({"t_s": t_s, "utc": utc, **found})
            # Only a save that arrived proves that a tier works again.
            self.tier_trouble.pop(fields["url"], None)
        elif kind == "tier-failed":
            self.tier_trouble[fields["url"]] = fields["reason"]

    # ------------------------------------------------------------ nodes

    def _node(self, t_s: float, kind: str, fields: dict[str, Any]) -> None:
        node = fields.get("node")
        if node and kind in _NODE_STATES:
            self._becomes(node, t_s, _NODE_STATES[kind])
        if node and kind == "node-joined":
            self._members.renew(node)
        # A departure was called off, so the node returns to its earlier state, which no entry gives.
        if kind == "node-stays" and node:
            self._becomes(node, t_s, "trains" if node in self._members.nodes else "waits")

    def _formed(self, t_s: float, came: set[str], left: set[str]) -> None:
        for node in came:
            self._becomes(node, t_s, "trains")
        for node in left:
            # If the node failed, that was recorded before: only a node that trained until now waits from now
            # on.
            if self.runs.get(node) and STATES[self.runs[node][-1][1]] == "trains":
                self._becomes(node, t_s, "waits")

    def _becomes(self, node: str, t_s: float, state: str) -> None:
        runs = self.runs.setdefault(node, deque(maxlen=RUNS_KEPT))
        number = STATES.index(state)
        if not runs or runs[-1][1] != number:
            runs.append((t_s, number))


class _Members:
    """The nodes that have workers in the newest generation.

    An entry about a generation names all its workers: with 16,000 that is a quarter of a megabyte, and two generations
    in a row differ by a few. So the texts are compared, and only the differences are parsed.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        """Node to the number of its workers in the generation."""
        self._text = ""
        self._again: set[str] = set()

    def renew(self, node: str) -> None:
        """A node joined: if the next generation has it, it counts as new even if the one before had it, too."""
        self._again.add(node)

    def changed(self, fields: str) -> tuple[str, set[str], set[str]]:
        """The fields without the names, and the nodes that came and left with this generation."""
        begin = fields.find(_WORKERS)
        if begin < 0:
            return fields, set(), set()
        begin += len(_WORKERS)
        end = fields.find("]", begin)
        text = fields[begin:end]
        # The names of old generations are removed from a ledger, see `rollups.compact`: that says nothing
        # about nodes that came or left.
        if not text and _UNNAMED in fields:
            return fields, set(), set()
        head, tail = _differ(self._text, text)
        old, new = self._text[head : len(self._text) - tail], text[head : len(text) - tail]
        # The counts before anything changes. A name that only moves within the list is removed and added
        # again, which is no change of its node.
        before = {
            node: self.nodes.get(node, 0)
            for name in (*_names(old), *_names(new))
            for node in [_node_of(name)]
        }
        for name in _names(old):
            self._count(_node_of(name), -1)
        for name in _names(new):
            self._count(_node_of(name), 1)
        self._text = text
        came = {n for n, count in before.items() if not count and n in self.nodes}
        left = {n for n, count in before.items() if count and n not in self.nodes}
        # A node that was lost and came back between two generations has the same name in both.
        came |= {n for n in self._again if n in self.nodes}
        self._again.clear()
        # The list stays there, empty, so that decoding the fields still finds its key.
        return fields[:begin] + fields[end:], came, left

    def _count(self, node: str, by: int) -> None:
        count = self.nodes.get(node, 0) + by
        if count:
            self.nodes[node] = count
        else:
            self.nodes.pop(node, None)


def _fits(kind: str, fields: dict[str, Any]) -> bool:
    """Whether the fields have the types of this kind. A damaged ledger may contain any JSON, and kinds of a later
    version are not known here."""
    if any(fields.get(name) is None for name in _NEEDED.get(kind, ())):
        return False
    if kind not in ledger.EVENTS:
        return True
    try:
        decode(partial(msgspec.convert, type=_some_of(kind)), fields, kind)
    except Damaged:
        return False
    return True


@cache
def _some_of(kind: str) -> type[msgspec.Struct]:
    """The fields of a kind, each of which may be missing."""
    event = ledger.EVENTS[kind]
    return msgspec.defstruct(
        "SomeOf",
        [(f.name, f.type | msgspec.UnsetType, msgspec.UNSET) for f in msgspec.structs.fields(event)],
    )


def _differ(a: str, b: str) -> tuple[int, int]:
    """Lengths of the common beginning and the common end of two lists of names, in whole names."""
    head = _common(len(a), len(b), lambda n: a[:n] == b[:n])
    # Cut at a comma: in the middle of a name, parts of two names would be read as names.
    head = a.rfind(",", 0, head) + 1
    most = min(len(a), len(b)) - head
    tail = _common(most, most, lambda n: n == 0 or a[-n:] == b[-n:])
    cut = a.find(",", len(a) - tail) if tail else -1
    return head, len(a) - cut if cut >= 0 else 0


def _common(one: int, other: int, same: Any) -> int:
    """The largest length for which `same` holds, if it also holds for all shorter ones."""
    low, high = 0, min(one, other)
    # By bisection, with one comparison of slices at each step. A loop over characters would take a step of
    # Python for each of them.
    while low < high:
        middle = (low + high + 1) // 2
        if same(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _names(text: str) -> list[str]:
    return [name.strip('"') for name in text.split(",") if name]


def _node_of(worker: str) -> str:
    """Workers are named `node.slot#incarnation`."""
    return worker.rpartition(".")[0] or worker
