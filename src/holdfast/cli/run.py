"""`holdfast run`: launches a training script and keeps it running."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast import plugins
from holdfast.cli.options import command as with_options
from holdfast.cli.torchrun import ALL_OPTIONS, RunCommand
from holdfast.cli.view import keep_ticking, view_of, write_report
from holdfast.engines.base import Engine, engine_named
from holdfast.engines.run_options import RunOptions
from holdfast.protocol.options import OptionGroup, declared

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.observe.live import LiveView, PlainView
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport

# Options behind SCRIPT belong to the script. With interspersed options its own `--report` or `--port` would
# be taken for Holdfast's.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _help_all(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[ALL_OPTIONS] = True
        context.get_help()  # it prints
        raise typer.Exit()


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_help_all, is_eager=True, metavar="", help="Show all options and exit."
    ),
]


def _command(*others: str) -> RunCommand:
    """The command with the options of Holdfast's own engines and of these others.

    Raises:
        UsageError: one of the others cannot be used.
    """
    engines = {name: engine_named(name) for name in (*plugins.ours(plugins.ENGINES), *others)}
    # Options that two engines share are declared once, by the first of them.
    titles: dict[Any, str] = {}
    for name, engine in engines.items():
        if engine.options is not None:
            titles.setdefault(engine.options, engine.title or f"With --engine {name}")
    fields: list[Any] = [
        (f"of_{number}", Annotated[kind, OptionGroup(title)], dataclasses.field(default_factory=kind))
        for number, (kind, title) in enumerate(titles.items())
    ]
    of_engines = dataclasses.make_dataclass("EngineOptions", fields, frozen=True)

    def run(options: RunOptions, of_engines: Any, help_all: Any = False) -> None:
        """Runs a training script on several nodes and keeps it running through failures."""
        given = {type(each): each for each in vars(of_engines).values()}
        by_name = {
            name: given[engine.options] for name, engine in engines.items() if engine.options is not None
        }
        _run(dataclasses.replace(options, engines=by_name))

    run.__annotations__ = {"options": RunOptions, "of_engines": of_engines, "help_all": HelpAll}
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command("run", cls=RunCommand, context_settings=CONTEXT)(with_options(run))
    made = typer.main.get_command(alone)
    assert isinstance(made, RunCommand)
    made.known = {each.name: each.option for kind in (RunOptions, of_engines) for each in declared(kind)}
    made.with_engine = _command
    return made


command = _command()


def _run(options: RunOptions) -> None:
    """Exits with the job's exit code."""
    engine = engine_named(options.engine)
    if (code := engine.run(options)) is not None:
        sys.exit(code)
    from holdfast.cli.spec import plan

    spec = plan(options)
    if options.preview:
        _show(spec, engine)
        return
    from holdfast.cli import followers

    followers.check(options.track, options.notify)
    from holdfast.engines.jobs import EXIT_UNSAVED, exit_code

    ended = _launched(spec, engine, options)
    code = exit_code(ended)
    if code == EXIT_UNSAVED:
        saved = ended.saved
        there = (
            f"the newest checkpoint there is of step {saved.step}"
            if saved
            else "there is no checkpoint there"
        )
        here = (
            "; `holdfast run` with this --job continues from the snapshot in memory"
            if ended.in_memory
            else ""
        )
        sys.stderr.write(
            f"[holdfast] the last state, of step {ended.unsaved}, was not saved to a durable tier: {there}{here} "
            f"(exit code {EXIT_UNSAVED})\n"
        )
    sys.exit(code)


def _show(spec: JobSpec, engine: Engine) -> None:
    """`--dry-run`: what would be started."""
    text = engine.preview(spec)
    if text is None:
        import msgspec

        from holdfast.cli.yaml_file import yaml_text

        text = yaml_text([msgspec.to_builtins(spec)])
    sys.stdout.write(text)


def _launched(spec: JobSpec, engine: Engine, options: RunOptions) -> JobReport:
    """Runs the job to its end, shows it and writes its report; returns that."""
    import asyncio

    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import unread
    from holdfast.errors import UsageError

    # Holds the job's lock from here to `close`. Two launchers of one job would each start a coordinator, and
    # both would write the same ledger.
    folder = JobFolder(spec.name)
    view = view_of(spec, folder.path, options.no_ui)
    try:
        with view:
            ended = asyncio.run(_launch(spec, engine, folder, view, options))
    except UsageError:
        # The job never started. Its folder would make the name look taken, and `holdfast status` show an
        # empty job.
        folder.discard()
        raise
    finally:
        folder.close()
    # Before anything is printed: a terminal that is gone, or a pipe that closed, must not cost the report.
    if options.report is not None:
        write_report(ended, options.report)
    with unread():
        view.ended(ended)
    return ended


async def _launch(
    spec: JobSpec, engine: Engine, folder: JobFolder, view: LiveView | PlainView, options: RunOptions
) -> JobReport:
    import asyncio

    from holdfast import logs
    from holdfast.cli.followers import Followers

    ticking = asyncio.create_task(keep_ticking(view))
    shown = Followers(view, spec.name, folder.path / "logs", options.track, options.notify)
    try:
        if engine.submits:
            return await engine.launch(spec, folder, shown, options.port)
        # Without other libraries' warnings: what is written before the old logs are put away is put away
        # with them.
        close_log = logs.configure(
            spec.log, {"job": spec.name}, file=folder.path / "logs" / "launcher.log", others=False
        )
        try:
            return await engine.launch(spec, folder, shown, options.port)
        finally:
            close_log()
    finally:
        if shown.has_begun:
            # They read on for as long as something of the job runs, and by its lock this process does. It has ended:
            # nothing of it is removed after this.
            folder.close()
            await shown.end()
        ticking.cancel()
