"""Megatron's `.bin` and `.idx`: read whoever wrote them, written as Megatron writes them, refused when broken."""

import ctypes
import io
import mmap
import os
import pickle
import struct
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_files import CODES, write_megatron

from holdfast.data import TokenDataset, megatron
from holdfast.data.files import TokenFile
from holdfast.data.megatron import HEADER, MegatronIndex, write_index

DOCUMENTS = [[[1, 2, 3]], [[4, 5]], [[6]], [[7, 8, 9, 10]]]


@pytest.fixture
def pair(tmp_path):
    return write_megatron(tmp_path / "corpus", DOCUMENTS)


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_and_documents_of_every_dtype(tmp_path, dtype):
    file = TokenFile(write_megatron(tmp_path / "corpus", DOCUMENTS, dtype))
    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == list(range(1, 11))
    assert file.index.documents == 4
    assert file.index.edges(np.arange(5)).tolist() == [0, 3, 5, 6, 10]
    file.index.check()


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_every_name_of_a_pair_means_the_pair(pair, ending):
    data = TokenDataset(f"{pair}{ending}", seq_len=4)
    assert [tokens.tolist() for tokens, _ in data] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert pickle.loads(pickle.dumps(data))[1][1].tolist() == [6, 7, 8, 9]


def test_names_with_dots(tmp_path):
    write_megatron(tmp_path / "corpus.v2.text", DOCUMENTS)
    assert len(TokenFile(tmp_path / "corpus.v2.text").tokens) == 10
    np.save(tmp_path / "other.v2.npy", np.arange(5, dtype=np.uint8))
    assert len(TokenFile(tmp_path / "other.v2").tokens) == 5


def test_packed_it_is_the_data_set_that_a_flat_file_is(pair, tmp_path):
    np.save(tmp_path / "flat.npy", np.arange(1, 11, dtype=np.uint16))
    ours, flat = TokenDataset(pair, 3), TokenDataset(tmp_path / "flat.npy", 3)
    assert [t.tolist() for t, _ in ours] == [t.tolist() for t, _ in flat]
    assert ours.fingerprint == flat.fingerprint


def test_documents_of_several_sequences(tmp_path):
    file = TokenFile(write_megatron(tmp_path / "corpus", [[[1], [2, 3]], [], [[4, 5], [6]], []]))
    assert file.index.edges(np.arange(5)).tolist() == [0, 3, 3, 6, 6]
    file.index.check()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    dtype=st.sampled_from(["uint8", "uint16", "int32"]),
    at_once=st.integers(1, 25),
)
def test_what_is_written_is_what_megatron_writes(tmp_path_factory, lengths, dtype, at_once):
    prefix = tmp_path_factory.mktemp("index") / "corpus"
    write_megatron(prefix, [[[1] * n] for n in lengths], dtype)
    file = io.BytesIO()
    with patch.object(megatron, "_AT_ONCE", at_once):
        write_index(file, np.dtype(dtype), np.array(lengths, np.int32))
        if sum(lengths):
            TokenFile(prefix).index.check()
    assert file.getvalue() == prefix.with_suffix(".idx").read_bytes()


def test_a_pair_without_one_of_the_two(pair):
    bin_, idx = pair.with_suffix(".bin"), pair.with_suffix(".idx")
    content = idx.read_bytes()
    idx.unlink()
    with pytest.raises(FileNotFoundError, match=r"corpus\.bin needs corpus\.idx in the same folder"):
        TokenDataset(pair, 3)
    assert len(TokenDataset(bin_, 3, "uint16").tokens) == 10  # its name and dtype: raw
    idx.write_bytes(content)
    bin_.unlink()
    with pytest.raises(FileNotFoundError, match=r"corpus\.bin does not exist"):
        TokenDataset(pair, 3)


def test_a_dtype_that_contradicts_the_index(pair):
    with pytest.raises(ValueError, match=r"contains uint16, not int32, according to corpus\.idx"):
        TokenDataset(pair, 3, "int32")


def changed(offset, content):
    def change(data):
        data[offset : offset + len(content)] = content

    return change


