"""The life of a worker process: from a warm process that waits to the script that it becomes."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import logs
from holdfast.checkpoint import agent_link
from holdfast.errors import HoldfastError, JobStopped, UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.machine.progress_record import STACKS_SIGNAL, ProgressRecord
from holdfast.protocol.network.sockets import raise_descriptor_limit
from holdfast.protocol.phases import Phase
from holdfast.protocol.wire.frames import Codec, pack
from holdfast.train import script
from holdfast.train.faults import FaultPlan
from holdfast.train.imports import changed, import_ahead, imported, read_at_import, when_imported
from holdfast.train.level0_hook import CollectivesTeller, last_positions
from holdfast.train.link import Link

if TYPE_CHECKING:
    from holdfast.train.peer_transfer import PeerEndpoint

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Attachment:
    """What ties a script to its job."""

    link: Link
    """To the agent."""
    faults: FaultPlan
    """Faults that are to be injected here."""
    target: int
    """Workers of the job at full strength."""
    minimum: int = 1
    """The fewest that it trains with."""
    alone: bool = False
    """There is no job: a thread of this process plays agent and coordinator."""
    shard_index: int | None = None
    """The shard for which `main` runs again; None: it runs for the first time."""
    _endpoint: PeerEndpoint | None = None
    _player: threading.Thread | None = None

    @property
    def position(self) -> int:
        """This worker's number among all, as far as it decides which shard is built here."""
        if self.shard_index is not None:
            return self.shard_index
        # Not of `os.environ`, whose variables are those of another world while `main` runs.
        env = self.link.start.env
        return int(env.get(m.SHARD_INDEX_VARIABLE) or env.get("RANK", "0"))

    def endpoint(self) -> PeerEndpoint:
        """Where other workers reach this process, for as long as it lives."""
        from holdfast.train.peer_transfer import PeerEndpoint

        if self._endpoint is None:
            start = self.link.start
            self._endpoint = PeerEndpoint(start.host, self.link.token, start.worker)
        return self._endpoint

    def close(self) -> None:
        """A job of one has ended, and its process goes on: gives back its threads and connections. What the script keeps
        of the run (a model with its hooks) can still be used."""
        if self._endpoint is not None:
            self._endpoint.close()
        self.link.close()
        if self._player is not None:
            self._player.join()


_attachment: list[Attachment] = []
"""Holds this process's attachment: a process is one worker for its whole life."""


def attachment() -> Attachment | None:
    """The job that this process belongs to; None under plain `python`."""
    return _attachment[0] if _attachment else None


def attach() -> Attachment | None:
    """The same, and from now on the job is at level 2: a worker that ends before it has trained to the end is lost."""
    if (ours := attachment()) is not None:
        ours.link.send(m.Attached())
    return ours


def alone() -> Attachment:
    """A job of one: the messages go to a thread of this process that plays agent and coordinator."""
    ours, theirs = socket.socketpair()
    record = ProgressRecord()
    start = m.Start(
        worker="alone",
        script="",
        args=(),
        module=False,
        env={},
        cwd=".",
        log="",
        page=record.path,
        stacks="",
        token="",
        host="127.0.0.1",
    )
    link = Link(ours, start, record, "alone")
    player = threading.Thread(target=_play_coordinator, args=(theirs,), name="holdfast-alone", daemon=True)
    player.start()
    link.listen()
    return Attachment(link=link, faults=FaultPlan(link), target=1, alone=True, _player=player)


def _play_coordinator(sock: socket.socket) -> None:
    """Forms one generation of one worker."""
    codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
    with sock:
        while (message := codec.read(sock)) is not None:
            if isinstance(message, m.Ready):
                member = m.Member(
                    rank=0,
                    worker="alone",
                    node="localhost",
                    slot=0,
                    host=message.host,
                    vote_port=message.vote_port,
                    data_port=message.data_port,
                )
                sock.sendall(
                    pack(m.JoinGeneration(generation=m.Generation(number=1, members=(member,)), rank=0))
                )


