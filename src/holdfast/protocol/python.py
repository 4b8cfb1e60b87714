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


def python_for_scripts(name: str, *arguments: str) -> list[str]:
    """The same for a process whose forks become users' scripts, which see the flags of this command line.

    They are those of `python -u script.py`, as torchrun starts it: -P would show in `sys.flags`, and would be passed on to
    Python's child processes. So the current folder is taken off sys.path by the first line, and NAME's `main()` called.
    """
    first = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
    return [sys.executable, "-u", "-c", f"{first}; from {name} import main; sys.exit(main())", *arguments]
