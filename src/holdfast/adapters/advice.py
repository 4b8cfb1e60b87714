"""What errors tell users of a trainer to write, whose loop over steps is not theirs."""

from __future__ import annotations

from holdfast.train.advice import Advice


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
