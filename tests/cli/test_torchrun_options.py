"""A command line of torchrun can be pasted."""

import json
import socket
from pathlib import Path

import pytest
import torch

from holdfast.cli.torchrun import OPTIONS, of_environment, take_out
from holdfast.errors import UsageError

VALUED = ("--nnodes", "--job", "--nproc-per-node", "--nproc_per_node", "--max-restarts")
OURS = dict.fromkeys(VALUED, True) | dict.fromkeys(("--no-ui", "-m", "--module"), False)

RELEASES = json.loads(Path(__file__).with_name("torchrun_options.json").read_text())
"""What torchrun's parser has in the oldest and the newest release that Holdfast knows: options, and whether a value follows."""

NEWEST = (2, 15)
"""Older releases have fewer options."""


def take(*args):
    return take_out(args, OURS)


def test_every_option_of_torchruns_is_known():
    """A newer torch may have one that is answered nowhere."""
    from torch.distributed.run import get_args_parser

    theirs = {
        name.replace("_", "-") if name.startswith("--") else name
        for name in get_args_parser()._option_string_actions
    }
    assert theirs - {"-h", "--help"} <= OPTIONS
    if tuple(map(int, torch.__version__.split(".")[:2])) >= NEWEST:
        assert theirs - {"-h", "--help"} == OPTIONS


@pytest.mark.parametrize("release", RELEASES)
def test_options_of_the_oldest_and_the_newest_release(release):
    """Each is left out, shared with Holdfast, or answered; and its value is not taken for SCRIPT."""
    options = RELEASES[release]
    assert options.keys() <= OPTIONS
    for name, valued in options.items():
        try:
            pasted = take(name, *(["1"] if valued else []), "train.py")
        except UsageError as error:
            assert str(error).startswith(name)  # noqa: PT017 - either way is right
        else:
            assert pasted.kept[-1] == "train.py"
            assert pasted.left_out.keys() | set(pasted.kept[:-1]) >= {name}
    assert set(RELEASES["2.15.0"]) == OPTIONS


def test_a_beginning_of_a_name_is_taken_as_torchrun_takes_it():
    from torch.distributed.run import get_args_parser

    words = [
        "--standal",
        "--nproc_per=2",
        "--max-r",
        "3",
        "--rdzv-b",
        "c10d",
        "--local-r",
        "0",
        "-r3",
        "-t",
        "1",
        "train.py",
        "--lr",
        "9",
    ]
    theirs = get_args_parser().parse_args(words)
    pasted = take(*words)
    assert pasted.kept == [
        f"--nproc-per-node={theirs.nproc_per_node}",
        "--max-restarts",
        str(theirs.max_restarts),
        "train.py",
        "--lr",
        "9",
    ]
    assert pasted.left_out == {
        "--standalone": None, "--rdzv-backend": theirs.rdzv_backend, "--local-ranks-filter": theirs.local_ranks_filter,
        "-r": theirs.redirects, "-t": theirs.tee,
    }  # fmt: skip


def test_a_beginning_of_several_names_is_refused():
    with pytest.raises(UsageError, match="--rdzv-backend or --rdzv-conf"):
        take("--rdzv", "x", "train.py")


def test_what_begins_an_option_of_holdfasts_is_not_taken_for_torchruns():
    assert take("--no-ui", "--job", "x", "train.py").kept == ["--no-ui", "--job", "x", "train.py"]


def test_variables_stand_for_options_that_are_not_given(monkeypatch):
    from torch.distributed.run import get_args_parser

    environ = {
        "PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_NNODES": "1:1",
        "PET_RDZV_BACKEND": "c10d",
    }  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = ["--max_restarts", "7", "train.py"]
    found = of_environment(words, OURS, environ)
    ours = get_args_parser().parse_args([*found, *words])
    assert vars(ours) == vars(get_args_parser().parse_args(words))
    assert found == ["--nnodes=1:1", "--nproc-per-node=4", "--rdzv-backend=c10d", "--standalone"]
    assert take(*found, *words).kept == [
        "--nnodes=1:1",
        "--nproc-per-node=4",
        "--max-restarts",
        "7",
        "train.py",
    ]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PET_NNODES": "2"}, "one of several torchrun nodes"),
        ({"PET_NNODES": "1:4"}, "one of several torchrun nodes"),
        ({"PET_NODE_RANK": "1"}, "run this command once"),
        ({"PET_MASTER_ADDR": "job-node-0-0.job"}, "cannot join another"),
        ({"PET_NUMA_BINDING": "node"}, None),
    ],
)
def test_the_variables_of_one_of_several_nodes_start_no_job(environ, words):
    """As a TrainJob of Kubeflow's sets them in each of its pods."""

    def started():
        return take(*of_environment(["train.py"], OURS, environ), "train.py").kept

    if words is None:
        assert started() == ["train.py"]
    else:
        with pytest.raises(UsageError, match=words):
            started()


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
        (["--node-rank", "2"], "run this command once"),
        (["--no_python"], "SCRIPT must be a Python file"),
        (["--run-path"], "remove the option"),
    ],
)
def test_what_cannot_work_is_refused(args, words):
    with pytest.raises(UsageError, match=words):
        take(*args, "train.py")


def test_the_note_is_written(holdfast):
    said = holdfast("run", "--standalone", "--rdzv-backend", "c10d", "nope.py")
    assert "ignored, because Holdfast does not need a rendezvous: --standalone, --rdzv-backend" in said.err
    assert "the script 'nope.py' does not exist" in said.err
