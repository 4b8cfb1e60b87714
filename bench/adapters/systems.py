"""What is compared for each framework: Holdfast's adapter, and the framework's own restart under torchrun."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from bench.recovery.systems.base import System
from bench.recovery.systems.holdfast import HoldfastWritten
from bench.recovery.systems.torchrun import Torchrun

FRAMEWORKS = {"transformers": "Hugging Face's Trainer", "lightning": "Lightning"}
"""Names of the distributions."""


def _script(framework: str) -> Path:
    return Path(__file__).with_name(f"train_{framework}.py")


def _missing(framework: str) -> str | None:
    if importlib.util.find_spec(framework) is None:
        return f"{framework} is not installed: pip install 'holdfast-train[{framework}]'"
    return None


class UnderTorchrun(Torchrun):
    """The framework's DDP; a restart goes on from the framework's own checkpoint."""

    arguments = ("plain",)

    def __init__(self, framework: str, *, checkpoints: bool = True) -> None:
        self.name = f"torchrun-{framework}" if checkpoints else f"plain-{framework}"
        self.title = f"{FRAMEWORKS[framework]}, torchrun"
        self.note = "the framework's DDP and checkpoints, in tmpfs; --max-restarts"
        self.script, self.checkpoints, self._framework = _script(framework), checkpoints, framework

    def trouble(self) -> str | None:
        """Whether the framework is there."""
        return _missing(self._framework)


class Adapted(HoldfastWritten):
    """The same script with one changed line, as a job of the same shape as the row of `Run`."""

    arguments = ("holdfast",)

    def __init__(self, framework: str) -> None:
        self.name, self.title = f"holdfast-{framework}", f"{FRAMEWORKS[framework]}, Holdfast"
        self.script, self._framework = _script(framework), framework

    def trouble(self) -> str | None:
        """Whether Holdfast's command and the framework are there."""
        return super().trouble() or _missing(self._framework)

    def unprotected(self) -> System:
        """The framework's DDP, without checkpoints."""
        return UnderTorchrun(self._framework, checkpoints=False)


class Written(HoldfastWritten):
    """The loop that the adapters are to be as quick as."""

    title = "a loop with hf.Run"


def select(names: str) -> list[str]:
    """Those of a comma-separated list of frameworks, in their order. Raises ValueError for one that is not known."""
    chosen = names.split(",")
    unknown = sorted(set(chosen) - set(FRAMEWORKS))
    if unknown:
        raise ValueError(f"no framework is called {unknown[0]!r}; there are: {', '.join(FRAMEWORKS)}")
    return [name for name in FRAMEWORKS if name in chosen]


def rows(frameworks: Sequence[str]) -> list[System]:
    """The rows of the table, in the order in which they are measured."""
    pairs: list[System] = [kind(name) for name in frameworks for kind in (Adapted, UnderTorchrun)]
    return [Written(), *pairs]
