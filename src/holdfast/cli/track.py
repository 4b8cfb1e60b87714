"""`holdfast track`: a job's steps and events for experiment trackers."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common import JobName, ledger


def track(
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="TARGET",
            help="The tracker: jsonl:PATH, tensorboard:DIR, mlflow:URI, wandb:PROJECT or otlp:URL. Can be repeated.",
            show_default=False,
        ),
    ],
    job: JobName = None,
) -> None:
    """Writes a job's steps and events to trackers until the job ends. Run again, it continues where it was."""
    import asyncio
    from contextlib import ExitStack, closing

    from holdfast.engines import jobs
    from holdfast.tools.tracking.follower import follow, tracker

    folder = jobs.existing(job)
    with ExitStack() as opened:
        trackers = [opened.enter_context(closing(tracker(target, folder))) for target in to]
        asyncio.run(follow(folder, trackers, ledger))
