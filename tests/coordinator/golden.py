"""What the core decides, for thousands of random schedules, as one digest each: a restructuring must change none.

    make golden                                                compares with golden.txt (15 minutes of a processor)
    python tests/coordinator/golden.py record FILE [COUNT]     records what this commit decides
    python tests/coordinator/golden.py compare FILE [COUNT]    COUNT: only so many of each kind
    python tests/coordinator/golden.py add FILE                records the schedules that have no record
    python tests/coordinator/golden.py show SEED               every event and action of one schedule, for a diff

A digest is over every event and every action with its time. Words for people (PROSE) do not count, nor do fields that hold
nothing, so a message may gain one. Where a name changes, the digests are recorded anew, and the commit before it is compared.
"""

from __future__ import annotations

import enum
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.kernel.events import NodeSays, Record, Tick, WorkersSay

PLAIN, SHARDED, PLACED = 4_000, 1_000, 40
"""Schedules of each kind that are recorded. About one plain one in eight is at level 0."""
SHARDED_FROM, PLACED_FROM = 10_000_000, 20_000_000
HASH_SEED = "0"
"""Sets of strings are walked in an order that depends on it, in the simulated cluster."""

PROSE = frozenset(
    [
        "advice",
        "blames",
        "cause",
        "causes",
        "checks",
        "detail",
        "error",
        "evidence",
        "log",
        "path",
        "reason",
        "reasons",
        "said",
        "stacks",
        "tail",
        "text",
        "traceback",
        "url",
        "verdict",
        "was",
        "what",
        "where",
        "why",
        "words",
    ]
)
"""Fields that hold words for people. What they say may change; what is decided may not."""


def run(seed: int, lines: list[str] | None = None) -> str:
    """The digest of a schedule. lines: gets every event and action."""
    from simcluster.checks import Checks, Violation
    from simcluster.run import run_seed

    digest = hashlib.blake2b(digest_size=8)
    heard = Checks.handled

    def handled(self: Any, event: Any, actions: list[Any], core: Any) -> None:
        if isinstance(event, Tick) and not actions:
            heard(self, event, actions, core)  # how often somebody looks at the clock decides nothing
            return
        # Workers' reports are recorded one by one, however many of them are one event.
        news = [NodeSays(event.node, r) for r in event.reports] if isinstance(event, WorkersSay) else [event]
        for way, what in (*(("<", e) for e in news), *((">", a) for a in actions)):
            line = f"{core.now:.6f} {way} {canonical(what)!r}"
            digest.update(line.encode())
            if lines is not None:
                lines.append(line)
        heard(self, event, actions, core)

    Checks.handled = handled  # type: ignore[method-assign]
    try:
        run_seed(seed)
        end = "ok"
    except Violation:
        end = "violation"
    finally:
        Checks.handled = heard  # type: ignore[method-assign]
    return f"{seed} {digest.hexdigest()} {end}"


def canonical(value: Any) -> Any:
    """A value as plain lists and words, under the recorded names, without what does not count."""
    if isinstance(value, Record):
        return ["Record", *canonical({"kind": value.kind, "fields": value.fields})]
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return [type(value).__name__, *canonical(fields)]
    if isinstance(value, dict):
        known = {str(k): v for k, v in value.items()}
        prose = {k for k, v in known.items() if k in PROSE or (k == "message" and isinstance(v, str))}
        kept = [(k, canonical(v)) for k, v in sorted(known.items()) if k not in prose]
        return [(k, v) for k, v in kept if v not in (None, "", 0, [])]
    if isinstance(value, set | frozenset):
        return sorted(map(canonical, value), key=repr)
    if isinstance(value, list | tuple):
        return [canonical(x) for x in value]
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, float):
        return round(value, 6)
    return value


def seeds(share: int | None = None) -> list[int]:
    """Those that are recorded; share: only so many of each kind, of those with places a third."""
    plain, sharded = range(min(PLAIN, share or PLAIN)), range(min(SHARDED, share or SHARDED))
    # Each takes as long as three of the others: more nodes, and racks that are lost as one.
    placed = range(min(PLACED, -(-share // 3) if share else PLACED))
    return [*plain, *(SHARDED_FROM + s for s in sharded), *(PLACED_FROM + s for s in placed)]


def ran(wanted: list[int]) -> Iterator[str]:
    """The digests of these schedules, in their order; says how far it is."""
    told = began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool() as pool:
        for count, line in enumerate(pool.imap(run, wanted, chunksize=8), 1):
            yield line
            if (now := time.monotonic()) - told > 2:
                told, left = now, (now - began) / count * (len(wanted) - count)
                print(f"\r{count} of {len(wanted)} schedules, {left:.0f} s left ", end="", file=sys.stderr)
    print(file=sys.stderr)


def recorded(file: Path) -> dict[int, str]:
    """The digests that a file has, by seed."""
    return {int(line.split()[0]): line for line in file.read_text().splitlines() if line}


def compare(file: Path, wanted: list[int]) -> list[str]:
    """Schedules whose decisions are not those that were recorded."""
    known = recorded(file)
    return [line for line in ran([s for s in wanted if s in known]) if known[int(line.split()[0])] != line]


def main(arguments: list[str]) -> int:
    """The command."""
    match arguments:
        case ["show", seed]:
            lines: list[str] = []
            end = run(int(seed), lines)
            print(*lines, end, sep="\n")
        case ["record", file, *count]:
            Path(file).write_text("".join(f"{line}\n" for line in ran(seeds(*map(int, count)))))
        case ["add", file]:
            known = Path(file).read_text().splitlines()
            new = ran([seed for seed in seeds() if seed not in recorded(Path(file))])
            lines = sorted([*known, *new], key=lambda line: int(line.split()[0]))
            Path(file).write_text("".join(f"{line}\n" for line in lines))
        case ["compare", file, *count]:
            wanted = seeds(*map(int, count))
            wrong = compare(Path(file), wanted)
            for line in wrong[:20]:
                print(f"decided otherwise: seed {line.split()[0]}")
            known = recorded(Path(file)).keys()
            missing = sum(seed not in known for seed in wanted)
            without = f"; {missing} others have no record" if missing else ""
            print(f"{len(wrong)} of {len(wanted) - missing} schedules are decided otherwise{without}")
            return bool(wrong)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": HASH_SEED})
    sys.exit(main(sys.argv[1:]))
