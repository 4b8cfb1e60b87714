"""`holdfast run -f FILE`: options in a file, by the names that they have on the command line.

The file becomes words of a command line, so each value meets the checks that it would meet there. What is given on the
command line comes after it and holds; options that can be repeated add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError

FLAGS = ("-f", "--file")
SCRIPT, ARGS = "script", "args"


def expand(
    args: Sequence[str], params: Sequence[Any], of_engine: Callable[[str], Sequence[Any]] | None = None
) -> list[str]:
    """The command line with the file's options in it.

    Args:
        params: the command's own, as click has them. of_engine: gives them for the engine that the file names.

    Raises:
        UsageError: the file has something that the command does not know.
    """
    options, negations = _by_name(params)
    path, own, script = _split(args, options)
    if path is None:
        return list(args)
    from holdfast.cli.yaml_file import read_yaml

    read = read_yaml("-f", path)
    if of_engine is not None and isinstance(engine := read.get("engine"), str):
        options, negations = _by_name(of_engine(engine))
    for key in read:
        if key not in (*options, *negations, SCRIPT, ARGS) or f"-{key}" in FLAGS or f"--{key}" in FLAGS:
            raise UsageError(f"-f {path}: {key!r} is not an option of `holdfast run`{_nearest(key, options)}")
    words = [
        word
        for key, value in read.items()
        if key not in (SCRIPT, ARGS)
        for word in _words(path, key, value, options.get(key), negations.get(key))
    ]
    # A script on the command line replaces the file's script and its arguments: half of each would
    # be a mix that nobody wrote.
    if not script:
        script = [
            *([_text(path, SCRIPT, read[SCRIPT])] if SCRIPT in read else []),
            *(_text(path, ARGS, one) for one in _list(path, ARGS, read.get(ARGS, []))),
        ]
        # A script may be called like an option.
        script = ["--", *script] if script else []
    return [*words, *own, *script]


def _by_name(params: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options by their names without dashes, and those by the names that switch them off."""
    options = [one for one in params if one.param_type_name == "option"]
    return (
        {name.lstrip("-"): one for one in options for name in one.opts},
        {name.lstrip("-"): one for one in options for name in one.secondary_opts},
    )


def _split(args: Sequence[str], options: dict[str, Any]) -> tuple[Path | None, list[str], list[str]]:
    """The file, the options that are given, and the script with its arguments."""
    path: Path | None = None
    own: list[str] = []
    rest = iter(args)
    for word in rest:
        if word == "--" or not word.startswith("-"):
            return path, own, [word, *rest]
        name, equals, value = word.partition("=")
        if name in FLAGS:
            given = value if equals else next(rest, "")
            if not given:
                raise UsageError("-f needs the name of a file, for example job.yaml")
            path = Path(given)
            continue
        own.append(word)
        known = options.get(name.lstrip("-"))
        # A value is not to be taken for the script.
        if known is not None and not known.is_flag and not equals:
            own += [follows] if (follows := next(rest, None)) is not None else []
    return path, own, []


def _nearest(key: str, options: dict[str, Any]) -> str:
    known = [*(name for name in options if len(name) > 1), SCRIPT, ARGS]
    found = get_close_matches(key.replace("_", "-"), known, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _words(path: Path, key: str, value: Any, option: Any, negation: Any) -> Iterator[str]:
    flagged = option if option is not None else negation
    if flagged.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"-f {path}: {key} must be true or false (got {value!r})")
        # `no-health: true` says what `health: false` says.
        wanted = value if option is not None else not value
        if wanted:
            yield flagged.opts[0]
        elif flagged.secondary_opts:
            yield flagged.secondary_opts[0]
        return
    for one in _list(path, key, value) if flagged.multiple else [value]:
        yield f"--{key}"
        yield _text(path, key, one)


def _list(path: Path, key: str, value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict) or value is None:
        raise UsageError(f"-f {path}: {key} must be a list, a string or a number (got {value!r})")
    return [value]


def _text(path: Path, key: str, value: Any) -> str:
    # YAML reads a bare `no` as false. The text `False` is not what the person wrote, so it is refused.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(
            f"-f {path}: {key} must be a string or a number (got {value!r}); write it in quotes if YAML reads it as "
            "another type"
        )
    return str(value)
