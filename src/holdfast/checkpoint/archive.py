"""The checkpoints of one durable tier: which exist, which are complete, and how one is written.

A checkpoint is complete if its manifest and heads are as they were written, and every chunk of its blobs has the
checksum that its head names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from holdfast.checkpoint.layout import (
    BEING_REMOVED,
    CHUNK_BYTES,
    FORMAT,
    MANIFEST,
    Head,
    Manifest,
    Sealed,
    damaged,
    decode_head,
    decode_manifest,
    digest,
    encode_manifest,
    folder_of,
    parts_of,
    step_of,
)
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.replicate import WINDOW_BYTES, Blob, TierSource
from holdfast.checkpoint.tier import Tier, open_tier
from holdfast.errors import ChecksumError, StateError, TierError
from holdfast.protocol.snapshots import Shard

OnSkip = Callable[[str], None]


class Archive:
    """Reads and writes the checkpoints of a tier. Every method blocks and may be called from any thread."""

    def __init__(self, tier: Tier | str) -> None:
        self.tier = open_tier(tier) if isinstance(tier, str) else tier
        self._unfinished: set[str] = set()

    # ------------------------------------------------------------ reading

    def steps(self) -> list[int]:
        """Steps with a manifest, oldest first. Whether they are complete is not looked at."""
        steps = [s for s in map(step_of, self.tier.folders()) if s is not None]
        # The manifest decides, not the folder. It is written last, so a folder without one is a checkpoint
        # that is still being written, or one whose writer died. It must never be offered for a restore.
        return sorted(s for s in steps if self.tier.size(f"{folder_of(s)}/{MANIFEST}") is not None)

    def where(self, step: int) -> str:
        """Where a checkpoint is, for messages."""
        return f"{self.tier.url}/{folder_of(step)}"

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of a step is made of.

        Raises:
            StateError: there is none, or it cannot be read.
            ChecksumError: the manifest was changed.
        """
        where = f"{self.where(step)}/{MANIFEST}"
        manifest = decode_manifest(self.tier.read(f"{folder_of(step)}/{MANIFEST}"), where)
        # A renamed or copied folder passes every checksum. Loading it would resume training at a step whose
        # data and schedule belong elsewhere.
        if manifest.step != step:
            raise StateError(
                f"{where} contains a checkpoint of step {manifest.step}: was the folder renamed?"
            )
        return manifest

    def head(self, shard: Shard) -> Head:
        """A shard's head.

        Raises:
            StateError: it is not there, or was changed.
        """
        return decode_head(self.tier.read(shard.head.name), shard.head, f"{self.tier.url}/{shard.head.name}")

    def blob(self, shard: Shard, head: Head, on_skip: OnSkip = lambda why: None) -> Blob:
        """A shard's bytes, verified as they are read."""
        # The header is skipped and not read: it is for others, and what is damaged there harms no restore.
        source = TierSource(self.tier, shard.blob.name, shard.header_bytes)
        return Blob([source], head.sums, head.index.nbytes, on_skip)

    def verify(self, step: int, seen: Callable[[int], None] = lambda nbytes: None) -> Manifest:
        """Reads every byte; returns the manifest of a complete checkpoint. `seen` is told of bytes as they are read.

        Raises:
            StateError: no checkpoint, cut short, or unreadable.
            ChecksumError: bytes were changed; the message says which.
        """
        manifest = self.manifest(step)
        self.verify_all(manifest, seen)
        return manifest

    def verify_all(self, manifest: Manifest, seen: Callable[[int], None]) -> None:
        """As `verify`, for whoever has read the manifest."""
        blobs = set()
        for shard in manifest.shards:
            head = self.head(shard)
            if shard.blob.name not in blobs:
                self._verify_blob(shard, head, seen)
                blobs.add(shard.blob.name)

    def _verify_blob(self, shard: Shard, head: Head, seen: Callable[[int], None]) -> None:
        self.check_size(shard, head)
        where, at = f"{self.tier.url}/{shard.blob.name}", shard.header_bytes
        bad = self._first_damage(shard, head.sums, seen)
        if bad is not None:
            begin, end = bad
            held = _named(
                [t.path for t in head.index.tensors if t.offset < end and t.offset + t.nbytes > begin]
            )
            raise ChecksumError(
                f"{where}: bytes {at + begin} to {at + end}{held} do not match their checksums"
            )
        if not self._has_header(shard, head.sums):
            raise ChecksumError(
                f"{where}: its header, bytes 0 to {at}, does not match its checksum. Its tensors "
                "are intact: a job can resume from them, and `holdfast checkpoint export` writes them to new files"
            )

    def _has_header(self, shard: Shard, sums: bytes) -> bool:
        """Whether what is before the blob in its file is as it was saved."""
        header = bytearray(shard.header_bytes)
        self.tier.read_into(shard.blob.name, 0, memoryview(header))
        return digest(bytes(header) + sums) == shard.blob.xxh3

    def _first_damage(
        self, shard: Shard, sums: bytes, seen: Callable[[int], None] = lambda nbytes: None
    ) -> tuple[int, int] | None:
        """The first range of a blob that differs from its checksums; None when all of it is as it was saved."""
        nbytes = shard.blob.nbytes
        # One buffer for all windows: blobs are larger than the memory that verification may take, and a new
        # buffer for each window would page-fault every time.
        scratch = memoryview(bytearray(min(WINDOW_BYTES, nbytes)))
        for low in range(0, nbytes, WINDOW_BYTES):
            view = scratch[: min(WINDOW_BYTES, nbytes - low)]
            self.tier.read_into(shard.blob.name, shard.header_bytes + low, view)
            bad = next(damaged(view, low, sums), None)
            if bad is not None:
                return bad
            seen(len(view))
        return None

    def check(self, step: int, seen: Callable[[int], None] = lambda nbytes: None) -> Manifest:
        """Whether a checkpoint is complete as far as its manifest, heads and sizes tell. Its blobs are verified as they are
        read. `seen` is told of bytes as they are read.

        Raises:
            StateError: no checkpoint, damaged, or cut short; the message says which file.
        """
        manifest = self.manifest(step)
        for shard in manifest.shards:
            self.check_size(shard, self.head(shard))
            seen(shard.head.nbytes)
        return manifest

    def check_size(self, shard: Shard, head: Head) -> None:
        """Raises StateError unless the file of a blob has the size of its header and of what its head names."""
        where, nbytes = f"{self.tier.url}/{shard.blob.name}", shard.header_bytes + head.index.nbytes
        size = self.tier.size(shard.blob.name)
        if size is None:
            raise StateError(f"{where} does not exist")
        if size != nbytes:
            how = "cut short" if size < nbytes else "longer"
            raise StateError(f"{where} is {how}: {size} of {nbytes} bytes")

    def candidates(
        self, on_skip: OnSkip = lambda why: None, seen: Callable[[int], None] = lambda nbytes: None
    ) -> list[int]:
        """Steps to go on from, newest first: the newest that `check` calls complete, and all before it, in case that it
        proves to be damaged. `on_skip` is told why newer ones are not among them."""
        steps = self.steps()[::-1]
        # Only the newest readable one is checked here. The older ones are handed over unchecked, because each
        # check costs requests to the tier, and they matter only if the newest proves to be damaged while it
        # is read.
        for number, step in enumerate(steps):
            try:
                self.check(step, seen)
            except (StateError, TierError) as error:
                on_skip(str(error))
            else:
                return steps[number:]
        return []

    # ------------------------------------------------------------ writing

    def save_shard(
        self,
        step: int,
        rank: int,
        sealed: Sealed,
        buffers: Iterable[memoryview],
        seen: Callable[[int], None] = lambda n: None,
    ) -> Shard:
        """Writes one rank's part; it counts when a manifest names it. A blob that is there already is read, and written
        again if it is not complete: saving a step again repairs it.

        Raises:
            TierError: the tier cannot take it.
        """
        shard = parts_of(step, rank, sealed)
        # Blob first, head second, manifest (by `commit`) last. Each file refers only to files that are
        # durable already, so a writer that dies at any point leaves unreferenced files, never a reference to
        # missing bytes. Names come from the content, so this never overwrites what an older manifest of the
        # same step refers to.
        if not self._has_blob(shard, sealed.sums):
            file = itertools.chain([memoryview(sealed.header)], buffers)
            blob_seen = _behind(len(sealed.header), seen)
            self.tier.write(shard.blob.name, file, shard.files[shard.blob.name], blob_seen)
        return self.save_head(shard, sealed.head)

    def _has_blob(self, shard: Shard, sums: bytes) -> bool:
        # A blob with the right name and size is read completely before it is trusted. A name promises
        # content, but a disk may have lost or flipped bytes since, and the new manifest would vouch for them.
        if self.tier.size(shard.blob.name) != shard.files[shard.blob.name]:
            return False
        try:
            return self._has_header(shard, sums) and self._first_damage(shard, sums) is None
        except (StateError, TierError):
            return False

    def save_head(self, shard: Shard, head: bytes) -> Shard:
        """Writes only a head: the blob is another rank's, with equal bytes."""
        self.tier.write(shard.head.name, [memoryview(head)], len(head))
        return shard

    def commit(self, step: int, shards: Sequence[Shard]) -> Manifest:
        """Writes the manifest: from now on the checkpoint exists.

        Raises:
            StateError: a shard is missing.
            TierError: the tier cannot take the manifest, or somebody removed what was written.
        """
        ordered = tuple(sorted(shards, key=lambda s: s.rank))
        if [s.rank for s in ordered] != list(range(len(ordered))) or not ordered:
            raise StateError(
                f"step {step}: shards of ranks {[s.rank for s in ordered]} do not make a complete checkpoint"
            )
        # From here on every file that the manifest names is complete and durable: each `save_shard` returned
        # before its caller reported the shard.
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(
            format=FORMAT,
            step=step,
            world=len(ordered),
            chunk_bytes=CHUNK_BYTES,
            saved_at=saved_at,
            shards=ordered,
        )
        self.tier.publish(f"{folder_of(step)}/{MANIFEST}", encode_manifest(manifest))
        # The pruner and this writer run on different nodes without a common lock. Each writes first and looks
        # second: the pruner writes its tombstone and then looks for a manifest, this writer writes its
        # manifest and then looks for a tombstone. Whichever order the four steps take, at least one of the
        # two sees the other, so no manifest stays whose files are gone. If both give way, only one checkpoint
        # is lost, and training goes on.
        self._still_there(manifest)
        return manifest

    def _still_there(self, manifest: Manifest) -> None:
        """Raises TierError if a pruner removed files of this checkpoint meanwhile; see `_remove_unfinished`."""
        folder = folder_of(manifest.step)
        files = self.tier.files(folder)
        parts = {name: nbytes for shard in manifest.shards for name, nbytes in shard.files.items()}
        # The list of files is compared too, not only the tombstone: a pruner that has finished removed its
        # tombstone last, and leaves no other trace than missing files.
        if f"{folder}/{BEING_REMOVED}" in files or not parts.items() <= files.items():
            self.tier.remove(f"{folder}/{MANIFEST}")
            raise TierError(
                f"{self.where(manifest.step)} was removed while it was being written, by `holdfast checkpoint prune` "
                "or by another job that saves there; saving is tried again with the next checkpoint"
            )

    # ------------------------------------------------------------ removing

    def remove(self, step: int) -> None:
        """Removes a checkpoint: first it ceases to exist, then its bytes go."""
        # The reverse order of writing. If this process dies between the two calls, the files that remain have
        # no manifest and are pruned later. Blobs first would leave a manifest that names missing files.
        self.tier.remove(f"{folder_of(step)}/{MANIFEST}")
        self.tier.remove_folder(folder_of(step))

    def prune(self, retention: Retention, spare: int | None = None, unfinished: bool = False) -> list[int]:
        """Removes what need not be kept; never the newest, nor `spare`, which was saved just now (training may have
        gone back behind what is newest). Returns the steps removed.

        An unfinished checkpoint below the newest one is removed when two passes have seen it, because a rank may still
        be writing it. unfinished: at once.
        """
        steps = self.steps()
        gone = retention.superfluous(steps, spare)
        # Nothing here can remove the last complete checkpoint: `superfluous` always keeps the newest step,
        # and `spare`, which is older than the newest only after a rollback.
        for step in gone:
            self.remove(step)
        newest, seen = max(steps, default=-1), set[str]()
        for folder in self.tier.folders():
            begun = step_of(folder)
            # Only folders below the newest complete step are candidates. A folder above it may be the
            # checkpoint that is being written at this moment.
            if begun is not None and begun < newest and begun not in (*steps, spare):
                seen.add(folder)
        # An unfinished folder must be seen on two passes, which lie at least one checkpoint apart. A slow
        # rank may still be writing into it during the first one. The tombstone covers the remaining race,
        # with a writer that is slower than that.
        for folder in seen if unfinished else seen & self._unfinished:
            self._remove_unfinished(folder)
        self._unfinished = seen
        return gone

    def _remove_unfinished(self, folder: str) -> None:
        """Writes a tombstone, looks for a manifest, and removes the folder if there is none. See `commit` for the order."""
        tombstone = f"{folder}/{BEING_REMOVED}"
        # See `commit`: the tombstone must be durable before the manifest is looked for. With the reverse
        # order a writer could publish its manifest between the look and the removal.
        self.tier.publish(tombstone, b"")
        if self.tier.size(f"{folder}/{MANIFEST}") is None:
            # The tombstone goes last. If it went earlier, a writer that publishes in between would find no tombstone, and
            # perhaps its own files still there, and would keep a manifest of files that go a moment later.
            self.tier.remove_folder(folder, last=tombstone)
        else:
            self.tier.remove(tombstone)


def _behind(skipped: int, seen: Callable[[int], None]) -> Callable[[int], None]:
    """Tells `seen` of bytes without the first ones."""
    done = 0

    def told(nbytes: int) -> None:
        nonlocal done
        counted, done = max(done, skipped), done + nbytes
        if done > counted:
            seen(done - counted)

    return told


def _named(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f" ({names[0]}{more})"
