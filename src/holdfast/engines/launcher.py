"""The base of every engine's launcher: it keeps a coordinator running and carries out its orders to the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from holdfast.engines import jobs
from holdfast.engines.base import NodeProvider
from holdfast.engines.client import Announcement, FolderReach, JobClient
from holdfast.engines.coordinator_supervisor import (
    CoordinatorConfig,
    CoordinatorSupervisor,
    LauncherSuperseded,
    listen,
)
from holdfast.engines.scraping import publish, withdraw
from holdfast.engines.shown import TolerantView, View
from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.protocol.engine_orders import (
    Availability,
    EngineOrder,
    MarkNode,
    OrderDone,
    ProvideNode,
    RebootNode,
    ReleaseNode,
    kind_of,
    of_announcement,
)
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.network.endpoint import read_endpoint
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.stored import word
from holdfast.web.sessions import CODE_PATH

_log = logging.getLogger(__name__)
KILLED = "killed"
"""Outcome of a job whose coordinator wrote no report."""


class Launcher(ABC):
    """Runs one job. A subclass provides its nodes.

    Attributes:
        host, port: where the coordinator listens.
        term: see `protocol.leadership`.
        inherited: file descriptors that the coordinator keeps open.
        relock: see `CoordinatorConfig`.
    """

    host = "127.0.0.1"
    term = 0
    inherited: tuple[int, ...] = ()
    relock: Callable[[], str] = str

    def __init__(self, spec: JobSpec, job_dir: Path, view: View, port: int = 0) -> None:
        self.spec, self.job_dir, self.port = spec, job_dir, port
        self.view: View = TolerantView(view)
        self.engine: NodeProvider | None = None
        self.interrupts = 0
        self._gives_back = False
        self._stop_asked: str | None = None
        self._supervisor: CoordinatorSupervisor | None = None
        self._listener: socket.socket | None = None
        self._port: int | None = None
        self._token = ""
        # Only this process holds the write end, and nothing is ever written. However the process ends, the kernel closes it,
        # which is visible at the read end.
        self._lifeline, self._held = os.pipe()
        self._announced_report: JobReport | None = None
        self._blind = False
        self._page_shown = False
        self._orders: asyncio.Queue[EngineOrder] = asyncio.Queue()
        self._newest_order = 0
        self._unacknowledged: dict[int, OrderDone | None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def open(self) -> NodeProvider:
        """Prepares everything for the coordinator's start; returns the provider of the nodes."""

    @abstractmethod
    async def staff(self) -> None:
        """Starts the job's first nodes."""

    async def run(self) -> JobReport:
        """Runs the job to its end; returns the report.

        Raises:
            UsageError: the port cannot be used; nothing was started or changed.
            HoldfastError: the coordinator cannot be kept running.
            LauncherSuperseded: another launcher took over.
        """
        try:
            # First, because a port that is in use is the user's mistake, and nothing must have been started then.
            self._listener = listen(self.host, self.port)
            self.engine = await self.open()
            files = self._files()
            self._token = decode(word, files["token"], f"{self.job_dir / 'token'} is damaged")
            config = CoordinatorConfig(
                job_dir=self.job_dir,
                timing=self.spec.timing,
                host=self.host,
                listener=self._listener,
                term=self.term,
                inherited=self.inherited,
                lifeline=self._lifeline,
                files=files,
                relock=self.relock,
            )
            # Before the coordinator starts, which reads the token that `publish` creates.
            self._port = self._listener.getsockname()[1]
            publish(self.job_dir, self.host, self._port)
            self._supervisor = CoordinatorSupervisor(config, self.note, self._on_coordinator)
            await self._supervisor.start()
            await self.staff()
            watching = asyncio.create_task(self._watch())
            obeying = asyncio.create_task(self._obey(self.engine))
            try:
                await self._supervisor.keep()
            except LauncherSuperseded:
                for task in (watching, obeying, *self._tasks):
                    task.cancel()
                await self.abandon()
                raise
            self._listener.close()  # clients that wait for an answer are told at once that there will be none
            try:
                async with asyncio.timeout(1.0):
                    await watching  # its last announcement may still be on the way
            except TimeoutError:
                watching.cancel()
            obeying.cancel()
            report = self._report()
            # Only the coordinator's report proves that no state is in the nodes' memory alone.
            self._gives_back = report.outcome != KILLED and report.in_memory is None
        finally:
            await self.close()
        return report

    def _files(self) -> dict[str, bytes]:
        """The contents of the files that a coordinator needs to start. This process keeps them, so that the job does not end if
        somebody deletes one."""
        found = {}
        for name in ("spec.json", "resume.json", "token", "identity"):
            with suppress(FileNotFoundError):
                found[name] = (self.job_dir / name).read_bytes()
        return found

    def _on_coordinator(self) -> None:
        """Sends each new coordinator the engine's traits, and a stop that the one before it may have received but not
        recorded."""
        if self.engine is not None:
            self.post(self.engine.traits)
        if self._stop_asked is not None:
            self.spawn(self._ask(self._stop_asked))
        if not self._page_shown:
            self._page_shown = True
            self.spawn(self._show_page())

    async def _show_page(self) -> None:
        """Shows the user the link to the job's page."""
        # There is no TLS, so a link with a code is only for a browser on this machine. From elsewhere `holdfast ui` is used
        # through ssh.
        if self.host not in ("127.0.0.1", "::1"):
            self.view.note(f"page: holdfast ui --job {self.spec.name}")
            return
        try:
            async with self._client() as client:
                code = (await client.post(f"{CODE_PATH}?role=view", repeat=True))["code"]
        except UsageError as error:
            _log.info("no link to the page: %s", error)
            return
        # Not through `note`: the code must not be in a log.
        where = read_endpoint(self.job_dir)
        if where is not None:
            link = f"{where.url}/enter?code={code}"
            self.view.note(
                f"page: {link}  (valid once, for one minute; later: holdfast ui --job {self.spec.name})"
            )

    async def _watch(self) -> None:
        async with self._client() as client:
            async for announcement in client.watch():
                self.on_announcement(announcement)

    def on_announcement(self, announcement: Announcement) -> None:
        """Shows announcements for people, and queues orders for the engine."""
        if announcement.kind in ("event", "status", "log"):
            try:
                self._show(announcement)
            except Exception:  # noqa: BLE001 - the job does not depend on its view, but on the announcements that follow
                if not self._blind:
                    self._blind = True
                    _log.exception(
                        "an announcement cannot be shown; the job continues",
                        extra={"kind": announcement.kind},
                    )
        elif announcement.kind == "ended":
            self._announced_report = announcement.value
        elif (order := of_announcement(announcement.kind, announcement.value)) is not None:
            self._on_order(order)

    def _on_order(self, order: EngineOrder) -> None:
        # Open orders are announced again on each new connection. One that was carried out already is only acknowledged again. It
        # is recognized by its number: numbers increase, and orders are announced in their order.
        if order.order_id <= self._newest_order:
            done = self._unacknowledged.get(order.order_id, OrderDone(order.order_id))
            if done is not None:  # else it is still being carried out
                self._acknowledge(done)
            return
        self._newest_order = order.order_id
        self._unacknowledged[order.order_id] = None
        # Queued and not carried out here, because Slurm, for example, may take seconds to answer, during which the view must not
        # stop.
        self._orders.put_nowait(order)

    def _acknowledge(self, done: OrderDone) -> None:
        self._unacknowledged[done.order_id] = done
        self.spawn(self._tell_done(done))

    async def _tell_done(self, done: OrderDone) -> None:
        try:
            async with self._client() as client:
                await client.post("/engine", msgspec.json.encode(done).decode(), repeat=True)
        except UsageError as error:
            # Sent again when a coordinator announces the order again. At the end of the job that does not happen.
            _log.debug("an order is not acknowledged: %s", error, extra={"order_id": done.order_id})
        else:
            self._unacknowledged.pop(done.order_id, None)

    def _show(self, announcement: Announcement) -> None:
        match announcement.kind:
            case "event":
                self.view.event(announcement.value)
            case "status":
                self.view.status(announcement.value)
            case "log":
                self.view.note(announcement.value["text"])

    async def _obey(self, engine: NodeProvider) -> None:
        """Carries out orders one after the other: a node, for example, is marked before it is released."""
        while True:
            order = await self._orders.get()
            error = None
            try:
                await self._carry_out(engine, order)
            # A failed order must not end this task, not even because of a bug in another package's engine: the orders after it
            # would never be carried out.
            except Exception as failure:  # noqa: BLE001 - an engine of another package may raise anything
                expected = isinstance(failure, (HoldfastError, OSError))
                error = str(failure) if expected else f"{type(failure).__name__}: {failure}"
                if not expected:
                    _log.exception("%s failed", kind_of(order))
                self.note(f"{kind_of(order)}: {error}")
            self._acknowledge(OrderDone(order.order_id, error))

    async def _carry_out(self, engine: NodeProvider, order: EngineOrder) -> None:
        _log.info("%s: %s", kind_of(order), order.reason, extra={"node": getattr(order, "node", None)})
        match order:
            case ProvideNode():
                await engine.provide()
            case ReleaseNode():
                await engine.release(order)
            case MarkNode(node, reason):
                await engine.mark(node, reason)
            case RebootNode(node, reason):
                await engine.reboot(node, reason)

    def note_resume(self, resume: Resume) -> None:
        """Tells the user from which checkpoint the job continues."""
        if resume.checkpoints:
            newest = resume.checkpoints[0]
            self.note(
                f"--job {self.spec.name} has run before and continues from step {newest.step} ({newest.where}); to "
                "train from the beginning, choose another --job"
            )

    def note(self, text: str, **fields: object) -> None:
        """Shows a message about the launcher itself to the user, and logs it."""
        _log.info("%s", text, extra=fields)
        self.view.note(text)

    # ------------------------------------------------------------ the end

    def heed_signals(self) -> None:
        """Handles the signals by which a person or a scheduler ends the job: the four that torchrun handles."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            loop.add_signal_handler(number, self.on_interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        """The terminal was closed. The signal may come twice, from the shell and the kernel, so that the second one is
        ignored."""
        if not self.interrupts:
            self.interrupts = 1
            self.stop("the terminal was closed")
            self.note("the terminal was closed: stopping after this step")

    def on_interrupt(self) -> None:
        """Ctrl-C: the first stops the job in order, the second ends it at once."""
        self.interrupts += 1
        if self.interrupts == 1:
            self.stop("interrupted")  # before anything is shown, because the stop is more important
            self.note("stopping after this step; press Ctrl-C again to stop immediately")
        else:
            self.end_now()
            self.note(
                "snapshots that are only in the nodes' memory are kept there for the next start of this job"
            )

    def stop(self, reason: str, cause: NoticeCause = NoticeCause.STOP) -> None:
        """Asks the coordinator to end the job in order. cause: passed to the job's scripts."""
        self._stop_asked = "/stop?" + urlencode({"reason": reason, "cause": cause.value})
        self.spawn(self._ask(self._stop_asked))

    def end_now(self) -> None:
        """Kills the coordinator at once."""
        if self._supervisor is not None:
            self._supervisor.end_now()

    def post(self, news: Availability) -> None:
        """Tells the coordinator about available nodes."""
        self.spawn(self._ask("/engine", msgspec.json.encode(news).decode()))

    def spawn(self, coroutine: Any) -> None:
        """Runs a coroutine in the background."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, path: str, body: str = "") -> None:
        try:
            async with self._client() as client:
                await client.post(path, body, repeat=True)
        except UsageError as error:
            self.note(str(error))

    def _client(self) -> JobClient:
        """A client of this job, which does not depend on the token file in the job's folder."""
        return JobClient(self.job_dir, FolderReach(self.job_dir, self._token))

    async def abandon(self) -> None:
        """Stops acting for the job at once, because another launcher has it."""
        self.engine = None

    async def close(self) -> None:
        """Ends what is left of the job."""
        if self._supervisor is not None:
            await self._supervisor.close()
        if self._port is not None:
            withdraw(self.job_dir, self.host, self._port)
        if self._listener is not None:
            self._listener.close()
        # After the coordinator's end, so that it does not take the end of the nodes for faults.
        if self.engine is not None:
            await self.engine.close(self._gives_back)
        os.close(self._held)
        os.close(self._lifeline)

    def _report(self) -> JobReport:
        try:
            return jobs.read_report(self.job_dir / "report.json")
        except (OSError, Damaged):
            if self._announced_report is not None:  # it could not be written
                return self._announced_report
            return JobReport(
                job=self.job_dir.name, incidents=[], outcome=KILLED, reason="stopped immediately"
            )
