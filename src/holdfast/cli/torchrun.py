"""Accepts a command line of torchrun as it is.

Options that Holdfast does not need are left out with a note. Options that ask for something that Holdfast does not do are
refused, with what to do instead.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand

from holdfast.cli.job_file import expand
from holdfast.errors import UsageError

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
    "--log-dir",
    "--redirects",
    "-r",
    "--tee",
    "-t",
    "--local-ranks-filter",
)
"""Options with a value: addresses come with every generation, and every worker has a log of its own."""

_NEEDLESS_FLAGS = ("--standalone",)
_REFUSED = {
    "--no-python": "a worker is a warm Python process, so SCRIPT must be a Python file or, with -m, a module",
    "--run-path": "SCRIPT is always run as a path; leave it out",
}


@dataclass
class Pasted:
    """A command line without torchrun's own options."""

    kept: list[str]
    """The script and its arguments."""
    left_out: dict[str, str | None] = field(default_factory=dict)
    """Torchrun's options, with their values; None: one without a value."""


def take_out(args: Sequence[str], has_value: Callable[[str], bool]) -> Pasted:
    """Splits the options before SCRIPT. `has_value`: whether an option of Holdfast is followed by a value.

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
        # torchrun spells its options with dashes and with underscores; both are in use.
        written, equals, value = word.partition("=")
        name = written if not written.startswith("--") else written.replace("_", "-")
        if name in _REFUSED:
            raise UsageError(f"{written}: {_REFUSED[name]}")
        if name in _NEEDLESS_FLAGS:
            pasted.left_out[name] = None
        elif name in _NEEDLESS:
            pasted.left_out[name] = value if equals else next(rest, "")
        else:
            # An option of Holdfast keeps the word after it, if it takes a value: otherwise that value would
            # be read as SCRIPT, and everything behind it as arguments of the script.
            pasted.kept.append(word)
            if not equals and has_value(word):
                pasted.kept += [follows] if (follows := next(rest, None)) is not None else []
    _check(pasted.left_out, _line(pasted))
    return pasted


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
            f"--node-rank {rank}: one command starts all nodes; give this command once, without --node-rank; for "
            f"several machines: {line}"
        )
    for name in _ADDRESSES:
        address = left_out.get(name)
        if address and not _is_here(address):
            raise UsageError(
                f"{name} {address}: one command starts all nodes, so it cannot join another; leave {name} out to run them "
                f"on this machine; for several machines: {line}"
            )


def _is_here(address: str) -> bool:
    """Whether HOST[:PORT] names this machine."""
    import socket

    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    if host.startswith("127.") or host in ("localhost", "::1", "0.0.0.0"):
        return True
    return host.partition(".")[0] == socket.gethostname().partition(".")[0]


class RunCommand(TyperCommand):
    """`holdfast run`, which also takes a command line of torchrun."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the job file, leaves torchrun's options out, and says so."""
        args = expand(args, self.params)
        valued = frozenset(_valued(self.params))
        pasted = take_out(args, valued.__contains__)
        if pasted.left_out:
            names = ", ".join(pasted.left_out)
            sys.stderr.write(f"[holdfast] left out, because Holdfast needs no rendezvous: {names}\n")
        return super().parse_args(ctx, pasted.kept)


def _valued(params: Iterable[Any]) -> Iterable[str]:
    for param in params:
        if param.param_type_name == "option" and not param.is_flag:
            yield from param.opts
