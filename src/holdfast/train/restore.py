"""Where a worker's state comes from when it has none: peers, snapshot memory, a durable tier. And how it is written to a tier when the job ends early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.tensor import zeros

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import seal, sums_of_buffers
from holdfast.checkpoint.loading import regions_of
from holdfast.checkpoint.located import Located, find_in_archive, find_in_memory
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.checkpoint.replicate import WINDOW_BYTES, Blob, Pull
from holdfast.errors import CollectiveFault, StateError, StateLost, TierError, UnreadError, UsageError
from holdfast.observe.transfer_progress import HowFar, Seen
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.protocol.snapshots import Part
from holdfast.tensors.dtensor_shards import Submesh, parsed, piece_of
from holdfast.tensors.index import TensorSpec
from holdfast.tensors.loaded import is_expanded
from holdfast.tensors.tree import dtype_of, within_wrappers
from holdfast.tensors.wrappers import inside_of
from holdfast.train import state_image
from holdfast.train.constants import Constants
from holdfast.train.link import Link
from holdfast.train.peer_transfer import Fetch
from holdfast.train.state_image import Image, Protected, give, lies_alike, live, load, parameter_of, targets

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding


class StateRestorer:
    """Restores the state of a generation's start into the protected objects, from the source that the coordinator names."""

    def __init__(
        self, link: Link, objects: state_image.Protected, sharding: Sharding | None, constants: Constants
    ) -> None:
        """sharding: of a replica of several workers."""
        self.link = link
        self._record = link.record
        self._objects = objects
        self._sharding = sharding
        self._constants = constants

    def restore(self, form: m.JoinGeneration) -> int:
        """Restores the state. Returns the number of bytes that were transferred.

        Raises:
            CollectiveFault: the source could not deliver it; another generation tries again.
            UsageError: the state in a durable tier is of other objects.
            StateLost: that checkpoint is damaged.
            GenerationBroken: the generation broke meanwhile.
        """
        # Peers first: their memory has the newest state, at the network's speed. Which of the sources is
        # meant was decided by the coordinator; nothing here falls back, because all newcomers must load the
        # same step.
        if form.donors:
            # Before the state, which has the hash of these and is refused where they have another.
            nbytes = self._fetch_constants(form) if self._constants else 0
            return nbytes + self._load(form, self._fetch(form))
        if form.copy is not None:
            return self._load(form, self._from_memory(form))
        return self._from_shards(form) if form.shards else self._from_tier(form)

    def _fetch(self, form: m.JoinGeneration) -> state_image.Image:
        fetch = Fetch(form.generation, form.donors, self.link.token, self._seen(form), self._record.wait_for)
        # A transfer waits for a peer like a collective does, so it is ended in the same way.
        self.link.guard(form.generation.number, fetch.abort)
        try:
            return fetch.run(self._objects)
        except StateError as error:
            raise CollectiveFault(str(error)) from error

    def _fetch_constants(self, form: m.JoinGeneration) -> int:
        seen = self._seen(form)
        fetch = Fetch(
            form.generation, form.donors, self.link.token, seen, self._record.wait_for, what="constant"
        )
        self.link.guard(form.generation.number, fetch.abort)
        try:
            index = fetch.index()
            if self._constants.are_those_of(index):
                return 0
            self._constants.take(fetch.fill(self._constants.targets, index))
        except StateError as error:
            raise CollectiveFault(str(error)) from error
        return index.nbytes

    def _load(self, form: m.JoinGeneration, image: state_image.Image) -> int:
        # Before the objects are changed: if the generation is over, the next one may start from another step.
        self.link.check(form.generation.number)
        self._record.beat()
        state_image.load(self._objects, image, self._submesh)
        return image.index.nbytes

    def _from_memory(self, form: m.JoinGeneration) -> state_image.Image:
        """The snapshot, from this node's memory or another's."""
        assert form.copy is not None
        own_node = self.link.start.env.get("HOLDFAST_NODE", "")
        pull = Pull(key=form.copy.key, holders=form.holders, token=self.link.token, own_node=own_node)
        self.link.guard(form.generation.number, pull.abort)
        try:
            return pull_image(self._objects, pull, form.copy.shard.head, self._seen(form))
        except (StateError, TierError) as error:
            raise CollectiveFault(str(error)) from error

    def _from_shards(self, form: m.JoinGeneration) -> int:
        """The snapshot, which was taken with another number of shards."""
        own_node = self.link.start.env.get("HOLDFAST_NODE", "")
        shard_index, shard_count = self._shard_of(form)
        try:
            found = find_in_memory(
                form.shards, self.link.token, own_node=own_node, reader=shard_index, readers=shard_count
            )
            return load_resharded(self._objects, found, shard_index, self._submesh, self._seen(form))
        except (StateError, TierError) as error:
            raise CollectiveFault(str(error)) from error

    def _shard_of(self, form: m.JoinGeneration) -> tuple[int, int]:
        """Which shard this worker holds, of how many."""
        return form.generation.members[form.rank].shard_index, form.generation.shard_count

    @property
    def _submesh(self) -> Submesh | None:
        return self._sharding.submesh if self._sharding else None

    def _from_tier(self, form: m.JoinGeneration) -> int:
        """The checkpoint, from its durable tier."""
        assert form.durable is not None
        self._record.enter(Phase.TIER)
        try:
            seen, shard = self._seen(form), self._shard_of(form)
            return restore(self._objects, form.durable.url, form.durable.step, seen, shard, self._submesh)
        except UnreadError as error:
            # StateLost and CollectiveFault lead to different decisions. A damaged checkpoint is damaged for
            # everybody, so the coordinator takes an older one; a tier that does not answer is tried again.
            raise StateLost(str(error)) from error
        except TierError as error:
            raise CollectiveFault(str(error)) from error
        except StateError as error:
            # Its bytes were whole. Whoever changed the model is told so at the first attempt: the others would say the same.
            raise UsageError(
                f"the checkpoint of step {form.durable.step} in {form.durable.url} contains other objects than those "
                "that the script protects; protect the same objects as before, or use another --checkpoint and "
                f"another --job: {error}"
            ) from error

    def _seen(self, form: m.JoinGeneration) -> Seen:
        """A sign of life for all that comes in, and an end to it when the generation has ended."""
        number = form.generation.number
        restoring = HowFar(lambda nbytes, total: self.link.send(m.Restoring(number, nbytes, total)))

        def seen(nbytes: int, total: int) -> None:
            self._record.beat()
            # Called for every chunk, in the thread that reads: it ends a transfer whose generation broke, at
            # most one chunk late.
            self.link.check(number)
            if nbytes:
                restoring.add(nbytes, total)

        return seen


