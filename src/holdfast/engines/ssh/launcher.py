"""The launcher of the ssh engine: coordinator and view on this machine, agents on the hosts."""

from __future__ import annotations

import os
import sys

from holdfast import __version__
from holdfast.engines.base import NodeProvider
from holdfast.engines.client import Announcement
from holdfast.engines.jobs import JobFolder
from holdfast.engines.launcher import Launcher
from holdfast.engines.shown import View
from holdfast.engines.ssh.addresses import choose_address
from holdfast.engines.ssh.connection import SshSettings
from holdfast.engines.ssh.engine import SshProvider, environment_of
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.network.sockets import listening
from holdfast.protocol.wire.stored import read_stored_word


class SshLauncher(Launcher):
    """Runs one job on `--hosts`. Ctrl-C once stops it in order, twice at once."""

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View, port: int = 0) -> None:
        super().__init__(spec, folder.path, view, port)
        self._folder = folder
        self.inherited = (
            folder.lock,
        )  # as in LocalLauncher: a job whose launcher was killed still counts as running
        self.relock = folder.relock
        options = spec.ssh
        self._problems: dict[str, str] = {}
        self._ssh_engine = SshProvider(
            spec,
            folder.path,
            reach=SshSettings(options.config, options.python or sys.executable, __version__),
            env=environment_of(options.env, dict(os.environ)),
            output=self.view.output,
            note=self.note,
            post=self.post,
        )

    async def run(self) -> JobReport:
        """Connects to the hosts, then runs the job, see `Launcher.run`.

        Raises:
            UsageError: too few hosts can be used. Nothing was started.
        """
        try:
            self.note(f"connecting {len(self.spec.ssh.hosts)} hosts")
            seen, self._problems = await self._ssh_engine.survey()
            # Checked before anything is created: with too few hosts the job's folder, its token and the ledger of the previous
            # run stay as they are.
            self._enough(len(seen))
            self.host = choose_address(seen, self.spec.ssh.address, _is_ours)
        except BaseException:
            await self._ssh_engine.close()
            await self.close()
            raise
        return await super().run()

    async def open(self) -> NodeProvider:
        """Checks the hosts, then prepares the job's folder."""
        assert self._listener is not None
        try:
            # The socket listens already, so that a host that cannot reach it reports this before anything is started.
            self._problems |= await self._ssh_engine.check(self.host, self._listener.getsockname()[1])
            self._enough(len(self.spec.ssh.hosts) - len(self._problems))
        except BaseException:
            await self._ssh_engine.close()
            raise
        for why in self._problems.values():
            self.note(f"{why}. The job starts without it")
        resume = self._folder.prepare(self.spec, self.view.note)
        self._folder.identify()
        self.note_resume(resume)
        self.heed_signals()
        return self._ssh_engine

    def _enough(self, count: int) -> None:
        least = self.spec.max_nodes if self.spec.wait_for_spare else self.spec.min_nodes
        if count < least:
            problems = "\n".join(self._problems.values())
            raise UsageError(f"{count} of the {least} hosts that the job needs can be used:\n{problems}")

    async def staff(self) -> None:
        """Starts agents on the first hosts."""
        identity = read_stored_word(self.job_dir / "identity")
        await self._ssh_engine.start(self.spec.max_nodes + self.spec.spares, identity)

    def on_announcement(self, announcement: Announcement) -> None:
        """See `Launcher.on_announcement`."""
        if announcement.kind == "event":
            self._ssh_engine.on_event(
                announcement.value["kind"], str(announcement.value["fields"].get("node", ""))
            )
        super().on_announcement(announcement)


def _is_ours(address: str) -> bool:
    """Whether this machine has the address."""
    try:
        listening(address).close()
    except OSError:
        return False
    return True
