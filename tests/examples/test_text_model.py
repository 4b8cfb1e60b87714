"""The text example: its corpus is made once and always the same, its model is causal and repeatable."""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

EXAMPLE = Path(__file__).parents[2] / "examples" / "text"


def load(name):
    """Imports a file of the example under a name of its own: `model` may be anyone's."""
    spec = importlib.util.spec_from_file_location(f"text_example_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus = load("corpus")
model = load("model")

SMALL = model.ModelConfig(dim=32, layers=2, heads=2, seq_len=16)


def seeded(config, seed=0):
    torch.manual_seed(seed)
    return model.Transformer(config)


def tokens_of(count, length, seed=0):
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(seed))


def loss_of(transformer, tokens):
    logits = transformer(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def test_the_default_model_has_a_few_million_parameters():
    count = sum(weight.numel() for weight in seeded(model.ModelConfig()).parameters())
    assert count == 2_410_176


def test_logits_have_one_row_per_token():
    logits = seeded(SMALL)(tokens_of(3, 11))
    assert (logits.shape, logits.dtype) == ((3, 11, 256), torch.float32)


@pytest.mark.parametrize("changed", [1, 7, 15])
def test_a_later_token_changes_no_earlier_logit(changed):
    transformer, tokens = seeded(SMALL), tokens_of(2, 16)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    before, after = transformer(tokens), transformer(other)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, changed:], after[:, changed:], rtol=0, atol=1e-3)


def test_the_order_of_earlier_tokens_matters():
    transformer, tokens = seeded(SMALL), torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    one, other = transformer(tokens)[:, -1]
    assert not torch.allclose(one, other, rtol=0, atol=1e-5)


def test_the_same_seed_gives_the_same_bits():
    one, two, other = seeded(SMALL), seeded(SMALL), seeded(SMALL, seed=1)
    tokens = tokens_of(2, 16)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(one(tokens), two(tokens))
    assert not torch.equal(one(tokens), other(tokens))


def test_a_fresh_model_guesses_about_evenly():
    assert abs(loss_of(seeded(SMALL), tokens_of(8, 17)).item() - np.log(256)) < 0.2


def test_a_step_on_one_batch_lowers_its_loss():
    transformer, tokens = seeded(SMALL), tokens_of(4, 17)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
    before = loss_of(transformer, tokens)
    before.backward()
    optimizer.step()
    assert all(weight.grad is not None for weight in transformer.parameters())
    assert loss_of(transformer, tokens).item() < before.item()


def test_the_state_holds_weights_only():
    transformer = seeded(SMALL)
    assert set(transformer.state_dict()) == {name for name, _ in transformer.named_parameters()}


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"dim": 30, "heads": 4}, {"dim": 12, "heads": 4}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match=r"at least 1|not a multiple"):
        model.ModelConfig(**sizes)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b" / "tests").mkdir(parents=True)
    (folder / "b" / "tests" / "deep.txt").write_text("deep")
    (folder / "z.txt").write_text("last")
    (folder / "a.txt").write_text("first")
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    return folder


def test_the_corpus_is_the_text_files_in_order_with_a_zero_between(texts, tmp_path):
    path = corpus.build_corpus(texts, tmp_path / "cache" / "corpus.npy")
    tokens = np.load(path)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"first\0deep\0last"
    assert {file.name for file in path.parent.iterdir()} == {"corpus.npy", "corpus.json", "corpus.lock"}


def test_the_standard_library_is_text_enough(tmp_path):
    one = corpus.build_corpus(None, corpus.corpus_path(None, tmp_path / "one"))
    two = corpus.build_corpus(None, corpus.corpus_path(None, tmp_path / "two"))
    assert one.read_bytes() == two.read_bytes()
    assert len(np.load(one)) > 1_000_000


def test_a_corpus_is_used_again_until_its_folder_changes(texts, tmp_path):
    out = tmp_path / "corpus.npy"
    first = corpus.build_corpus(texts, out).stat().st_ino
    assert corpus.build_corpus(texts, out).stat().st_ino == first
    (texts / "c.txt").write_text("new")
    assert np.load(corpus.build_corpus(texts, out)).tobytes() == b"first\0deep\0new\0last"


@pytest.mark.parametrize(
    "damage", [lambda out: out.unlink(), lambda out: out.with_suffix(".json").write_text("{")]
)
def test_a_corpus_without_its_other_half_is_made_again(texts, tmp_path, damage):
    out = corpus.build_corpus(texts, tmp_path / "corpus.npy")
    damage(out)
    corpus.build_corpus(texts, out)
    assert np.load(out).tobytes() == b"first\0deep\0last"
    assert json.loads(out.with_suffix(".json").read_text())["folder"] == str(texts)


def test_a_corpus_inside_its_own_folder_does_not_feed_on_itself(texts):
    out = corpus.build_corpus(texts, texts / "corpus.npy")
    first = out.stat().st_ino
    assert corpus.build_corpus(texts, out).stat().st_ino == first


def test_callers_at_the_same_time_build_once(texts, tmp_path, monkeypatch):
    writes, results = [], []
    save = np.save
    monkeypatch.setattr(corpus.np, "save", lambda file, tokens: (writes.append(1), save(file, tokens)))
    out, together = tmp_path / "corpus.npy", threading.Barrier(6)

    def build():
        together.wait()
        results.append(np.load(corpus.build_corpus(texts, out)).tobytes())

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"first\0deep\0last"] * 6
    assert len(writes) == 1


def test_each_folder_has_a_corpus_of_its_own(tmp_path):
    folders = [None, tmp_path / "a" / "text", tmp_path / "b" / "text"]
    assert len({corpus.corpus_path(folder, tmp_path) for folder in folders}) == 3


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"no text found in .*binary"):
        corpus.build_corpus(tmp_path / "binary", tmp_path / "out.npy")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        corpus.build_corpus(tmp_path / "nowhere", tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()
