"""Where a job's coordinator listens, as it wrote it into the job's folder, and whether a node hears it.

An agent answers the latter to those who know the job's token; a caller may also tell the agent where the coordinator is now.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.stored import decode_file

FILE_NAME = "coordinator.json"
NAME_PATH = "/name"
"""HTTP path at which a coordinator says its name to whoever asks, and nothing else."""


class CoordinatorName(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator says of itself without a proof."""

    instance: str
    term: int


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the newest coordinator process."""

    host: str
    port: int
    pid: int
    instance: str
    """Made up by the process: no other has it."""
    term: int = 0
    """Its term, see `protocol.leadership`; 0: no other machine can have the coordinator."""
    # A stranger at the address of a coordinator that is gone could say the name of the one that lives, and pass on what it
    # is sent. So a name that was asked for is only good together with the address where it was asked: the coordinator that
    # lives has another one, and refuses.
    dialled: str = ""
    """HOST:PORT where its name was asked for; empty: it is known from the job's folder."""

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.address}"

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return host_and_port(self.host, self.port)

    @property
    def name(self) -> str:
        """By which `protocol.network.proof` knows it."""
        # With the term: who calls the coordinator of a term is answered by none of another one.
        known = f"coordinator {self.instance} of term {self.term}"
        return f"{known} at {self.dialled}" if self.dialled else known

    @property
    def names(self) -> tuple[str, str]:
        """Both by which the process is called: by who reads the job's folder, and by who asks at its address."""
        return self.name, msgspec.structs.replace(self, dialled=self.address).name


_endpoints = msgspec.json.Decoder(Endpoint)


def read_endpoint(job_dir: Path) -> Endpoint | None:
    """What the newest coordinator wrote; None while there is none."""
    try:
        return decode_file(_endpoints.decode, job_dir / FILE_NAME)
    # Not there yet, or not readable on this machine yet: both mean the same to whoever waits for a
    # coordinator.
    except (OSError, Damaged):
        return None


def write_endpoint(job_dir: Path, endpoint: Endpoint) -> None:
    """Replaces the file in one step."""
    work = job_dir / f".{FILE_NAME}.{os.getpid()}"
    work.write_bytes(msgspec.json.encode(endpoint))
    # Readers look at any moment. They see the old address or the new one, and never half of one.
    work.replace(job_dir / FILE_NAME)


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
    """By which `protocol.network.proof` knows the agent of a node. The node's name must not come again in the job's life."""
    return f"agent of {node}"
