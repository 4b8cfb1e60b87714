"""Padded documents and several files, against a reading that is as plain as possible."""

import itertools
import pickle
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_files import write_megatron

from holdfast.data import TokenDataset, packing


def padded_plainly(documents, seq_len, pad):
    for document in documents:
        for low in range(0, len(document) - 1, seq_len):
            tokens = document[low : low + seq_len + 1]
            fill = seq_len + 1 - len(tokens)
            yield tokens[:-1] + [pad] * fill, tokens[1:] + [-100] * fill


def numbered(lengths):
    """Documents of these lengths; tokens count from 1."""
    edges = np.cumsum([0, *lengths]).tolist()
    return [list(range(low + 1, high + 1)) for low, high in itertools.pairwise(edges)]


def pairs(data, ids=None):
    tokens, labels = data.batch(np.arange(len(data)) if ids is None else ids)
    return list(zip(tokens.tolist(), labels.tolist(), strict=True))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=300).filter(lambda n: max(n) > 1),
    seq_len=st.integers(1, 12),
    pad=st.integers(0, 9),
    at_once=st.integers(1, 4),
)
def test_padded_documents(tmp_path_factory, lengths, seq_len, pad, at_once):
    documents = numbered(lengths)
    prefix = write_megatron(tmp_path_factory.mktemp("padded") / "corpus", [[d] for d in documents])
    with patch.object(packing, "_BLOCKS_AT_ONCE", at_once):
        data = TokenDataset(prefix, seq_len, documents="padded", pad_token=pad)
    assert pairs(data) == list(padded_plainly(documents, seq_len, pad))


def test_every_token_but_a_documents_first_is_a_label_once(tmp_path):
    documents = numbered([5, 1, 0, 64, 2, 17] * 40)
    prefix = write_megatron(tmp_path / "corpus", [[d] for d in documents])
    data = TokenDataset(prefix, 8, documents="padded")
    _, labels = data.batch(np.arange(len(data)))
    assert labels[labels != -100].tolist() == [t for d in documents for t in d[1:]]


def test_the_loss_leaves_padding_out(tmp_path):
    data = TokenDataset(write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]]), 4, documents="padded")
    _, labels = data.batch([0, 1])
    logits = torch.randn(2, 4, 10)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    by_hand = -sum(torch.log_softmax(logits[r, c], 0)[t] for r, c, t in [(0, 0, 2), (0, 1, 3), (1, 0, 5)])
    assert torch.allclose(loss, by_hand)
    assert (labels != -100).sum() == 3


def test_several_files_are_one_data_set(tmp_path):
    one = write_megatron(tmp_path / "one", [[list(range(1, 12))]])
    np.save(tmp_path / "two.npy", np.arange(3, dtype=np.int64))  # shorter than a sample
    np.arange(100, 121, dtype=np.uint16).tofile(tmp_path / "three.raw")
    files = [one, tmp_path / "two", tmp_path / "three.raw"]
    with pytest.raises(ValueError, match="raw file; specify the type of its tokens"):
        TokenDataset(files, 5)
    np.save(tmp_path / "three.npy", np.arange(100, 121, dtype=np.uint16))
    data = TokenDataset([*files[:2], tmp_path / "three.npy"], 5)
    assert len(data) == 2 + 0 + 4
    assert [row[0][0] for row in pairs(data, [5, 0, 2, 1, 3])] == [115, 1, 100, 6, 105]
    assert pairs(pickle.loads(pickle.dumps(data))) == pairs(data)
    assert data.batch([])[0].shape == (0, 5)
    with pytest.raises(ValueError, match="has 3 files"):
        data.tokens  # noqa: B018


def test_padded_documents_of_several_files(tmp_path):
    first, second = numbered([3, 9, 2]), numbered([7, 1])
    paths = [
        write_megatron(tmp_path / "a", [[d] for d in first], "uint8"),
        write_megatron(tmp_path / "b", [[d] for d in second], "int32"),
    ]
    data = TokenDataset(paths, 4, documents="padded", pad_token=7)
    assert pairs(data) == list(padded_plainly(first + second, 4, 7))
    assert len({data.fingerprint, TokenDataset(paths, 4, documents="padded").fingerprint}) == 2


def test_the_fingerprint_sees_where_documents_begin_only_where_it_matters(tmp_path):
    one = write_megatron(tmp_path / "one", [[[1, 2, 3]], [[4, 5, 6]]])
    two = write_megatron(tmp_path / "two", [[[1, 2]], [[3, 4, 5, 6]]])
    assert TokenDataset(one, 2).fingerprint == TokenDataset(two, 2).fingerprint
    padded = [TokenDataset(p, 2, documents="padded").fingerprint for p in (one, two)]
    assert len({*padded, TokenDataset(one, 2).fingerprint}) == 3


def test_bad_arguments(tmp_path):
    np.save(tmp_path / "flat.npy", np.arange(50, dtype=np.uint8))
    with pytest.raises(ValueError, match="does not contain the beginnings of documents"):
        TokenDataset(tmp_path / "flat.npy", 4, documents="padded")
    with pytest.raises(ValueError, match="must be 'packed' or 'padded'"):
        TokenDataset(tmp_path / "flat.npy", 4, documents="stacked")
    with pytest.raises(ValueError, match="list of token files is empty"):
        TokenDataset([], 4)
    prefix = write_megatron(tmp_path / "corpus", [[[1]], [[2]]])
    with pytest.raises(ValueError, match=r"no document in .* has the 2 tokens"):
        TokenDataset(prefix, 4, documents="padded")