LENGTHS, POINTERS, FIRSTS = HEADER.size, HEADER.size + 4 * 4, HEADER.size + 12 * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.clear(), "is not a Megatron index"),
        (changed(0, b"PK"), "is not a Megatron index"),
        (changed(0, b"TNTIDX\x00\x00"), "format used before 2019"),
        (
            lambda data: data.__delitem__(slice(20, None)),
            "cut short: it has 20 bytes, but its header alone needs 34",
        ),
        (changed(9, struct.pack("<Q", 2)), "has version 2; only version 1"),
        (changed(17, b"\x07"), "dtype code 7, which is not an integer type"),
        (changed(17, b"\x63"), "dtype code 99"),
        (lambda data: data.pop(), "cut short or corrupt: it names 4 sequences and 5 document edges"),
        (changed(18, struct.pack("<Q", 2**60)), "cut short or corrupt"),
        (lambda data: data.extend(bytes(4)), "a mode for each sequence"),
        (lambda data: data.extend(bytes(5)), "cut short or corrupt"),
        (changed(FIRSTS, struct.pack("<q", 1)), "documents do not span its 4 sequences"),
        (changed(FIRSTS + 32, struct.pack("<q", 3)), "documents do not span its 4 sequences"),
        (changed(POINTERS, struct.pack("<q", 2)), "describes 20 bytes"),
        (
            changed(POINTERS + 24, struct.pack("<q", 14)),
            "describes 22 bytes of tokens, but .*corpus.bin has 20",
        ),
    ],
)
def test_an_index_that_is_seen_to_be_broken_at_opening(pair, change, says):
    path = pair.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    for documents in ("packed", "padded"):
        with pytest.raises(ValueError, match=says) as caught:
            TokenDataset(pair, 3, documents=documents)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed(LENGTHS + 4, struct.pack("<i", 5)), "sequence 1 does not end where the next one begins"),
        (changed(LENGTHS + 4, struct.pack("<i", -2)), "sequence 1 does not end"),
        (changed(POINTERS + 8, struct.pack("<q", 100)), "sequence 0 does not end"),
        (changed(FIRSTS + 8, struct.pack("<q", 3)), "document 2 begins before document 1"),
    ],
)
def test_an_index_that_is_broken_inside_is_found_by_the_check(pair, change, says):
    path = pair.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=says):
        TokenFile(pair).index.check()


@pytest.mark.parametrize("place", [POINTERS + 8, FIRSTS + 8])
def test_padded_samples_never_lie_outside_of_the_tokens(pair, place):
    path = pair.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    data[place : place + 8] = struct.pack("<q", 3 if place > POINTERS + 8 else 100)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"is corrupt: document [01] ends before it begins"):
        TokenDataset(pair, 3, documents="padded")


@pytest.mark.parametrize("documents", [-1, 2**62])
def test_document_edges_outside_of_the_index(pair, documents):
    path = pair.with_suffix(".idx")
    data = bytearray(path.read_bytes())
    data[FIRSTS + 8 : FIRSTS + 16] = struct.pack("<q", documents)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is corrupt"):
        TokenDataset(pair, 3, documents="padded")


def test_tokens_that_were_cut_short(pair):
    path = pair.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"describes 20 bytes of tokens, but .* has 18"):
        TokenDataset(pair, 3)


def test_a_billion_tokens_are_not_read(tmp_path):
    """Opening, the fingerprint and a batch bring no page into the page cache but those that they look at."""
    tokens, documents = 10**9, 1000
    prefix = tmp_path / "corpus"
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * tokens)
    with prefix.with_suffix(".idx").open("wb") as file:
        write_index(file, np.dtype("uint16"), np.full(documents, tokens // documents, np.int32))
    data = TokenDataset(prefix, seq_len=1024)
    assert len(data) == (tokens - 1) // 1024
    data.fingerprint  # noqa: B018
    data.batch(np.linspace(0, len(data) - 1, 8, dtype=np.int64))
    resident = pages_in_memory(prefix.with_suffix(".bin"))
    assert 0 < resident < 400


def pages_in_memory(path):
    size = path.stat().st_size
    vector = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, size) as mapped:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            assert (
                ctypes.CDLL(None, use_errno=True).mincore(
                    ctypes.c_void_p(address), ctypes.c_size_t(size), vector
                )
                == 0
            )
    finally:
        os.close(fd)
    return int((np.frombuffer(vector, np.uint8) & 1).sum())


def test_an_index_of_no_documents_is_of_no_tokens(tmp_path):
    write_megatron(tmp_path / "corpus", [])
    with pytest.raises(ValueError, match="is empty"):
        TokenDataset(tmp_path / "corpus", 3)
    assert MegatronIndex(tmp_path / "corpus.idx", 0).documents == 0
