"""Checks of RDMA: recorded trees of /sys, and pairs with a stand-in for perftest's tool."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
from machines import write

from holdfast.health.checks import pairs
from holdfast.health.checks.check import CannotCheck, Task, attempt
from holdfast.health.checks.fleet import against_fleet
from holdfast.health.checks.pairs import Measured, judge
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.messages import Peer
from holdfast.tools.checks import network, rdma_pair
from holdfast.tools.checks.rdma import check_rdma, gid_index, read_ports
from holdfast.tools.checks.rdma_pair import ClientResult, Rail, check_rdma_pair, judge_rails, read_outcome

HEALTHY, FAULTY, UNKNOWN = Condition.HEALTHY, Condition.FAULTY, Condition.UNKNOWN
HOST = "127.0.0.1"
UP = ("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
NO_CABLE = ("1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
LOCAL = "fe80:0000:0000:0000:b83f:d2ff:fea0:0001"


def card(
    root: Path, device: str, port=UP, layer="InfiniBand", gids=((LOCAL, "IB/RoCE v1"),), number=1
) -> None:
    """A port of a card as mlx5's driver shows it."""
    folder = root / "sys/class/infiniband" / device
    state, physical, rate = port
    write(
        folder,
        {
            "hca_type": "MT4129\n",
            "board_id": "MT_0000000838\n",
            f"ports/{number}/state": state + "\n",
            f"ports/{number}/phys_state": physical + "\n",
            f"ports/{number}/rate": rate + "\n",
            f"ports/{number}/link_layer": layer + "\n",
            **{f"ports/{number}/gids/{i}": f"{gid}\n" for i, (gid, _) in enumerate([*gids, (NONE, "")])},
            **{f"ports/{number}/gid_attrs/types/{i}": f"{kind}\n" for i, (_, kind) in enumerate(gids)},
        },
    )
    verbs = f"uverbs{device.rpartition('_')[2]}"
    write(root, {f"sys/class/infiniband_verbs/{verbs}/ibdev": device + "\n", f"dev/infiniband/{verbs}": ""})


def checked(root: Path) -> list[CheckResult]:
    return attempt("rdma", lambda task: check_rdma(task, root), Task())


def troubles(root: Path) -> list[tuple[str, str, Condition, str]]:
    return [(r.name, r.subject, r.condition, r.detail) for r in checked(root) if r.condition is not HEALTHY]


def test_a_machine_without_rdma_has_no_result(tmp_path):
    assert checked(tmp_path) == []


def test_eight_ports_that_are_well(tmp_path):
    for i in range(8):
        card(tmp_path, f"mlx5_{i}")
    results = checked(tmp_path)
    assert {r.condition for r in results} == {HEALTHY}
    assert {r.value for r in results if r.name == "rdma-rate"} == {400.0}
    (active,) = [r for r in results if r.name == "rdma-ports"]
    assert (active.value, active.model) == (8, "MT4129 MT_0000000838")


def test_the_port_that_is_down_where_the_others_are_active(tmp_path):
    for i in range(8):
        card(tmp_path, f"mlx5_{i}", NO_CABLE if i == 5 else UP)
    assert troubles(tmp_path) == [
        ("rdma-port", "mlx5_5 port 1", FAULTY, "DOWN, Polling: 7 of 8 of its kind are active")
    ]


def test_second_ports_that_nobody_uses_are_no_fault(tmp_path):
    for i in range(4):
        card(tmp_path, f"mlx5_{i}")
        card(tmp_path, f"mlx5_{i}", NO_CABLE, number=2)
    assert troubles(tmp_path) == []


def test_where_none_is_active_nobody_can_tell(tmp_path):
    card(tmp_path, "mlx5_0", NO_CABLE)
    ((name, _, condition, detail),) = troubles(tmp_path)
    assert (name, condition) == ("rdma-port", UNKNOWN)
    assert "no cable, or a fault" in detail


def test_a_link_that_the_subnet_manager_has_not_made_active(tmp_path):
    card(tmp_path, "mlx5_0", ("2: INIT", "5: LinkUp", UP[2]))
    ((_, _, condition, detail),) = troubles(tmp_path)
    assert condition is FAULTY
    assert "INIT, LinkUp: the link is up and was not made active" in detail


def test_a_slower_link_than_its_kind_has(tmp_path):
    for i in range(4):
        card(tmp_path, f"mlx5_{i}", (*UP[:2], "200 Gb/sec (2X NDR)") if i == 2 else UP)
    assert troubles(tmp_path) == [
        ("rdma-rate", "mlx5_2 port 1", FAULTY, "2X; 3 of 4 of its kind have 400 Gb/s")
    ]


def test_a_narrow_link(tmp_path):
    card(tmp_path, "mlx5_0", (*UP[:2], "100 Gb/sec (1X NDR)"))
    card(tmp_path, "mlx5_1", (*UP[:2], "25 Gb/sec (1X EDR)"), layer="Ethernet")  # nothing is wrong with that
    assert [(x[1], x[2]) for x in troubles(tmp_path)] == [("mlx5_0 port 1", FAULTY)]


