"""The command line as a whole."""

import os
import subprocess
import sys

import pytest

import holdfast as package


def test_version(holdfast):
    assert holdfast("--version").out == f"holdfast {package.__version__}\n"


def test_help_names_every_command(holdfast):
    said = holdfast("--help")
    assert said.code == 0
    for command in ("run", "status", "events", "logs", "report", "fault", "plan", "resize", "drain", "stop"):
        assert command in said.out


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
