"""Options of a command, declared once as fields of a dataclass.

A command's options are one frozen dataclass. Each field carries an `Option` (or `Argument`) in its type, so parser, help,
checks and error messages all read the same line. The values then travel in that dataclass: to the planner, to `data build`, and
within a job's specification to every node.

    spares: Annotated[int, Option(help="Nodes that wait.", least=0)] = 0     # --spares
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from holdfast.errors import UsageError

# The standard library alone: `holdfast --help` loads this module, and every agent does. A Typer option at the field would
# need no class of ours, but then the agents, which read the same dataclasses, would import the command line's library.
#
# Start-up is also why `Option` and `Declared` are neither frozen nor comparable: making the methods of a dataclass costs
# half a millisecond each, and the modules that declare options do without `from __future__ import annotations`, because
# compiling their annotations a second time cost 5 ms.

T = TypeVar("T")


@dataclass(kw_only=True, eq=False, repr=False)
class Option:
    """One option of a command."""

    help: str
    """One or two sentences for `--help`."""
    names: tuple[str, ...] = ()
    """The flags; by default one flag that is spelt like the field."""
    metavar: str | None = None
    """How the value is written, for example `MIN:MAX`; None: the name of its type."""
    group: str = ""
    """The heading in `--help`; by default that of the dataclass."""
    least: float | None = None
    """The smallest value that is allowed."""
    most: float | None = None
    """The largest value that is allowed."""
    unit: str = ""
    """The unit that a message about a wrong number names."""
    example: str = ""
    """A value that works, for messages."""
    choices: tuple[str, ...] = ()
    """All values that are allowed; empty: any."""
    pattern: str = ""
    """What a text has to match, for the schema of an object that has the field as well. The command line, which can say more of
    what is wrong, parses it."""
    default: str = ""
    """What holds when the option is not given, where the field's own default (None, or 0) does not show it."""
    usual: bool = False
    """Most people use it: the short help of a command with very many options shows it."""


@dataclass(kw_only=True, eq=False, repr=False)
class Argument(Option):
    """A value that is given by its position, without a flag."""


@dataclass(frozen=True)
class OptionGroup:
    """The heading under which `--help` lists the fields of a nested dataclass."""

    title: str


@dataclass(kw_only=True, eq=False, repr=False)
class Declared:
    """One option, with everything that the parser needs to know."""

    name: str
    """The field's name; no two options of a command have the same."""
    option: Option
    """What the field carries."""
    type: Any
    """The field's type, without `Annotated`."""
    default: Any
    """The field's default; `dataclasses.MISSING` if the option has to be given."""

    @property
    def flags(self) -> tuple[str, ...]:
        """All ways to write the flag, the usual one first."""
        return self.option.names or (f"--{self.name.replace('_', '-')}",)

    @property
    def flag(self) -> str:
        """The flag as messages write it."""
        return self.flags[0].partition("/")[0]


@functools.cache
def declared(options: Any, title: str = "") -> tuple[Declared, ...]:
    """All options of a dataclass, those of nested dataclasses too, in the order of the fields."""
    found: list[Declared] = []
    for field, kind, marks in _fields(options):
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        if option is not None:
            option = dataclasses.replace(option, group=option.group or title)
            found.append(Declared(name=field.name, option=option, type=kind, default=_default(field)))
        elif is_options(kind):
            group = next((mark.title for mark in marks if isinstance(mark, OptionGroup)), title)
            found += declared(kind, group)
    names = [option.name for option in found]
    # Parsed values come back as one flat mapping by name, so a second field of a name would take the first one's value.
    assert len(set(names)) == len(names), f"{options.__name__} declares an option twice: {names}"
    return tuple(found)


def build(options: Callable[..., T], parsed: Mapping[str, Any]) -> T:
    """The dataclass out of parsed values, nested dataclasses included. What is missing keeps its default."""
    values: dict[str, Any] = {}
    for field, kind, _ in _fields(options):
        if field.name in parsed:
            values[field.name] = parsed[field.name]
        elif is_options(kind):
            values[field.name] = build(kind, parsed)
    return options(**values)


def given(options: Any) -> dict[str, Any]:
    """The values that are not None, by name, those of nested dataclasses too."""
    found: dict[str, Any] = {}
    for field, kind, _ in _fields(type(options)):
        value = getattr(options, field.name)
        if is_options(kind):
            found |= given(value)
        elif value is not None:
            found[field.name] = value
    return found


def check(options: Any) -> None:
    """Compares every value with the limits that its field declares.

    Raises:
        UsageError: names the flag, the value and what is allowed.
    """
    # Not in `__post_init__`: a specification on disk was checked when its job started, and has to be readable for ever,
    # also after a limit was narrowed. Tests drive the core with times that are shorter than people may give.
    for field, kind, marks in _fields(type(options)):
        value = getattr(options, field.name)
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        if option is not None:
            _check(Declared(name=field.name, option=option, type=kind, default=None), value)
        elif is_options(kind):
            check(value)


def is_options(kind: Any) -> bool:
    """Whether a type is a dataclass, whose fields may be options."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _check(declared: Declared, value: Any) -> None:
    option, flag = declared.option, declared.flag
    if option.choices and value is not None and value not in option.choices:
        raise UsageError(
            f"{flag} must be {', '.join(option.choices[:-1])} or {option.choices[-1]} (got {value!r})"
        )
    if not isinstance(value, int | float):
        return
    low, high = option.least, option.most
    # Written so that NaN, which compares false with everything, is refused too.
    if (low is None or value >= low) and (high is None or value <= high):
        return
    unit = f" {option.unit}" if option.unit else ""
    if low is not None and high is not None:
        allowed = f"between {low:g} and {high:g}{unit}"
    else:
        allowed = f"at least {low:g}{unit}" if low is not None else f"at most {high:g}{unit}"
    example = f", for example {option.example}" if option.example else ""
    raise UsageError(f"{flag} must be {allowed} (got {value:g}){example}")


def _fields(options: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, tuple[Any, ...]]]:
    """Every field with its plain type and what `Annotated` adds to it."""
    hints = _hints(options)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, *marks = get_args(hint)
            yield field, kind, tuple(marks)
        else:
            yield field, hint, ()


@functools.cache
def _hints(options: Any) -> dict[str, Any]:
    # Not `get_type_hints`, which walks through every type although only the outermost `Annotated` matters here.
    return {
        name: hint
        for cls in reversed(options.__mro__)
        for name, hint in inspect.get_annotations(cls, eval_str=True).items()
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
