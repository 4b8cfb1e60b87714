"""Rules for buffers that forward passes change, in a script that has no `Run` of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from holdfast.errors import UsageError
from holdfast.train.buffer_rules import BufferRule, check_rule
from holdfast.train.state_image import persistent_buffers

if TYPE_CHECKING:
    from holdfast.train.run import Run


class Buffers:
    """What the user gave as `buffers={"model.*.loads": "sum"}`: each path or pattern has its rule, see `Run.buffers`."""

    def __init__(self, rules: Mapping[str, BufferRule] | None, call: str) -> None:
        """call: how the adapter's call begins that takes `buffers`, up to it; errors name it.

        Raises:
            UsageError: it maps no names, or to a rule that there is not.
        """
        self._call = call
        if not isinstance(rules or {}, Mapping):
            raise UsageError(
                f"{call}buffers=...): a {type(rules).__name__} has no rule for each name; write "
                f"{self.line('sum', 'model.*.loads')}"
            )
        self._rules = dict(rules or {})
        for name, rule in self._rules.items():
            check_rule(rule, self.line(rule, name))

    def line(self, rule: str, path: str) -> str:
        """What the user writes to give a buffer a rule."""
        return f'{self._call}buffers={{"{path}": "{rule}"}})'

    def declare(self, run: Run, **modules: torch.nn.Module) -> None:
        """To the run, for these protected modules. Batch norms have the rule "mean" where the user gives no other: DDP takes
        rank 0's statistics without a word of the script's, so a script for these trainers has none."""
        run.buffer_line = self.line
        norms = [
            at.path
            for at in persistent_buffers(modules)
            if isinstance(at.module, torch.nn.modules.batchnorm._NormBase)
        ]
        if norms:
            run.buffers("mean", *norms)
        for name, rule in self._rules.items():
            run.buffers(rule, name)
