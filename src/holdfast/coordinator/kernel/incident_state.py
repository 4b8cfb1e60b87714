"""What is remembered of faults: one incident each, and injected ones that none has claimed."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.health_state import Evidence
from holdfast.protocol.causes import Cause
from holdfast.protocol.health import Remedy, Severity
from holdfast.protocol.place import NodePlace


class Incident(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One fault, from its first sign to the first commit at full strength."""

    id: int
    """Counts from 1 on."""
    cause: Cause
    node: str | None
    """None: nobody says which one."""
    ranks: list[int]
    """Ascending, in the generation that it struck."""
    at_step: int | None
    """Committed steps when it struck last."""
    fault_at_s: float | None
    """When the fault was; None: only its first sign is known."""
    detected_at_s: float
    """When its first sign came."""
    generation: int
    """The number of the generation that it struck."""
    world: int = 1
    """Workers that computed in that generation, so what full strength means for it."""
    kind: str | None = None
    """The fault's kind where the opener knows it (`nan`, `kill-coordinator`); None: its cause says what it is."""
    injected: str | None = None
    """The injected fault as it was written; None: nobody injected it. For the record alone: what is decided is what would be
    decided for a fault that nobody injected."""
    injected_at_s: float | None = None
    """When it was injected; None: it was not, or what struck last was not."""
    workers: list[str] = []
    """Those that it took, or made fail."""
    rung: str | None = None
    """How the job went on from it, in words; None: not decided yet."""
    decided_at_s: float | None = None
    """When a generation without the fault was formed; None: not yet."""
    replaced_at_s: float | None = None
    """When a newcomer was ready in the place of what was lost; None: not yet, or none is needed."""
    joined_at_s: float | None = None
    """When the last member so far was connected; None: none was yet."""
    join_s: float | None = None
    """The longest that a member needed to connect; None: not known."""
    restore_s: float | None = None
    """The longest that a member needed to get the state; None: none had to."""
    first_commit_at_s: float | None = None
    """When training went on; None: it stands still."""
    full_at_s: float | None = None
    """When it was closed, at full strength; None: it is open."""
    lost_steps: int | None = None
    """Steps that it made the job do again; None: not known."""
    needs_newcomer: bool = False
    """A worker is missing because of it."""
    rule: str = ""
    """Of the finding that explains it; empty: none does."""
    device: str = ""
    """Which one the finding is about; empty: the whole node, or not known."""
    source: str = ""
    """Where the finding was seen; empty: there is none."""
    firm: bool = False
    """One finding of this rule is enough."""
    severity: Severity = Severity.INFO
    """The worst of all findings."""
    asked: Remedy = Remedy.WATCH
    """The remedy that the worst finding asks for."""
    quiet: bool = False
    """Training was not disturbed."""
    heard_s: float = 0.0
    """When its newest evidence came; 0 without any."""
    due_s: float | None = None
    """When it will be decided; None: it has been, or nothing is to be decided."""
    does: Remedy | None = None
    """What is done about it; None: nothing was decided."""
    verdict: str = ""
    """That in words, for people."""
    evidence: list[Evidence] = []
    """What was seen, oldest first; at most `KEPT_EVIDENCE`."""
    where: str = ""
    """Of a hang, where all ranks stood; else empty."""
    raised: bool = False
    """The first sign was an error of a worker at level 0."""
    lost_nodes: list[str] = []
    """Nodes whose loss this is, in the order in which they were lost; empty: it is not the loss of a node, or nobody
    knows where the node stood."""
    lost_at_s: float = 0.0
    """When the last of them was lost."""
    place: NodePlace = ()
    """The innermost place that all of them are in."""
    earlier_stalls: int = 0
    """Stalls of training before the newest one."""
    earlier_stall_s: float = 0.0
    """How long they lasted together."""
    paused_s: float = 0.0
    """Of the newest stall, in which the script did work of its own between two steps."""
    paused_first_s: float = 0.0
    """Of that, before it was decided how the job goes on."""

    @property
    def struck_s(self) -> float:
        """As `began_s`, and of an injected fault when it was injected. For the record alone."""
        return self.began_s if self.injected_at_s is None else self.injected_at_s

    @property
    def began_s(self) -> float:
        """The fault if its time is known, else its first sign."""
        return self.detected_at_s if self.fault_at_s is None else self.fault_at_s

    @property
    def open(self) -> bool:
        """Not yet back at full strength."""
        return self.full_at_s is None


class Injection(msgspec.Struct, kw_only=True):
    """An injected fault that no incident has claimed yet."""

    fault: str
    """As it was written, with its options."""
    kind: str
    """The fault's name alone."""
    at_s: float
    node: str | None = None
    """None: it names no node."""
    worker: str | None = None
    """None: it hits no worker in particular."""
