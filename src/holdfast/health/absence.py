"""Lines that must come: soon after a worker's start, and again and again."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.health.rules import Rule

RANKS_OF_ABSENCE = (0,)
"""Whose log must show a line when the rule does not say: most scripts print on rank 0 only."""


class Training(msgspec.Struct):
    """A worker that trains."""

    rank: int
    since_s: float
    """When it began."""
    seen_s: dict[str, float] = {}
    """When each rule's line came last, by the rule's name."""
    reported: set[str] = set()
    """Rules whose missing line was reported."""


class Absence:
    """Who trains, and which lines each of them still owes."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._training: dict[str, Training] = {}

    def set_rules(self, rules: Iterable[Rule]) -> None:
        """Other rules from now on."""
        self._rules = list(rules)

    def on_training_started(self, worker: str, rank: int, now_s: float) -> None:
        """The worker trains from now on, perhaps again: what it owes is counted anew."""
        # A new entry each time: after a recovery or a resize the worker repeats work and may be silent for as
        # long as after its first start. What it owed before must not be held against it.
        self._training[worker] = Training(rank, now_s)

    def on_training_paused(self, worker: str) -> None:
        """It owes nothing now."""
        # While a generation forms, a worker waits for others and prints nothing. Counting that time would
        # report the healthy workers of every recovery.
        self._training.pop(worker, None)

    def is_line_of(self, rule: Rule, worker: str, now_s: float) -> bool:
        """Whether a line of this worker's log is for this rule."""
        training = self._training.get(worker)
        # A rule for certain ranks needs to know the rank, which is only known while the worker trains; all
        # other rules judge every line that a worker prints, also during its start.
        if rule.ranks and (training is None or training.rank not in rule.ranks):
            return False
        # `start_after` leaves out the first steps, in which compilation and caches make every figure look
        # bad.
        return not rule.start_after or (training is not None and now_s >= training.since_s + rule.start_after)

    def on_line(self, rule: Rule, worker: str, now_s: float) -> None:
        """The line came."""
        training = self._training.get(worker)
        if training is not None:
            training.seen_s[rule.id] = now_s
            # The line came after all: if it stops again, that is news.
            training.reported.discard(rule.id)

    def next_due_s(self) -> float | None:
        """When the next line is overdue."""
        return min((due for _, _, due, _ in self._owed()), default=None)

    def overdue(self, now_s: float) -> list[tuple[Rule, str, str]]:
        """Rule and worker of every line that is overdue; each is told once until the line comes."""
        overdue = [(rule, worker, words) for rule, worker, due, words in self._owed() if due <= now_s]
        for rule, worker, _ in overdue:
            self._training[worker].reported.add(rule.id)
        return overdue

    def _owed(self) -> list[tuple[Rule, str, float, str]]:
        owed = []
        for rule in self._rules:
            for worker, training in self._training.items():
                # Every rank that must print and does not would be a finding of its own, and most scripts
                # print on rank 0 only: looked for on all ranks, such a rule would blame the whole job.
                if training.rank not in (rule.ranks or RANKS_OF_ABSENCE) or rule.id in training.reported:
                    continue
                seen = training.seen_s.get(rule.id)
                counts_s = training.since_s + rule.start_after
                if seen is None:
                    within = rule.start_within or rule.every
                    words = (
                        f"no line like {rule.pattern!r} within {rule.start_after + within:g} s of the start"
                    )
                    owed.append((rule, worker, counts_s + within, words))
                elif rule.every:
                    words = f"no line like {rule.pattern!r} for {rule.every:g} s"
                    # A line that came early, before `start_after` was over, must not bring the next one
                    # forward.
                    owed.append((rule, worker, max(seen, counts_s) + rule.every, words))
        return owed
