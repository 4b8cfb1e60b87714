"""Token files: what a sample is, what tells two data sets apart, and what is refused."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data import TokenDataset
from holdfast.data.tokens import TOKEN_DTYPES


@pytest.fixture
def save(tmp_path):
    """Writes an array as `.npy` and gives its path."""

    def write(array, name="corpus.npy"):
        np.save(tmp_path / name, array)
        return tmp_path / name

    return write


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_a_sample_is_a_stretch_of_tokens_and_the_same_one_later(save, dtype):
    data = TokenDataset(save(np.arange(100, 121).astype(dtype)), seq_len=5)
    assert len(data) == 4
    tokens, labels = data[1]
    assert tokens.tolist() == [105, 106, 107, 108, 109]
    assert labels.tolist() == [106, 107, 108, 109, 110]
    assert tokens.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize(("length", "samples"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_only_whole_samples_count(save, length, samples):
    data = TokenDataset(save(np.arange(length, dtype=np.uint8)), seq_len=3)
    assert len(data) == samples
    assert len(list(data)) == samples  # ends by IndexError, as a map-style dataset must


def test_raw_and_npy_files_hold_the_same_data_set(save, tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "corpus.bin")
    raw = TokenDataset(tmp_path / "corpus.bin", seq_len=7, dtype="uint16")
    npy = TokenDataset(str(save(tokens)), seq_len=7)
    assert all(torch.equal(a, b) for a, b in zip(raw[5], npy[5], strict=True))
    assert raw.fingerprint == npy.fingerprint


def test_npy_is_known_by_its_content_not_by_its_name(save, tmp_path):
    save(np.arange(50, dtype=np.uint16)).rename(tmp_path / "corpus")
    assert TokenDataset(tmp_path / "corpus", seq_len=3).tokens.dtype == np.uint16


def test_tokens_of_the_other_byte_order_are_read_right(save):
    data = TokenDataset(save(np.arange(300, 310, dtype=">u2")), seq_len=2)
    assert data[0][0].tolist() == [300, 301]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_batch_is_its_samples_stacked(tmp_path_factory, data):
    seq_len = data.draw(st.integers(1, 20))
    array = np.arange(data.draw(st.integers(seq_len + 1, 400)), dtype=np.int32)
    path = tmp_path_factory.mktemp("batch") / "corpus.npy"
    np.save(path, array)
    dataset = TokenDataset(path, seq_len)
    ids = data.draw(st.lists(st.integers(0, len(dataset) - 1), max_size=8))
    tokens, labels = dataset.batch(ids)
    assert tokens.shape == labels.shape == (len(ids), seq_len)
    assert tokens.is_contiguous()
    assert labels.is_contiguous()
    for row, sample in enumerate(ids):
        assert tokens[row].tolist() == array[sample * seq_len : (sample + 1) * seq_len].tolist()
        assert labels[row].tolist() == array[sample * seq_len + 1 : (sample + 1) * seq_len + 1].tolist()


def test_a_batch_is_a_copy(save):
    data = TokenDataset(save(np.zeros(20, dtype=np.int64)), seq_len=3)
    data.batch([0])[0].fill_(7)
    assert data[0][0].tolist() == [0, 0, 0]
    assert not data.tokens.flags.writeable


def test_torch_data_loaders_take_it(save):
    data = TokenDataset(save(np.arange(25, dtype=np.uint8)), seq_len=4)
    batches = list(torch.utils.data.DataLoader(data, batch_size=3))
    assert [tuple(tokens.shape) for tokens, _ in batches] == [(3, 4), (3, 4)]


def test_a_pickled_data_set_is_its_path(save):
    data = TokenDataset(save(np.arange(100_000, dtype=np.int64)), seq_len=4)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[7][0].tolist() == data[7][0].tolist()


def test_the_fingerprint_is_short_and_repeatable(save):
    path = save(np.arange(10_000, dtype=np.uint16))
    one, two = TokenDataset(path, seq_len=8), TokenDataset(path, seq_len=8)
    assert one.fingerprint == two.fingerprint
    assert len(one.fingerprint) == 16


def test_the_fingerprint_sees_length_dtype_seq_len_and_both_ends(save):
    tokens = np.zeros(1_000_000, dtype=np.uint16)
    first, last, probed = tokens.copy(), tokens.copy(), tokens.copy()
    first[0] = last[-1] = probed[len(tokens) // 2] = 1
    variants = [
        TokenDataset(save(tokens), 8),
        TokenDataset(save(tokens), 9),
        TokenDataset(save(tokens[:-1], "shorter.npy"), 8),
        TokenDataset(save(tokens.astype(np.int32), "wider.npy"), 8),
        TokenDataset(save(tokens.view(np.uint8), "bytes.npy"), 8),
        TokenDataset(save(first, "first.npy"), 8),
        TokenDataset(save(last, "last.npy"), 8),
        TokenDataset(save(probed, "probed.npy"), 8),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)


@pytest.mark.parametrize("ids", [[-1], [0, 4]])
def test_a_sample_that_is_not_there_is_an_index_error(save, ids):
    data = TokenDataset(save(np.arange(13, dtype=np.uint8)), seq_len=3)
    with pytest.raises(IndexError, match="has 4 samples"):
        data.batch(ids)
    with pytest.raises(IndexError, match="has 4 samples"):
        data[ids[-1]]


@pytest.mark.parametrize("ids", [[[0]], [0.5], [True]])
def test_sample_numbers_are_a_flat_list_of_integers(save, ids):
    with pytest.raises(ValueError, match="1-D array of integers"):
        TokenDataset(save(np.arange(13, dtype=np.uint8)), seq_len=3).batch(ids)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(0, dtype=np.uint8), "holds 0 tokens"),
        (np.zeros(3, dtype=np.uint8), "holds 3 tokens, but one sample of seq_len 3 needs 4"),
        (np.zeros((4, 4), dtype=np.uint8), r"shape \(4, 4\), but tokens must be 1-D"),
        (np.zeros(9, dtype=np.float32), "cannot be of dtype float32; use one of uint8"),
        (np.zeros(9, dtype=bool), "cannot be of dtype bool"),
        (np.array([{}] * 9, dtype=object), "not a readable .npy file"),
    ],
)
def test_an_array_that_is_no_token_stream_is_refused(save, array, says):
    path = save(array)
    with pytest.raises(ValueError, match=says) as caught:
        TokenDataset(path, seq_len=3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "dtype", "says"),
    [
        ("a.bin", b"", "uint8", "is empty"),
        ("a.bin", b"abcdef", None, "specify the type of its tokens"),
        ("a.bin", b"abcde", "uint16", "not a whole number of uint16 tokens"),
        ("a.bin", b"abcdefgh", "float16", "cannot be of dtype float16"),
        ("a.bin", b"abcdefgh", "words", "cannot be of dtype words"),
        ("a.npy", b"no magic here", None, "not a readable .npy file"),
        ("a.npy", b"", None, "is empty"),
    ],
)
def test_a_file_that_is_no_token_stream_is_refused(tmp_path, name, content, dtype, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        TokenDataset(tmp_path / name, seq_len=3, dtype=dtype)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_was_cut_short_is_refused(save):
    path = save(np.arange(1000, dtype=np.int64))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"not a readable \.npy file"):
        TokenDataset(path, seq_len=3)


def test_a_dtype_that_contradicts_the_file_is_refused(save):
    with pytest.raises(ValueError, match="contains uint8, not uint16"):
        TokenDataset(save(np.zeros(9, dtype=np.uint8)), seq_len=3, dtype="uint16")


@pytest.mark.parametrize("seq_len", [0, -1])
def test_a_sample_has_at_least_one_token(save, seq_len):
    with pytest.raises(ValueError, match="at least 1 token"):
        TokenDataset(save(np.zeros(9, dtype=np.uint8)), seq_len=seq_len)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npy does not exist"):
        TokenDataset(tmp_path / "nowhere.npy", seq_len=3)
    with pytest.raises(ValueError, match="is a folder"):
        TokenDataset(tmp_path, seq_len=3)


def test_importing_the_package_loads_neither_torch_nor_numpy():
    check = "import sys, holdfast.data; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    import holdfast.data

    assert {"SampleOrder", "TokenDataset"} <= set(dir(holdfast.data))
    with pytest.raises(AttributeError, match="SampleOrder, TokenDataset"):
        holdfast.data.nothing  # noqa: B018
