"""What an idle process may import ahead, and what it must leave to the worker."""

import os
import signal
import sys
import types

import pytest

from holdfast.protocol import messages as m
from holdfast.train import imports


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    """Imports modules of the folder ahead, in this process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def run(*modules, **order):
        return imports.import_ahead(m.Preload(modules=modules, cwd=str(tmp_path), **order))

    yield run
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_are_imported_as_the_worker_would_import_them(ahead, tmp_path):
    (tmp_path / "plain_one.py").write_text(
        "import os, sys\nwhere, argv, home = os.getcwd(), sys.argv, os.environ.get('HOME')\n"
    )
    plain = type(os.environ)
    assert ahead("plain_one", script="train.py", args=("--lr", "1"), variables=("RANK",)) == m.Preloaded()
    one = sys.modules["plain_one"]
    assert (one.where, one.argv) == (str(tmp_path), ["train.py", "--lr", "1"])
    assert type(os.environ) is plain


@pytest.mark.parametrize(
    "reads", ["os.environ.get('RANK')", "os.getenv('RANK')", "'RANK' in os.environ", "dict(os.environ)"]
)
def test_a_module_that_reads_the_rank_is_left_out_with_whoever_imports_it(ahead, tmp_path, reads):
    (tmp_path / "reader_two.py").write_text(f"import os\nrank = {reads}\n")
    (tmp_path / "brings_two.py").write_text("import reader_two\n")
    (tmp_path / "after_two.py").write_text("")
    answer = ahead("brings_two", "after_two", variables=("RANK",))
    assert answer.without == ("brings_two", "reader_two")
    assert "brings_two reads" in answer.reason
    assert "after_two" not in sys.modules  # this process is of no use any more


@pytest.mark.parametrize("text", ["import no_such_module_3", "raise SystemExit(3)", "1 / 0"])
def test_a_module_that_fails_is_named(ahead, tmp_path, text):
    (tmp_path / "fails_three.py").write_text(text)
    answer = ahead("fails_three")
    assert answer.without == ("fails_three",)
    assert answer.reason.startswith("fails_three: ")


def test_a_module_that_opens_an_accelerator_is_named(ahead, tmp_path, monkeypatch):
    (tmp_path / "opens_four.py").write_text("")
    for number, target in enumerate(("/dev/nvidiactl", "/dev/nvidia0", "/dev/null")):
        (tmp_path / str(number)).symlink_to(target)
    assert imports.accelerator(tmp_path) == ""
    (tmp_path / "9").symlink_to("/dev/nvidia-uvm")
    assert imports.accelerator(tmp_path) == "/dev/nvidia-uvm"
    monkeypatch.setattr(imports, "accelerator", lambda: "/dev/nvidia-uvm")
    assert ahead("opens_four").without == ("opens_four",)


def test_only_installed_modules_are_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_own.py").write_text("")
    for name in ("users_own", "xml.sax.saxutils"):
        sys.modules.pop(name, None)
    before = frozenset(sys.modules)
    __import__("users_own")
    __import__("xml.sax.saxutils")
    monkeypatch.setitem(sys.modules, "another_name", signal)
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    told = imports.imported(before)
    assert "xml.sax.saxutils" in told
    assert not {"users_own", "another_name", "made_here"} & set(told)
    del sys.modules["users_own"]


def test_what_a_script_changes_in_its_environment_is_told(monkeypatch):
    monkeypatch.setenv("GOES", "1")
    monkeypatch.setenv("STAYS", "1")
    before = dict(os.environ)
    monkeypatch.delenv("GOES")
    monkeypatch.setenv("COMES", "1")
    assert imports.changed(before) == ("COMES", "GOES")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"])
def test_what_torch_reads_in_c_keeps_a_cold_process_cold(ahead, tmp_path, monkeypatch, name):
    (tmp_path / "plain_nine.py").write_text("")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert ahead("plain_nine", variables=(name,)) == m.Preloaded()  # torch is here, and has read it
    monkeypatch.delitem(sys.modules, "torch")
    answer = ahead("plain_nine.part", "other", variables=("RANK", name))
    assert answer == m.Preloaded(("other", "plain_nine"), f"torch reads {name}")