def test_no_address_and_no_device_file(tmp_path):
    card(tmp_path, "mlx5_0", gids=())
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    card(tmp_path, "mlx5_1")
    (tmp_path / "sys/class/infiniband_verbs/uverbs1/ibdev").unlink()
    found = {(name, subject): (condition, detail) for name, subject, condition, detail in troubles(tmp_path)}
    assert found["rdma-gids", "mlx5_0 port 1"] == (FAULTY, "an active port without an address (GID)")
    assert found["rdma-device", "mlx5_0"][0] is UNKNOWN
    assert found["rdma-device", "mlx5_1"][0] is FAULTY


def test_a_container_that_was_given_no_device_does_without(tmp_path):
    card(tmp_path, "mlx5_0")
    shutil.rmtree(tmp_path / "dev")
    assert troubles(tmp_path) == []


def test_the_address_of_a_roce_port(tmp_path):
    gids = [
        (LOCAL, "IB/RoCE v1"),
        (LOCAL, "RoCE v2"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    ]
    card(tmp_path, "mlx5_0", layer="Ethernet", gids=gids)
    card(tmp_path, "mlx5_1", layer="Ethernet", gids=gids[:2])
    card(tmp_path, "mlx5_2")
    assert [gid_index(port) for port in read_ports(tmp_path)] == [3, 1, None]


def test_a_node_with_fewer_active_ports_than_the_others(tmp_path):
    by_node = {}
    for node in range(5):
        for i in range(2):
            card(tmp_path / str(node), f"mlx5_{i}", NO_CABLE if node == 3 else UP)
        by_node[f"n{node}"] = checked(tmp_path / str(node))
    judged = against_fleet(by_node)
    assert {n: [r.name for r in rs if r.condition is FAULTY] for n, rs in judged.items()} == {
        "n0": [],
        "n1": [],
        "n2": [],
        "n3": ["rdma-ports"],
        "n4": [],
    }


# ---------------------------------------------------------------- pairs

TABLE = """
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 Number of qps   : 1            Transport type : IB
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 1500.000000 != 3300.016000. CPU Frequency is not max.
 65536      560845           0.00               {gbps}                0.186950
---------------------------------------------------------------------------------------
"""

TOOL = f'''#!{sys.executable}
"""As perftest's: without a host it serves one client. What each device measures is in a file."""
import json, os, socket, sys
args = sys.argv[1:]
told = {{args[i]: args[i + 1] for i in range(len(args) - 1) if args[i] in ("-d", "-i", "-p", "-D", "-x")}}
port, here = int(told["-p"]), os.path.dirname(sys.argv[0])
server = args[-1] in (told["-D"], told.get("-x"))
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(json.dumps(args) + "\\n")
if server:
    listening = socket.create_server(("127.0.0.1", port))
    listening.accept()[0].close()
    sys.exit(0)
try:
    socket.create_connection((args[-1], port)).close()
except OSError:
    print(f" Couldn't connect to {{args[-1]}}:{{port}}")
    sys.exit(1)
gbps = open(os.path.join(here, told["-d"])).read()
if gbps == "0":
    print(" Completion with error at client")
    print(" Failed status 12: wr_id 0 syndrom 0x81")
    sys.exit(1)
if gbps == "-":
    print(" Couldn't allocate MR")
    sys.exit(1)
print("""{TABLE}""".replace("{{gbps}}", gbps))
'''


@pytest.fixture
def fabric(tmp_path, monkeypatch):
    """Two machines with two ports each, and the tool on PATH. Returns their folder, the tool's."""
    for node in ("a", "b"):
        for device in ("mlx5_0", "mlx5_1"):
            card(tmp_path / node, device)
    tools = tmp_path / "tools"
    write(tools, {"ib_write_bw": TOOL, "mlx5_0": "390.5", "mlx5_1": "388.0"})
    (tools / "ib_write_bw").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    return tmp_path


def pair(home: Path) -> list[CheckResult]:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    listening = Task(node="a", host=HOST, seconds=0.1, port=port, peers=(Peer("b", HOST, 0),), token="t")
    listened: list[CheckResult] = []
    thread = threading.Thread(
        target=lambda: listened.extend(
            attempt("rdma-pair", lambda task: check_rdma_pair(task, home / "a"), listening)
        )
    )
    thread.start()
    calling = Task(node="b", host=HOST, seconds=0.1, peers=(Peer("a", HOST, port),), token="t")
    try:
        return attempt("rdma-pair", lambda task: check_rdma_pair(task, home / "b"), calling)
    finally:
        thread.join()


def test_every_rail_is_measured_both_ways(fabric):
    (result,) = pair(fabric)
    assert (result.name, result.condition, result.with_node) == ("rdma-pair", HEALTHY, "a")
    assert result.value == pytest.approx(388e9 / 8e9)
    assert result.detail == "mlx5_1 port 1, the slowest of 2: 388 of 400 Gb/s"
    calls = (fabric / "tools/calls").read_text().splitlines()
    clients = [c for c in calls if HOST in c]
    assert {c for d in ("mlx5_0", "mlx5_1") for c in clients if d in c} == set(clients)
    assert len(calls) - len(clients) == 4  # servers: two rails, two directions
    measured = pairs.measured_of([result], "rdma-pair")
    assert (measured.bytes_per_s, measured.why) == (result.value * 1e9, result.detail)


def test_packets_that_do_not_arrive(fabric):
    (fabric / "tools/mlx5_1").write_text("0")
    (result,) = pair(fabric)
    assert (result.condition, result.value) == (FAULTY, 0.0)
    assert "mlx5_1 port 1" in result.detail
    assert "Failed status 12" in result.detail


def test_a_tool_that_cannot_measure_proves_nothing(fabric):
    (fabric / "tools/mlx5_0").write_text("-")
    (result,) = pair(fabric)
    assert result.condition is UNKNOWN
    assert "Couldn't allocate MR" in result.detail
    assert pairs.measured_of([result], "rdma-pair") == Measured(None, why=result.detail)


def test_without_the_tool(fabric):
    (fabric / "tools/ib_write_bw").unlink()
    (result,) = pair(fabric)
    assert (result.condition, result.detail) == (UNKNOWN, "there is no ib_write_bw: install perftest")


def test_an_end_without_an_active_port(fabric):
    for device in ("mlx5_0", "mlx5_1"):
        card(fabric / "a", device, NO_CABLE)
    (result,) = pair(fabric)
    assert (result.condition, result.detail) == (UNKNOWN, "the other end: no active port for ib_write_bw")


def test_nobody_there(fabric, monkeypatch):
    monkeypatch.setattr(network, "MEET_S", 0.1)
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    task = Task(node="b", host=HOST, peers=(Peer("a", HOST, port),))
    (result,) = attempt("rdma-pair", lambda task: check_rdma_pair(task, fabric / "b"), task)
    assert result.condition is UNKNOWN


def test_only_the_fastest_ports_are_rails(tmp_path, fabric):
    card(tmp_path / "a", "mlx5_2", (*UP[:2], "25 Gb/sec (1X EDR)"), layer="Ethernet")
    offered = rdma_pair.offer(read_ports(tmp_path / "a"))
    assert [rail.name for rail in offered.rails] == ["mlx5_0 port 1", "mlx5_1 port 1"]


def test_efa_is_not_measured(tmp_path, fabric):
    card(tmp_path / "efa", "rdmap_0")
    write(tmp_path, {"drivers/efa/module": ""})
    (tmp_path / "efa/sys/class/infiniband/rdmap_0/device").mkdir()
    (tmp_path / "efa/sys/class/infiniband/rdmap_0/device/driver").symlink_to(tmp_path / "drivers/efa")
    assert rdma_pair.offer(read_ports(tmp_path / "efa")).why == "ib_write_bw is not for EFA"


def test_output_of_the_tool():
    assert read_outcome(0, TABLE.format(gbps="98.02")) == ClientResult(98.02e9 / 8)
    assert (
        read_outcome(0, " 65536      5000             51.05              51.04\n").bytes_per_s == 51.04e9 / 8
    )
    missing = " Did not detect devices \n Unable to find the Infiniband/RoCE device\n"
    assert read_outcome(1, missing).bytes_per_s is None
    assert read_outcome(1, missing).why.endswith("exit code 1: Unable to find the Infiniband/RoCE device")
    with pytest.raises(CannotCheck, match="mlx5_0 port 1: no"):
        judge_rails([(Rail("mlx5_0", 1, 400.0), ClientResult(None, "no"))], "n2")


def test_two_rounds_name_the_node_and_its_rail():
    fast, slow = Measured(48e9), Measured(6e9, why="mlx5_3 port 1, the slowest of 8: 48 of 400 Gb/s")
    first = {("n0", "n1"): slow, ("n2", "n3"): fast}
    second = {("n0", "n2"): slow, ("n1", "n3"): fast}
    results = judge(first, second, "rdma-")
    assert {n: rs[0].condition for n, rs in results.items()} == {
        "n0": FAULTY,
        "n1": HEALTHY,
        "n2": HEALTHY,
        "n3": HEALTHY,
    }
    assert {r.name for rs in results.values() for r in rs} == {"rdma-pair"}
    assert "mlx5_3 port 1" in results["n0"][0].detail
    bad_way = judge(first, {("n0", "n2"): fast, ("n1", "n3"): fast}, "rdma-")
    assert [(r.name, r.with_node) for r in bad_way["n0"][1:]] == [("rdma-link", "n1")]
