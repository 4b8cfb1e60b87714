"""Groups the stacks of all ranks by where they are, and finds the group that the others wait for. Pure.

When a job stands still, almost all ranks wait in the same collective, and those that do not are the ones it waits for.
Stacks of the same place differ in details (which wake-up loop of the standard library, whose installation path), so
frames are first reduced to the essential ones.
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
    ("holdfast/train/tree_channel.py", "_read", "the words of the others", True),
    ("holdfast/train/tree_channel.py", "", "connecting", True),
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
"""Part of a path, a function ('': any), its description for people ('': the function's name), and whether a worker
waits for others there."""


LINES = 12
"""Groups that are listed one by one; if there are more, the smaller ones are only in the files of the stacks."""
FRAMES = 6


@dataclass(frozen=True)
class Frame:
    """A place in a program."""

    file: str
    name: str
    line: int = 0
    """Only for the script's own code, where one function may contain several collectives; elsewhere 0."""


@dataclass(frozen=True)
class StackGroup:
    """Workers whose stacks are at the same place."""

    location: str
    workers: tuple[str, ...]
    waits: bool
    """Whether workers wait for others at this place."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Odd:
    """The workers that the others wait for, and the reason. None in its place: no worker can be singled out."""

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
        # A rank without a stack may be anywhere; it belongs to no group, and is never the odd one for this
        # alone.
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
    # Ties are broken by names, so that the same stacks always give the same text.
    return sorted(groups, key=lambda g: (-len(g.workers), g.location, g.workers))


def odd_ones(groups: list[StackGroup]) -> Odd | None:
    """Finds the workers that the others wait for, from their stacks alone.

    If some workers wait in a collective and fewer do not, it is those that do not. If all wait, or none does, it is the
    workers that are elsewhere, provided that more than half are at one place. If the
    largest group does not wait, waiting workers are not suspected. Of two workers, only one that does not wait can be
    singled out.
    """
    total = sum(len(g.workers) for g in groups)
    busy = [g for g in groups if not g.waits]
    count = sum(len(g.workers) for g in busy)
    # Strictly fewer than half. When most ranks do not wait, the few that do are merely early, and a slow file
    # system would otherwise take half of the job's nodes.
    if busy and 0 < count < total and (2 * count < total or (total == 2 and count == 1)):
        return Odd(_workers(busy), f"the others wait for it: {_names(busy)}")
    most = len(groups[0].workers) if groups else 0
    # If the largest group does not wait for others, groups that do wait are left out: a waiting worker is not
    # the cause of what the others do.
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
        counted = f"{count} rank{'s' if count > 1 else ''}" if not number else str(count)
        known = sorted(ranks[w] for w in group.workers if w in ranks)
        shown = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        who = f" (rank{'s' if len(known) > 1 else ''} {shown})" if known and (number or count == 1) else ""
        parts.append(f"{counted} in {group.location}{who}")
    return ", ".join(parts)


def lines(groups: Iterable[StackGroup], ranks: Mapping[str, int]) -> list[str]:
    """Each group with its innermost frames: `ranks 0-2 wait in a reduction: wait (holdfast/train/generation_group.py) < ...`."""
    made = []
    for group in list(groups)[:LINES]:
        known = sorted(ranks[w] for w in group.workers if w in ranks)
        # A worker without a rank is not a member of the generation, and is named instead.
        who = f"{'rank' if len(known) == 1 else 'ranks'} {units.ranks(known)}" if known else group.workers[0]
        does = (
            ("waits in" if len(known) < 2 else "wait in")
            if group.waits
            else ("is in" if len(known) < 2 else "are in")
        )
        frames = " < ".join(_place(frame) for frame in group.frames[:FRAMES])
        made.append(f"{who} {does} {group.location}: {frames}")
    return made


def _place(frame: Frame) -> str:
    return (
        f"{frame.name} ({frame.file}{f':{frame.line}' if frame.line else ''})" if frame.file else frame.name
    )


def _locate(frames: tuple[Frame, ...]) -> tuple[str, bool]:
    """A description for people of the innermost known place, and whether workers wait for others there."""
    for frame in frames:
        for part, name, description, waits in _LOCATIONS:
            if part in frame.file and name in ("", frame.name):
                return description or frame.name, waits
        if frame.line:
            return f"{frame.name} ({frame.file}:{frame.line})", False
    return (frames[0].name if frames else "no Python frame"), False


def _short(path: str) -> str:
    """The part of a path that is the same on all nodes: below the packages, else the last two components."""
    inside = re.search(r"/(?:site|dist)-packages/(.*)", path) or re.search(r"/(holdfast/.*)", path)
    return inside[1] if inside else "/".join(path.rsplit("/", 2)[-2:])


def _workers(groups: list[StackGroup]) -> tuple[str, ...]:
    return tuple(w for g in groups for w in g.workers)


def _names(groups: list[StackGroup]) -> str:
    shown = [g.location for g in groups[:3]]
    return ", ".join(shown) + (f" and {len(groups) - 3} other places" if len(groups) > 3 else "")
