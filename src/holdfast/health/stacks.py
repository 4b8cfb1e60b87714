"""Who stands where: the stacks of all ranks in groups, and which group is the odd one. Pure.

When a job stands still, almost all ranks wait in the same collective, and those that do not are what it waits for. Stacks
of the same place differ in details (which wake-up loop of the standard library, whose installation path), so frames are
brought down to what matters first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.protocol import units

_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')

_STANDARD = re.compile(r"(^|/)lib/python3\.\d+/(?!(site|dist)-packages/)|^<frozen |^<string>$")
_INSTALLED = re.compile(
    r"/(site|dist)-packages/|(^|/)holdfast/(train|adapters|data|tensors|checkpoint|protocol|agent|observe)/"
)

_LOCATIONS: tuple[tuple[str, str, str, bool], ...] = (
    # The order matters: the first entry that fits an innermost frame wins, so a special place in a file
    # stands before the file as a whole. tests/health/test_stacks.py holds that our own places exist.
    ("torch/distributed/distributed_c10d.py", "", "", True),
    ("holdfast/train/control_channel.py", "_receive_one", "the words of the others", True),
    ("holdfast/train/control_channel.py", "", "connecting", True),
    ("holdfast/train/generation_group.py", "wait", "a reduction", True),
    ("holdfast/train/generation_group.py", "", "connecting", True),
    ("holdfast/train/link.py", "next_order", "the next generation", True),
    ("holdfast/train/link.py", "wait_broken", "the end of the generation", True),
    ("holdfast/train/peer_transfer.py", "", "fetching the state", False),
    ("torch/utils/data/", "", "a data loader", False),
    ("holdfast/data/", "", "loading data", False),
    ("holdfast/checkpoint/", "", "a checkpoint", False),
    ("torch/distributed/checkpoint/", "", "a checkpoint", False),
    ("torch/serialization.py", "", "a checkpoint", False),
    ("torch/cuda/", "synchronize", "waiting for the device", False),
    ("torch/autograd/graph.py", "_engine_run_backward", "the backward pass", False),
    ("torch/_dynamo/", "", "compiling", False),
    ("torch/_inductor/", "", "compiling", False),
)
"""Part of a path, a function ('': any), what people call it ('': the function itself), and whether it waits for others."""


LINES = 12
"""Groups that are told one by one: of more the smaller ones are in the files of the stacks."""
FRAMES = 6


@dataclass(frozen=True)
class Frame:
    """A place in a program."""

    file: str
    name: str
    line: int = 0
    """Of the script's own code only, where one function may hold several collectives; elsewhere 0."""


@dataclass(frozen=True)
class StackGroup:
    """Workers that stand at the same place."""

    location: str
    workers: tuple[str, ...]
    waits: bool
    """It is a place where a worker waits for others."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Odd:
    """The workers that are not where most are, and why they are the ones. None: nobody can be told from the others."""

    workers: tuple[str, ...]
    reason: str


def read(stack: str) -> tuple[Frame, ...]:
    """The frames of a stack as faulthandler writes it, innermost first, without the standard library's."""
    frames = []
    for text in stack.splitlines():
        found = _FRAME.match(text)
        if found is None:
            if text.strip():
                frames.append(Frame("", text.strip()))
            continue
        path = found["path"]
        # Threads wait in different loops of the standard library for the same thing; with these frames two
        # ranks at one place would be in two groups.
        if _STANDARD.search(path):
            continue
        # Line numbers of installed code are left out: a wake-up may come from several lines of one function.
        # The script's own lines are kept, because one function of it may contain several collectives and
        # which one a rank waits in is the question.
        own = not _INSTALLED.search(path)
        line = int(found["line"]) if own else 0
        frames.append(Frame(_short(path), found["name"], line))
    return tuple(frames)


def cluster(stacks: Mapping[str, str]) -> list[StackGroup]:
    """Groups of workers at the same place, largest first. stacks: per worker; those without one are left out."""
    by_frames: dict[tuple[Frame, ...], list[str]] = {}
    known: dict[str, tuple[Frame, ...]] = {}
    for worker, stack in stacks.items():
        # A rank whose stack nobody could take may be anywhere; it belongs to no group and is never the odd
        # one by this alone.
        if not stack:
            continue
        frames = known.get(stack)
        if frames is None:
            # Of thousands of ranks most have exactly the same text. Reading it once keeps a diagnosis of
            # 4,096 ranks well below a second.
            frames = known[stack] = read(stack)
        by_frames.setdefault(frames, []).append(worker)
    groups = []
    for frames, workers in by_frames.items():
        location, waits = _locate(frames)
        groups.append(StackGroup(location, tuple(workers), waits, frames))
    # Ties are broken by names, so that the same stacks give the same words on every run.
    return sorted(groups, key=lambda g: (-len(g.workers), g.location, g.workers))


