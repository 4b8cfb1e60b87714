"""What a checkpoint is made of. Free of torch, so it can be listed and verified without it.

    step-40/
      rank-0.9f31c2d4.safetensors        a header, and a *blob*: the bytes of one rank's tensors, one after the other
      rank-0.51d7a0be.head.safetensors   its *head*: small tensors, plain values, a checksum of every chunk of the blob
      manifest.json                      which heads and blobs make up the checkpoint; written last

A checkpoint exists when its manifest does. Files are named by their content, so that writing a step again (after
a fault took it back) never touches what an older manifest refers to.

Both files of a rank are safetensors, for others. Nothing here depends on the header of the blob's file: what its tensors
are is said in the head, and they are the last bytes of the file. docs/architecture/storage.md has the format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from holdfast.errors import ChecksumError, StateError
from holdfast.protocol.snapshots import Part, Shard
from holdfast.protocol.wire.decoding import decode
from holdfast.tensors.index import LARGE, StateIndex, checked, leaves, with_leaves

FORMAT = 1
CHUNK_BYTES = 32 << 10
"""What one checksum covers. A reader of a slice must read whole chunks, on average one more than it needs: with slices
of 0.9 MB (1 GiB of each of 2 ranks, read by 8) that is 3% (`bench.checkpoint`), and it would be 6% with twice as
much. Smaller ones make hashing slower."""

SUM_BYTES = 8

MANIFEST = "manifest.json"
MANIFEST_BYTES = 32 << 20
"""Of a manifest that is read. A shard takes 300 to 400 bytes of it, so this is one of 80,000 ranks."""
HEAD_SUFFIX = ".head.safetensors"
HEAD_BYTES = 1 << 30
"""Of a head that is read. Its checksums take 8 bytes for each CHUNK_BYTES, so this is one of a blob of 4 TiB."""
BEING_REMOVED = "being-removed"
"""The tombstone: a pruner is about to remove this folder, because it takes the checkpoint for abandoned."""


class Head(msgspec.Struct, frozen=True):
    """A blob's index, and the xxh3_64 of every CHUNK_BYTES of it, 8 bytes each."""

    index: StateIndex
    sums: bytes


class Sealed(NamedTuple):
    """What goes with the bytes of one rank's tensors."""

    head: bytes
    """The file of that name."""
    header: bytes
    """What comes before the blob in its file."""
    sums: bytes
    """Of the blob's chunks."""
    nbytes: int
    """Of the blob."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint."""

    format: int
    """At most FORMAT, or this version cannot read it."""
    step: int
    """Committed steps when it was saved."""
    world: int
    """How many ranks saved it."""
    chunk_bytes: int
    """What one checksum covers."""
    saved_at: str
    """UTC, ISO 8601."""
    shards: tuple[Shard, ...]
    """One for every rank, in their order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs, shared ones counted once."""
        return sum({s.blob.name: s.blob.nbytes for s in self.shards}.values())


class _Signed(msgspec.Struct):
    xxh3: str
    manifest: msgspec.Raw


# Made once, and not by whoever reads first: msgspec 0.22 crashes where two threads are the first to decode a type.
_signed = msgspec.json.Decoder(_Signed)
_manifests = msgspec.json.Decoder(Manifest)


