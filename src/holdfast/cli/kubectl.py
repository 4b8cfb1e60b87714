"""`kubectl holdfast COMMAND`: the command line for jobs of a cluster, those of other people too.

`-n` and `--context` say where the job is, as with kubectl; `run` has the engine already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.errors import HoldfastError

_PLACE = {"-n": "--namespace", "--namespace": "--namespace", "--context": "--context"}
_KNOWS_PLACES = ("run", "attach")


def main() -> None:
    """Entry point of the plugin. Exit codes as those of `holdfast`."""
    from holdfast.cli import app

    try:
        sys.argv[1:] = arguments(sys.argv[1:])
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {error}\n")
        sys.exit(app.EXIT_USAGE)
    app.main()


def arguments(given: Sequence[str]) -> list[str]:
    """What `holdfast` is given instead. A job that is named is looked for in the cluster, and remembered here.

    Raises:
        UsageError: there is no such job.
    """
    command, *rest = given or ["--help"]
    if command == "run":
        return [command, "--engine", "kubernetes", *(_PLACE.get(word, word) for word in rest)]
    if command in _KNOWS_PLACES:
        return [command, *(_PLACE.get(word, word) for word in rest)]
    place, kept = _split(rest)
    if job := _value(kept, "--job"):
        from holdfast.cli.kubernetes import find

        folder = find(job, place.get("--namespace", ""), place.get("--context", ""))
        kept = _renamed(kept, job, folder.name)
    return [command, *kept]


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Where the job is, and the other words."""
    place: dict[str, str] = {}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        # `-n` is also the number of lines of some commands; a namespace is no number.
        if name in _PLACE:
            given = value if equals else next(rest, "")
            if name != "-n" or not given.isdecimal():
                place[_PLACE[name]] = given
                continue
            kept += [name, given]
        else:
            kept.append(word)
    return place, kept


def _renamed(words: Sequence[str], job: str, folder: str) -> list[str]:
    """Another job of this name may have its folder here."""
    renamed = {job: folder, f"--job={job}": f"--job={folder}"}
    before = ["", *words]
    return [
        renamed.get(word, word) if "--job" in (previous, word.partition("=")[0]) else word
        for previous, word in zip(before, words, strict=False)
    ]


def _value(words: Sequence[str], flag: str) -> str:
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else next(iter(words[position + 1 :]), "")
    return ""
