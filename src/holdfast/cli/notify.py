"""`holdfast notify`: tells people what a job needs them for."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common import JobName, ledger


def notify(
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="TARGET",
            help="slack:FILE or webhook:FILE, a file with the URL; slack:env:NAME or webhook:env:NAME, a variable that has "
            "it; mail:ADDRESS. Can be repeated.",
            show_default=False,
        ),
    ],
    job: JobName = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="URL",
            help="A link for each message, with {job} and {incident}: for example that of a dashboard.",
        ),
    ] = None,
) -> None:
    """Sends what a person has to do, until the job ends: asks, tiers that fail, a failed end. Never the same twice."""
    import asyncio
    from contextlib import ExitStack, closing

    from holdfast.engines import jobs
    from holdfast.tracking.follower import follow
    from holdfast.tracking.notify import Notifier

    folder = jobs.existing(job)
    with ExitStack() as opened:
        # All are opened before one follows: a wrong target is refused before any message goes out.
        notifiers = [opened.enter_context(closing(Notifier(target, folder, link))) for target in to]
        asyncio.run(follow(folder, notifiers, ledger))
