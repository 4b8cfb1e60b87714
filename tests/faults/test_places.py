"""Nodes that know where they stand, in a real job."""

import itertools
from pathlib import Path

import pytest
from harness import run

from holdfast.protocol.place import PLACE_VARIABLE

SCRIPT = Path(__file__).with_name("train_logging.py")


@pytest.mark.long
def test_ranks_follow_the_racks(tmp_path, monkeypatch):
    """Places of three nodes from a file; the fourth has its own from the environment."""
    file = tmp_path / "topology"
    file.write_text("node[0,2]  hall/rack1\nnode1  hall/rack2\n")
    monkeypatch.setenv(PLACE_VARIABLE, "hall/rack2")
    ran = run(tmp_path, "--nnodes", 4, "--topology", file, SCRIPT, 5, 0)
    assert ran.code == 0, ran.output[-3000:]
    places = {f["node"]: f["place"] for f in ran.fields("node-joined")}
    racks = {"node0": "rack1", "node1": "rack2", "node2": "rack1", "node3": "rack2"}
    assert places == {node: f"hall/{rack}" for node, rack in racks.items()}
    (formed,) = ran.fields("formed")
    nodes = [w.partition(".")[0] for w in formed["workers"]]
    assert len([rack for rack, _ in itertools.groupby(racks[n] for n in nodes)]) == 2
