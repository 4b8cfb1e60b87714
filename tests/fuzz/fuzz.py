"""Changes kept inputs at random and reads them, in a process of its own: `python tests/fuzz/fuzz.py --seconds 60`.

Every input has to end as its target declares, within 512 MiB more than the process has after its imports, and within a second
of processor time. Prints one line for each target, and the traceback of each kind of failure once; exits with 1 where there
was one. With `--keep` the smallest input of each failure is written into the corpus.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import msgspec
from hypothesis import strategies as st
from targets import TARGETS, Target, corpus

MEMORY_BYTES = 512 << 20
INPUT_S = 1.0
BATCH = 200

WORDS = [
    *(
        b"[" * 5000,
        b'{"a":' * 3000,
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
        b"(" * 300,
        b"-" * 9000,
    ),
    *(
        b"\xff",
        b"\xed\xa0\x80",
        b"\\ud800",
        b"\0",
        b"\n",
        b'"',
        b"null",
        b"true",
        b"NaN",
        b"1e999",
        b"-1",
        b"0",
        b"{}",
        b"[]",
    ),
    *(b"9223372036854775807", b"-9223372036854775809", b"18446744073709551616", b"30000000", b"9" * 5000),
    *(
        b"a." * 2000 + b"b=1",
        b"&a [*a, *a]",
        b"!!python/object:os.system",
        b"{18446744073709551616}",
        b"(?P<",
        b"{0.__class__}",
    ),
]
VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        30_000_000,
        2**31,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        0.5,
        1e308,
        "",
        "a",
        "é" * 99,
        "1" * 5000,
    ),
    *(
        [],
        {},
        [[]],
        {"": None},
        ["d", 3],
        ["T", 9],
        ["T", -1],
        ["b", 3],
        ["w", [{}, []]],
        ["p", [{}, 1]],
        {"a": {"a": {}}},
    ),
    *(b"", b"abc", "0001-01-01T00:00:00+23:59", "9999-12-31", [1] * 1000),
]

change = st.tuples(
    st.sampled_from(
        [
            "flip",
            "set",
            "cut",
            "insert",
            "repeat",
            "splice",
            "end",
            "leaf",
            "leaf",
            "leaf",
            "drop",
            "copy",
            "deep",
        ]
    ),
    st.integers(0, 1 << 16),
    st.integers(0, 1 << 8),
    st.sampled_from(range(max(len(WORDS), len(VALUES)))),
)


def changed(data: bytes, changes: list[tuple[str, int, int, int]], others: list[bytes]) -> bytes:
    for how, at, count, which in changes:
        place = at % (len(data) + 1)
        match how:
            case "flip" if data:
                place %= len(data)
                data = data[:place] + bytes([data[place] ^ 1 << count % 8]) + data[place + 1 :]
            case "set" if data:
                data = data[:place] + bytes([count % 256]) + data[place + 1 :]
            case "cut":
                data = data[:place] + data[place + count :]
            case "insert":
                data = data[:place] + WORDS[which % len(WORDS)] + data[place:]
            case "repeat":
                data = data[:place] + data[place : place + count] * (which + 1) + data[place:]
            case "splice":
                other = others[which % len(others)]
                data = data[:place] + other[count % (len(other) + 1) :]
            case "end":
                data = data[:place]
            case _:
                data = restructured(data, how, at, VALUES[which % len(VALUES)])
    return data[: 1 << 20]


def restructured(data: bytes, how: str, nth: int, value: Any) -> bytes:
    """With one value of a document replaced, left out, doubled, or within many lists; as it is where it is no document."""
    for kind in (msgspec.json, msgspec.msgpack):
        try:
            places: list[tuple[Any, Any]] = []
            whole = {"": kind.decode(data)}
            open_: list[Any] = [whole]
            for holder in open_:
                keys = range(len(holder)) if isinstance(holder, list) else list(holder)
                places += [(holder, key) for key in keys]
                open_ += [holder[key] for key in keys if isinstance(holder[key], list | dict)]
            holder, key = places[nth % len(places)]
            if how == "drop" and holder is not whole:
                del holder[key]
            elif how == "copy" and isinstance(holder, list):
                holder.append(holder[key])
            elif how == "deep":
                for _ in range(nth % 400):
                    value = [value]
                holder[key] = value
            else:
                holder[key] = value
            return kind.encode(whole[""])
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
            continue
    return data


class TooSlow(BaseException):
    """A reader took more processor time than an input may take."""


def late(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {INPUT_S} s")


class Failed(Exception):
    """An input ended in another way than its target declares."""


def attempt(target: Target, data: bytes, known: set[str]) -> None:
    """known: failures that were told, which are passed over."""
    signal.setitimer(signal.ITIMER_PROF, INPUT_S)
    try:
        target.read(data)
    except target.may_raise:
        pass
    except (Exception, TooSlow) as error:
        where = (
            "slow"
            if isinstance(error, TooSlow)
            else str(traceback.extract_tb(error.__traceback__)[-1].lineno)
        )
        kind = f"{type(error).__name__}-{where}"
        if kind not in known:
            raise Failed(kind) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def fuzz(name: str, seed: int, count: int, known: set[str]) -> tuple[int, tuple[str, bytes, str] | None]:
    """Tries some inputs; how many, and the first failure: its kind, its smallest input, its traceback."""
    target, kept = TARGETS[name], [data for _, data in corpus(name)]
    tried, last = 0, b""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.given(st.sampled_from(kept), st.lists(change, min_size=1, max_size=5))
    def run(data: bytes, changes: list[tuple[str, int, int, int]]) -> None:
        nonlocal tried, last
        tried += 1
        data = changed(data, changes, kept)
        try:
            attempt(target, data, known)
        except Failed:
            last = data
            raise

    try:
        run()
    except Failed as failure:
        return tried, (str(failure), last, "".join(traceback.format_exception(failure.__cause__ or failure)))
    return tried, None


def bounded() -> None:
    """Memory from now on, and processor time of each input."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--inputs", type=int, default=0, help="for each target, where no seconds are given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(TARGETS))
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    found: list[tuple[str, str]] = []
    known: dict[str, set[str]] = {name: set() for name in given.only}
    tried: Counter[str] = Counter()

    def failed(name: str, kind: str, data: bytes, told: str) -> None:
        known[name].add(kind)
        found.append((name, kind))
        print(f"FAILED {name} {kind}: {data[:200]!r} ({len(data)} bytes)\n{told[-3000:]}", flush=True)
        if given.keep:
            folder = Path(__file__).parent / "corpus" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / kind).write_bytes(data)

    inputs = {name: list(corpus(name)) for name in given.only}  # made before memory is bounded
    bounded()
    for name in given.only:
        for kept, data in inputs[name]:
            tried[name] += 1
            try:
                attempt(TARGETS[name], data, known[name])
            except Failed as failure:
                failed(name, f"{failure}", data, f"the kept input {kept}: {failure.__cause__!r}")
    began, seed = time.monotonic(), given.seed << 20
    while given.inputs or time.monotonic() - began < given.seconds:
        for name in given.only:
            seed += 1
            count, failure = fuzz(name, seed, given.inputs or BATCH, known[name])
            tried[name] += count
            if failure is not None:
                failed(name, *failure)
        if given.inputs:
            break
    for name, count in tried.items():
        print(f"{name}: {count} inputs")
    print(f"{sum(tried.values())} inputs in {time.monotonic() - began:.0f} s, {len(found)} kinds of failures")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
