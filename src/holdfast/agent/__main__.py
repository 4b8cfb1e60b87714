"""`python -m holdfast.agent`: one node. Started by an engine, not by people."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast import logs
from holdfast.agent.agent import Agent, AgentConfig
from holdfast.agent.zygote import Zygote
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.lookup import parse_address
from holdfast.protocol.network.sockets import raise_descriptor_limit
from holdfast.protocol.place import PLACE_VARIABLE, parse_place
from holdfast.protocol.wire.stored import START_ANEW, read_stored, read_stored_word

_log = logging.getLogger("holdfast.agent")
_specs = msgspec.json.Decoder(JobSpec)
SWITCH_S = 0.0005
"""Threads that sum and send snapshots hold the interpreter for a moment at a time; the loop that workers and the
coordinator wait for gets its turn ten times sooner than by default."""


def parser() -> argparse.ArgumentParser:
    """The parser of the arguments that are the node's own. Everything else an agent reads in its job's folder."""
    made = argparse.ArgumentParser(prog="holdfast.agent")
    made.add_argument("--node", required=True)
    made.add_argument("--job-dir", type=Path, required=True)
    made.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address where it listens; by default the address in the job's folder",
    )
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--memory", type=Path, required=True, help="folder of the snapshot memory")
    made.add_argument(
        "--place",
        help=f"location of this node, as zone/rack; by default the job's, else the value of {PLACE_VARIABLE}",
    )
    made.add_argument("--grace", type=float, default=30.0, help="seconds from SIGTERM to the node's end")
    made.add_argument("--ready-port", type=int, help="takes connections once the node has joined")
    made.add_argument(
        "--coordinator-is-late", action="store_true", help="the first one may take as long to come as a node"
    )
    made.add_argument("--shared-machine", action="store_true", help="other nodes are on this machine, too")
    made.add_argument("--lifeline", type=int)
    made.add_argument("--log-file", type=Path, help="gets the log; without it stderr does")
    return made


def main(arguments: Sequence[str] | None = None, zygote: Zygote | None = None) -> int:
    """Runs the agent until the job is over; returns the exit code. zygote: one that was forked for it."""
    given = (made := parser()).parse_args(arguments)
    os.umask(0o077)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    try:
        token = read_stored_word(given.job_dir / "token")
        spec = read_stored(given.job_dir / "spec.json", _specs, START_ANEW)
    except (OSError, UsageError) as error:
        sys.stderr.write(f"holdfast: the agent cannot start: {error}\n")
        return 1
    of_job = spec.places.get(given.node, ())
    try:
        place = parse_place(given.place or "") or of_job or parse_place(os.environ.get(PLACE_VARIABLE, ""))
    except ValueError as error:
        made.error(f"{'--place' if given.place else PLACE_VARIABLE}: {error}")
    config = AgentConfig(
        spec=spec,
        node=given.node,
        job_dir=given.job_dir,
        host=given.host,
        memory=given.memory,
        place=place,
        grace_s=given.grace,
        shared_machine=given.shared_machine,
        ready_port=given.ready_port,
        coordinator_is_late=given.coordinator_is_late,
        lookup=parse_address(given.coordinator, "--coordinator") if given.coordinator else None,
    )
    close_log = logs.configure(
        spec.log,
        {"job": config.job_dir.name, "node": config.node},
        file=given.log_file,
        secrets=(token,),
    )
    _log.info("the agent starts", extra={"pid": os.getpid(), "host": config.host})
    try:
        return asyncio.run(_run(config, zygote, given.lifeline))
    except Exception:  # noqa: BLE001 - the process ends, and its log is where people look for the reason
        _log.exception("the agent broke")
        return 1
    finally:
        close_log()


async def _run(config: AgentConfig, zygote: Zygote | None, lifeline: int | None) -> int:
    return await Agent(config, zygote).run(lifeline)


if __name__ == "__main__":
    # Without Python's teardown: it would join a thread that waits for a durable tier which does not answer.
    logs.exit_now(main())
