"""Accepts a command line of torchrun as it is.

Options that Holdfast does not need are left out with a note. Options that ask for something that Holdfast does not do are
refused, with what to do instead.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from holdfast import plugins
from holdfast.cli.job_file import expand
from holdfast.errors import UsageError
from holdfast.protocol.options import Argument, Option

ALL_OPTIONS = "holdfast.help-all"
"""In a context's `meta`: the help that is printed has all options."""
_ADDRESSES = "--rdzv-endpoint", "--master-addr", "--local-addr"
_NEEDLESS = (
    *_ADDRESSES,
    "--rdzv-backend",
    "--rdzv-id",
    "--rdzv-conf",
    "--master-port",
    "--node-rank",
    "--monitor-interval",
    "--role",
    "--start-method",
    "--event-log-handler",
    "--log-dir",
    "--redirects",
    "-r",
    "--tee",
    "-t",
    "--local-ranks-filter",
    "--log-line-prefix-template",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--signals-to-handle",
    "--shutdown-timeout",
)
"""Options with a value. Addresses come with every generation, every worker has a log of its own, and the ledger has the events."""

_NEEDLESS_FLAGS = ("--standalone",)
_REFUSED = {
    "--no-python": (
        "workers are Python processes that were started in advance, so SCRIPT must be a Python file or, with -m, a "
        "module"
    ),
    "--run-path": "SCRIPT is always run as a path; remove the option",
    "--logs-specs": "every worker has its own log file, which `holdfast logs` shows; remove the option",
    "--numa-binding": (
        "Holdfast does not bind workers to processors; remove the option, and bind in the script by LOCAL_RANK "
        "(os.sched_setaffinity)"
    ),
    "--virtual-local-rank": (
        "every worker sees all devices of its node; remove the option, and let the script use device LOCAL_RANK"
    ),
    "--print-completion": "use `holdfast --show-completion`, which prints Holdfast's own",
}
_SHARED = ("--nnodes", "--nproc-per-node", "--max-restarts", "-m", "--module")
"""Options that Holdfast has, too."""

_FLAGS = ("--standalone", "--no-python", "--run-path", "--virtual-local-rank", "-m", "--module")
_LONG = sorted(name for name in (*_NEEDLESS, *_NEEDLESS_FLAGS, *_REFUSED, *_SHARED) if name.startswith("--"))
OPTIONS = frozenset((*_NEEDLESS, *_NEEDLESS_FLAGS, *_REFUSED, *_SHARED))
"""All of torchrun's, spelled with dashes."""

_NOT_IN_THE_ENVIRONMENT = ("--logs-specs", "--numa-binding", "--print-completion")
"""Options for which torchrun reads no variable."""


@dataclass
class Pasted:
    """A command line without torchrun's own options."""

    kept: list[str]
    """The script and its arguments."""
    left_out: dict[str, str | None] = field(default_factory=dict)
    """Torchrun's options, with their values; None: one without a value."""


def take_out(args: Sequence[str], options: Mapping[str, bool]) -> Pasted:
    """Splits the options before SCRIPT.

    options: Holdfast's, by their names; whether a value follows.

    Raises:
        UsageError: an option that cannot be left out.
    """
    pasted = Pasted([])
    rest = iter(args)
    for word in rest:
        if word == "--" or not word.startswith("-"):
            # SCRIPT: everything from here on is its own. A script may have an option that is spelled like
            # one of torchrun's, and it has to get it.
            pasted.kept += [word, *rest]
            break
        written, equals, value = word.partition("=")
        if word[:2] in ("-r", "-t") and written not in options and len(word) > 2:
            written, equals, value = word[:2], "=", word[2:].removeprefix("=")
        name = _name(written, options)
        if name in _REFUSED:
            raise UsageError(f"{written}: {_REFUSED[name]}")
        if name in _NEEDLESS_FLAGS:
            pasted.left_out[name] = None
        elif name in _NEEDLESS:
            pasted.left_out[name] = value if equals else next(rest, "")
        else:
            # An option of Holdfast keeps the word after it, if it takes a value: otherwise that value would
            # be read as SCRIPT, and everything behind it as arguments of the script.
            pasted.kept.append(f"{name}{equals}{value}")
            if not equals and options.get(name):
                pasted.kept += [follows] if (follows := next(rest, None)) is not None else []
    _check(pasted.left_out, _line(pasted))
    return pasted


def _name(written: str, options: Mapping[str, bool]) -> str:
    """An option's whole name. torchrun spells them with dashes and with underscores, and takes the beginning of a name for
    the name where it is the only one; an option of Holdfast is known by its whole name alone."""
    if written in options or not written.startswith("--"):
        return written
    name = written.replace("_", "-")
    if name in options or name in OPTIONS:
        return name
    found = [each for each in _LONG if each.startswith(name)]
    if len(found) > 1:
        raise UsageError(f"{written} is ambiguous: it may mean {' or '.join(found)}; write the full option")
    return found[0] if found else written


def of_environment(args: Sequence[str], options: Mapping[str, bool], environ: Mapping[str, str]) -> list[str]:
    """What torchrun would read from its variables `PET_*`, as words of a command line: those of options that the command line
    does not have.

    Raises:
        UsageError: the variables are those of one of several nodes.
    """
    given = _given(args, options)
    words = []
    for name in (each for each in _LONG if each not in _NOT_IN_THE_ENVIRONMENT):
        variable = "PET_" + name.strip("-").replace("-", "_").upper()
        value = environ.get(variable, "")
        if not value or name in given:
            continue
        if name == "--nnodes" and value.rpartition(":")[2] not in ("0", "1"):
            # Each of these nodes would run a job of its own, with so many nodes in it.
            raise UsageError(
                f"{variable}={value}: this is the environment of one of several torchrun nodes, but one `holdfast "
                "run` starts all nodes; on Kubernetes use `--engine kubernetes` instead of a TrainJob, or pass "
                "--nnodes to run all nodes here"
            )
        if name not in _FLAGS:
            words.append(f"{name}={value}")
        elif value != "0":
            words.append(name)
    return words


