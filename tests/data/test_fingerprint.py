"""What is saved of a data set, and what is said when it is not the same any more."""

import json

import numpy as np
import pytest
from megatron_files import write_megatron

from holdfast.data import Mixture, TokenDataset, check_fingerprint
from holdfast.data.fingerprint import identity
from holdfast.errors import UsageError


@pytest.fixture
def corpus(tmp_path):
    return write_megatron(tmp_path / "corpus", [[list(range(100))], [list(range(50))]])


def saved(data):
    """As a checkpoint gives it back."""
    return json.loads(json.dumps(identity(data)))


def said(before, data):
    with pytest.raises(UsageError) as caught:
        check_fingerprint(before, data)
    return str(caught.value)


def test_the_same_data_set_is_accepted(corpus):
    data = TokenDataset(corpus, 5)
    check_fingerprint(saved(data), TokenDataset(corpus, 5))
    check_fingerprint(data.fingerprint, data)


def test_files_may_move_and_change_their_format(corpus, tmp_path):
    before = saved(TokenDataset(corpus, 5))
    np.save(tmp_path / "moved.npy", np.array([*range(100), *range(50)], np.uint16))
    check_fingerprint(before, TokenDataset(tmp_path / "moved.npy", 5))


def test_a_file_that_grew_is_named_with_what_changed(corpus):
    before = saved(TokenDataset(corpus, 5))
    write_megatron(corpus, [[list(range(100))], [list(range(51))]], "int32")
    message = said(before, TokenDataset(corpus, 5))
    assert (
        f"{corpus}.bin: bytes 300 -> 604, dtype uint16 -> int32, tokens 150 -> 151, content changed"
        in message
    )
    assert "Restore the data to resume" in message


def test_an_edit_in_place(corpus):
    before = saved(TokenDataset(corpus, 5))
    with open(f"{corpus}.bin", "r+b") as file:
        file.write(b"\xff")
    assert said(before, TokenDataset(corpus, 5)).startswith(
        f"the data set changed since the checkpoint: {corpus}.bin: content changed. Restore"
    )


def test_other_documents_of_the_same_tokens(corpus):
    before = saved(TokenDataset(corpus, 5, documents="padded"))
    write_megatron(corpus, [[list(range(99))], [[99, *range(50)]]])
    assert "corpus.bin: document edges changed" in said(before, TokenDataset(corpus, 5, documents="padded"))


def test_only_the_file_that_changed_is_named(tmp_path):
    paths = [write_megatron(tmp_path / f"part{n}", [[list(range(90 + n))]]) for n in range(9)]
    before = saved(TokenDataset(paths, 5))
    write_megatron(paths[4], [[list(range(1, 95))]])
    message = said(before, TokenDataset(paths, 5))
    assert "part4.bin: content changed" in message
    assert "part3" not in message
    for path in paths:
        write_megatron(path, [[list(range(80))]])
    assert "; and 4 more" in said(before, TokenDataset(paths, 5))


def test_files_that_are_missing_or_new(tmp_path):
    paths = [write_megatron(tmp_path / f"part{n}", [[list(range(90))]]) for n in range(3)]
    before = saved(TokenDataset(paths, 5))
    message = said(before, TokenDataset(paths[:2], 5))
    assert "it had 3 files and now has 2" in message
    assert "part2.bin is missing" in message
    assert "part2.bin is new" in said(saved(TokenDataset(paths[:2], 5)), TokenDataset(paths, 5))


def test_other_options(corpus):
    before = saved(TokenDataset(corpus, 5))
    assert "seq_len was 5 and is now 6" in said(before, TokenDataset(corpus, 6))
    assert "documents was packed and is now padded" in said(
        before, TokenDataset(corpus, 5, documents="padded")
    )


def test_a_source_or_weight_of_a_mixture(corpus, tmp_path):
    other = write_megatron(tmp_path / "other", [[list(range(90))]])

    def mixture(weight, seq_len=5):
        return Mixture([(TokenDataset(corpus, seq_len), 1 - weight), (TokenDataset(other, seq_len), weight)])

    before = saved(mixture(0.25))
    check_fingerprint(before, mixture(0.25))
    assert "source 1: weight was 0.25 and is now 0.5" in said(before, mixture(0.5))
    write_megatron(tmp_path / "other", [[list(range(91))]])
    message = said(before, mixture(0.25))
    assert "source 1: " in message
    assert "other.bin: bytes 180 -> 182" in message
    assert "corpus" not in message
    assert "the mixture had 2 sources and now has 1" in said(
        before, Mixture([(TokenDataset(corpus, 5), 1.0)])
    )


def test_another_kind_of_data_set(corpus):
    data = TokenDataset(corpus, 5)
    assert "mixture" in said(saved(data), Mixture([(data, 1.0)]))
    assert "list does not have a fingerprint" in said(saved(data), [1, 2])
    assert "its fingerprint was 0123456789abcdef and is now" in said("0123456789abcdef", data)
    assert identity([1, 2]) is None
