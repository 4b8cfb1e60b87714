"""Whether a node hears its job's coordinator, as its agent tells those who know the job's token. Who asks may say where it is."""

from __future__ import annotations

from ipaddress import ip_address

import msgspec

PATH = "/coordinator"
"""HTTP path at the agent's port. The answer is JSON: a `Hearing`. Below it the asker may tell of a coordinator: /TERM/ADDRESS."""
MAX_ANSWER_BYTES = 1024


class Hearing(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of its coordinator."""

    term: int
    """The latest that it has met; 0: none."""
    missing_s: float | None
    """For how long the coordinator's machine has said nothing, by its own clock, and now there is no connection, or the coordinator does
    not answer on it; None: it has one."""


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a coordinator may be."""

    term: int
    address: str
    """Of its pod or host, in numbers."""

    @property
    def path(self) -> str:
        """By which an agent is asked and told."""
        return f"{PATH}/{self.term}/{self.address}"


def told_by(path: str) -> Whereabouts | None:
    """What this path tells; None: nothing, or nothing that one could use."""
    if not path.startswith(f"{PATH}/"):
        return None
    term, _, address = path.removeprefix(f"{PATH}/").partition("/")
    try:
        # Nothing but an address: a name would be looked up where the asker wants it to be.
        return Whereabouts(int(term), str(ip_address(address)))
    except ValueError:
        return None


def agent_name(node: str) -> str:
    """By which `protocol.proof` knows the agent of a node. The node's name must not come again in the job's life."""
    return f"agent of {node}"
