"""A node that joins a job at its coordinator's address: it gets the job's description from there, prepares a folder and becomes
the agent."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from holdfast.engines import jobs
from holdfast.engines.agents import agent_arguments
from holdfast.engines.folders import (
    find_environment_problems,
    find_tier_problem,
    has_token,
    is_marked,
    prepare_folder,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job import JobDescription
from holdfast.protocol.machine.processes import python_module
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.http_client import Unproven, request
from holdfast.protocol.network.lookup import parse_address
from holdfast.protocol.place import NodePlace
from holdfast.protocol.wire.decoding import decode

RETRY_S = 0.5
TELL_S = 2.0
"""Seconds without an answer after which the user is told what the node is waiting for."""
ANSWER_S = 10.0
DESCRIPTION_PATH = "/description"


@dataclass(frozen=True, kw_only=True)
class Joining:
    """How a node is started."""

    address: str
    """HOST:PORT of the coordinator."""
    token_file: Path
    node: str
    """Its name in the job."""
    place: NodePlace = ()
    """Its place; empty: that of the job's topology file, or else of `place.PLACE_VARIABLE`."""
    wait_s: float = 300.0
    """How long to wait for a coordinator, in seconds."""
    shared_machine: bool = False
    """Whether other nodes of the job are on this machine."""


def join(given: Joining, note: Callable[[str], None]) -> None:
    """Becomes the agent of the node. Never returns.

    note: shows a message to the user.

    Raises:
        UsageError: the job cannot run on this machine, or the token cannot be read.
        HoldfastError: no coordinator answered in time.
    """
    token = _read_token(given.token_file)
    where, job = asyncio.run(_describe(given, token, note))
    spec = job.spec
    problems = find_environment_problems(
        script=spec.script, module=spec.module, cwd=spec.cwd, preload=spec.preload, digest=job.script_digest
    )
    if spec.engine == "join":
        # With other engines no launcher leaves markers, and it is up to them whether tiers are shared.
        own = Path(job.job_dir)
        seen = is_marked(own, job.identity)
        urls = [tier.url for tier in spec.saving.tiers]
        problems += [why for url in urls if (why := find_tier_problem(url, own, seen, job.identity))]
    if problems:
        raise UsageError(f"the job {spec.name!r} cannot run on this machine: {'; '.join(problems)}")
    folder = jobs.job_dir(jobs.check_name(spec.name))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    jobs.check_own(folder)
    with (folder / "join.lock").open("w") as lock:
        # Several nodes may be started on one machine at once, of which one prepares the folder.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not has_token(folder, token) and jobs.is_running(folder):
            raise UsageError(
                f"another job named {spec.name!r} is running on this machine; set HOLDFAST_HOME to another folder"
            )
        prepare_folder(folder, spec, token, job.identity)
    logs = folder / "logs" / "agents"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{given.node}.log"
    memory = jobs.memory_of(folder) / given.node
    arguments = [
        *agent_arguments(folder, given.node, _own_address(where), memory, given.place),
        f"--coordinator={given.address}",
        f"--log-file={log}",
        *(["--shared-machine"] if given.shared_machine else []),
    ]
    note(f"{given.node} joins the job {spec.name!r} at {given.address}; its log is {log}")
    os.chdir(spec.cwd)
    command = python_module("holdfast.agent", *arguments)
    # Replaces this process, so that its parent waits for the agent, signals it and gets its exit code.
    os.execv(command[0], command)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"--token-file {path}: {why}; `holdfast run --engine join` prints its path"
        ) from None
    if not token:
        raise UsageError(f"--token-file {path}: the file is empty")
    return token


async def _describe(
    given: Joining, token: str, note: Callable[[str], None]
) -> tuple[Endpoint, JobDescription]:
    """The job's description, from a coordinator that has proved that it knows the token."""
    lookup = parse_address(given.address, "--join")
    began, noted, why = time.monotonic(), False, "there is no answer"
    while True:
        # Looked up each time, so that a coordinator that starts on another machine behind the same name is found without a
        # restart of this node.
        where = await lookup.find()
        if where is not None:
            try:
                return where, await _ask(where, token)
            except Unproven:
                why = (
                    "the process that answers there has not proved that it is the job's coordinator: compare the "
                    "token with that of the job, and the address with the one with which the coordinator was started"
                )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
        waited_s = time.monotonic() - began
        if waited_s > given.wait_s:
            raise HoldfastError(
                f"no coordinator was reached at {given.address} within {given.wait_s:g} s: {why}"
            )
        if waited_s > TELL_S and not noted:
            noted = True
            note(f"waiting for the coordinator at {given.address}: {why}")
        # There is no event for a process on another machine that starts to listen.
        await asyncio.sleep(RETRY_S)


async def _ask(where: Endpoint, token: str) -> JobDescription:
    answer = await request(token, where, "GET", DESCRIPTION_PATH, limit_s=ANSWER_S)
    if answer.status >= 400:
        raise aiohttp.ClientError(f"it answers {answer.status}: {answer.words}")
    what = f"the job at {where.address} uses another version of Holdfast; install the same version here"
    return decode(_descriptions.decode, answer.body, what, error=UsageError)


_descriptions = msgspec.json.Decoder(JobDescription)


def _own_address(where: Endpoint) -> str:
    """The address of this machine from which the coordinator is reached."""
    host = ipaddress.ip_address(where.host)
    family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
    # A datagram socket sends nothing when it is connected; the kernel only chooses the address.
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.connect((str(host), where.port))
        return str(trial.getsockname()[0])