def _given(args: Sequence[str], options: Mapping[str, bool]) -> set[str]:
    """The whole names of the options before SCRIPT."""
    found = set()
    rest = iter(args)
    for word in rest:
        if word == "--" or not word.startswith("-"):
            break
        written, equals, _ = word.partition("=")
        name = _name(written, options)
        found.add("--module" if name == "-m" else name)
        if not equals and (options.get(name) or (name in OPTIONS and name not in _FLAGS)):
            next(rest, None)
    return found


def _line(pasted: Pasted) -> str:
    """What to write instead, on one machine and once."""
    first = next((a for name in _ADDRESSES[:2] if (a := pasted.left_out.get(name))), None)
    host = (first or "HOST0").partition(":")[0]
    return f"holdfast run --engine ssh --hosts {host},HOST1,... {shlex.join(pasted.kept)}"


def _check(left_out: dict[str, str | None], line: str) -> None:
    rank = left_out.get("--node-rank")
    # torchrun wants one command on each node, and of those only one may start the job. Rank 0 is taken for
    # that one; each further one would start a job of its own, which trains the same steps again.
    if rank not in (None, "0"):
        raise UsageError(
            f"--node-rank {rank}: one `holdfast run` starts all nodes; run this command once, without --node-rank. "
            f"For several machines: {line}"
        )
    for name in _ADDRESSES:
        address = left_out.get(name)
        if address and not _is_here(address):
            raise UsageError(
                f"{name} {address}: one `holdfast run` starts all nodes and cannot join another command; remove "
                f"{name} to run all nodes on this machine. For several machines: {line}"
            )


def _is_here(address: str) -> bool:
    """Whether HOST[:PORT] names this machine."""
    import socket

    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    if host.startswith("127.") or host in ("localhost", "::1", "0.0.0.0"):
        return True
    return host.partition(".")[0] == socket.gethostname().partition(".")[0]


class RunCommand(TyperCommand):
    """`holdfast run`, which also takes a command line of torchrun, and the options of other packages' engines.

    Attributes:
        known: what its options are declared with, by their names.
        with_engine: the same command with the options of an engine of another package, too.
    """

    known: Mapping[str, Option] = {}
    with_engine: Callable[[str], RunCommand]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The options that most people use, and with `--help-all` all of them."""
        if ctx.meta.get(ALL_OPTIONS):
            super().format_help(ctx, formatter)
            return
        rare: list[Any] = [
            p
            for p in self.params
            if (option := self.known.get(p.name)) and not (option.usual or isinstance(option, Argument))
        ]
        for param in rare:
            param.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for param in rare:
                param.hidden = False
        sys.stdout.write(
            f" {len(rare)} more options, for health, tuning and each engine: {ctx.command_path} --help-all\n\n"
        )

    def get_help_option(self, ctx: Any) -> Any:
        """Without a type: it takes no value."""
        if (option := super().get_help_option(ctx)) is not None:
            option.metavar = ""
        return option

    def _with_options_of(self, engine: str) -> Sequence[Any]:
        """The parameters, with those of an engine of another package where this is one."""
        if engine and engine not in plugins.ours(plugins.ENGINES) and plugins.find(plugins.ENGINES, engine):
            wider = self.with_engine(engine)
            self.params, self.callback, self.known = wider.params, wider.callback, wider.known
        return self.params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the job file and torchrun's variables, leaves torchrun's options out, and says so."""
        args = expand(args, self._with_options_of(_named_engine(args)), self._with_options_of)
        options = dict(_options(self.params))
        if found := of_environment(args, options, os.environ):
            sys.stderr.write(f"[holdfast] from torchrun's variables PET_*: {shlex.join(found)}\n")
        pasted = take_out([*found, *args], options)
        if pasted.left_out:
            names = ", ".join(pasted.left_out)
            sys.stderr.write(f"[holdfast] ignored, because Holdfast does not need a rendezvous: {names}\n")
        rest = super().parse_args(ctx, pasted.kept)
        script, given = str(ctx.params.get("script") or ""), ctx.params.get("args") or ()
        if behind := misplaced(script, list(map(str, given)), options):
            sys.stderr.write(
                f"[holdfast] {', '.join(behind)} after {script} is passed to the script, which does not mention it; "
                "options of `holdfast run` must come before the script\n"
            )
        return rest


def _named_engine(args: Sequence[str]) -> str:
    """The value of `--engine`, or nothing."""
    # Before the options are parsed, because they depend on it. A word of the script's own that looks the same does no harm:
    # the command knows some more options then.
    for word, follows in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == "--engine":
            return value if equals else follows
    return ""


def misplaced(script: str, args: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Options of `holdfast run` among a script's arguments of which the script's text has no word; none where it cannot be read."""
    ours = dict.fromkeys(
        name for arg in args if (name := arg.partition("=")[0]) in options and name.startswith("--")
    )
    if not ours:
        return []
    try:
        text = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [name for name in ours if not re.search(rf"\b{name[2:].replace('-', '[-_]')}\b", text)]


def _options(params: Iterable[Any]) -> Iterable[tuple[str, bool]]:
    """Every name of an option, and whether a value follows."""
    for param in params:
        if param.param_type_name == "option":
            yield from ((name, not param.is_flag) for name in (*param.opts, *param.secondary_opts))
