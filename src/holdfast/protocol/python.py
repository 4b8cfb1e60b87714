"""How a process of Holdfast's own is started, whatever it is."""

from __future__ import annotations

import sys


def python_module(name: str, *arguments: str) -> list[str]:
    """The command line of `python -m NAME ARGUMENTS...`, by this interpreter.

    -P: without it the current folder comes first on sys.path, and whoever can write there would have his `asyncio.py` run
    by the coordinator. Not the variable PYTHONSAFEPATH, which the user's script would pass on to what it starts.
    """
    # -P for ours only. Exported as a variable it would change how the user's script finds its own modules.
    return [sys.executable, "-P", "-m", name, *arguments]
