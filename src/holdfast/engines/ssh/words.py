"""What the launcher and its process on a host say to each other over ssh: one JSON object a line, both ways.

Secrets come this way and no other. A command line and, on some systems, an environment can be read by everybody on the host.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.wire.decoding import decode

PREFIX = b"holdfast-host "
"""Begins every line of the host's. A shell's start-up file may print something before the first."""
LINE_BYTES = 1 << 20
"""A line is shorter: what comes from a host is bounded."""
OUTPUT_BYTES = 1 << 16
"""Output of workers in one message, at most."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """The host's first line."""

    version: str
    """Holdfast's."""
    python: str
    """`3.11`: minor versions differ in what they can load."""
    torch: str
    """Its version; empty: it is not installed."""
    boot: str
    """Identifies one boot of one machine."""
    client: str
    """The launcher's address as this host sees it; empty where sshd does not tell."""
    server: str
    """The host's own address of this connection; empty where sshd does not tell."""


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Asks whether the job can run there. Nothing is started or changed."""

    home: str
    """`$HOLDFAST_HOME` of the launcher; the host uses the same path."""
    job: str
    nonce: str
    """What the launcher wrote into its folders, so that the host knows a folder that both see."""
    script: str
    module: bool
    digest: str
    """Of the script's bytes; empty for a module."""
    cwd: str
    preload: tuple[str, ...]
    tiers: tuple[str, ...]
    """URLs of the durable tiers."""
    coordinator: tuple[str, int]
    """Where the launcher listens."""


class HostChecked(msgspec.Struct, frozen=True, tag="checked"):
    """Whether the job can run there."""

    shared: bool
    """The job's folder is the launcher's."""
    problems: tuple[str, ...] = ()
    """Why the job cannot run there, each a sentence without the host's name."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Starts the host's agent, or takes note of the one that runs."""

    spec: JobSpec
    token: str
    identity: str
    """Names the job's snapshot memory."""
    start: str
    """Of this launcher alone: an agent of an earlier one is ended."""
    node: str
    address: str
    """What the agent binds."""
    endpoint: Endpoint | None
    """Of the coordinator, if there is one already."""
    env: dict[str, str]
    """Variables for the agent and its workers."""
    fresh: bool
    """An agent that runs is ended first: the job has gone on without it."""
    seen: int
    """Bytes of the agent's output that the launcher has."""
    shared_machine: bool


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The agent runs."""

    pid: int
    """The agent's."""
    attached: bool
    """It ran already."""


class CoordinatorStarted(msgspec.Struct, frozen=True, tag="coordinator"):
    """A coordinator has started, at this address."""

    endpoint: Endpoint


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Ends the agent at once; the kernel then ends its workers."""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The job is over."""

    within_s: float
    """How long the agent has to end in order."""
    gives_back: bool
    """Its snapshot memory is given back."""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """What the agent printed: the output of rank 0, if that is on this host."""

    data: bytes


class AgentEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The agent is gone."""

    code: int | None
    """Its exit code; None: it was started by an earlier connection, so nobody knows."""


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
    """Raises ProtocolError for a line that is none."""
    return decode(_to_host.decode, line, "what the launcher says", error=ProtocolError, most=LINE_BYTES)


def read_answer(line: bytes) -> FromHost | None:
    """None for a line that somebody else printed there. Raises ProtocolError for one that is damaged."""
    # Lines of others are passed over and not refused: a shell's start-up file is none of ours to mend, and a
    # host that greets its users can be used.
    if not line.startswith(PREFIX):
        return None
    word = line[len(PREFIX) :]
    return decode(_from_host.decode, word, "what the host says", error=ProtocolError, most=LINE_BYTES)
