"""Stacks as faulthandler writes them, of two ranks and of thousands."""

import ast
from pathlib import Path

import pytest

import holdfast
from holdfast.health import stacks as known
from holdfast.health.stacks import cluster, describe, odd_ones, read

PYTHON = "/opt/python/lib/python3.11"


def stack(*frames, site=f"{PYTHON}/site-packages", src="/home/me/run"):
    """`frames`: `path:line name`, innermost first; `site/` and `src/` are prefixes."""
    lines = []
    for frame in frames:
        place, name = frame.rsplit(" ", 1)
        path, line = place.rsplit(":", 1)
        path = path.replace("site/", f"{site}/").replace("std/", f"{PYTHON}/").replace("src/", f"{src}/")
        lines.append(f'File "{path}", line {line} in {name}')
    return "\n".join(lines)


def reducing(line=2, **places):
    return stack(
        f"site/torch/distributed/distributed_c10d.py:{2800 + line} all_reduce",
        f"site/torch/distributed/c10d_logger.py:{80 + line} wrapper",
        "src/train.py:40 train",
        "src/train.py:60 <module>",
        **places,
    )


LOADING = stack(
    "std/threading.py:327 wait",
    "std/queue.py:180 get",
    "site/torch/utils/data/dataloader.py:1275 _try_get_data",
    "src/train.py:35 train",
)
POLLING = stack("std/socket.py:706 readinto", "src/licence.py:12 ask", "src/train.py:37 train")
BACKWARD = stack(
    "site/torch/autograd/graph.py:825 _engine_run_backward",
    "site/torch/autograd/__init__.py:347 backward",
    "site/torch/_tensor.py:581 backward",
    "src/train.py:39 train",
)
HEARING = stack(
    "/srv/holdfast/train/control_channel.py:178 _receive_one",
    "/srv/holdfast/train/control_channel.py:165 receive",
    "/srv/holdfast/train/replica.py:370 vote",
    "src/train.py:39 train",
)


def look(**stacks):
    groups = cluster(stacks)
    return groups, odd_ones(groups)


def test_thousands_of_ranks_in_three_groups():
    stacks = {
        f"w{n}": reducing(line=n % 3, site=f"/venv{n % 2}/lib/python3.11/site-packages") for n in range(4096)
    }
    stacks |= {"w17": LOADING, "w1003": LOADING, "w3000": POLLING}
    groups = cluster(stacks)
    ranks = {f"w{n}": n for n in range(4096)}
    assert describe(groups, ranks) == (
        "4093 ranks in all_reduce, 2 in a data loader (ranks 17, 1003), 1 in ask (run/licence.py:12) (rank 3000)"
    )
    odd = odd_ones(groups)
    assert odd is not None
    assert set(odd.workers) == {"w17", "w1003", "w3000"}
    assert odd.reason == "the others wait for it: a data loader, ask (run/licence.py:12)"


def test_what_is_installed_elsewhere_or_woken_otherwise_is_the_same_place():
    woken = "\n".join([stack("std/threading.py:331 wait", "std/threading.py:629 wait"), reducing()])
    groups, odd = look(a=reducing(), b=reducing(line=7, site="/x/dist-packages"), c=woken)
    assert [len(g.workers) for g in groups] == [3]
    assert odd is None


def test_another_collective_of_the_same_function_is_another_place():
    """Rank c skipped one: all wait for others, and for ever."""
    later = reducing().replace("line 40 in train", "line 48 in train")
    groups, odd = look(a=reducing(), b=reducing(), c=later)
    assert [g.waits for g in groups] == [True, True]
    assert odd.workers == ("c",)
    assert "differs" in odd.reason


def test_of_two_the_one_that_waits_for_nobody():
    assert look(a=reducing(), b=POLLING)[1].workers == ("b",)
    assert look(a=BACKWARD, b=POLLING)[1] is None
    assert look(a=reducing(), b=reducing().replace("line 40", "line 48"))[1] is None


@pytest.mark.parametrize(("waiting", "elsewhere"), [(2, 2), (1, 3)])
def test_most_are_not_to_blame(waiting, elsewhere):
    """They may all read the same slow file system; and who waits for them is not to blame either."""
    stacks = {f"r{n}": reducing() for n in range(waiting)} | {f"l{n}": LOADING for n in range(elsewhere)}
    assert look(**stacks)[1] is None


def test_half_and_half_is_nobody():
    assert look(a=BACKWARD, b=BACKWARD, c=POLLING, d=POLLING)[1] is None


def test_those_whose_stacks_are_not_known_are_left_out():
    groups, odd = look(a=HEARING, b=HEARING, c="", d=POLLING)
    assert describe(groups, {"a": 0, "b": 1, "c": 2, "d": 3}) == (
        "2 ranks in the words of the others, 1 in ask (run/licence.py:12) (rank 3)"
    )
    assert odd.workers == ("d",)
    assert look(a="", b="") == ([], None)


def test_lines_that_are_no_frames_are_kept():
    assert [f.name for f in read("  \n<no Python frame>\n")] == ["<no Python frame>"]


@pytest.mark.parametrize(
    ("path", "function"), [(path, function) for path, function, *_ in known._LOCATIONS if "holdfast" in path]
)
def test_the_places_of_our_own_exist(path, function):
    """A module or function that is renamed would otherwise be the script's own, and a rank that waits there a culprit."""
    file = Path(holdfast.__file__).parent / path.removeprefix("holdfast/")
    assert file.exists()
    if function:
        defined = ast.walk(ast.parse(file.read_text()))
        assert function in {node.name for node in defined if isinstance(node, ast.FunctionDef)}