# ---------------------------------------------------------------- checkpoint restore
# Live tensors to and from a durable tier, without a detour over snapshot memory.
#
# For the one checkpoint that a job writes when it ends early, and for a start from a tier.


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
            return load_resharded(objects, found, shard[0], submesh, seen)
        archive.check_size(saved, head)
        image = targets(objects, head.index)
        fill(image, archive.blob(saved, head), lambda nbytes: seen(nbytes, head.index.nbytes))
    except StateError as error:
        # Bytes are verified while they are read, so the live tensors may be half written by now. The caller
        # counts the state as absent until `load` below has run.
        raise UnreadError(str(error)) from error
    load(objects, image, submesh)
    return head.index.nbytes


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
    shard = archive.save_shard(index.step, 0, seal(index, sums), image.pieces(0, index.nbytes), seen)
    archive.commit(index.step, [shard])
    # Only after the commit, and never the one that was written just now: whatever fails before, the older
    # checkpoint is still there.
    archive.prune(retention, spare=index.step)
    return archive.where(index.step)


def load_resharded(
    objects: Protected,
    found: Located,
    shard_index: int,
    submesh: Submesh | None,
    seen: Callable[[int, int], None] = lambda nbytes, total: None,
) -> int:
    """Reads only what this worker's pieces need; returns its bytes.

    Args:
        shard_index: the shard that this worker holds.
        submesh: of its replica, if it has several workers.
        seen: told of bytes that came in, and of how many there are, from several threads.

    Raises:
        StateError: no source has all of it, or it is of other objects.
    """
    index = found.heads[found.nearest(shard_index)].index
    # As in `state_image.targets`: neither what wrappers are made of is written to where it is, nor what is expanded.
    within = within_wrappers(index)
    there = {p: t for p, t in live(objects).items() if p not in within and not is_expanded(inside_of(t))}
    tensors: list[torch.Tensor] = []
    regions: list[Region] = []
    # Live tensors that cannot be read into directly, such as those of a GPU or of another layout, get a
    # staged copy. They are filled after all regions have arrived.
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    for spec in index.tensors:
        target = _target(objects, there, spec, submesh)
        tensors.append(target)
        regions += regions_of(found, piece_of(spec.path, target), shard_index, late)
    total = sum(r.target.numel() * r.target.element_size() for r in regions)
    read_regions(found, regions, seen=lambda nbytes: seen(nbytes, total))
    # Only when everything is here: an error above leaves these tensors untouched.
    with torch.no_grad():
        for ours, staged in late:
            ours.copy_(staged)
    give(objects, index.tree, tensors, submesh)
    return total


def _target(
    objects: Protected, there: dict[str, torch.Tensor], spec: TensorSpec, submesh: Submesh | None
) -> torch.Tensor:
    """What is to receive a saved tensor: the live one, or a new one that lies as its parameter does."""
    shape = spec.global_shape or spec.shape
    now = there.get(spec.path)
    if now is not None and tuple(now.shape) == shape and now.dtype == dtype_of(spec):
        return now.detach()
    # An optimizer that has not made a step has no moments yet, so there is no live tensor to take the layout
    # from. Its parameter has that layout.
    parameter = parameter_of(objects, spec.path)
    if parameter is not None and tuple(parameter.shape) == shape:
        return torch.zeros_like(parameter, dtype=dtype_of(spec), requires_grad=False)
    if not spec.placed:
        return torch.empty(shape, dtype=dtype_of(spec))
    if submesh is None:
        raise StateError(
            f"{spec.path} was saved in pieces, but this script does not determine which of them it needs"
        )
    names, placements = parsed(spec.placed)
    return zeros(shape, dtype=dtype_of(spec), device_mesh=submesh(names), placements=placements)


READERS = 4
"""Windows that are read from a tier at once."""


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
