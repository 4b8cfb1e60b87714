"""The launcher of a job whose nodes somebody else starts: coordinator and view on this machine, and no node."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

from holdfast.engines.base import NodeProvider
from holdfast.engines.folders import Markers
from holdfast.engines.jobs import JobFolder
from holdfast.engines.launcher import Launcher
from holdfast.engines.shown import View
from holdfast.protocol.engine_orders import EngineTraits, ReleaseNode
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.stored import read_stored_word


class JoinProvider:
    """Asks people to start nodes. It owns none: an agent ends when its coordinator tells it to, or is gone for good."""

    traits = EngineTraits(nodes_are_machines=True)

    def __init__(self, line: str, note: Callable[[str], None]) -> None:
        """line: the command that starts a node."""
        self._line, self._note = line, note

    async def provide(self) -> bool:
        """Asks the user for another node, which may be started at any time."""
        self._note(f"the job needs another node; start it on another machine with: {self._line}")
        return False

    async def release(self, order: ReleaseNode) -> None:
        """Does nothing: the coordinator no longer communicates with the agent, which then ends by itself."""

    async def mark(self, node: str, reason: str) -> None:
        """Tells the user."""
        self._note(f"{node} is faulty ({reason}): do not start a node there before it is repaired")

    async def reboot(self, node: str, reason: str) -> None:
        """Asks the user to do it."""
        self._note(f"reboot {node} ({reason}), and start its node again")

    async def close(self, gives_back: bool = True) -> None:
        """Does nothing: the coordinator tells the agents when the job ends."""


class JoinLauncher(Launcher):
    """Runs one job. Ctrl-C once stops it in order, twice at once."""

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View, port: int = 0) -> None:
        super().__init__(spec, folder.path, view, port)
        self._folder, self._markers = folder, ExitStack()
        self.inherited = (folder.lock,)  # as in LocalLauncher
        self.relock = folder.relock
        self.host = spec.ssh.address or _reachable_address()

    async def open(self) -> NodeProvider:
        """Prepares the job's folder, and tells the user how to start nodes."""
        assert self._listener is not None
        resume = self._folder.prepare(self.spec, self.view.note)
        self._folder.identify()
        self.note_resume(resume)
        # As long as the job runs, because a node may join at any time. Named by the identity, so that a launcher that follows one
        # that was killed finds its files, and removes them at the end.
        identity = read_stored_word(self.job_dir / "identity")
        self._markers.enter_context(Markers(self.spec, self.job_dir, identity))
        address, token = host_and_port(self.host, self._listener.getsockname()[1]), self.job_dir / "token"
        line = f"holdfast agent --join {address} --token-file {shlex.quote(str(token))}"
        self.note(f"start {self.spec.max_nodes + self.spec.spares} nodes, each with: {line}")
        self.note(
            "each machine needs a copy of that file, readable only by you, and the script at the same path"
        )
        self.heed_signals()
        return JoinProvider(line, self.note)

    async def staff(self) -> None:
        """Does nothing: people start the nodes."""

    async def close(self) -> None:
        """See `Launcher.close`."""
        self._markers.close()
        await super().close()


def _reachable_address() -> str:
    """An address of this machine by which others may reach it, IPv4 if possible; loopback if there is no network."""
    # Addresses for documentation (RFC 5737, RFC 3849). Nothing is sent: the kernel only chooses its own address.
    for family, nobody in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect((nobody, 9))
            return str(trial.getsockname()[0])
    return "127.0.0.1"
