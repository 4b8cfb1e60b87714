"""Where a node stands: the names of what it shares with others, from the outermost in.

What stands close together is connected well and fails together, so ranks and shards stay close and copies go far apart.
How many levels there are and what they are called (zone, block, rack, NVLink domain) is the site's affair: nothing
here depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec

PLACE_VARIABLE = "HOLDFAST_NODE_PLACE"
"""The environment variable by which an engine, or a person, tells an agent where its node stands: `zone/block/rack`."""

MOST_LEVELS = 8
"""Of a place. Slurm's trees have three or four switches above a node, Kubernetes' labels five."""
MOST_CHARS = 253
"""Of one name, as Kubernetes has them."""
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f]+")

NodePlace = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_CHARS)], ...],
    msgspec.Meta(max_length=MOST_LEVELS),
]
"""Names from the outermost to the innermost, for example `("zone-a", "block2", "rack7")`; empty: not known."""


def parse_place(text: str) -> NodePlace:
    """`zone-a/block2/rack7` as a place; an empty text is the unknown one. Raises ValueError with what is wrong."""
    if not text:
        return ()
    names = tuple(text.split("/"))
    if len(names) > MOST_LEVELS:
        raise ValueError(f"a place can have at most {MOST_LEVELS} levels, but {text!r} has {len(names)}")
    for name in names:
        if len(name) > MOST_CHARS:
            raise ValueError(
                f"the name of a place can have at most {MOST_CHARS} characters, but one has {len(name)}"
            )
        if not _NAME.fullmatch(name):
            what = "an empty name" if not name else f"the name {name!r}"
            raise ValueError(
                f"{text!r} contains {what}; write names without spaces and separate them with one /, for example "
                "zone-a/rack7"
            )
    return names


def shown(place: NodePlace) -> str:
    """As `parse_place` reads it."""
    return "/".join(place)


def common(places: Iterable[NodePlace]) -> NodePlace:
    """The innermost place that all of them are in; empty where there is none, or one of them is not known."""
    shared: NodePlace | None = None
    for place in places:
        shared = place if shared is None else shared[: nearness(shared, place)]
        if not shared:
            return ()
    return shared or ()


def nearness(one: NodePlace, other: NodePlace) -> int:
    """How many levels two places share. 0: none, or one of them is not known."""
    # A node whose place is not known counts as near to nobody, and not as near to all of which as little is known:
    # two of these may stand at the two ends of the site.
    for level, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return level
    return min(len(one), len(other))
