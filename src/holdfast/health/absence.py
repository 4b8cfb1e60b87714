"""Rules about lines that are expected in a worker's log: soon after its start, and repeatedly from then on."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.health.rules import Rule

RANKS_OF_ABSENCE = (0,)
"""The ranks whose logs must show the line if the rule names none: most scripts print on rank 0 only."""


class Training(msgspec.Struct):
    """A worker that is training."""

    rank: int
    since_s: float
    """When its training began."""
    seen_s: dict[str, float] = {}
    """When the line of each rule was last seen, by the rule's name."""
    reported: set[str] = set()
    """Rules whose missing line was already reported."""


class Absence:
    """Keeps track of the workers that train, and of the lines that each of them has yet to print."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._training: dict[str, Training] = {}

    def set_rules(self, rules: Iterable[Rule]) -> None:
        """Replaces the rules."""
        self._rules = list(rules)

    def on_training_started(self, worker: str, rank: int, now_s: float) -> None:
        """The worker starts to train, possibly not for the first time: its deadlines start anew."""
        # A new entry each time: after a recovery or a resize the worker repeats work and may be silent for as
        # long as after its first start. Deadlines from before must not be held against it.
        self._training[worker] = Training(rank, now_s)

    def on_training_paused(self, worker: str) -> None:
        """No line is expected from the worker until it trains again."""
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
        """Records that the expected line appeared."""
        training = self._training.get(worker)
        if training is not None:
            training.seen_s[rule.id] = now_s
            # The line came after all: if it stops again, that is news.
            training.reported.discard(rule.id)

    def next_due_s(self) -> float | None:
        """When the next expected line becomes overdue."""
        return min((due for _, _, due, _ in self._expected()), default=None)

    def overdue(self, now_s: float) -> list[tuple[Rule, str, str]]:
        """Rule, worker and message for every line that is overdue. Each is reported once until the line appears again."""
        overdue = [(rule, worker, message) for rule, worker, due, message in self._expected() if due <= now_s]
        for rule, worker, _ in overdue:
            self._training[worker].reported.add(rule.id)
        return overdue

    def _expected(self) -> list[tuple[Rule, str, float, str]]:
        expected = []
        for rule in self._rules:
            for worker, training in self._training.items():
                # Every rank that should print but does not would be a finding of its own. Most scripts print
                # on rank 0 only, so a rule that looked at all ranks would report the whole job.
                if training.rank not in (rule.ranks or RANKS_OF_ABSENCE) or rule.id in training.reported:
                    continue
                seen = training.seen_s.get(rule.id)
                counts_s = training.since_s + rule.start_after
                if seen is None:
                    within = rule.start_within or rule.every
                    message = (
                        f"no line like {rule.pattern!r} within {rule.start_after + within:g} s of the start"
                    )
                    expected.append((rule, worker, counts_s + within, message))
                elif rule.every:
                    message = f"no line like {rule.pattern!r} for {rule.every:g} s"
                    # A line that came early, before `start_after` was over, must not bring the next one
                    # forward.
                    expected.append((rule, worker, max(seen, counts_s) + rule.every, message))
        return expected