def become(sock: socket.socket) -> int:
    """Turns this warm process into the worker that its agent asks for; returns the exit code."""
    before = frozenset(
        sys.modules
    )  # what is imported ahead is the script's too: the next coordinator learns it again
    start = _wait_for_work(sock)
    if start is None:
        return 0
    raise_descriptor_limit()
    # Before torch is used: libraries read their settings when they are first called, not when they are
    # imported.
    os.environ.update(start.env)
    environment = dict(os.environ)
    os.chdir(start.cwd)
    script.settle(start.log)
    # Into the worker's log, which is the script's own output: so only warnings, unless the user asks for more.
    logs.configure(
        os.environ.get(logs.VARIABLE, ""),
        {name: os.environ.get(f"HOLDFAST_{name.upper()}", "") for name in ("job", "node", "worker")},
        default=logging.WARNING,
        others=False,
    )
    record = ProgressRecord(start.page)
    record.enter(Phase.STARTUP)
    with os.fdopen(script.open_log(start.stacks), "w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        faulthandler.enable()
        link = Link(sock, start, record, start.token)
        link.on_stacks = partial(faulthandler.dump_traceback, stacks)
        faults = FaultPlan(link)
        # A data loader's child inherits the socket. Two readers on one connection would each get half of the
        # messages.
        os.register_at_fork(after_in_child=lambda: _forget(sock))
        link.listen()
        agent_link.attach(link)
        _attachment.append(
            Attachment(
                link=link,
                faults=faults,
                target=int(start.env.get("HOLDFAST_TARGET", "1")),
                minimum=int(start.env.get("HOLDFAST_MINIMUM", "1")),
            )
        )

        def made_a_step() -> None:
            # Of all ranks one is enough for the job; the others only say that their start is over.
            if start.env.get("RANK") != "0":
                link.send(m.Imported())
                return
            other = changed(environment)
            link.send(m.Imported(imported(before), (*start.env, *other)[: m.MOST_MODULES]))
            if "torch" in before and (late := ", ".join(filter(_unheeded, other))):
                _log.warning(
                    "the script changed %s after torch had read it: torch was imported before this process became a "
                    "worker, so the change has no effect. Set the variable in the environment of `holdfast run`, or "
                    "pass --preload ''",
                    late,
                )

        CollectivesTeller(link)
        _count_steps(link, faults, made_a_step)
        code = _run_script(start, link)
        # While the agent still listens. A script that failed says no more to it.
        if not code and (saving := sys.modules.get("holdfast.checkpoint.api")) is not None:
            saving.flush()
        link.send(m.ScriptEnded(last_positions()))
        return code


def leave_sigterm_to_the_agent() -> None:
    """A scheduler that wants the node sends SIGTERM to every process on it. The agent then sees to it that this one ends
    in order; unless the script has a handler of its own, it takes no notice. Its children do."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    ours = os.getpid()

    def heed(number: int, frame: object) -> None:
        # Inherited by forked children, which have no agent that ends them.
        if os.getpid() != ours:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, heed)


def die_with_parent() -> None:
    """The kernel kills this process when its agent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_work(sock: socket.socket) -> m.Start | None:
    codec: Codec[m.ToWorker] = Codec(m.ToWorker)
    while isinstance(order := codec.read(sock), m.Preload):
        answer = import_ahead(order)
        try:
            sock.sendall(pack(answer))
        except OSError:
            return None  # the agent is gone
        if answer.without:
            return None
    return order if isinstance(order, m.Start) else None


def _forget(sock: socket.socket) -> None:
    """In a child that the script forks (a data loader's worker): let go of what is only the worker's."""
    _attachment.clear()
    agent_link.detach()
    try:
        os.close(sock.fileno())
    except OSError:
        return


def _run_script(start: m.Start, link: Link) -> int:
    try:
        script.run(start.script, start.args, start.module)
    except SystemExit as leaving:
        code = _exit_code(leaving)
        if code and (error := _caught(leaving)) is not None:
            _report(error, link)
        return code
    except JobStopped as ending:
        # Not the script's error. Whose it is, if there is one, the coordinator knows.
        sys.stderr.write(f"holdfast: {ending}\n")
        return 0
    except BaseException as error:  # noqa: BLE001 - the border of the user's code: report whatever it raised
        _report(error, link)
        return 1
    return 0


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _caught(leaving: SystemExit) -> HoldfastError | None:
    """An error of Holdfast's that something around the script has caught and printed before it left by `sys.exit(1)`, as Hydra does.
    It is reported as if it had come out of the script: an exit code says nothing of the cause."""
    error: BaseException | None = leaving
    while error is not None and not isinstance(error, HoldfastError):
        error = error.__cause__ or error.__context__
    return None if isinstance(error, JobStopped) else error


def _report(error: BaseException, link: Link) -> None:
    """The script's own traceback, without the frames that started it; the agent writes it into the log."""
    # Without the frame of `_run_script`.
    trace = script.from_the_script(error.__traceback__.tb_next if error.__traceback__ else None)
    told = traceback.TracebackException(type(error), error, trace)
    refused = isinstance(error, UsageError)
    if refused:
        # The message says all, and the script's line where. What stands below it is ours, and errors that led to
        # this one repeat the message.
        told.__cause__ = told.__context__ = None
        theirs = [frame for frame in told.stack if not frame.filename.startswith(script.PACKAGE)]
        told.stack = traceback.StackSummary.from_list(theirs)
    text, frames = "".join(told.format()), told.stack
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = str(error)
    # Set before it is reported: other threads stop sending, so nothing comes behind the error that ends this
    # worker.
    link.failed = True
    link.send(
        m.Failed(
            generation=0,
            step=None,
            phase=int(link.record.phase),
            error=type(error).__name__,
            message=message,
            traceback=text,
            where=where,
            refused=refused,
        )
    )


def _unheeded(name: str) -> bool:
    """A variable that the script has changed, too late. (Lightning writes the number of threads that it has set.)"""
    import torch

    return read_at_import(name) and not (
        name == "OMP_NUM_THREADS" and os.environ.get(name) == str(torch.get_num_threads())
    )


def _count_steps(link: Link, faults: FaultPlan, first: Callable[[], None]) -> None:
    """Level 0: every optimizer step is a sign of progress, read from torch's own global hook."""
    if "torch" not in sys.modules:  # it started cold
        when_imported("torch.optim.optimizer", lambda: _count_steps(link, faults, first))
        return
    from holdfast.train.level0_hook import StepCounter

    StepCounter(link, faults, first).listen()
