"""Started in a folder in which others have put modules by the names of ours and of the library's."""

import asyncio
import os
import subprocess
import sys

import pytest
from harness import leftovers

from holdfast.agent.warm_pool import WarmPool
from holdfast.data.collate import Maker
from holdfast.data.decoding import Decoders
from holdfast.health.checks.check import Task
from holdfast.health.checks.child import check_in_child
from holdfast.protocol.health import Condition
from holdfast.tools.corpora.build import build
from holdfast.tools.corpora.options import BuildOptions

NAMES = (
    "aiohttp",
    "asyncio",
    "ctypes",
    "holdfast",
    "json",
    "msgspec",
    "multiprocessing",
    "socket",
    "torch",
    "xxhash",
)


@pytest.fixture
def came(tmp_path, monkeypatch):
    """The current folder is theirs; returns the file in which each module of theirs that was loaded leaves a line."""
    folder, came = tmp_path / "theirs", tmp_path / "came"
    folder.mkdir()
    for name in NAMES:
        said = f"import sys\nopen({str(came)!r}, 'a').write(f'{{__name__}} in {{sys.argv}}\\n')\nraise ImportError\n"
        (folder / f"{name}.py").write_text(said)
    monkeypatch.chdir(folder)
    return came


def holdfast(home, *args):
    """As the installed command, which has not the current folder on its path."""
    command = [sys.executable, "-P", "-m", "holdfast.cli", *map(str, args)]
    env = dict(os.environ, HOLDFAST_HOME=str(home))
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert not leftovers(home)
    return ran


@pytest.mark.long
def test_a_job_loads_nothing_of_theirs_and_the_script_finds_its_neighbours(came, tmp_path):
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "neighbour.py").write_text("NAME = 'the neighbour'")
    (ours / "train.py").write_text("import sys, neighbour\nprint(neighbour.NAME, sys.path[0], flush=True)\n")
    ran = holdfast(tmp_path / "home", "run", "--no-ui", "--nnodes", 2, "--job", "job", ours / "train.py")
    assert not came.exists(), came.read_text()
    assert ran.returncode == 0, ran.stderr
    assert f"the neighbour {ours}" in ran.stdout


@pytest.mark.nightly
def test_a_module_finds_those_of_the_folder_it_was_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("NAME = 'found beside it'")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, beside\nprint(beside.NAME, sys.path[0], flush=True)\n"
    )
    args = ["--no-ui", "--nnodes", 1, "--preload", "torch,beside", "-m", "package.train"]
    ran = holdfast(tmp_path / "home", "run", *args)
    assert ran.returncode == 0, ran.stderr
    assert f"found beside it {tmp_path}" in ran.stdout


def start_a_pool(folder):
    async def pool():
        pool = WarmPool(1, ("json",))
        await pool.start()
        await pool.close()

    asyncio.run(pool())


def make_data(folder):
    """In two processes, and one that tracks them."""
    source = folder / "in.jsonl"
    source.write_text('{"text": "abc"}\n' * 50)
    build(BuildOptions(inputs=(str(source),), prefix=folder / "out", unit_bytes=300), 2)


def decode(folder):
    decoders = Decoders(Maker([1, 2], None, seed=0), workers=1)
    for greeting in decoders._greetings:
        greeting.result()
    decoders.close()


def check(folder):
    """One that imports torch, and judges bits: what it finds does not depend on how busy the machine is."""
    results = asyncio.run(check_in_child(Task(only=("cpu",), seconds=0.05)))
    assert [(r.name, r.condition) for r in results] == [
        ("cpu-bits", Condition.HEALTHY),
        ("cpu-matrix", Condition.HEALTHY),
    ]


STARTS = (start_a_pool, make_data, decode, check)


@pytest.mark.parametrize("start", STARTS, ids=[start.__name__ for start in STARTS])
def test_nothing_that_is_started_loads_anything_of_theirs(came, tmp_path, start):
    try:
        start(tmp_path)
    finally:
        assert not came.exists(), came.read_text()
