"""Whether a node hears its job's coordinator, as its agent tells those who know the job's token."""

from __future__ import annotations

import msgspec

PATH = "/coordinator"
"""HTTP path at the agent's port. The answer is JSON: a `Hearing`."""
MAX_ANSWER_BYTES = 1024


class Hearing(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of its coordinator."""

    term: int
    """The latest that it has met; 0: none."""
    missing_s: float | None
    """For how long it has had no connection, by its own clock; None: it has one."""


def agent_name(node: str) -> str:
    """By which `protocol.proof` knows the agent of a node. The node's name must not come again in the job's life."""
    return f"agent of {node}"
