"""`build`: what comes out, that nothing about how it was cut or interrupted shows in it, and what is refused."""

import errno
import gzip
import itertools
import json
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import holdfast as hf
from holdfast.data.files import TokenFile
from holdfast.errors import DataError, UsageError
from holdfast.tools.corpora import build, build_units
from holdfast.tools.corpora.build import describe, verify
from holdfast.tools.corpora.options import BuildOptions, Documents, InputKind, InputOptions, TokenFormat

LINES = InputOptions(documents=Documents.LINE)


def make(*inputs, prefix, workers=1, **options):
    return build.build(BuildOptions(inputs=tuple(map(str, inputs)), prefix=prefix, **options), workers)


def documents_of(prefix):
    file = TokenFile(prefix)
    edges = file.index.edges(np.arange(file.index.documents + 1))
    return [file.tokens[low:high].tolist() for low, high in itertools.pairwise(edges.tolist())]


def files_of(folder, name):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(f"{name}.")}


def jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)))
    return path


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer.json of a few words that is set to cut off and to add what must not be added."""
    words = {w: n for n, w in enumerate(["<unk>", "<end>", "a", "b", "c", *(f"w{n}" for n in range(300))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", 1)])
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=25).filter(any)


@settings(deadline=None, max_examples=40)
@given(texts=texts, unit_bytes=st.integers(1, 300))
def test_json_lines_cut_anywhere(tmp_path_factory, texts, unit_bytes):
    folder = tmp_path_factory.mktemp("build")
    source = jsonl(folder / "in.jsonl", texts)
    built = make(source, prefix=folder / "out", unit_bytes=unit_bytes)
    assert documents_of(folder / "out") == [list(t.encode()) for t in texts if t]
    assert (built.documents, built.dtype) == (len([t for t in texts if t]), "uint8")
    verify(TokenFile(folder / "out"))


lines = st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), max_size=25)


@settings(deadline=None, max_examples=40)
@given(
    lines=lines.filter(any),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    unit_bytes=st.integers(1, 50),
)
def test_lines_of_text_cut_anywhere(tmp_path_factory, lines, ending, last, unit_bytes):
    folder = tmp_path_factory.mktemp("build")
    (folder / "in.txt").write_bytes(ending.join(lines) + ending * last)
    make(folder / "in.txt", prefix=folder / "out", reading=LINES, unit_bytes=unit_bytes)
    assert documents_of(folder / "out") == [list(line) for line in lines if line]


def test_files_of_a_folder_are_documents_in_the_order_of_their_names(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name, text in {
        "z.txt": "z",
        "a.txt": "first\nsecond\n",
        "b/c.md": "\xff",
        ".hidden/x": "x",
        "e": "",
    }.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    make(folder, prefix=tmp_path / "out")
    assert documents_of(tmp_path / "out") == [list(b"first\nsecond\n"), [255], [ord("z")]]


def test_a_tokenizer_adds_only_the_end_that_is_asked_for(tmp_path, tokenizer):
    source = jsonl(tmp_path / "in.jsonl", ["a b c a b c", "w299 nothing", ""])
    built = make(source, prefix=tmp_path / "out", tokenizer=str(tokenizer), eod="<end>")
    assert documents_of(tmp_path / "out") == [[2, 3, 4, 2, 3, 4, 1], [304, 0, 1]]
    assert (built.dtype, built.vocabulary, built.eod) == ("uint16", 305, 1)
    make(source, prefix=tmp_path / "plain", tokenizer=str(tokenizer))
    assert documents_of(tmp_path / "plain")[0] == [2, 3, 4, 2, 3, 4]


def test_gzip_is_read_as_what_is_in_it(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["one", "two"])
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    (tmp_path / "whole.txt.gz").write_bytes(gzip.compress(b"text\n"))
    make(tmp_path / "in.jsonl.gz", tmp_path / "whole.txt.gz", prefix=tmp_path / "out", unit_bytes=3)
    assert documents_of(tmp_path / "out") == [list(b"one"), list(b"two"), list(b"text\n")]
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(500))[:-100])
    with pytest.raises(DataError, match=r"cut\.txt\.gz cannot be read"):
        make(tmp_path / "cut.txt.gz", prefix=tmp_path / "other")
    (tmp_path / "no.txt.gz").write_bytes(b"not compressed")
    with pytest.raises(DataError, match=r"no\.txt\.gz cannot be read"):
        make(tmp_path / "no.txt.gz", prefix=tmp_path / "other")


def parquet(path, values, rows=3, column="text", kind=None):
    table = pa.table({"other": list(range(len(values))), column: pa.array(values, kind or pa.string())})
    pq.write_table(table, path, row_group_size=rows)
    return path


@pytest.mark.parametrize("unit_bytes", [1, 150, 10**6])
def test_parquet_in_row_groups(tmp_path, unit_bytes):
    values = [f"row {n}" for n in range(20)]
    source = parquet(tmp_path / "in.parquet", values, column="body", kind=pa.large_string())
    make(source, prefix=tmp_path / "out", reading=InputOptions(field="body"), unit_bytes=unit_bytes)
    assert documents_of(tmp_path / "out") == [list(v.encode()) for v in values]


def test_parquet_that_cannot_be_read(tmp_path):
    source = parquet(tmp_path / "in.parquet", ["a", "b", "c", "d", None, "f"])
    with pytest.raises(DataError, match=r"in\.parquet, row 5: there is no text in the column `text`"):
        make(source, prefix=tmp_path / "out", unit_bytes=1)
    assert make(source, prefix=tmp_path / "out", reading=InputOptions(skip_bad=True)).skipped == 1
    with pytest.raises(UsageError, match="does not have a column 'body'; choose one of other, text"):
        make(source, prefix=tmp_path / "none", reading=InputOptions(field="body"))
    with pytest.raises(UsageError, match=r"column 'other' of .* contains int64, not text"):
        make(source, prefix=tmp_path / "none", reading=InputOptions(field="other"))
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(UsageError, match=r"no\.parquet is not a readable Parquet file"):
        make(tmp_path / "no.parquet", prefix=tmp_path / "none")


def test_npy(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["abc", "d"])
    built = make(source, prefix=tmp_path / "out", format=TokenFormat.NPY, eod_id=256)
    assert np.load(tmp_path / "out.npy").tolist() == [97, 98, 99, 256, 100, 256]
    assert built.dtype == "uint16"
    verify(TokenFile(tmp_path / "out"))
    assert len(hf.data.TokenDataset(tmp_path / "out", 2)) == 2
    assert make(source, prefix=tmp_path / "big", format=TokenFormat.NPY, eod_id=70_000).dtype == "uint32"
    assert make(source, prefix=tmp_path / "mega", eod_id=70_000).dtype == "int32"


def test_units_and_workers_do_not_show(tmp_path, tokenizer):
    source = jsonl(tmp_path / "in.jsonl", [f"a w{n} b" * (n % 7) for n in range(200)])
    more = [jsonl(tmp_path / f"more{n}.jsonl", ["c c"]) for n in range(5)]
    results = []
    for number, (unit_bytes, workers) in enumerate([(None, 1), (37, 1), (500, 2)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(
            source,
            *more,
            prefix=folder / "out",
            tokenizer=str(tokenizer),
            unit_bytes=unit_bytes,
            workers=workers,
        )
        found = files_of(folder, "out")
        assert set(found) == {"out.bin", "out.idx", "out.build.json"}
        results.append((found["out.bin"], found["out.idx"]))
    assert results[0] == results[1] == results[2]


def test_what_is_finished_is_not_made_again(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", ["x" * 40] * 10)
    other = jsonl(tmp_path / "other.jsonl", ["y" * 40] * 10)
    other.write_text(other.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"other\.jsonl, line 11"):
        make(source, other, prefix=tmp_path / "out", unit_bytes=100)
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:10]))
    made = []
    really = build.make_unit
    monkeypatch.setattr(build, "make_unit", lambda unit, *rest: (made.append(unit), really(unit, *rest)))
    make(source, other, prefix=tmp_path / "out", unit_bytes=100)
    names = [os.path.basename(piece.path) for unit in made for piece in unit.spans]
    assert names.count("other.jsonl") > names.count("in.jsonl") <= 1  # its last piece shares a unit
    assert not (tmp_path / "out.build").exists()
    assert describe(tmp_path / "out").documents == 20


def test_the_same_again_is_there_already(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["abc"])
    first = make(source, prefix=tmp_path / "out")
    before = files_of(tmp_path, "out")
    assert make(source, prefix=tmp_path / "out", overwrite=True) == first
    assert files_of(tmp_path, "out") == before


def test_another_data_set_is_only_replaced_when_asked(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["abc"])
    make(source, prefix=tmp_path / "out")
    before = files_of(tmp_path, "out")
    with pytest.raises(UsageError, match=r"out\.bin exists already, built from other input or options"):
        make(source, prefix=tmp_path / "out", eod_id=0)
    assert files_of(tmp_path, "out") == before
    make(source, prefix=tmp_path / "out", eod_id=0, overwrite=True)
    assert documents_of(tmp_path / "out") == [[97, 98, 99, 0]]
    (tmp_path / "raw.bin").write_bytes(b"someone's")
    with pytest.raises(UsageError, match=r"raw\.bin exists already"):
        make(source, prefix=tmp_path / "raw")
    assert not (tmp_path / "raw.build").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "Expecting property name"),
        ('{"id": 1}', "missing required field `text`"),
        ('{"text": 7}', "Expected `str`, got `int`"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"text": "\\ud800"}', "surrogates not allowed"),
        ("\udcff", "can't decode byte 0xff"),
    ],
)
@pytest.mark.parametrize("unit_bytes", [1, 25, 10**6])
def test_a_bad_line_is_named(tmp_path, line, says, unit_bytes):
    path = jsonl(tmp_path / "in.jsonl", ["one", "two", "three"])
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n" + path.read_bytes())
    with pytest.raises(DataError, match=rf"in\.jsonl, line 4: .*{says}.*--skip-bad"):
        make(path, prefix=tmp_path / "out", unit_bytes=unit_bytes)
    assert not (tmp_path / "out.bin").exists()
    built = make(path, prefix=tmp_path / "out", reading=InputOptions(skip_bad=True), unit_bytes=unit_bytes)
    assert (built.documents, built.skipped) == (6, 1)


def test_json_as_python_writes_it(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"score": NaN, "text": "fine"}\n\n  \n')
    make(tmp_path / "in.jsonl", prefix=tmp_path / "out")
    assert documents_of(tmp_path / "out") == [list(b"fine")]


def test_text_that_is_not_utf8_is_only_a_trouble_for_tokenizers(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_bytes(b"a\nb\n\xff\n")
    make(tmp_path / "in.txt", prefix=tmp_path / "bytes")
    for reading in (InputOptions(), LINES):
        with pytest.raises(DataError, match=r"in\.txt, line 3: .*0xff"):
            make(tmp_path / "in.txt", prefix=tmp_path / "out", tokenizer=str(tokenizer), reading=reading)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"dtype": "uint8"},
            "--dtype uint8 holds numbers up to 255, but tokens go up to 304; .* or use uint16",
        ),
        (
            {"dtype": "uint32"},
            "--dtype uint32 is not available for megatron files; choose one of uint8, uint16, int32",
        ),
        ({"dtype": "words"}, "--dtype words is not available"),
        ({"eod": "<nothing>"}, "does not have a token '<nothing>'"),
        ({"eod": "<end>", "eod_id": 1}, "specify the token that ends documents"),
        ({"eod_id": -1}, "--eod-id must be between 0"),
        ({"eod_id": 2**31}, "must be between 0"),
        ({"tokenizer": "nowhere.json"}, "nowhere.json cannot be read .No such file"),
        (
            {"tokenizer": "bytes", "eod": "<end>"},
            "the tokenizer bytes does not have a token '<end>'.*--eod-id",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_read(tmp_path, tokenizer, options, says):
    source = jsonl(tmp_path / "in.jsonl", ["abc"])
    with pytest.raises(UsageError, match=says):
        make(source, prefix=tmp_path / "out", **({"tokenizer": str(tokenizer)} | options))
    assert not (tmp_path / "out.build").exists()


def test_a_name_with_an_ending(tmp_path):
    with pytest.raises(UsageError, match=r"out\.bin must not have a suffix; use .*out$"):
        make(jsonl(tmp_path / "in.jsonl", ["abc"]), prefix=tmp_path / "out.bin")


def test_a_tokenizer_file_that_is_none(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UsageError, match=r"t\.json is not a file of the tokenizers library"):
        make(
            jsonl(tmp_path / "in.jsonl", ["abc"]), prefix=tmp_path / "out", tokenizer=str(tmp_path / "t.json")
        )


def test_inputs_that_do_not_work(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name, says in {"nowhere": "does not exist", "empty": "does not contain any files"}.items():
        with pytest.raises(UsageError, match=says):
            make(tmp_path / name, prefix=tmp_path / "out")
    closed = tmp_path / "empty" / "closed"
    (closed / ".hidden").mkdir(parents=True)
    listed = os.scandir

    def scandir(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    with monkeypatch.context() as denied:
        # Not by the folder's mode: the superuser reads everything.
        denied.setattr(os, "scandir", scandir)
        with pytest.raises(
            UsageError, match="closed cannot be read: Permission denied; check its permissions"
        ):
            make(tmp_path / "empty", prefix=tmp_path / "out")
    with pytest.raises(UsageError, match="there is no input"):
        make(prefix=tmp_path / "out")
    (tmp_path / "blank.txt").touch()
    with pytest.raises(DataError, match="no tokens: every document is empty"):
        make(tmp_path / "blank.txt", prefix=tmp_path / "out")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(
        UsageError, match="one document of 2048 MiB; cut it into documents with --documents line"
    ):
        make(tmp_path / "large.txt", prefix=tmp_path / "out")


def test_a_kind_that_is_not_in_the_name(tmp_path):
    jsonl(tmp_path / "part-00000", ["abc"])
    make(tmp_path / "part-00000", prefix=tmp_path / "out", reading=InputOptions(kind=InputKind.JSONL))
    assert documents_of(tmp_path / "out") == [list(b"abc")]


@contextmanager
def files_up_to(nbytes):
    """No file can grow beyond this: as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("most_bytes", [100, 3000, 8000])
