"""Everything that is no command or picture for people logs by `logging`, and importing the library sets nothing up."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from imports import modules_of

from holdfast import __file__ as package

FOR_PEOPLE = ("holdfast.cli", "holdfast.observe")
ALLOWED = {
    (
        "holdfast.agent.__main__",
        "main",
    ): "why it cannot start: its log must not have the token, which cannot be read",
    ("holdfast.agent.worker_logs", "_copy"): "what rank 0 printed is passed on",
    ("holdfast.coordinator.__main__", "main"): "why it cannot start: its log may be what cannot be opened",
    (
        "holdfast.plugins",
        "_others",
    ): "that a name of another package is not used: no command has to know that it is so",
    ("holdfast.train.script", "_print_error"): "the error that ends a script, as Python does",
    ("holdfast.train.script", "open_log"): "that a worker has no log, where its agent's log has it",
    ("holdfast.train.worker", "_exit_code"): "sys.exit(text) prints its text, as Python does",
    (
        "holdfast.train.worker",
        "_run_script",
    ): "why training ended before the last step, in the script's own log",
}
WRITES = {
    "print",
    *(f"sys.{stream}{way}.write" for stream in ("stdout", "stderr") for way in ("", ".buffer")),
}


def written_to_streams(tree):
    """Functions that write to a standard stream themselves, or print a traceback."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in ast.walk(function):
                if isinstance(call, ast.Call):
                    name = ast.unparse(call.func)
                    if name in WRITES or name.startswith("traceback.print_"):
                        yield function.name


def test_nothing_but_commands_and_views_writes_to_the_standard_streams():
    found = {
        (module.name, function)
        for module in modules_of(Path(package).parent)
        if not module.name.startswith(FOR_PEOPLE)
        for function in written_to_streams(module.tree)
    }
    assert found == set(ALLOWED)


CONFIGURES = """
import logging, sys
before = logging.getLogger().level
import {module}
ours = logging.getLogger("holdfast")
print(logging.getLogger().handlers, ours.handlers, ours.level, ours.propagate, logging.getLogger().level == before)
"""


@pytest.mark.parametrize("module", ["holdfast", "holdfast.train.run, holdfast.data, holdfast.checkpoint"])
def test_importing_configures_nothing(module):
    code = CONFIGURES.format(module=module)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] [] 0 True True\n"
