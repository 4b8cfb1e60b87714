"""What errors tell a person to write. A script with a loop of its own has these lines; an adapter's user has others."""

from __future__ import annotations


class Advice:
    """For a script with a `Run`."""

    def buffer(self, rule: str, path: str) -> str:
        """What gives a buffer a rule."""
        return f'run.buffers("{rule}", "{path}")'

    def commit(self, call: str) -> str:
        """What makes a call part of every step's commit."""
        return f"step.apply(optimizer, also=lambda: {call})"

    def schedule(self, optimizer: str, scheduler: str) -> str:
        """What steps a scheduler with every step. Both are names."""
        return f"step.apply({optimizer}, scheduler={scheduler})"

    def unprotected(self, name: str) -> str | None:
        """How a protected object becomes one that may change at any time; None: it cannot."""
        return f"do not pass `{name}` to run.protect if it need not survive a fault"

    def skip_nonfinite(self) -> str | None:
        """What commits a step without its update when the gradient is not finite; None: the script has no line for it."""
        return "step.apply(optimizer, skip_nonfinite=True)"

    def put_back(self) -> str | None:
        """Where weights may be written into and put back; None: where the script has no line for it."""
        return "inside `with run.relaxed_watchdog():`, which compares their content"
