"""Bad input gets a message with what to do and exit code 2; nothing is started, nothing is left."""

import errno
import os
import py_compile
import socket
import zipfile

import pytest
from conftest import processes_of

from holdfast.cli import script_source
from holdfast.cli import spec as spec_module
from holdfast.engines.jobs import JobFolder

CASES = {
    "no script": (["nope.py"], "the script 'nope.py' does not exist"),
    "a folder": (["."], "is a folder; specify the training script in it"),
    "a module without -m": (["torch.nope"], "use -m to run a module"),
    "a folder that is not valid UTF-8": (
        ["--checkpoint", os.fsdecode(b"/tmp/bild-\xe4"), "train.py"],
        r"b'/tmp/bild-\xe4' is not valid UTF-8",
    ),
    "no module": (
        ["-m", "no.such.module"],
        "the module 'no.such.module' was not found; is its folder on PYTHONPATH?",
    ),
    "0 nodes": (["--nnodes", "0", "train.py"], "MIN must be at least 1"),
    "MIN over MAX": (["--nnodes", "3:2", "train.py"], "MAX must not be less than MIN, for example 2:4"),
    "no number": (
        ["--nnodes", "many", "train.py"],
        "must be a number or MIN:MAX (got 'many'), for example 4 or 2:4",
    ),
    "0 workers": (["--nproc-per-node", "0", "train.py"], "at least 1"),
    "spares below 0": (["--spares", "-1", "train.py"], "--spares must be at least 0 (got -1)"),
    "another engine": (["--engine", "moon", "train.py"], "must be local, ssh, slurm, kubernetes or join"),
    "an option of Slurm": (["--partition", "p", "train.py"], "holdfast: --partition needs --engine slurm"),
    "options of hosts": (
        ["--hosts", "a,b", "--remote-python", "p", "train.py"],
        "holdfast: --hosts, --remote-python need --engine ssh",
    ),
    "no hosts": (["--engine", "ssh", "train.py"], "needs the hosts"),
    "hosts of nobody": (["--hosts", "a,b", "train.py"], "--hosts needs --engine ssh"),
    "too few hosts": (["--engine", "ssh", "--hosts", "a,b", "--nnodes", "3", "train.py"], "--hosts has 2"),
    "a host that is an option": (
        ["--engine", "ssh", "--hosts=-oProxyCommand=x", "train.py"],
        "must be a name that ssh accepts",
    ),
    "no such rank": (["--nnodes", "2", "--fault", "kill-worker:rank=2", "train.py"], "ranks are 0 to 1"),
    "no such node": (["--nnodes", "2", "--fault", "kill-node:node=2", "train.py"], "nodes are 0 to 1"),
    "a rank that is none": (["--fault", "kill-worker:rank=x", "train.py"], "not a whole number"),
    "no such fault": (["--fault", "kill-all", "train.py"], "choose one of kill-worker, kill-node"),
    "a fault without a time": (
        ["--fault", "raise:after=soon", "train.py"],
        "write for example 8s, 500ms or 2m",
    ),
    "a fault of a machine that nobody watches": (
        ["--no-health", "--fault", "xid=79", "train.py"],
        "the health rules, which --no-health turns off",
    ),
    "an Xid on a node that is none": (["--fault", "xid=79,node=5", "train.py"], "there is no node 5"),
    "an unknown option": (["--spare", "1", "train.py"], "--spares"),
    "a bad name": (["--job", "../escape", "train.py"], "may contain only letters, digits"),
    "no such preload": (["--preload", "torch,nope", "train.py"], "the module 'nope' was not found"),
    "a detection time that is too short": (["--detection", "0.01", "train.py"], "between 0.2 and 600"),
    "a stall factor that is too small": (["--stall-factor", "1", "train.py"], "between 2 and 1000"),
    "budgets below 0": (["--max-restarts", "-1", "train.py"], "must be at least 0"),
    "a report without a folder": (["--report", "nowhere/report.json", "train.py"], "nowhere does not exist"),
    "a report that is a folder": (["--report", ".", "train.py"], "this is a folder"),
    "a port that is none": (["--port", "70000", "train.py"], "between 0 and 65535"),
    "a second machine": (["--node-rank", "1", "train.py"], "one `holdfast run` starts all nodes"),
    "a rendezvous elsewhere": (["--rdzv-endpoint", "other:29400", "train.py"], "remove --rdzv-endpoint"),
    "a data cache of no size": (
        ["--data-cache", "cache,size=big", "train.py"],
        "must be a size (got",
    ),
    "a data cache with another word": (["--data-cache", "cache,sise=1G", "train.py"], "unknown 'sise'"),
    "no Python": (["--no-python", "train.sh"], "SCRIPT must be a Python file"),
}


