"""What an engine does: it provides nodes and takes them away."""

from __future__ import annotations

from typing import Protocol

from holdfast.protocol.engine_orders import EngineTraits, ReleaseNode


class Engine(Protocol):
    """Where a job's nodes come from. A node is there when its agent connects to the coordinator.

    Attributes:
        traits: what the core has to know of it.
    """

    @property
    def traits(self) -> EngineTraits: ...

    async def provide(self) -> bool:
        """Starts one more node; False when there is none to be had."""
        ...

    async def release(self, order: ReleaseNode) -> None:
        """Makes sure that nothing of the node runs on."""
        ...

    async def mark(self, node: str, reason: str) -> None:
        """Tells whoever owns the node that it is bad, so that nobody gets it."""
        ...

    async def reboot(self, node: str, reason: str) -> None:
        """Boots a node that was released; it comes back as a new one."""
        ...

    async def close(self, gives_back: bool = True) -> None:
        """Ends every node; returns when all are gone. gives_back: their snapshot memory too; else it is left to the job's
        next start, where the nodes are still this user's then."""
        ...
