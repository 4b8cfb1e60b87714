"""Any part of what was saved, into any shape: bit-equal, and hardly more bytes than are needed."""

import math
import threading
from itertools import pairwise

import pytest
import torch
from blobs_on_tiers import blob_of
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.layout import CHUNK_BYTES, Head, sums_of
from holdfast.checkpoint.loading import Leaf, regions_of
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.regions import Region, read_regions
from holdfast.checkpoint.replicate import Blob
from holdfast.errors import StateError, TierError
from holdfast.tensors.index import StateIndex, TensorSpec
from holdfast.tensors.staging import copy_into

LENGTH = 7 * CHUNK_BYTES + 1234
DATA = blob_of(1, 0, LENGTH)
SUMS = sums_of(memoryview(DATA))


class Bytes:
    """A source; `asked` notes what was read. wrong: bytes that it gives damaged."""

    def __init__(self, data, where="here", wrong=()):
        self.data, self.where, self.wrong, self.asked = data, where, wrong, []

    def read_into(self, low, view):
        if low + len(view) > len(self.data):
            raise StateError("cut short")
        self.asked.append((low, low + len(view)))
        view[:] = self.data[low : low + len(view)]
        for at in self.wrong:
            if low <= at < low + len(view):
                view[at - low] ^= 1


class Gone:
    where = "there"

    def read_into(self, low, view):
        raise TierError("does not answer")


# ---------------------------------------------------------------- a blob

ranges = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)


@settings(deadline=None, max_examples=120)
@given(st.lists(ranges, min_size=1, max_size=4))
def test_any_range_comes_whole_in_whole_chunks_and_is_counted(spans):
    source = Bytes(DATA)
    blob = Blob([source], SUMS, LENGTH)
    for low, high in spans:
        assert bytes(blob.fetch(low, high)) == DATA[low:high]
        into = bytearray(b"x" * (high - low))
        blob.fetch_into(low, memoryview(into))
        assert bytes(into) == DATA[low:high]
    for begin, end in source.asked:
        assert begin % CHUNK_BYTES == 0
        assert end % CHUNK_BYTES == 0 or end == LENGTH
    assert blob.fetched_bytes == sum(end - begin for begin, end in source.asked)
    assert blob.fetched_bytes <= sum(2 * (high - low + 2 * CHUNK_BYTES) for low, high in spans if high > low)


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (5, 4), (0, LENGTH + 1), (LENGTH + 1, LENGTH + 2)])
def test_a_range_that_the_blob_does_not_have_is_refused(low, high):
    with pytest.raises(StateError, match=f"are outside of a blob of {LENGTH}"):
        Blob([Bytes(DATA)], SUMS, LENGTH).fetch(low, high)


@settings(deadline=None, max_examples=100)
@given(ranges, st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1))
def test_damage_is_found_wherever_it_is_and_the_next_source_read(span, first, second):
    low, high = span
    why = []
    sources = [Gone(), Bytes(DATA, "bad", [first]), Bytes(DATA, "worse", [second]), Bytes(DATA, "good")]
    blob = Blob(sources, SUMS, LENGTH, why.append)
    assert bytes(blob.fetch(low, high)) == DATA[low:high]
    assert bytes(blob.fetch(0, LENGTH)) == DATA
    assert [w.split(":")[0] for w in why] == ["there", "bad", "worse"]


def test_damage_everywhere_is_refused_with_every_reason():
    blob = Blob([Gone(), Bytes(DATA, "bad", [5])], SUMS, LENGTH)
    with pytest.raises(
        StateError, match=r"there: does not answer; bad: bytes 0 to 32768 do not match their checksums"
    ):
        blob.fetch(0, 10)
    with pytest.raises(StateError, match="every source of these bytes failed"):
        blob.fetch(CHUNK_BYTES, 2 * CHUNK_BYTES)


def test_a_blob_whose_sums_are_too_few_is_damaged():
    with pytest.raises(StateError, match="do not match their checksums"):
        Blob([Bytes(DATA)], SUMS[:-8], LENGTH).fetch(LENGTH - 1, LENGTH)


# ---------------------------------------------------------------- regions