@pytest.fixture
def refused(holdfast, home):
    def check(args, words):
        said = holdfast("run", *args)
        assert said.code == 2, said
        assert words in " ".join(said.err.split()), said.err
        assert said.out == ""
        assert not home.exists()
        assert processes_of(home) == []

    return check


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused(refused, name):
    refused(*CASES[name])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            b"import torch\n\ndef broken(:\n",
            "train.py, line 3: SyntaxError: invalid syntax; correct the script",
        ),
        (b"x = 1\0\n", "train.py: SyntaxError: source code"),
        (b"# coding: nonsense\n", "train.py: SyntaxError: unknown encoding: nonsense"),
        (b"return 5\n", "line 1: SyntaxError: 'return' outside function"),
    ],
    ids=["syntax", "NUL", "encoding", "return"],
)
def test_a_script_that_cannot_be_compiled(refused, tmp_path, source, words):
    (tmp_path / "train.py").write_bytes(source)
    refused(["train.py"], words)


def test_a_home_that_cannot_be_one(holdfast, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", os.fsdecode(b"/tmp/bild-\xe4"))
    said = holdfast("run", "train.py")
    assert (said.code, said.out) == (2, "")
    assert r"HOLDFAST_HOME b'/tmp/bild-\xe4' is not valid UTF-8: choose another folder" in said.err

    def none():
        raise RuntimeError("Could not determine home directory.")  # no HOME, and no entry in passwd

    monkeypatch.delenv("HOLDFAST_HOME")
    monkeypatch.setattr("pathlib.Path.home", none)
    said = holdfast("ls")
    assert (said.code, said.out) == (2, "")
    assert "this user does not have a home folder, in which jobs are stored: set HOLDFAST_HOME" in said.err


def test_a_script_without_permission(refused, monkeypatch):
    def read(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Not by the file's mode: the superuser reads everything.
    monkeypatch.setattr("pathlib.Path.read_bytes", read)
    refused(["train.py"], "the script train.py cannot be read: Permission denied; check its permissions")


def test_a_compiled_script_is_none_of_the_checks(tmp_path):
    py_compile.compile("/dev/null", cfile=str(tmp_path / "train.pyc"), doraise=True)
    assert script_source.read_script(str(tmp_path / "train.pyc"), module=False) is None
    with zipfile.ZipFile(tmp_path / "train.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    assert script_source.read_script(str(tmp_path / "train.pyz"), module=False) is None


def test_too_little_memory(refused, monkeypatch):
    monkeypatch.setattr("holdfast.protocol.machine.processes.available_bytes", lambda: 1 << 30)
    refused(
        ["--nnodes", "4", "--spares", "1", "train.py"], "use a smaller --nnodes, --nproc-per-node or --spares"
    )


def test_too_little_room_on_disk(refused, monkeypatch):
    monkeypatch.setattr(spec_module, "MIN_FREE_BYTES", 1 << 62)
    refused(["train.py"], "set HOLDFAST_HOME to a folder on another disk")


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(["--port", str(port), "train.py"], f"--port {port} is in use; choose another")


def test_a_port_that_is_taken_after_all(holdfast, home, monkeypatch):
    """The check at the start cannot see what happens a moment later: then the coordinator says so."""
    monkeypatch.setattr(spec_module, "_check_port", lambda port: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = holdfast("run", "--no-ui", "--port", port, "--job", "late", "train.py")
    assert said.code == 2
    assert f"port {port} is in use" in said.err
    assert list((home / "jobs").iterdir()) == []
    assert processes_of(home) == []


def test_a_job_that_runs_already(holdfast, home):
    folder = JobFolder("busy")
    before = sorted(folder.path.iterdir())
    try:
        said = holdfast("run", "--job", "busy", "train.py")
    finally:
        folder.close()
    assert said.code == 2
    assert (
        "a job named 'busy' is running: see `holdfast status --job busy`, or choose another name with --job"
        in said.err
    )
    assert sorted(folder.path.iterdir()) == before
    assert processes_of(home) == []
