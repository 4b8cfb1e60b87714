"""A command line of torchrun can be pasted."""

import socket

import pytest

from holdfast.cli.torchrun import take_out
from holdfast.errors import UsageError

VALUED = frozenset({"--nnodes", "--job", "--nproc-per-node", "--nproc_per_node"})


def take(*args):
    return take_out(args, VALUED.__contains__)


def test_what_needs_no_rendezvous_is_left_out():
    pasted = take(
        "--standalone", "--nnodes=2", "--rdzv_backend", "c10d", "--rdzv-id=7", "--nproc_per_node", "4",
        "--master_port", "29500", "--node_rank=0", "-t", "3", "train.py", "--lr", "1",
    )  # fmt: skip
    assert pasted.kept == ["--nnodes=2", "--nproc_per_node", "4", "train.py", "--lr", "1"]
    assert list(pasted.left_out) == [
        "--standalone", "--rdzv-backend", "--rdzv-id", "--master-port", "--node-rank", "-t",
    ]  # fmt: skip


def test_the_script_keeps_its_own_options():
    rest = ["train.py", "--standalone", "--rdzv-backend", "x", "--no-python"]
    assert take(*rest).kept == rest
    assert take("--", *rest).kept == ["--", *rest]


def test_the_value_of_an_option_is_not_the_script():
    assert take("--job", "--standalone", "train.py").kept == ["--job", "--standalone", "train.py"]
    assert take("--job", "train.py", "--standalone", "x.py").left_out == {"--standalone": None}


def test_this_machine_by_any_name_is_no_rendezvous_elsewhere():
    for here in ("localhost:29400", "127.0.0.1", "[::1]:1", f"{socket.gethostname()}:29400"):
        assert take("--rdzv-endpoint", here, "train.py").kept == ["train.py"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rdzv_endpoint=other:29400"], "cannot join another"),
        (["--master-addr", "10.1.2.3"], "cannot join another"),
        (["--node-rank", "2"], "give this command once"),
        (["--no_python"], "SCRIPT must be a Python file"),
        (["--run-path"], "leave it out"),
    ],
)
def test_what_cannot_work_is_refused(args, words):
    with pytest.raises(UsageError, match=words):
        take(*args, "train.py")


def test_the_note_is_written(holdfast):
    said = holdfast("run", "--standalone", "--rdzv-backend", "c10d", "nope.py")
    assert "left out, because Holdfast needs no rendezvous: --standalone, --rdzv-backend" in said.err
    assert "there is no script 'nope.py'" in said.err