def found_of(states):
    """A checkpoint in this process: of each rank its leaves, as `save` makes a blob of them."""
    heads, sources = [], []
    for leaves in states:
        specs, offset = [], 0
        for leaf in leaves:
            nbytes = leaf.local.numel() * leaf.local.element_size()
            shape, dtype = tuple(leaf.local.shape), str(leaf.local.dtype)[6:]
            specs.append(
                TensorSpec(
                    path=leaf.path,
                    dtype=dtype,
                    shape=shape,
                    offset=offset,
                    nbytes=nbytes,
                    global_shape=leaf.global_shape,
                    start=leaf.start,
                )
            )
            offset += nbytes
        data = bytearray(offset)
        copy_into(memoryview(data), [leaf.local for leaf in leaves], {})
        heads.append(Head(StateIndex(1, {}, tuple(specs), offset), sums_of(memoryview(data))))
        sources.append(data)

    def open_blob(rank):
        return Blob([Bytes(sources[rank])], heads[rank].sums, len(sources[rank]))

    return Located(step=1, where="here", heads=heads, open_blob=open_blob)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8,
    torch.int16, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


def random_tensor(shape, dtype, seed=0):
    """Any bytes that are values of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor):
    if not tensor.numel():
        return b""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@st.composite
def boxes(draw):
    """A shape of up to four dimensions, and a box within it."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    box = []
    for size in shape:
        low = draw(st.integers(0, size))
        box.append((low, draw(st.integers(low, size))))
    return tuple(shape), tuple(box)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(boxes(), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=4))
def test_any_boxes_of_any_tensors(wanted):
    tensors = [random_tensor(shape, dtype, i) for i, ((shape, _), dtype, _) in enumerate(wanted)]
    found = found_of([[Leaf(path=f"t{i}", local=t) for i, t in enumerate(tensors)]])
    regions, right = [], []
    for i, ((_, box), dtype, strided) in enumerate(wanted):
        part = tensors[i][tuple(slice(low, high) for low, high in box)]
        target = torch.zeros(part.shape, dtype=dtype)
        if strided and part.dim():
            wide = torch.zeros((*part.shape[:-1], 2 * part.shape[-1]), dtype=dtype)
            target = wide[..., ::2]
        spec = found.heads[0].index.tensors[i]
        regions.append(Region(0, spec, tuple(low for low, _ in box), target))
        right.append(part)
    read_regions(found, regions, threads=2)
    for region, part in zip(regions, right, strict=True):
        assert region.target.shape == part.shape
        assert bits(region.target) == bits(part)


@pytest.mark.parametrize("width", [1, 700, 1023, 1024])
@pytest.mark.parametrize("lines", [10, 5000])
def test_columns_of_a_large_matrix(lines, width):
    """5000 lines: more runs than are read one by one."""
    whole = random_tensor((lines, 1024), torch.float32)
    found = found_of([[Leaf(path="w", local=whole)]])
    target = torch.empty((lines, width))
    read_regions(found, [Region(0, found.heads[0].index.tensors[0], (0, 1024 - width), target)])
    assert bits(target) == bits(whole[:, 1024 - width :])


def test_a_tensor_larger_than_a_read():
    whole = random_tensor((5 << 20,), torch.float64)
    found = found_of([[Leaf(path="w", local=whole)]])
    target = torch.empty(whole.shape, dtype=whole.dtype)
    read_regions(found, [Region(0, found.heads[0].index.tensors[0], (0,), target)])
    assert torch.equal(target.view(torch.int64), whole.view(torch.int64))


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (5, 5)])
def test_a_box_that_is_not_within_its_piece(offsets):
    found = found_of([[Leaf(path="w", local=torch.zeros(4, 4))]])
    region = Region(0, found.heads[0].index.tensors[0], offsets, torch.zeros(4, 4))
    with pytest.raises(StateError, match=r"w: \(4, 4\) at .* is not within \(4, 4\)"):
        read_regions(found, [region])


@pytest.mark.parametrize("change", [{"offset": 1 << 40}, {"shape": (1 << 20, 4)}, {"dtype": "float99"}])
def test_an_index_that_says_what_cannot_be(change):
    found = found_of([[Leaf(path="w", local=torch.zeros(4, 4))]])
    spec = found.heads[0].index.tensors[0]
    fields = {f: getattr(spec, f) for f in spec.__struct_fields__} | change
    target = torch.zeros(fields["shape"])
    with pytest.raises(StateError, match=r"are outside of a blob|does not have the dtype"):
        read_regions(found, [Region(0, TensorSpec(**fields), (0, 0), target)])


