"""The messages between the launcher and its process on a host over ssh: one JSON object per line, in both directions.

Secrets are sent only this way: command lines and, on some systems, environments can be read by every user of the host.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.wire.decoding import decode

PREFIX = b"holdfast-host "
"""Prefix of every line from the host, before whose first message a shell's start-up file may print other lines."""
LINE_BYTES = 1 << 20
"""Largest length of a line, which bounds what a host can send."""
OUTPUT_BYTES = 1 << 16
"""Largest piece of output in one message."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """The host's first message."""

    version: str
    """Version of Holdfast."""
    python: str
    """Python's version as in `3.11`: minor versions differ in what they can load."""
    torch: str
    """Version of torch; empty: it is not installed."""
    boot: str
    """Id of the boot, unique across machines."""
    client: str
    """The launcher's address as this host sees it; empty: sshd does not report it."""
    server: str
    """The host's own address of this connection; empty: sshd does not report it."""


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Asks whether the job can run on the host. No process is started."""

    home: str
    """`$HOLDFAST_HOME` of the launcher; the host uses the same path."""
    job: str
    nonce: str
    """Name of the markers in the launcher's folders, by which the host recognizes folders that both share."""
    script: str
    module: bool
    digest: str
    """SHA-256 of the script; empty for a module."""
    cwd: str
    preload: tuple[str, ...]
    tiers: tuple[str, ...]
    """URLs of the durable tiers."""
    coordinator: tuple[str, int]
    """Address and port at which the launcher listens."""


class HostChecked(msgspec.Struct, frozen=True, tag="checked"):
    """Whether the job can run on the host."""

    shared: bool
    """Whether the job's folder is shared with the launcher."""
    problems: tuple[str, ...] = ()
    """Why the job cannot run there, each a sentence without the host's name."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Starts the host's agent, or attaches to one that runs."""

    spec: JobSpec
    token: str
    identity: str
    """Identity of the job's snapshot memory."""
    start: str
    """Id of this launcher's start: an agent of an earlier start is ended."""
    node: str
    address: str
    """The address that the agent binds."""
    endpoint: Endpoint | None
    """The coordinator's, if there is one already."""
    env: dict[str, str]
    """Variables for the agent and its workers."""
    fresh: bool
    """Whether to end a running agent first, because the job has continued without it."""
    seen: int
    """Number of bytes of the agent's output that the launcher already has."""
    shared_machine: bool


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The agent runs."""

    pid: int
    """The agent's process id."""
    attached: bool
    """Whether it was running already."""


class CoordinatorStarted(msgspec.Struct, frozen=True, tag="coordinator"):
    """A coordinator has started, at this address."""

    endpoint: Endpoint


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Kills the agent, upon which the kernel ends its workers."""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The job is over."""

    within_s: float
    """Seconds that the agent has to end in order."""
    gives_back: bool
    """Whether to free the job's snapshot memory on the host."""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Output of the agent, which includes that of rank 0 if it is on this host."""

    data: bytes


class AgentEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The agent is gone."""

    code: int | None
    """Its exit code; None: not known, because it was started by an earlier connection."""


class RequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A request could not be carried out; a sentence without the host's name."""

    why: str


ToHost = Check | Begin | CoordinatorStarted | Kill | Close
FromHost = Greeting | HostChecked | Begun | Output | AgentEnded | RequestFailed
_to_host: msgspec.json.Decoder[ToHost] = msgspec.json.Decoder(ToHost)
_from_host: msgspec.json.Decoder[FromHost] = msgspec.json.Decoder(FromHost)


def to_host(message: ToHost) -> bytes:
    """A line for the host."""
    return msgspec.json.encode(message) + b"\n"


def from_host(message: FromHost) -> bytes:
    """A line for the launcher."""
    return PREFIX + msgspec.json.encode(message) + b"\n"


def read_order(line: bytes) -> ToHost:
    """Decodes a line from the launcher. Raises ProtocolError if it is invalid."""
    return decode(_to_host.decode, line, "what the launcher says", error=ProtocolError, most=LINE_BYTES)


def read_answer(line: bytes) -> FromHost | None:
    """Decodes a line from the host; None: the line is from another program. Raises ProtocolError if it is damaged."""
    # Lines of other programs are ignored, so that a host whose shell prints something at login can be used.
    if not line.startswith(PREFIX):
        return None
    body = line[len(PREFIX) :]
    return decode(_from_host.decode, body, "what the host says", error=ProtocolError, most=LINE_BYTES)
