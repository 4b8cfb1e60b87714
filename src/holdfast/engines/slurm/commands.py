"""Runs Slurm's commands and parses their output. They are its public interface: its C library changes with every version."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.engines.slurm import parse
from holdfast.engines.slurm.parse import JobLine, NodeLine
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.wire.decoding import decode

ANSWER_S = 15.0
JSON_SINCE = (23, 2)
NEEDED = ("sbatch", "srun", "squeue", "scontrol", "scancel")


class SlurmError(HoldfastError):
    """A command of Slurm failed; the message has its output."""


def check_installed() -> None:
    """Raises UsageError if Slurm's commands are not on this machine."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"--engine slurm: {' and '.join(missing)} not found in PATH; run this command where Slurm's commands are "
            "installed (on a login node, perhaps after `module load slurm`)"
        )


def clean_environment() -> dict[str, str]:
    """The environment without the variables that Slurm has set for the current step."""
    # A step that is started from within a step would take its node list, memory and task count from them as options.
    keep = ("SLURM_CONF",)
    return {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k in keep}


T = TypeVar("T")


def _read(reader: Callable[[str], T], output: str) -> T:
    return decode(reader, output, "the output of Slurm cannot be read", error=SlurmError)


class SlurmCommands:
    """Slurm's commands. Every method raises SlurmError if Slurm refuses or does not answer."""

    def __init__(self) -> None:
        self._version: tuple[int, int] | None = None

    async def run(
        self, *argv: str, within_s: float = ANSWER_S, stdin: str | None = None, cwd: Path | None = None
    ) -> str:
        """Runs one command; returns what it printed. within_s: the time that it may take, in seconds."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environment(),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(within_s):
                out, err = await process.communicate(None if stdin is None else stdin.encode())
        except TimeoutError:
            process.kill()
            await process.communicate()
            raise SlurmError(
                f"{argv[0]}: Slurm's controller did not answer within {within_s:g} s; `scontrol ping` shows whether it runs"
            ) from None
        except asyncio.CancelledError:
            process.kill()  # a command that waits for the network must not take effect when that is back
            raise
        if process.returncode != 0:
            output = err.decode(errors="replace") + out.decode(errors="replace")
            raise SlurmError(f"{argv[0]}: {parse.plain_error(output)}")
        return out.decode(errors="replace")

    async def version(self) -> tuple[int, int]:
        """Slurm's version, for example (22, 5)."""
        if self._version is None:
            self._version = parse.parse_version(await self.run("scontrol", "--version"))
        return self._version

    async def submit(self, script: str, cwd: Path) -> str:
        """Submits a batch script; returns the job's id."""
        output = await self.run("sbatch", "--parsable", stdin=script, cwd=cwd)
        return output.strip().partition(";")[0]

    async def try_submit(self, script: str, cwd: Path) -> None:
        """Checks whether Slurm would accept a script, without submitting it."""
        await self.run("sbatch", "--test-only", stdin=script, cwd=cwd)

    async def jobs(self, *ids: str) -> dict[str, JobLine]:
        """Those of the jobs that are in the queue, by id."""
        try:
            output = await self.run(
                "squeue", "--noheader", f"--format={parse.JOB_FORMAT}", "--jobs", ",".join(ids)
            )
        except SlurmError as error:
            # squeue fails for a single id of a job that has ended, but silently leaves such an id out among several.
            if "invalid job id" in str(error).lower():
                return {}
            raise
        return {job.id: job for job in _read(parse.parse_jobs, output)}

    async def named(self, name: str) -> dict[str, JobLine]:
        """This user's jobs of a name, by id."""
        output = await self.run(
            "squeue", "--noheader", f"--format={parse.JOB_FORMAT}", f"--name={name}", f"--user={os.getuid()}"
        )
        return {job.id: job for job in _read(parse.parse_jobs, output)}

    async def job(self, id: str) -> JobLine | None:
        """A job; None: it is no longer in the queue."""
        return (await self.jobs(id)).get(id)

    async def names(self, nodes: str) -> list[str]:
        """The names in a list of nodes: `n[1-3]` as n1, n2, n3."""
        return (await self.run("scontrol", "show", "hostnames", nodes)).split() if nodes else []

    async def nodes(self, names: list[str]) -> dict[str, NodeLine]:
        """Nodes by name."""
        if not names:
            return {}
        # JSON where it is supported, because values in the text output of `scontrol show node` contain blanks.
        json = await self.version() >= JSON_SINCE
        output = await self.run(
            "scontrol", "show", "node", ",".join(names), "--json" if json else "--oneliner"
        )
        return {node.name: node for node in _read(parse.parse_nodes, output)}

    async def steps(self, job: str) -> dict[str, str]:
        """Ids of a job's steps by name, of several the newest."""
        output = await self.run(
            "squeue", "--noheader", "--steps", f"--format={parse.STEP_FORMAT}", "--jobs", job
        )
        return _read(parse.parse_steps, output)

    async def config(self) -> dict[str, str]:
        """Slurm's settings."""
        return _read(parse.parse_config, await self.run("scontrol", "show", "config"))

    async def cancel(self, *what: str, within_s: float = ANSWER_S) -> None:
        """Cancels jobs (`17`) or steps (`17.2`); the arguments may include options of scancel."""
        await self.run("scancel", *what, within_s=within_s)