def test_a_thread_that_fails_ends_the_others():
    leaves = [Leaf(path=f"w{i}", local=random_tensor((600_000,), torch.float64, i)) for i in range(8)]
    found = found_of([leaves])
    opened = []

    def open_blob(rank):
        source = Bytes(bytes(found.heads[0].index.nbytes))
        opened.append(source)
        return Blob([source], found.heads[0].sums, found.heads[0].index.nbytes)

    bad = Located(step=1, where="here", heads=found.heads, open_blob=open_blob)
    regions = [
        Region(0, s, (0,), torch.empty(s.shape, dtype=torch.float64)) for s in found.heads[0].index.tensors
    ]
    before = threading.active_count()
    with pytest.raises(StateError, match="do not match their checksums"):
        read_regions(bad, regions)
    assert threading.active_count() == before
    assert sum(len(s.asked) for s in opened) <= 4


# ---------------------------------------------------------------- another number of ranks


def sharded(path, whole, world, rank):
    """Rank's piece of a tensor that is cut along its first dimension, as torch cuts it."""
    pieces = torch.chunk(whole, world, 0)
    start = sum(len(p) for p in pieces[:rank])
    local = pieces[rank] if rank < len(pieces) else whole[:0]
    return Leaf(
        path=path, local=local, global_shape=tuple(whole.shape), start=(start, *[0] * (whole.dim() - 1))
    )


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 8), (3, 4), (8, 1), (1, 5)])
def test_resharding_reads_hardly_more_than_is_needed(before, after):
    """Pieces of about a megabyte. 2 to 8 is the worst: both ends of every slice lie within a chunk."""
    wholes = {f"layer{i}": random_tensor((2040 + i, 1000), torch.float32, i) for i in range(3)}
    found = found_of(
        [[sharded(p, w, before, rank) for p, w in wholes.items()] for rank in range(before)],
    )
    needed = 0
    for rank in range(after):
        regions, right = [], []
        for path, whole in wholes.items():
            mine = sharded(path, whole, after, rank)
            target = Leaf(
                path=path,
                local=torch.empty_like(mine.local),
                global_shape=mine.global_shape,
                start=mine.start,
            )
            regions += regions_of(found, target, rank, [])
            right.append((target.local, mine.local))
            needed += mine.local.numel() * 4
        read_regions(found, regions)
        assert all(bits(a) == bits(b) for a, b in right)
    assert needed == sum(w.numel() * 4 for w in wholes.values())
    assert needed <= found.fetched_bytes <= 1.05 * needed


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_grid_into_any_other(data):
    """Pieces along two dimensions, some of them empty; a reader wants any box."""
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    whole = random_tensor(shape, torch.int16)

    def cuts(size):
        inner = data.draw(st.lists(st.integers(0, size), max_size=3))
        return [0, *sorted(inner), size]

    states = []
    lines, columns = cuts(shape[0]), cuts(shape[1])
    for top, bottom in pairwise(lines):
        for left, right in pairwise(columns):
            states.append(
                [Leaf(path="w", local=whole[top:bottom, left:right], global_shape=shape, start=(top, left))]
            )
    found = found_of(states)
    top, left = data.draw(st.integers(0, shape[0])), data.draw(st.integers(0, shape[1]))
    bottom, right = data.draw(st.integers(top, shape[0])), data.draw(st.integers(left, shape[1]))
    local = torch.zeros((bottom - top, right - left), dtype=torch.int16)
    read_regions(
        found, regions_of(found, Leaf(path="w", local=local, global_shape=shape, start=(top, left)), 0, [])
    )
    assert bits(local) == bits(whole[top:bottom, left:right])


def test_a_piece_that_is_missing_is_said():
    whole = torch.zeros(8, 4)
    found = found_of([[sharded("w", whole, 2, 0)]])
    with pytest.raises(StateError, match="w: the checkpoint has 16 of the 32 elements needed"):
        regions_of(found, Leaf(path="w", local=whole), 0, [])


def test_a_reader_takes_its_own_of_equal_pieces_and_others_spread():
    found = found_of([[Leaf(path="w", local=torch.full((4,), float(rank)))] for rank in range(3)])
    for reader in range(6):
        local = torch.empty(4)
        read_regions(found, regions_of(found, Leaf(path="w", local=local), reader, []))
        assert local.tolist() == [float(reader % 3)] * 4