def test_a_disk_that_is_full(tmp_path, most_bytes):
    """It fails in a unit, or where the units are put together; afterwards it goes on."""
    source = jsonl(tmp_path / "in.jsonl", [f"{n:100}" for n in range(100)])
    with (
        files_up_to(most_bytes),
        pytest.raises(DataError, match="could not be written: File too large; free some space"),
    ):
        make(source, prefix=tmp_path / "out", unit_bytes=2000)
    assert not (tmp_path / "out.idx").exists()
    make(source, prefix=tmp_path / "out", unit_bytes=2000)
    assert documents_of(tmp_path / "out") == [list(f"{n:100}".encode()) for n in range(100)]


def test_a_finished_part_that_was_damaged_is_found_and_made_again(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", ["abc"] * 20)
    with monkeypatch.context() as patch:
        patch.setattr(build._Output, "publish", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(source, prefix=tmp_path / "out", unit_bytes=100)
    part = next(p for p in (tmp_path / "out.build").glob("*.bin") if p.stat().st_size)
    part.write_bytes(b"x" * part.stat().st_size)
    with pytest.raises(DataError, match="is damaged; run the same command again"):
        make(source, prefix=tmp_path / "out", unit_bytes=100)
    make(source, prefix=tmp_path / "out", unit_bytes=100)
    assert documents_of(tmp_path / "out") == [list(b"abc")] * 20


def test_input_that_changes_meanwhile(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", ["abc"] * 20)
    really = build.make_unit

    def late(*rest):
        source.write_text("{}")
        really(*rest)

    monkeypatch.setattr(build, "make_unit", late)
    with pytest.raises(DataError, match=r"in\.jsonl changed while it was being read"):
        make(source, prefix=tmp_path / "out")


def test_two_builders_of_one_data_set(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", ["abc"])
    really = build.make_unit

    def meanwhile(*rest):
        with pytest.raises(UsageError, match="is already building"):
            make(source, prefix=tmp_path / "out")
        really(*rest)

    monkeypatch.setattr(build, "make_unit", meanwhile)
    make(source, prefix=tmp_path / "out")
    assert documents_of(tmp_path / "out") == [list(b"abc")]


def test_a_bad_line_in_a_worker_process(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["abc"] * 50)
    source.write_text(source.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"in\.jsonl, line 51"):
        make(source, prefix=tmp_path / "out", unit_bytes=300, workers=2)


def test_a_worker_process_that_is_killed(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", ["abc"] * 50)
    monkeypatch.setattr(build, "make_unit", _kill_oneself)
    with pytest.raises(DataError, match=r"a process that was encoding was killed.*fewer --workers"):
        make(source, prefix=tmp_path / "out", unit_bytes=300, workers=2)


def test_ctrl_c_waits_for_nobody(tmp_path, monkeypatch):
    def interrupted(*rest):
        raise KeyboardInterrupt

    source = jsonl(tmp_path / "in.jsonl", ["abc"] * 50)
    monkeypatch.setattr(build, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(source, prefix=tmp_path / "out", unit_bytes=300, workers=2)
    assert multiprocessing.active_children() == []


def _kill_oneself(*rest):
    os.kill(os.getpid(), signal.SIGKILL)


START_POOL = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from holdfast.tools.corpora.build import _die_with_parent
pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_die_with_parent)
print(pool.submit(os.getpid).result(), flush=True)
signal.pause()
"""


def test_worker_processes_end_with_their_parent():
    with subprocess.Popen([sys.executable, "-c", START_POOL], stdout=subprocess.PIPE, text=True) as parent:
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([worker], [], [], 60)[0] == [worker]
        os.close(worker)


def test_a_document_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(build_units, "MOST_TOKENS", 5)
    with pytest.raises(DataError, match="has 6 tokens; the limit is 5"):
        make(jsonl(tmp_path / "in.jsonl", ["abcdef"]), prefix=tmp_path / "out")


def test_verify_finds_every_damage(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["abc"] * 20)
    make(source, prefix=tmp_path / "out", eod_id=300)
    good = files_of(tmp_path, "out")
    for name, at, says in [
        ("out.bin", 0, "differs from what `holdfast data build` wrote"),
        ("out.bin", 1, "is not a token of 0 to 300"),
        ("out.idx", 40, "does not end where the next one begins"),
    ]:
        content = bytearray(good[name])
        content[at] ^= 0x44
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=says):
            verify(TokenFile(tmp_path / "out"))
        (tmp_path / name).write_bytes(good[name])
    assert verify(TokenFile(tmp_path / "out")).tokens == 80