def folder_of(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    number = folder.removeprefix("step-")
    return int(number) if folder.startswith("step-") and number.isdigit() else None


def digest(data: bytes | memoryview) -> str:
    """xxh3 (128 bits, hex)."""
    return xxhash.xxh3_128_hexdigest(data)


def parts_of(step: int, rank: int, sealed: Sealed, blob: str = "") -> Shard:
    """The names and digests of one rank's files. blob: the name of a blob of equal content, to share it."""
    # The header counts: other names for the same bytes are another file. It does not name the rank, so replicas
    # have equal ones.
    blob_digest, head_digest = digest(sealed.header + sealed.sums), digest(sealed.head)
    # Named by the digest of the chunk sums, which needs no second pass over the bytes. Eight hex digits
    # suffice for a name: it must differ between the few versions of one rank and step, and the manifest has
    # the complete digest.
    name = blob or f"{folder_of(step)}/rank-{rank}.{blob_digest[:8]}.safetensors"
    head = f"{folder_of(step)}/rank-{rank}.{head_digest[:8]}{HEAD_SUFFIX}"
    return Shard(
        rank,
        Part(head, len(sealed.head), head_digest),
        Part(name, sealed.nbytes, blob_digest),
        len(sealed.header),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with its own checksum."""
    raw = msgspec.json.encode(manifest)
    return msgspec.json.format(msgspec.json.encode(_Signed(digest(raw), msgspec.Raw(raw))), indent=1)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Reads what `encode_manifest` wrote.

    Raises:
        StateError: it is none, or of a later version.
        ChecksumError: it was changed.
    """
    xxh3, raw, manifest = decode(
        _read_manifest,
        data,
        f"{where} is not the manifest of a checkpoint",
        error=StateError,
        most=MANIFEST_BYTES,
    )
    # Checked after the decoding because `raw` is rebuilt from the decoded values. Nothing of the manifest is
    # used before this line.
    if digest(raw) != xxh3:
        raise ChecksumError(f"{where} is damaged: its checksum does not match")
    # Newer formats are refused. Older ones must be read for ever: checkpoints outlive versions.
    if manifest.format > FORMAT:
        raise StateError(
            f"{where} has format {manifest.format}, but this version of Holdfast reads formats up to {FORMAT}: "
            "update Holdfast"
        )
    # Their number first: `world` is only a number, and a list of so many ranks would be made of it.
    complete = len(manifest.shards) == manifest.world
    if not complete or sorted(s.rank for s in manifest.shards) != list(range(manifest.world)):
        raise StateError(f"{where} does not name all {manifest.world} shards")
    return manifest


def _read_manifest(data: bytes) -> tuple[str, bytes, Manifest]:
    # The checksum is over a canonical encoding, not over the bytes of the file. So a manifest that somebody
    # pretty-printed is still valid, while any change of a value is found.
    signed = _signed.decode(data)
    raw = msgspec.json.encode(msgspec.json.decode(signed.manifest))
    return signed.xxh3, raw, _manifests.decode(raw)


# ---------------------------------------------------------------- files of safetensors

# https://huggingface.co/docs/safetensors/index#format: eight bytes with the length of the header, the header (JSON,
# padded with spaces), and the tensors without gaps. The library opens headers of up to 100 MB, which are hundreds of
# thousands of tensors; Holdfast reads longer ones, too.

ALIGNED_BYTES = 64
"""The tensors of a file begin at a multiple of it, so that a reader can map them."""

DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
}
"""Torch's dtypes that safetensors has in 0.4.1 and later, and their bytes. A library that does not know one dtype refuses
the whole file, so those that it learned later (C64, F8_E8M0, F4) are written like those that it does not have."""
_OTHERS = {"complex32": 4, "complex64": 8, "complex128": 16}
"""The other dtypes of more than one byte."""


class FileTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def header_of(tensors: Iterable[FileTensor], **metadata: str) -> bytes:
    """What comes before the bytes of these tensors, which lie one after the other."""
    about = {"format": "pt", **metadata}  # transformers refuses a file without a format
    entries: dict[str, Any] = {"__metadata__": about}
    numbers: dict[str, int] = {}
    at = 0
    for tensor in tensors:
        name = tensor.name
        # Pieces of one tensor, as torch.distributed.checkpoint saves them where a rank has several.
        while name in entries:
            numbers[tensor.name] = numbers.get(tensor.name, 1) + 1
            name = f"{tensor.name}#{numbers[tensor.name]}"
        dtype, shape = DTYPES.get(tensor.dtype, ("U8", 1))[0], tensor.shape
        if tensor.dtype not in DTYPES:
            about[f"dtype:{name}"] = tensor.dtype
            shape = (*shape, _OTHERS.get(tensor.dtype, 1))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + tensor.nbytes)}
        at += tensor.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text


