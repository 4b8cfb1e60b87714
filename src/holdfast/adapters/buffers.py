"""Rules for buffers that forward passes change, in a script that has no `Run` of its own, and what errors tell users of a trainer to
write, whose loop over steps is not theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.train.buffer_rules import Advice, BufferRule, check_rule

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


class TrainersAdvice(Advice):
    """For a trainer that takes `buffers` and `on_commit`."""

    def __init__(self, call: str) -> None:
        """call: how the adapter's call begins that takes them, up to them: `wrap(Trainer, `."""
        self._call = call

    def buffer(self, rule: str, path: str) -> str:
        """What gives a buffer a rule."""
        return f'{self._call}buffers={{"{path}": "{rule}"}})'

    def commit(self, call: str) -> str:
        """What makes a call part of every step's commit."""
        return f"{self._call}on_commit=lambda step: {call})"

    def schedule(self, optimizer: str, scheduler: str) -> str:
        """The trainer steps its scheduler with every step."""
        return f"pass {scheduler} to the trainer, and let it call {scheduler}.step()"

    def unprotected(self, name: str) -> str | None:
        """The adapter decides what is protected."""
        return None

    def skip_nonfinite(self) -> str | None:
        """The trainer calls `step.apply`."""
        return None

    def put_back(self) -> str | None:
        """Evaluations are the trainer's."""
        return None


class LoopAdvice(Advice):
    """For Accelerate, whose script has the loop, and is given the steps."""

    def buffer(self, rule: str, path: str) -> str:
        """What gives a buffer a rule."""
        return f'accelerator.steps(loader, until=N, buffers={{"{path}": "{rule}"}})'

    def unprotected(self, name: str) -> str | None:
        """What was registered is protected; so is what was prepared."""
        if name.startswith("registered"):
            return "do not pass it to register_for_checkpointing if it need not survive a fault"
        return None

    def put_back(self) -> str | None:
        """Where weights may be written into and put back."""
        return "inside `with accelerator.run.relaxed_watchdog():`, which compares their content"
