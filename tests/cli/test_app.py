"""The command line as a whole."""

import subprocess
import sys

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
