"""The connections on which agents are sent what was decided: one for every node."""

from __future__ import annotations

import asyncio

import msgspec

from holdfast.protocol import messages as m
from holdfast.protocol.wire.frames import encode


class Line(asyncio.Queue[bytes | None]):
    """A connection of an agent: what it is sent, in order; None: the end.

    Attributes:
        session: of the agent's last hello. known: the one that the core knows on this node; when the connection ends, it
            is this one that is lost.
        introduced: the core has heard of it; before that, orders are for the agent that it knows.
    """

    def __init__(self, node: str, session: str, transport: asyncio.Transport | None) -> None:
        super().__init__()
        self.node, self.session, self.known, self.transport = node, session, session, transport
        self.introduced = False


class AgentLines:
    """The line that speaks for each node, and what is sent on it."""

    def __init__(self) -> None:
        self.by_node: dict[str, Line] = {}
        self.with_copy: set[str] = set()
        """Connected nodes that have a copy of the ledger which may be old: none of its pages were sent to them for a while."""
        self._formed: tuple[m.Generation, msgspec.Raw] | None = None

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queues a message for a node's agent, if the core has heard of the one that is connected."""
        # Until the core has heard of this agent, its orders are meant for the one before. A dropped order is
        # repeated when the agent's hello is handled.
        if (line := self.by_node.get(node)) and line.introduced:
            line.put_nowait(self._frame(message))

    def _frame(self, message: m.ToAgent) -> bytes:
        """The same generation is in every JoinGeneration of a batch: it is encoded once."""
        if not isinstance(message, m.Relay) or not isinstance(message.message, m.JoinGeneration):
            return encode(message)
        generation = message.message.generation
        # By identity: the core makes one Generation per formation. It names every member, so encoding it once
        # for each would cost the square of the workers.
        if self._formed is None or self._formed[0] is not generation:
            self._formed = generation, msgspec.Raw(encode(generation))
        form = msgspec.structs.replace(message.message, generation=self._formed[1])
        return encode(m.Relay(message.worker, form))
