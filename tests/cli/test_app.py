"""The command line as a whole."""

import errno
import os
import subprocess
import sys
from typing import get_type_hints

import pytest

import holdfast as package
from holdfast import plugins
from holdfast.cli import app
from holdfast.engines.base import engine_named
from holdfast.engines.run_options import RunOptions
from holdfast.protocol.options import OptionGroup


def test_version(holdfast):
    assert holdfast("--version").out == f"holdfast {package.__version__}\n"


def test_help_names_every_command(holdfast):
    said = holdfast("--help")
    assert said.code == 0
    for command in ("run", "status", "events", "logs", "report", "fault", "plan", "resize", "drain", "stop"):
        assert command in said.out


def test_the_short_form_of_help(holdfast):
    assert holdfast("-h").out == holdfast("--help").out
    assert "Runs a training script" in holdfast("run", "-h").out


def test_the_options_of_run_are_in_groups(holdfast):
    shown = holdfast("run", "--help-all").out
    titles = [
        mark.title
        for hint in get_type_hints(RunOptions, include_extras=True).values()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, OptionGroup)
    ]
    titles += filter(None, (engine_named(name).title for name in plugins.ours(plugins.ENGINES)))
    assert len(titles) >= 6
    places = [shown.index(f" {title} ─") for title in titles]
    assert places == sorted(places)
    assert shown.index(" Health of the nodes ─") < shown.index("--health-rules") < shown.index(" Hosts, with")


def test_a_file_without_permission_is_named_with_a_way_out(holdfast, home, monkeypatch):
    def denied(path):
        def call():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(app, "app", call)
        return holdfast("status")

    said = denied(home / "jobs" / "x")
    assert (said.code, said.err) == (
        1,
        f"holdfast: {home}/jobs/x: Permission denied; this path is in HOLDFAST_HOME ({home}): set HOLDFAST_HOME to a folder that you can read and "
        "write\n",
    )
    assert (
        denied("/elsewhere").err
        == "holdfast: /elsewhere: Permission denied; check the permissions of the file\n"
    )


def test_no_command_shows_the_help(holdfast):
    assert "Usage" in holdfast().out


def test_starting_is_cheap():
    """What costs time is imported when it is needed: not for --help, and not to refuse bad input."""
    code = (
        "import sys, holdfast.cli.app;"
        "print(*{'torch', 'numpy', 'aiohttp', 'asyncio', 'rich', 'msgspec', 'sqlite3', 'logging'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("typed", "offered"), [("holdfast sta", ["status"]), ("holdfast run --max-re", ["--max-restarts"])]
)
def test_a_shell_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    environment = {
        **os.environ,
        "_HOLDFAST_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    code = "import sys; sys.argv = ['holdfast']; from holdfast.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == offered