def odd_ones(groups: list[StackGroup]) -> Odd | None:
    """Whom the others wait for, by their stacks alone.

    Where some wait in a collective and fewer do not, it is those. Where all wait, or none does, it is those that are
    elsewhere, if more than half are at one place. Who waits is not to blame for those who do not. Of two workers only one that waits for nobody can be told from the other.
    """
    total = sum(len(g.workers) for g in groups)
    busy = [g for g in groups if not g.waits]
    count = sum(len(g.workers) for g in busy)
    # Strictly fewer than half. When most ranks do not wait, the few that do are merely early, and a slow file
    # system would otherwise take half of the job's nodes.
    if busy and 0 < count < total and (2 * count < total or (total == 2 and count == 1)):
        return Odd(_workers(busy), f"the others wait for it: {_names(busy)}")
    most = len(groups[0].workers) if groups else 0
    # If most do not wait for anybody, those that wait are left out: who waits is not to blame for who does
    # not.
    others = [g for g in groups[1:] if groups[0].waits or not g.waits]
    # A majority is needed to say what is usual. With two workers there is none.
    if total >= 3 and others and 2 * most > total:
        return Odd(_workers(others), f"its stack differs from the others': {_names(others)}")
    return None


def describe(groups: Iterable[StackGroup], ranks: Mapping[str, int]) -> str:
    """`61 ranks in all_reduce, 2 in a data loader (ranks 3, 17), 1 in poll (rank 5)`; the largest group's are left out."""
    parts = []
    for number, group in enumerate(groups):
        count = len(group.workers)
        word = f"{count} rank{'s' if count > 1 else ''}" if not number else str(count)
        known = sorted(ranks[w] for w in group.workers if w in ranks)
        shown = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        who = f" (rank{'s' if len(known) > 1 else ''} {shown})" if known and (number or count == 1) else ""
        parts.append(f"{word} in {group.location}{who}")
    return ", ".join(parts)


def lines(groups: Iterable[StackGroup], ranks: Mapping[str, int]) -> list[str]:
    """Each group with its innermost frames: `ranks 0-2 wait in a reduction: wait (holdfast/train/generation_group.py) < ...`."""
    told = []
    for group in list(groups)[:LINES]:
        known = sorted(ranks[w] for w in group.workers if w in ranks)
        # A worker without a rank is none of the members, and is named.
        who = f"{'rank' if len(known) == 1 else 'ranks'} {units.ranks(known)}" if known else group.workers[0]
        does = (
            ("waits in" if len(known) < 2 else "wait in")
            if group.waits
            else ("is in" if len(known) < 2 else "are in")
        )
        frames = " < ".join(_place(frame) for frame in group.frames[:FRAMES])
        told.append(f"{who} {does} {group.location}: {frames}")
    return told


def _place(frame: Frame) -> str:
    return (
        f"{frame.name} ({frame.file}{f':{frame.line}' if frame.line else ''})" if frame.file else frame.name
    )


def _locate(frames: tuple[Frame, ...]) -> tuple[str, bool]:
    """What people call the innermost place that says something, and whether one waits for others there."""
    for frame in frames:
        for part, name, words, waits in _LOCATIONS:
            if part in frame.file and name in ("", frame.name):
                return words or frame.name, waits
        if frame.line:
            return f"{frame.name} ({frame.file}:{frame.line})", False
    return (frames[0].name if frames else "no Python frame"), False


def _short(path: str) -> str:
    """What is the same on all nodes: below the packages, else the last two parts."""
    inside = re.search(r"/(?:site|dist)-packages/(.*)", path) or re.search(r"/(holdfast/.*)", path)
    return inside[1] if inside else "/".join(path.rsplit("/", 2)[-2:])


def _workers(groups: list[StackGroup]) -> tuple[str, ...]:
    return tuple(w for g in groups for w in g.workers)


def _names(groups: list[StackGroup]) -> str:
    shown = [g.location for g in groups[:3]]
    return ", ".join(shown) + (f" and {len(groups) - 3} other places" if len(groups) > 3 else "")
