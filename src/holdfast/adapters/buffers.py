"""Rules for buffers that forward passes change, in a script that has no `Run` of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.train.advice import Advice
from holdfast.train.buffer_rules import BufferRule, check_rule

if TYPE_CHECKING:
    from holdfast.train.run import Run


class Buffers:
    """What the user gave as `buffers={"model.*.loads": "sum"}`: each path or pattern has its rule, see `Run.buffers`."""

    def __init__(self, rules: Mapping[str, BufferRule] | None, advice: Advice) -> None:
        """advice: what errors tell the user to write.

        Raises:
            UsageError: it maps no names, or to a rule that there is not.
        """
        self._advice = advice
        if not isinstance(rules or {}, Mapping):
            raise UsageError(
                f"buffers=...: must be a dict of names to rules, not a {type(rules).__name__}; write for example "
                f"{advice.buffer('sum', 'model.*.loads')}"
            )
        self._rules = dict(rules or {})
        for name, rule in self._rules.items():
            check_rule(rule, advice.buffer(rule, name))

    def declare(self, run: Run) -> None:
        """To the run."""
        run.advice = self._advice
        for name, rule in self._rules.items():
            run.buffers(rule, name)
