"""Faults of the machine, found by the agent's own watching: the node is replaced, and no bit of the training changes."""

from conftest import STEPS
from harness import TINY, run


def test_a_fatal_xid_replaces_its_node(tmp_path, undisturbed):
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, "--fault", "xid=79,node=2,step=40", TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"] == undisturbed.report["final"]
    assert ran.losses() == undisturbed.losses()
    (incident,) = ran.report["incidents"]
    assert incident["fault"] == "xid:code=79,node=2,step=40"
    assert incident["injected"]
    assert incident["node"] == "node2"
    assert "fallen off the bus" in incident["cause"]
    assert incident["detect_s"] is not None
    assert incident["full_strength_s"] is not None
    found = ran.fields("finding")
    assert [f["rule"] for f in found if f["node"] == "node2" and f["source"] == "kmsg"] == ["xid-79"]
