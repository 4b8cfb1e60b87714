"""The engine of a job whose nodes somebody else starts."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.protocol.engine_orders import EngineTraits, ReleaseNode


class JoinProvider:
    """Asks people for nodes. It owns none: an agent ends when its coordinator says so, or is gone for good."""

    traits = EngineTraits(nodes_are_machines=True)

    def __init__(self, line: str, note: Callable[[str], None]) -> None:
        """line: the command that starts a node."""
        self._line, self._note = line, note

    async def provide(self) -> bool:
        """Says what is missing. Who reads it may start a node at any time."""
        self._note(f"the job needs another node; start it on another machine with: {self._line}")
        return False

    async def release(self, order: ReleaseNode) -> None:
        """Nothing: the coordinator does not speak with its agent any more, which then ends by itself."""

    async def mark(self, node: str, reason: str) -> None:
        """Tells whoever looks on."""
        self._note(f"{node} is faulty ({reason}): do not start a node there before it is repaired")

    async def reboot(self, node: str, reason: str) -> None:
        """Tells whoever looks on."""
        self._note(f"reboot {node} ({reason}), and start its node again")

    async def close(self, gives_back: bool = True) -> None:
        """Nothing: agents end with the job, by the coordinator's last word."""
