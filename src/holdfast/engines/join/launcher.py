"""The launcher of a job whose nodes somebody else starts: coordinator and view on this machine, and no node."""

from __future__ import annotations

import shlex
import socket
from contextlib import ExitStack, suppress

from holdfast.engines.base import NodeProvider
from holdfast.engines.folders import Markers
from holdfast.engines.jobs import JobFolder
from holdfast.engines.join.engine import JoinProvider
from holdfast.engines.launcher import Launcher
from holdfast.engines.shown import View
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.stored import read_stored_word


class JoinLauncher(Launcher):
    """Runs one job. Ctrl-C once stops it in order, twice at once."""

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View, port: int = 0) -> None:
        super().__init__(spec, folder.path, view, port)
        self._folder, self._markers = folder, ExitStack()
        self.inherited = (folder.lock,)  # as in LocalLauncher
        self.relock = folder.relock
        self.host = spec.ssh.address or _reachable_address()

    async def open(self) -> NodeProvider:
        """Prepares the job's folder, and says how nodes are started."""
        assert self._listener is not None
        resume = self._folder.prepare(self.spec, self.view.note)
        self._folder.identify()
        self.note_resume(resume)
        # For as long as the job runs: a node may come at any time. By the identity, so that a launcher that comes after
        # one that was killed finds its files, and removes them at the end.
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
        """Somebody else does."""

    async def close(self) -> None:
        """See `Launcher.close`."""
        self._markers.close()
        await super().close()


def _reachable_address() -> str:
    """An address of this machine by which others may reach it, of IPv4 where it can be; loopback where there is no network."""
    # Nobody's addresses (RFC 5737, RFC 3849). Nothing is sent: the kernel only chooses its own.
    for family, nobody in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect((nobody, 9))
            return str(trial.getsockname()[0])
    return "127.0.0.1"
