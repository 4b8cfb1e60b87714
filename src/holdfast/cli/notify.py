"""`holdfast notify`: tells people what a job needs them for."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common import JobName, ledger
from holdfast.cli.ui import PORT

LINK = f"http://127.0.0.1:{PORT}/?job={{job}}#/incident/{{incident}}"
"""The page of `holdfast ui`, opened at the incident."""
LINK_VARIABLE = "HOLDFAST_NOTIFY_LINK"


def notify(
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="TARGET",
            help=(
                "Where to send messages. slack:FILE or webhook:FILE: a file contains the URL. slack:env:NAME or "
                "webhook:env:NAME: an environment variable contains it. mail:ADDRESS: by mail. Can be repeated."
            ),
            show_default=False,
        ),
    ],
    job: JobName = None,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="URL",
            envvar=LINK_VARIABLE,
            show_envvar=False,
            help=(
                "Link to put into each message; {job} and {incident} in it are replaced. An empty text means no "
                f"link. By default the page that `holdfast ui` serves on this machine. {LINK_VARIABLE} sets it, too, "
                "also for `run --notify`."
            ),
            show_default=False,
        ),
    ] = LINK,
) -> None:
    """Sends what a person has to do, until the job ends: asks, tiers that fail, a failed end.

    The same matter is silent for six hours. Only a notifier that is killed between a delivery and its note sends again, with the
    same ids.
    """
    import asyncio
    from contextlib import ExitStack, closing

    from holdfast.engines import jobs
    from holdfast.tools.tracking.follower import follow
    from holdfast.tools.tracking.notify import Notifier

    folder = jobs.existing(job)
    with ExitStack() as opened:
        # All are opened before one follows: a wrong target is refused before any message goes out.
        notifiers = [opened.enter_context(closing(Notifier(target, folder, link or None))) for target in to]
        asyncio.run(follow(folder, notifiers, ledger))
