"""`holdfast check --write-topology`: where nodes stand, out of what every pair of them measured."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.common import Format, width_of, write_as

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.health.checks.pairs import Measured, Pair
    from holdfast.health.checks.places import Between
    from holdfast.protocol.health import PairFigures
    from holdfast.protocol.place import NodePlace

    Places = dict[str, NodePlace]

MARK = "Measured by holdfast check --write-topology"
"""The first line of a file that this command has written, and may write again."""


def refuse_file(path: Path) -> None:
    """Before anything is measured, because that takes minutes. Raises UsageError if the file cannot be written, or is
    somebody's own."""
    from holdfast.errors import UsageError

    if not path.resolve().parent.is_dir():
        raise UsageError(f"--write-topology {path}: the folder {path.resolve().parent} does not exist")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--write-topology {path}: {error.strerror}") from None
    # What a person wrote knows of switches that no pair can see, and it would be lost without a word.
    if first and not first.startswith(f"# {MARK}"):
        raise UsageError(
            f"--write-topology {path}: the file exists and was not written by this command; choose another file"
        )


def write_places(
    figures: Sequence[PairFigures], seconds: float, path: Path, json: Path | None, output: Format | None
) -> bool:
    """Writes the file and shows what was measured. seconds: as given for each pair, 0: as usual. json: also a file for
    programs; `-`: standard output, and nothing else there. Returns whether every node could be placed."""
    import msgspec

    from holdfast.engines.topology import topology_text
    from holdfast.health.checks.check import SECONDS
    from holdfast.health.checks.pairs import Measured
    from holdfast.health.checks.places import between, domains

    measured = {p.nodes: Measured(p.bytes_per_s, p.latency_s, p.why, p.damaged) for p in figures}
    places, utc = domains(measured), datetime.now(UTC).isoformat(timespec="seconds")
    rows = between(places, measured)
    left_out = _left_out(places, measured)
    divided = any(places.values())
    if divided:
        path.write_text(
            topology_text(places, _notes(utc, seconds or SECONDS, rows, left_out)), encoding="utf-8"
        )
    report: dict[str, Any] = {
        "utc": utc,
        "file": str(path) if divided else None,
        "places": {node: "/".join(place) for node, place in places.items()},
        "left_out": left_out,
        "between": rows,
        "pairs": figures,
    }
    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"
        if str(json) == "-":
            sys.stdout.write(text)
            return not left_out
        json.write_text(text, encoding="utf-8")
    if not write_as(report, False, output):
        _show(rows, left_out, path, divided, output)
    return bool(places) and not left_out


def _left_out(places: Places, measured: Mapping[Pair, Measured]) -> dict[str, str]:
    """Node to why it has no place."""
    reasons: dict[str, str] = {}
    for pair, m in measured.items():
        told = m.why or (
            "the bytes that came back differ from those sent"
            if m.damaged
            else "too few of the other nodes could be measured against it"
        )
        reasons |= {n: told for n in pair if n not in places and n not in reasons}
    return reasons


def _notes(utc: str, seconds: float, rows: Sequence[Between], left_out: Mapping[str, str]) -> list[str]:
    from holdfast.protocol import units

    count = len(rows[0].nodes)
    notes = [
        f"{MARK} at {utc}: {units.plural(sum(r.pairs for r in rows), 'pair')} of {units.plural(count, 'node')},",
        f"one TCP connection each, {seconds:g} s. d1, d2 and so on are parts of the place that is written before them.",
        "Rename them as you like, and remove the first line: while it is there, a later call overwrites this file.",
        *(f"between {what}: {latency}, {rate}" for what, _, _, latency, rate in _cells(rows)),
    ]
    return [*notes, *(f"not placed: {node}: {why}" for node, why in left_out.items())]


def _cells(rows: Sequence[Between]) -> list[tuple[str, str, str, str, str]]:
    """Place, nodes, pairs, latency and bandwidth, in words."""
    from holdfast.observe.checks import figure
    from holdfast.protocol import units

    places = {r.place for r in rows}
    cells = []
    for r in rows:
        parts = sum(p[:-1] == r.place for p in places if p)
        name = "/".join(r.place) or "all nodes"
        cells.append(
            (
                f"the {parts} parts of {name}" if parts else f"the nodes of {name}" if r.place else name,
                units.plural(len(r.nodes), "node") if parts else ", ".join(r.nodes),
                units.count(r.pairs),
                figure(r.latency_s, "s") if r.latency_s is not None else units.UNKNOWN,
                figure(r.bytes_per_s / 1e9, "GB/s") if r.bytes_per_s is not None else units.UNKNOWN,
            )
        )
    return cells


def _show(
    rows: Sequence[Between], left_out: Mapping[str, str], path: Path, divided: bool, output: Format | None
) -> None:
    from holdfast.observe.tables import WIDTH, print_table

    cells = [
        (latency, rate, pairs, f"{'  ' * len(r.place)}{what}", nodes)
        for r, (what, nodes, pairs, latency, rate) in zip(rows, _cells(rows), strict=True)
    ]
    if cells:
        heads = ("latency", "bandwidth", "pairs", "between", "nodes")
        print_table(sys.stdout, heads, cells, right=3, width=width_of(output, WIDTH))
    for node, why in left_out.items():
        sys.stdout.write(f"{node} was not placed: {why}\n")
    if divided:
        sys.stdout.write(f"written: {path}, for `holdfast run --topology {path}`\n")
        return
    # An older file may say otherwise, and whoever reads on would take it for the answer.
    older = f"; {path} was written by an earlier call" if path.exists() else ""
    found = (
        "all nodes are in one place: no difference between pairs was measured"
        if len(rows[0].nodes)
        else "no pair of nodes could be measured"
    )
    sys.stdout.write(f"{found}; no file was written{older}\n")
