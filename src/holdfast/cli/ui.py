"""`holdfast ui`: the page of all jobs in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import JobName

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.ui.host import UiHost
    from holdfast.ui.server import ClosableHost

PORT = 8765


def ui(
    job: JobName = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            help="Port on this machine's loopback address; 0 takes any free one.",
            min=0,
        ),
    ] = PORT,
    act: Annotated[
        bool,
        typer.Option(
            "--act",
            help=(
                "Let the page drain and clear nodes and resize and stop the job. Without it the page can only show."
            ),
        ),
    ] = False,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="URL",
            help=(
                "URL at which a proxy serves the page, for example JupyterHub's: "
                "https://hub.example/user/ada/proxy/8765/"
            ),
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the job's page into one HTML file, and exit."),
    ] = None,
) -> None:
    """Shows jobs in a browser: running ones wherever their coordinator is, and those that have ended."""
    import asyncio

    from holdfast.cli.ls import look_at
    from holdfast.engines import jobs
    from holdfast.ui.host import UiHost

    if job is not None or html is not None:
        jobs.existing(job)  # a wrong name is refused before anything starts
    host = UiHost(job, act, look_at)
    if html is not None:
        text = asyncio.run(_html(host, job or ""))
        html.write_text(text)
        sys.stdout.write(f"{html.absolute()}: {len(text.encode()):,} bytes\n")
        return
    asyncio.run(serve(host, port, act, at))


async def _html(host: UiHost, job: str) -> str:
    from holdfast.errors import HoldfastError, UsageError
    from holdfast.ui.single_file import single_file

    try:
        return await single_file(await host.source(job))
    except HoldfastError as error:
        raise UsageError(str(error)) from error
    finally:
        host.close()


async def serve(
    host: ClosableHost,
    port: int,
    act: bool,
    at: str | None,
    panels: Collection[str] | None = None,
    actions: Collection[str] | None = None,
) -> None:
    """Serves a page until SIGINT or SIGTERM, and prints links to it. panels, actions: None: those of every job."""
    import asyncio
    import signal
    import time

    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.ui.host import page_key
    from holdfast.ui.server import UiServer, loopback
    from holdfast.web.application import ACTIONS, PANELS
    from holdfast.web.sessions import Proxy, Role, Sessions

    try:
        proxy = None if at is None else Proxy.of(at)
    except ValueError as error:
        raise UsageError(f"--at: {error}") from None
    try:
        # Bound before the link is printed: no other program can take the port and be shown the code.
        listener = loopback(port)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used ({error.strerror}): choose another --port. If another `holdfast ui` uses "
            "it, press Enter in its terminal to get a new link"
        ) from None
    bound = listener.getsockname()[1]
    # With the port that was really given: the cookie's name has it, so two pages on one machine keep apart.
    sessions = Sessions(page_key(jobs.home()), bound, time.time, proxy=proxy)
    page = f"http://127.0.0.1:{bound}/" if proxy is None else proxy.url
    loop, ends = asyncio.get_running_loop(), asyncio.Event()

    def link() -> None:
        code = sessions.new_code(Role.ACT if act else Role.VIEW)
        sys.stdout.write(f"page: {page}enter?code={code}  (valid once, for one minute)\n")
        sys.stdout.flush()

    def again() -> None:
        # An end of the input would be readable for ever.
        if not sys.stdin.readline():
            loop.remove_reader(sys.stdin)
            return
        link()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ends.set)

    def started() -> None:
        link()
        # Only for a person: a pipe that has something to read would make links that nobody asked for.
        if sys.stdin.isatty():
            sys.stdout.write("press Enter for another link, Ctrl-C to exit\n")
            sys.stdout.flush()
            loop.add_reader(sys.stdin, again)

    server = UiServer(host, sessions, listener, panels or PANELS, actions or ACTIONS)
    await server.serve(started, ends)
