"""Level 0 and 1: what torch's flight recorder says of a script's collectives."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import msgspec
import pytest
import torch.distributed  # noqa: F401 - its recorders are replaced

from holdfast.protocol import messages as m
from holdfast.protocol.machine.progress_record import ProgressRecord
from holdfast.protocol.phases import MOST_GROUPS, GroupReading
from holdfast.protocol.wire.frames import Codec, pack
from holdfast.train import level0_hook
from holdfast.train.level0_hook import CollectivesTeller, positions
from holdfast.train.link import Link


def entry(number: int, group: str = "0", name: str = "gloo:all_reduce", **other: Any) -> dict[str, Any]:
    known = {"process_group": [group, ""], "profiling_name": name, "retired": True, "is_p2p": False}
    return known | {"collective_seq_id": number} | other


def read(groups: list[Any], *entries: dict[str, Any]) -> tuple[GroupReading, ...] | None:
    return level0_hook._readings(groups, list(entries))


def test_the_newest_collective_of_each_group_and_whether_it_is_complete():
    world, small = ("0", "default_pg", (0, 1, 2), ("gloo",)), ("4", "undefined", (0, 2), ("gloo",))
    found = read([world, small], entry(7), entry(8), entry(3, "4", "gloo:barrier", retired=False))
    assert found is not None
    assert [(g.label, g.size, g.entered, g.operation, g.waits) for g in found] == [
        ("group 4", 2, 3, "barrier", True),
        ("default_pg", 3, 8, "all_reduce", False),
    ]


def test_a_message_between_two_members_waits_and_has_no_number():
    found = read(
        [("0", "", (0, 1), ("nccl",))],
        entry(5, name="nccl:all_reduce"),
        entry(99, name="nccl:recv", is_p2p=True, retired=False),
    )
    assert found is not None
    assert (found[0].entered, found[0].waits) == (5, True)


def test_devices_of_one_group_count_by_themselves():
    found = read([("0", "", (0, 1), ("gloo", "nccl"))], entry(5), entry(900, name="nccl:all_gather"))
    assert found is not None
    assert [(g.entered, g.group.rpartition("/")[2]) for g in found] == [(5, "gloo"), (900, "nccl")]


def test_groups_of_one_name_with_other_members_are_others():
    found = read([("0", "", (0, 1), ("gloo",)), ("0", "", (2, 3), ("gloo",))], entry(1))
    assert found is not None
    assert len({g.group for g in found}) == 2


def test_a_group_that_is_made_again_counts_from_its_begin():
    found = read([("0", "", (0, 1), ("gloo",))], entry(499), entry(500), entry(1), entry(2))
    assert found is not None
    assert found[0].entered == 2


def test_entries_of_both_recorders_count(monkeypatch):
    c10d = sys.modules["torch._C"]._distributed_c10d
    texts = {"_dump_fr_trace_json": entry(5), "_dump_nccl_trace_json": entry(6, name="nccl:broadcast")}
    for name, one in texts.items():
        text = json.dumps({"entries": [one]}).encode()
        monkeypatch.setattr(c10d, name, lambda text=text, **options: text, raising=False)
    found = read([("0", "", (0, 1), ("gloo", "nccl"))], *level0_hook._recorded())
    assert found is not None
    assert [g.entered for g in found] == [5, 6]


def test_a_group_of_one_waits_for_nobody():
    assert read([("1", "", (0,), ("gloo",))], entry(1, "1")) == ()


def test_a_recorder_that_is_turned_off_says_nothing():
    assert read([("0", "", (0, 1), ("gloo",))]) is None


def test_an_answer_is_bounded_whatever_the_script_makes():
    groups = [(f"{n}" + "x" * 500, "y" * 500, (0, n + 1), ("gloo",)) for n in range(200)]
    found = read(groups, entry(1, groups[150][0], retired=False))
    assert found is not None
    assert len(found) == MOST_GROUPS
    assert found[0].waits
    assert len({g.group for g in found}) == MOST_GROUPS
    message = m.InCollectives(1, found)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.WorkerMessage) == message


def test_without_a_process_group_nothing_is_known():
    assert positions() is None


@pytest.fixture
def link():
    """A worker's link, and its agent's end."""
    ours, theirs = socket.socketpair()
    start = m.Start(
        worker="w", script="train.py", args=(), module=False, env={}, cwd=".", log="", page="", stacks="",
        token="", host="127.0.0.1",
    )  # fmt: skip
    record = ProgressRecord()
    link = Link(theirs, start, record, "token")
    link.listen()
    yield link, ours
    link.close()
    ours.close()
    record.close()


def test_the_agent_is_answered_with_its_number(link, monkeypatch):
    worker, agent = link
    CollectivesTeller(worker)
    monkeypatch.setattr(level0_hook, "positions", lambda: None)
    agent.sendall(pack(m.WhereInCollectives(7)))
    codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
    assert codec.read(agent) == m.InCollectives(7, None)


RANK = """
import sys, threading
import torch, torch.distributed as dist
from holdfast.train.level0_hook import positions
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
one = torch.ones(3)
dist.all_reduce(one)
(dist.send if rank == 0 else dist.recv)(one, 1 - rank)
dist.broadcast(one, 0)
# Gloo's own thread retires what this one has got already. A rank is asked when nothing has moved for long.
while positions()[0].waits:
    pass
if rank == 0:
    threading.Thread(target=dist.all_reduce, args=(one,), daemon=True).start()
    while not positions()[0].waits:
        pass
import msgspec
print(msgspec.json.encode(positions()).decode(), flush=True)
sys.stdin.readline()
import os
os._exit(0)
"""


@pytest.mark.long
def test_what_torch_says_of_two_ranks_of_which_one_stays_out(tmp_path):
    """If a new version of torch names things otherwise, it is seen here and not in a hang."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [json.loads(r.stdout.readline()) for r in ranks]
    for r in ranks:
        r.communicate("\n")
    ((waiting,), (outside,)) = said
    assert waiting["group"] == outside["group"]
    assert (waiting["label"], waiting["size"], waiting["operation"]) == ("default_pg", 2, "all_reduce")
    assert (waiting["entered"], waiting["waits"]) == (3, True)
    assert (outside["entered"], outside["operation"], outside["waits"]) == (2, "broadcast", False)
