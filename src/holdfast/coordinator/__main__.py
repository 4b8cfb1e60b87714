"""`python -m holdfast.coordinator`: one job's coordinator. Started by the launcher, and again when it dies."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import secrets
import select
import socket
import sqlite3
import sys
from pathlib import Path

import msgspec

from holdfast import logs
from holdfast.coordinator.service.garbage import short_searches
from holdfast.coordinator.service.gathering import CoordinatorSuperseded, gather
from holdfast.coordinator.service.ledger import RETRY_S
from holdfast.coordinator.service.liveness import beat
from holdfast.coordinator.service.server import Coordinator
from holdfast.coordinator.service.store import own_ledger, spoken
from holdfast.errors import Damaged, UsageError
from holdfast.health.identity import identity
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.leadership import EXIT_NO_ROOM, EXIT_OTHER_VERSION, EXIT_SUPERSEDED
from holdfast.protocol.messages import PROTOCOL_VERSION
from holdfast.protocol.network.listener import BACKLOG
from holdfast.protocol.network.sockets import listening, raise_descriptor_limit
from holdfast.protocol.wire.stored import decode_file, read_stored_word

_log = logging.getLogger("holdfast.coordinator")

OUR_MISTAKES = frozenset((errno.EBADF, errno.ENOTSOCK, errno.EINVAL))
"""What the system refuses because it was asked for nonsense: the next attempt would be refused, too."""


def main() -> int:
    """Serves until the job is over. Exit code 4: another took its place; 74: the system refuses what it needs; 75: it hands over,
    see `server`; 78: the job's processes speak another version."""
    parser = argparse.ArgumentParser(prog="holdfast.coordinator")
    parser.add_argument("--job-dir", type=Path, required=True)
    listening = parser.add_mutually_exclusive_group(required=True)
    listening.add_argument("--listen-fd", type=int, help="a listening socket, shared with the launcher")
    listening.add_argument(
        "--listen", type=int, metavar="PORT", help="where there is no launcher: a port on --host"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address that agents connect to")
    parser.add_argument(
        "--term", type=int, default=0, help="the leadership term; 0: no other machine can run the coordinator"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=0,
        help="of the ledger, at agents: where it is on this machine alone, so that a later term can go on from one",
    )
    parser.add_argument(
        "--instance", default=secrets.token_hex(8), help="its name, see `protocol.network.endpoint`"
    )
    parser.add_argument("--lifeline", type=int)
    parser.add_argument(
        "--liveness", type=int, help="a non-blocking pipe that tells the launcher that this process is alive"
    )
    parser.add_argument(
        "--gate",
        type=int,
        help="a pipe: this process waits, ready to serve, until something is written into it",
    )
    given = parser.parse_args()
    os.umask(0o077)
    raise_descriptor_limit()
    # Nothing of the job may be touched by a version that it was not started with: its agents would be refused, and end
    # their workers. They train on without a coordinator.
    if spoken(own_ledger(given.job_dir, given.term)) not in (None, PROTOCOL_VERSION):
        return EXIT_OTHER_VERSION
    if given.gate is not None and not os.read(given.gate, 1):
        return 0  # the launcher is gone
    try:
        return _run(given)
    except OSError as error:
        sys.stderr.write(f"holdfast: the coordinator cannot start: {error}\n")
        return EXIT_NO_ROOM
    except (Damaged, UsageError) as error:
        sys.stderr.write(f"holdfast: the coordinator cannot start: {error}\n")
        return 1


_specs = msgspec.json.Decoder(JobSpec)
_resumes = msgspec.json.Decoder(Resume)


def _run(given: argparse.Namespace) -> int:
    spec = decode_file(_specs.decode, given.job_dir / "spec.json")
    resume = decode_file(_resumes.decode, given.job_dir / "resume.json")
    # A file of its own for each term: machines that cannot see each other must not append to the same one.
    name = f"coordinator-{given.term}.log" if given.term else "coordinator.log"
    close_log = logs.configure(
        spec.log,
        {"job": spec.name, "term": str(given.term or "")},
        file=given.job_dir / "logs" / name,
        secrets=(read_stored_word(given.job_dir / "token"),),
    )
    _log.info("the coordinator starts", extra={"pid": os.getpid(), "host": given.host})
    try:
        asyncio.run(_serve(given, spec, resume))
    except CoordinatorSuperseded as error:
        _log.warning("%s; this one ends", error)
        return EXIT_SUPERSEDED
    except Exception as error:  # noqa: BLE001 - the process ends, and its log is where people look for the reason
        if isinstance(error, OSError) and error.errno not in OUR_MISTAKES:
            # It says nothing about the next attempt: a disk may have room again, a folder be back.
            _log.exception("the coordinator cannot go on: %s", error)
            return EXIT_NO_ROOM
        _log.exception("the coordinator broke")
        return 1
    finally:
        close_log()
    return 0


async def _serve(given: argparse.Namespace, spec: JobSpec, resume: Resume) -> None:
    if given.listen is None:
        listener = socket.socket(fileno=given.listen_fd)
    else:
        listener = listening(given.host, given.listen, BACKLOG)
    # Not for the first term, which has nothing to gather, and not after a restart in place, whose own file is
    # newer than any copy.
    if given.copies and given.term > 1 and not own_ledger(given.job_dir, given.term).exists():
        await gather(
            listener,
            host=given.host,
            term=given.term,
            job_dir=given.job_dir,
            token=read_stored_word(given.job_dir / "token"),
            nodes=spec.max_nodes + spec.spares,
            orphan_s=spec.timing.orphan_s,
            instance=given.instance,
        )
    coordinator = _take_up(given, spec, resume)
    if coordinator is None:
        return
    # After the ledger is open: silence counts from the first word on, so a coordinator that still waits for a
    # full disk is not ended as one whose loop hangs.
    if given.liveness is not None:
        beat(given.liveness, spec.timing.heartbeat_s / 2)
    with short_searches():
        await coordinator.serve(listener, given.host, given.lifeline, given.instance)


def _take_up(given: argparse.Namespace, spec: JobSpec, resume: Resume) -> Coordinator | None:
    """The job as its ledger has it. While that cannot be opened (the disk is full, somebody holds it) or read (it is damaged) this
    waits: training goes on without a coordinator, and would not without its state. None: the launcher is gone."""
    logged = False
    machine = identity(Path("/"), environ=os.environ) if given.copies else ""
    while True:
        try:
            return Coordinator(given.job_dir, spec, resume, given.term, given.copies, machine)
        except sqlite3.DatabaseError as error:
            if not logged and isinstance(error, sqlite3.OperationalError):
                _log.error(
                    "the ledger in %s cannot be opened (%s); free some space there, or make it writable: opening it "
                    "is retried until it succeeds",
                    given.job_dir,
                    error,
                )
            elif not logged:
                _log.error(
                    "the ledger %s is damaged (%s), so the coordinator cannot start; workers that train continue. "
                    "Replace the file by an intact copy: opening it is retried until it succeeds",
                    own_ledger(given.job_dir, given.term),
                    error,
                )
            logged = True
        lifelines = [] if given.lifeline is None else [given.lifeline]
        if select.select(lifelines, [], [], RETRY_S)[0]:
            return None


if __name__ == "__main__":
    sys.exit(main())
