"""Live tensors to and from a durable tier, without a detour over snapshot memory.

For the one checkpoint that a job writes when it ends early, and for a start from a tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.checksums import sums_of_buffers
from holdfast.checkpoint.layout import encode_head
from holdfast.checkpoint.located import find_in_archive
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.replicate import Pull
from holdfast.checkpoint.sources import WINDOW_BYTES, Blob
from holdfast.errors import StateError, UnreadError
from holdfast.observe.transfer_progress import Seen
from holdfast.protocol.snapshots import Part
from holdfast.tensors.dtensor_shards import Submesh
from holdfast.train import reshard
from holdfast.train.state_image import Image, Protected, lies_alike, load, targets

READERS = 4
"""Windows that are read from a tier at once."""


def save(
    image: Image, url: str, retention: Retention, seen: Callable[[int], None] = lambda nbytes: None
) -> str:
    """Writes the image as a checkpoint of one shard; returns where it is. Prunes what need not be kept.

    Raises:
        TierError: the tier cannot take it.
    """
    archive = Archive(url)
    index = image.index
    sums = sums_of_buffers(image.pieces(0, index.nbytes))
    shard = archive.save_shard(
        index.step, 0, encode_head(index, sums), sums, image.pieces(0, index.nbytes), index.nbytes, seen
    )
    archive.commit(index.step, [shard])
    # Only after the commit, and never the one that was written just now: whatever fails before, the older
    # checkpoint is still there.
    archive.prune(retention, spare=index.step)
    return archive.where(index.step)


def restore(
    objects: Protected,
    url: str,
    step: int,
    seen: Seen = lambda nbytes, total: None,
    shard: tuple[int, int] = (0, 1),
    submesh: Submesh | None = None,
) -> int:
    """Loads one shard of a checkpoint into the objects; returns its bytes. Every one of them is verified.

    Args:
        shard: which one, of how many; what was saved with another number is put together from its pieces.
        submesh: of the replica, if it has several workers.

    Raises:
        UnreadError: unreadable, cut short or changed; another checkpoint may do.
        StateError: it is of other objects.
        TierError: the tier does not answer.
    """
    archive = Archive(url)
    try:
        manifest = archive.manifest(step)
        saved = manifest.shards[shard[0] % manifest.world]
        head = archive.head(saved)
        # The same number of shards may still be cut in other places, by another mesh. Loading such bytes as
        # they are would give a model of the right shapes and wrong values.
        if manifest.world != shard[1] or not lies_alike(objects, head.index):
            found = find_in_archive(archive, step, reader=shard[0], readers=shard[1])
            return reshard.load(objects, found, shard[0], submesh, seen)
        archive.check_size(saved, head)
        image = targets(objects, head.index)
        fill(image, archive.blob(saved, head), lambda nbytes: seen(nbytes, head.index.nbytes))
    except StateError as error:
        # Bytes are verified while they are read, so the live tensors may be half written by now. The caller
        # counts the state as absent until `load` below has run.
        raise UnreadError(str(error)) from error
    load(objects, image, submesh)
    return head.index.nbytes


def pull_image(objects: Protected, pull: Pull, part: Part | None, seen: Seen) -> Image:
    """A snapshot from memory, into the live tensors where they fit.

    Raises:
        StateError: no holder has all of it.
    """
    _, head = pull.head(part)
    if not lies_alike(objects, head.index):
        raise StateError(
            "the snapshot in memory was saved with another sharding over the same number of ranks"
        )
    image = targets(objects, head.index)
    scratch = threading.local()

    def take(blob: Blob, low: int, high: int) -> None:
        if not hasattr(scratch, "buffer"):
            scratch.buffer = memoryview(bytearray(WINDOW_BYTES))
        window = scratch.buffer[: high - low]
        blob.fetch_into(low, window)
        _put(image, low, window)
        seen(high - low, head.index.nbytes)

    pull.run(head, take)
    return image


def fill(image: Image, blob: Blob, seen: Callable[[int], None] = lambda nbytes: None) -> None:
    """Brings a blob into an image, several windows at once: an object store answers each after a while."""
    # Taken one after the other by whichever reader is free: a window that the store is slow to give holds up
    # one reader and not a quarter of the blob.
    lows = iter(range(0, blob.nbytes, WINDOW_BYTES))
    lock = threading.Lock()
    # An object store may take minutes to fail every request. The first failure ends all readers.
    failed = threading.Event()  # then the others need not go on

    def work() -> None:
        buffer = memoryview(bytearray(min(WINDOW_BYTES, blob.nbytes)))
        try:
            while not failed.is_set():
                # An iterator is not safe to share between threads without this.
                with lock:
                    low = next(lows, None)
                if low is None:
                    return
                window = buffer[: min(WINDOW_BYTES, blob.nbytes - low)]
                blob.fetch_into(low, window)
                _put(image, low, window)
                seen(len(window))
        except BaseException:
            failed.set()
            raise

    count = min(READERS, -(-blob.nbytes // WINDOW_BYTES))
    if count <= 1:
        work()
        return
    with ThreadPoolExecutor(count, thread_name_prefix="holdfast-restore") as pool:
        for job in [pool.submit(work) for _ in range(count)]:
            job.result()


def _put(image: Image, low: int, window: memoryview) -> None:
    """Copies without holding the GIL: other streams go on meanwhile."""
    at = 0
    with image.filling(low, low + len(window)) as pieces:
        for piece in pieces:
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(window[at : at + len(piece)], np.uint8))
            at += len(piece)
