"""The places of nodes, from a file or from Slurm. Pure except for reading the file.

A file has a line for each group of hosts, `node[001-036] zone-a/block2/rack7`; or it is the output of `scontrol show topology`,
or Slurm's topology.conf.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.protocol.place import MOST_LEVELS, NodePlace, parse_place, shown

MOST_HOSTS = 100_000
"""Largest number of hosts in a file. A range with a digit too many would otherwise use up the machine's memory."""
MOST_BYTES = 16 << 20

_PART = re.compile(r"[^\[\],]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PAIR = re.compile(r"(\w+)=(\S*)")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SWITCH, _BLOCK = "switchname", "blockname"


def read_topology(path: Path) -> dict[str, NodePlace]:
    """The place of each host. Raises UsageError with the line and the field that is wrong."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"--topology {path}: larger than {MOST_BYTES >> 20} MiB; is it the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--topology {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--topology {path}: not a text file; write lines such as {_EXAMPLE!r}") from None
    try:
        found = parse_topology(text)
    except ValueError as error:
        raise UsageError(f"--topology {path}: {error}") from None
    if not found:
        raise UsageError(
            f"--topology {path}: the file does not contain any hosts; write lines such as {_EXAMPLE!r}"
        )
    return found


_EXAMPLE = "node[01-16] zone-a/rack7"


def parse_topology(text: str) -> dict[str, NodePlace]:
    """The same for the text of such a file. Raises ValueError."""
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line]
    if any(_is_slurm(line) for _, line in lines):
        return _of_slurm(lines)
    found: dict[str, NodePlace] = {}
    for number, line in lines:
        fields = line.split()
        if len(fields) != 2:
            raise ValueError(
                f"line {number}: {len(fields)} fields instead of two; write the hosts and their place, as in "
                f"{_EXAMPLE!r}"
            )
        try:
            place = parse_place(fields[1])
        except ValueError as error:
            raise ValueError(f"line {number}, field place: {error}") from None
        _give(found, number, fields[0], place)
    return found


def topology_text(places: Mapping[str, NodePlace], notes: Iterable[str] = ()) -> str:
    """The text of such a file, one line for each host. notes: lines of comment above. Hosts without a place are left out."""
    width = max(map(len, places), default=0)
    lines = [f"# {note}".rstrip() for note in notes]
    lines += [f"{host:{width}}  {shown(place)}" for host, place in places.items() if place]
    return "".join(f"{line}\n" for line in lines)


def place_of_variables(environment: Mapping[str, str]) -> NodePlace:
    """The place of this process's node according to Slurm's variables; empty: Slurm has no topology, or one that cannot be
    used."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # The last part is the node, whose name may contain dots. At a level at which no switch leads to the node the name is empty.
    names = address.split(".", len(pattern) - 1)[:-1]
    if len(names) != len(pattern) - 1:
        return ()
    try:
        return parse_place("/".join(n for n in names if n))
    except ValueError:
        # A site's names of switches cannot be changed here, and training works without places.
        return ()


def expand(hosts: str) -> Iterator[str]:
    """The names in a list of hosts in Slurm's notation, for example `n[1-3,7],gpu`. Raises ValueError."""
    for group in _groups(hosts):
        parts = _PART.findall(group)
        if "".join(parts) != group:
            raise ValueError(f"{group!r} has brackets that are not closed; write for example node[01-16]")
        yield from map("".join, itertools.product(*map(_names, parts)))


def _groups(hosts: str) -> Iterator[str]:
    """Split at commas that are not within brackets."""
    depth, group = 0, ""
    for c in hosts:
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            yield group
            group = ""
        else:
            group += c
    yield group


def _names(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    names: list[str] = []
    for text in part[1:-1].split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"{part} is not a range; write for example [01-16] or [1,3,7-9]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"{part}: {last} is before {first}")
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"{part}: more than {MOST_HOSTS} hosts")
        names += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return names


def _give(found: dict[str, NodePlace], number: int, hosts: str, place: NodePlace) -> None:
    try:
        # At most one more than is allowed, because the product of two ranges may not fit into any memory.
        names = list(itertools.islice(expand(hosts), MOST_HOSTS + 1))
    except ValueError as error:
        raise ValueError(f"line {number}, field hosts: {error}") from None
    if len(names) + len(found) > MOST_HOSTS:
        raise ValueError(f"line {number}, field hosts: more than {MOST_HOSTS} hosts")
    for name in names:
        if not _HOST.fullmatch(name):
            raise ValueError(f"line {number}, field hosts: {name!r} is not a valid name of a host")
        # A host may occur twice with the same place, because files are concatenated. With two places one of them is wrong, and it
        # is not known which.
        if found.setdefault(name, place) != place:
            raise ValueError(
                f"line {number}, field hosts: {name} has the place {shown(place)!r} here and {shown(found[name])!r} "
                "in an earlier line; each host can have only one place"
            )


# ---------------------------------------------------------------- Slurm's output


def _is_slurm(line: str) -> bool:
    return line.lower().startswith((f"{_SWITCH}=", f"{_BLOCK}="))


def _of_slurm(lines: list[tuple[int, str]]) -> dict[str, NodePlace]:
    """Parses switches (`SwitchName=s1 Nodes=n[1-4]`, `SwitchName=s0 Switches=s1`) or blocks (`BlockName=b1 Nodes=...`)."""
    above: dict[str, str] = {}
    leaves: list[tuple[int, str, str]] = []
    for number, line in lines:
        fields = {key.lower(): value for key, value in _PAIR.findall(line)}
        name = fields.get(_SWITCH) or fields.get(_BLOCK)
        # Lines with the sizes of blocks, or with aggregated blocks, whose parts have lines of their own.
        if not name:
            continue
        # A switch above others also lists the nodes of these, but a node belongs to the innermost switch.
        if fields.get("switches"):
            for below in _checked(number, "Switches", fields["switches"]):
                above.setdefault(below, name)
        elif fields.get("nodes"):
            leaves.append((number, name, fields["nodes"]))
    found: dict[str, NodePlace] = {}
    for number, name, hosts in leaves:
        path = [name]
        while (outer := above.get(path[-1])) is not None:
            # In a file that was written by hand a switch may be below itself. Without this check the loop would not end.
            if outer in path or len(path) == MOST_LEVELS:
                raise ValueError(
                    f"line {number}, field Switches: {name} is below itself, or below more than {MOST_LEVELS} others"
                )
            path.append(outer)
        try:
            place = parse_place("/".join(reversed(path)))
        except ValueError as error:
            raise ValueError(f"line {number}, field SwitchName: {error}") from None
        _give(found, number, hosts, place)
    return found


def _checked(number: int, field: str, names: str) -> list[str]:
    try:
        return list(itertools.islice(expand(names), MOST_HOSTS))
    except ValueError as error:
        raise ValueError(f"line {number}, field {field}: {error}") from None
