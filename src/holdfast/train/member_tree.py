"""The tree of the members of a generation, and what they say in a round over it. Pure.

A round goes once up the tree and once down: each member sends its parent one word about itself and all members below it, and the
root sends back one word about all, which everybody passes on. So a member of a large job reads and sends a few words, whatever
the size. `tree_channel` does it over connections; docs/architecture/step.md argues why a vote is safe.

Sums travel without any rounding, as a few numbers whose sum is that of all terms below (Shewchuk, Adaptive Precision
Floating-Point Arithmetic, 1997, section 2.4), and `math.fsum` rounds once, at the root. So a sum has the bits that `math.fsum`
gives for the terms themselves, whatever the shape of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from fractions import Fraction

import msgspec

FAN_OUT = 8
"""Leaders that one leader is the parent of. Fewer make more levels, and with more a parent takes longer to read and to send.
For 512 to 4,096 nodes 8 is near the best where a hop takes as long as one to fifteen words: `python -m bench.rounds`."""

MESH_UP_TO = 16
"""Members of a generation that are all connected to each other: each message takes one hop then, and there are few."""


def fan_out_for(members: int, asked: int | None = None) -> int | None:
    """The fan-out of a generation's tree; None: all of its members are connected to each other. asked: what a
    user says, as in `protocol.job.tree_fan_out`."""
    return asked or (FAN_OUT if members > MESH_UP_TO else None)


# ---------------------------------------------------------------- the tree


def parents(nodes: Sequence[str], fan_out: int) -> list[int]:
    """The parent of every member, by rank; -1: it is the root, which is rank 0. It is always of a lower rank.

    The member of a node with the lowest rank is the node's leader, and the parent of the others there. The leaders, in the order
    of their ranks, form a tree of which each has `fan_out` children.

    Args:
        nodes: the node of every member, by rank.
    """
    # It follows from the generation alone, so nobody is told. Words between nodes are then one for each node in each direction.
    leader_of: dict[str, int] = {}
    leaders: list[int] = []
    found: list[int] = []
    for rank, node in enumerate(nodes):
        if (leader := leader_of.setdefault(node, rank)) != rank:
            found.append(leader)
            continue
        # Leaders are numbered as they come, so the parent has the smaller number, and with it the lower rank. That keeps
        # members from waiting in a circle while they connect: each calls its parent and awaits its children.
        found.append(leaders[(len(leaders) - 1) // fan_out] if leaders else -1)
        leaders.append(rank)
    return found


def sides(parents_of: Sequence[int], rank: int) -> list[int]:
    """For every member, by rank, the neighbour of `rank` in the tree through which it is reached; for `rank` itself, `rank`."""
    found: list[int] = []
    for other, parent in enumerate(parents_of):
        if other == rank or parent == rank:
            found.append(other)
        # A parent comes before its children, so the parent's side is known already.
        else:
            found.append(parents_of[rank] if parent < 0 else found[parent])
    return found


# ---------------------------------------------------------------- sums


def without_rounding(terms: Iterable[float]) -> list[float]:
    """A few numbers with exactly the sum of these; not finite, if that has none."""
    parts: list[float] = []
    for term in terms:
        x, kept = term, 0
        for part in parts:
            big, small = (x, part) if abs(x) >= abs(part) else (part, x)
            x = big + small
            # Exact: the larger one first, so what the sum lost is a floating-point number itself. In the
            # other order the rest would be rounded too.
            if rest := small - (x - big):
                parts[kept] = rest
                kept += 1
        parts[kept:] = [x]
    return parts


def joined(terms: Sequence[float]) -> tuple[float, ...]:
    """Numbers for which `math.fsum` says the same as for the terms: the same sum, NaN, infinity, or error."""
    if not all(map(math.isfinite, terms)):
        # What is finite does not count then, and of what is not, only which kinds there are: `fsum` refuses infinities of both
        # signs, and else says NaN or the infinity.
        return tuple({repr(x): x for x in terms if not math.isfinite(x)}.values())
    parts = without_rounding(terms)
    # A sum on the way is beyond the largest number, which has no exact parts. The whole sum may still be none: the terms
    # stay as they are. There are as many then as members say, but only of numbers that large.
    return tuple(x for x in parts if x) if all(map(math.isfinite, parts)) else tuple(terms)


def rounded(terms: Sequence[float]) -> tuple[float, ...]:
    """One number, the sum of the terms rounded once; the terms, where `math.fsum` refuses them for good: whoever sums them
    gets its error."""
    try:
        return (math.fsum(terms),)
    except ValueError:  # infinities of both signs
        return tuple(terms)
    except OverflowError:  # on the way, which depends on the order
        try:
            return (float(sum(map(Fraction, terms))),)
        except OverflowError:
            return tuple(terms)


# ---------------------------------------------------------------- words


class Round(IntEnum):
    """What a round is about."""

    WEIGHTS = 0
    """What the micro-batches weigh, and their losses."""
    EXCHANGE = 1
    """Messages of some members, which all get."""
    SUM = 2
    """A `Step.sum`."""
    VOTE = 3
    """Every member is prepared."""


# What a single member can make of a word about all. Whole numbers: an `IntFlag` takes a microsecond for each operation.
END = 1
"""The generation is to end at this commit."""
SAVE = 2
"""The state is to be saved."""
NOT_IN_SUM = 4
"""The first of `Word.ranks` is in a `Step.sum`, and the second is not."""
OTHER_SUM = 8
"""The two `Word.ranks` sum different names or shapes."""
MISTAKES = NOT_IN_SUM | OTHER_SUM


class Word(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """What a member says in a round of itself and all members below it, and the root of all."""

    kind: Round
    step: int
    count: int
    """How many members it is about."""
    latest: int
    """The rank of the member of these whose own part came last."""
    flags: int = 0
    """END, SAVE, and the mistakes."""
    sums: tuple[tuple[float, ...], ...] = ()
    """Each as numbers that `joined` gives."""
    seen: tuple[float, ...] = ()
    """What is to be the same on all members, where it is not: at most two of the values there are."""
    by_rank: tuple[tuple[int, float, float, float], ...] = ()
    """A rank, and its message."""
    ranks: tuple[int, int] = (-1, -1)
    """Whom a mistake is about."""


def merged(own: Word, rank: int, below: Sequence[tuple[int, Word]], latest: int) -> Word:
    """One word of a member's own and of those of its children, each with the child's rank. rank, latest: the member's; as in
    `Word`. A mistake among them is the whole word."""
    if not below:
        return own
    words = [own, *(word for _, word in below)]
    count = sum(word.count for word in words)
    for child, word in below:
        mistake, ranks = word.flags & MISTAKES, word.ranks
        if not mistake and (word.kind is Round.SUM) != (own.kind is Round.SUM):
            mistake, ranks = NOT_IN_SUM, (rank, child) if own.kind is Round.SUM else (child, rank)
        # Compared before anything is added: with other names on one worker, all would sum different things.
        elif not mistake and own.kind is Round.SUM and word.seen != own.seen:
            mistake, ranks = OTHER_SUM, (rank, child)
        if mistake:
            return Word(kind=own.kind, step=own.step, count=count, latest=latest, flags=mistake, ranks=ranks)
    flags = 0
    for word in words:
        flags |= word.flags
    columns = zip(*(word.sums for word in words), strict=True)
    return Word(
        kind=own.kind,
        step=own.step,
        count=count,
        latest=latest,
        flags=flags,
        sums=tuple(joined([x for part in column for x in part]) for column in columns),
        seen=tuple(dict.fromkeys(x for word in words for x in word.seen))[:2],
        by_rank=tuple(entry for word in words for entry in word.by_rank),
    )


def result(word: Word, size: int) -> Word | None:
    """What the root makes of the word about all members; None: it is not about all of them.

    size: of the generation.
    """
    # A vote's result says that every member is prepared. With a member missing it would be a lie that commits a step.
    if word.count != size:
        return None
    return msgspec.structs.replace(word, sums=tuple(rounded(joined(column)) for column in word.sums))
