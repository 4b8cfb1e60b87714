"""Live tensors to and from a durable tier, without a detour over snapshot memory.

For the one checkpoint that a job writes when it ends early, and for a start from a tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import encode_head
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.pull import Pull
from holdfast.checkpoint.rows import WINDOW_BYTES, Row
from holdfast.checkpoint.sums import sums_of_pieces
from holdfast.errors import StateError
from holdfast.protocol.snapshots import Part
from holdfast.train.state import Image, Protected, load, targets


def save(image: Image, url: str, retention: Retention) -> str:
    """Writes the image as a checkpoint of one shard; returns its place. Prunes what need not be kept.

    Raises:
        TierError: the tier cannot take it.
    """
    archive = Archive(url)
    index = image.index
    sums = sums_of_pieces(image.pieces(0, index.nbytes))
    shard = archive.save_shard(
        index.step, 0, encode_head(index, sums), sums, image.pieces(0, index.nbytes), index.nbytes
    )
    archive.commit(index.step, [shard])
    archive.prune(retention, spare=index.step)
    return archive.where(index.step)


def restore(objects: Protected, url: str, step: int) -> int:
    """Loads shard 0 of a checkpoint into the objects; returns its bytes. Every one of them is verified.

    Raises:
        StateError: unreadable, cut short, changed, or of other objects.
    """
    archive = Archive(url)
    shard = archive.manifest(step).shards[0]
    head = archive.head(shard)
    image = targets(objects, head.index)
    fill(image, archive.row(shard, head))
    load(objects, image)
    return head.index.nbytes


def pull_image(objects: Protected, pull: Pull, part: Part | None, alive: Callable[[], None]) -> Image:
    """A snapshot from memory, into the live tensors where they fit. `alive` is called after every window.

    Raises:
        StateError: no holder has it whole.
    """
    _, head = pull.head(part)
    image = targets(objects, head.index)
    scratch = threading.local()

    def take(row: Row, low: int, high: int) -> None:
        if not hasattr(scratch, "buffer"):
            scratch.buffer = memoryview(bytearray(WINDOW_BYTES))
        window = scratch.buffer[: high - low]
        row.fetch_into(low, window)
        _put(image, low, window)
        alive()

    pull.run(head, take)
    return image


def fill(image: Image, row: Row) -> None:
    """Brings a row's bytes into an image."""
    if row.nbytes != image.index.nbytes:
        raise StateError(f"the row has {row.nbytes} bytes, its index {image.index.nbytes}")
    buffer = memoryview(bytearray(min(WINDOW_BYTES, row.nbytes)))
    for low in range(0, row.nbytes, WINDOW_BYTES):
        window = buffer[: min(WINDOW_BYTES, row.nbytes - low)]
        row.fetch_into(low, window)
        _put(image, low, window)


def _put(image: Image, low: int, window: memoryview) -> None:
    """Copies without holding the GIL: other streams go on meanwhile."""
    at = 0
    for piece in image.pieces(low, low + len(window)):
        np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(window[at : at + len(piece)], np.uint8))
        at += len(piece)