def seal(index: StateIndex, sums: bytes, head: bytes = b"") -> Sealed:
    """What is written beside a blob. head: made of the same index and sums, if it is there already."""
    tensors = (FileTensor(t.path, t.dtype, t.shape, t.nbytes) for t in index.tensors)
    header = header_of(tensors, step=str(index.step))
    return Sealed(head or encode_head(index, sums), header, sums, index.nbytes)


_SUMS = "holdfast-xxh3"


class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


class _HeadMetadata(msgspec.Struct):
    index: str = msgspec.field(name="holdfast-index")


class _HeadHeader(msgspec.Struct):
    metadata: _HeadMetadata = msgspec.field(name="__metadata__")
    sums: _Place = msgspec.field(name=_SUMS)


_head_headers = msgspec.json.Decoder(_HeadHeader)
_indexes = msgspec.json.Decoder(StateIndex)


def encode_head(index: StateIndex, sums: bytes) -> bytes:
    """The sums, and the tensors that lie with the plain values. The index is in the metadata (JSON); it has, instead of such a
    tensor's bytes, where they are among those of the file."""
    small = [
        (path, *value)
        for name, tree in index.tree.items()
        for path, kind, value in leaves(tree, name)
        if kind == "b" and value[0] != LARGE
    ]
    # The widest first, behind sums of eight bytes, so that each is aligned.
    order = sorted(range(len(small)), key=lambda n: -DTYPES.get(small[n][1], ("", 1))[1])
    places, at = [(0, 0)] * len(small), len(sums)
    for number in order:
        places[number] = at, at + len(small[number][3])
        at = places[number][1]
    remaining = iter(places)

    def leaf(kind: str, value: Any) -> Any:
        if kind == "b":
            dtype, shape, data = value
            return [kind, [dtype, shape, data.decode() if dtype == LARGE else next(remaining)]]
        if isinstance(value, float) and not math.isfinite(value):
            return ["float", str(value)]  # JSON knows none of these
        return [kind, value]

    written = msgspec.structs.replace(
        index, tree={name: with_leaves(tree, leaf) for name, tree in index.tree.items()}
    )
    tensors = [FileTensor(_SUMS, "uint8", (len(sums) // SUM_BYTES, SUM_BYTES), len(sums))]
    for path, dtype, shape, data in (small[number] for number in order):
        tensors.append(FileTensor(path, dtype, tuple(shape), len(data)))
    header = header_of(tensors, **{"holdfast-index": msgspec.json.encode(written).decode()})
    return b"".join((header, sums, *(small[number][3] for number in order)))


def _read_head(data: bytes | memoryview) -> Head:
    with memoryview(data) as view:
        begin = 8 + int.from_bytes(view[:8], "little")
        left = len(view) - begin
        header = _head_headers.decode(view[8:begin])
        index = checked(_indexes.decode(header.metadata.index), (list, str))

        def cut(place: Sequence[int]) -> bytes:
            nonlocal left
            low, high = place
            if not 0 <= low <= high <= len(view) - begin:
                raise ValueError(f"bytes {low} to {high} are outside of it")
            # Each byte is copied once. A small file whose tensors all name the same bytes could fill the memory.
            left -= high - low
            if left < 0:
                raise ValueError(f"bytes {low} to {high} are of two tensors")
            return bytes(view[begin + low : begin + high])

        def leaf(kind: str, value: Any) -> Any:
            if kind == "b":
                dtype, shape, place = value
                return [kind, [dtype, shape, place.encode() if dtype == LARGE else cut(place)]]
            if kind != "float":
                return [kind, value]
            if value not in ("inf", "-inf", "nan"):
                raise ValueError(f"{str(value)[:60]} is not inf, -inf or nan")
            return ["x", float(value)]

        tree = {name: with_leaves(part, leaf) for name, part in index.tree.items()}
        return Head(msgspec.structs.replace(index, tree=tree), cut(header.sums.data_offsets))


def decode_head(data: bytes | memoryview, part: Part, where: str) -> Head:
    """Reads a head.

    Raises:
        ChecksumError: it is not what the manifest names.
        StateError: it fits its checksum, but says what cannot be.
    """
    # The digest comes from the manifest, or from the agent that took the snapshot. It is checked before the
    # decoder sees the bytes, so what a damaged disk or a stranger sends is never parsed.
    if len(data) != part.nbytes or digest(data) != part.xxh3:
        raise ChecksumError(f"{where} is damaged: its checksum does not match")
    head = decode(_read_head, data, f"{where} is not the head of a shard", error=StateError, most=HEAD_BYTES)
    # Later code slices `sums` by chunk number without looking at its length. Too few sums would make the
    # slices empty, and an empty slice must not compare equal to anything.
    if len(head.sums) != SUM_BYTES * -(-head.index.nbytes // CHUNK_BYTES):
        raise StateError(
            f"{where} contains {len(head.sums) // SUM_BYTES} checksums for {head.index.nbytes} bytes, which do not match"
        )
    return head


def sums_of(blob: memoryview) -> bytes:
    """xxh3_64 of every chunk of a blob, one after the other."""
    # One call for each chunk, without an intermediate object. This function runs over every byte of every
    # snapshot, and an attribute look-up per 32 KiB shows in the profile.
    digest = xxhash.xxh3_64_digest
    return b"".join(digest(blob[low : low + CHUNK_BYTES]) for low in range(0, len(blob), CHUNK_BYTES))


def sums_of_buffers(buffers: Iterable[memoryview]) -> bytes:
    """The same for a blob that comes in buffers of any size."""
    sums = []
    # The sums must not depend on how the bytes were cut on the way: buffers end at tensors, chunks at
    # multiples of CHUNK_BYTES. So a chunk's hash is continued across buffers.
    chunk, room = xxhash.xxh3_64(), CHUNK_BYTES
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            part = buffer[at : at + room]
            chunk.update(part)
            at, room = at + len(part), room - len(part)
            if not room:
                sums.append(chunk.digest())
                chunk, room = xxhash.xxh3_64(), CHUNK_BYTES
    if room < CHUNK_BYTES:
        sums.append(chunk.digest())
    return b"".join(sums)


def damaged(data: memoryview, low: int, sums: bytes) -> Iterator[tuple[int, int]]:
    """The byte ranges of `data`, which begins at byte `low` of the blob (a chunk's begin), that are not as summed."""
    first = low // CHUNK_BYTES * SUM_BYTES
    actual = sums_of(data)
    # The common case is one comparison of the joined sums. Only damaged data pays for the loop that finds
    # which chunks differ. A short slice of `sums` compares unequal, so bytes without a checksum count as
    # damaged.
    if actual == sums[first : first + len(actual)]:
        return
    for begin in range(0, len(data), CHUNK_BYTES):
        at = begin // CHUNK_BYTES * SUM_BYTES
        if actual[at : at + SUM_BYTES] != sums[first + at : first + at + SUM_BYTES]:
            yield low + begin, low + min(begin + CHUNK_BYTES, len(data))


def whole_chunks(low: int, high: int, nbytes: int) -> tuple[int, int]:
    """The smallest range of whole chunks around [low, high) of a blob of `nbytes`."""
    # Bytes can be verified only in complete chunks, so a reader of a slice reads up to two chunks more than
    # it was asked for.
    return low // CHUNK_BYTES * CHUNK_BYTES, min(nbytes, -(-high // CHUNK_BYTES) * CHUNK_BYTES)
