"""`python -m holdfast.agent`: one node. Started by an engine, not by people."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast import logs
from holdfast.agent.agent import Agent, AgentConfig
from holdfast.agent.zygote import Zygote
from holdfast.errors import UsageError
from holdfast.protocol.job_options import Timing
from holdfast.protocol.network.lookup import parse_address
from holdfast.protocol.network.sockets import raise_descriptor_limit
from holdfast.protocol.place import PLACE_VARIABLE, parse_place
from holdfast.protocol.wire.stored import read_stored_word

_log = logging.getLogger("holdfast.agent")
SWITCH_S = 0.0005
"""Threads that sum and send snapshots hold the interpreter for a moment at a time; the loop that workers and the
coordinator wait for gets its turn ten times sooner than by default."""


def main(arguments: Sequence[str] | None = None, zygote: Zygote | None = None) -> int:
    """Runs the agent until the job is over; returns the exit code. zygote: one that was forked for it."""
    parser = argparse.ArgumentParser(prog="holdfast.agent")
    parser.add_argument("--node", required=True)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address where it listens; by default the address in the job's folder",
    )
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--preload", default="torch")
    parser.add_argument("--detection", type=float, default=Timing().detection_s)
    parser.add_argument("--stall-factor", type=float, default=Timing().stall_factor)
    parser.add_argument("--memory", type=Path, required=True, help="folder of the snapshot memory")
    parser.add_argument("--memory-bytes", type=int, default=0, help="its budget; 0: half of the free memory")
    parser.add_argument(
        "--place", help=f"location of this node, as zone/rack; by default the value of {PLACE_VARIABLE}"
    )
    parser.add_argument("--grace", type=float, default=30.0, help="seconds from SIGTERM to the node's end")
    parser.add_argument("--ready-port", type=int, help="takes connections once the node has joined")
    parser.add_argument(
        "--join-within", type=float, help="seconds in which it has to find its first coordinator"
    )
    parser.add_argument("--shared-machine", action="store_true", help="other nodes are on this machine, too")
    parser.add_argument("--lifeline", type=int)
    parser.add_argument("--log", default="", help="LEVEL[,json] of the agent's own log")
    parser.add_argument("--log-file", type=Path, help="gets the log; without it stderr does")
    given = parser.parse_args(arguments)
    try:
        place = parse_place(given.place or os.environ.get(PLACE_VARIABLE, ""))
    except ValueError as error:
        parser.error(f"{'--place' if given.place else PLACE_VARIABLE}: {error}")
    config = AgentConfig(
        node=given.node,
        job_dir=given.job_dir,
        slots=given.slots,
        host=given.host,
        preload=tuple(given.preload.split(",")),
        timing=Timing(given.detection, given.stall_factor),
        memory=given.memory,
        budget_bytes=given.memory_bytes,
        place=place,
        grace_s=given.grace,
        shared_machine=given.shared_machine,
        ready_port=given.ready_port,
        join_s=given.join_within,
        lookup=parse_address(given.coordinator, "--coordinator") if given.coordinator else None,
        log=given.log,
    )
    os.umask(0o077)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    try:
        token = read_stored_word(config.job_dir / "token")
    except (OSError, UsageError) as error:
        sys.stderr.write(f"holdfast: the agent cannot start: {error}\n")
        return 1
    close_log = logs.configure(
        given.log,
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
