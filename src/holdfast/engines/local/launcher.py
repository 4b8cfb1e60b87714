"""The launcher of the local engine: coordinator, agents and the view of them, from start to the last process."""

from __future__ import annotations

from holdfast.engines.base import NodeProvider
from holdfast.engines.jobs import JobFolder
from holdfast.engines.launcher import Launcher
from holdfast.engines.local.engine import LocalProvider
from holdfast.engines.shown import View
from holdfast.protocol.job import JobSpec


class LocalLauncher(Launcher):
    """Runs one job on this machine. Ctrl-C once stops it in order, twice at once."""

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View, port: int = 0) -> None:
        super().__init__(spec, folder.path, view, port)
        self._folder = folder
        # The coordinator holds the lock as well, so that a job whose launcher was killed still counts as
        # running.
        self.inherited = (folder.lock,)
        self.relock = folder.relock

    async def open(self) -> NodeProvider:
        """Prepares the job's folder."""
        resume = self._folder.prepare(self.spec, self.view.note)
        self.note_resume(resume)
        self.heed_signals()
        return LocalProvider(self.spec, self._folder.path, self._folder.memory, self.view.output)

    async def staff(self) -> None:
        """Starts an agent for every node."""
        assert self.engine is not None
        for _ in range(self.spec.max_nodes + self.spec.spares):
            await self.engine.provide()
