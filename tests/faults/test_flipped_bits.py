"""A bit of one replica's state flips: it is found, the right node is named, and the others go on without it."""

import pytest
from harness import TINY, run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("nodes", [3, 2])
def test_a_flipped_bit_of_the_state_is_found(tmp_path, nodes):
    """Of three replicas two agree. Of two nobody can tell whose is wrong, so both are named and a person is asked."""
    ran = run(tmp_path, "--nnodes", nodes, "--fault", "flip-bit:rank=1,step=12", TINY, 60)
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    apart = [i for i in ran.report["incidents"] if i["cause_kind"] == "corruption"]
    if nodes == 3:
        (incident,) = apart
        assert incident["node"] == "node1"
        # Its tensors make two windows. After the flip the parameters have their turn after the steps 40 to 44.
        assert "after step 44 the state of" in incident["cause"]
        assert ran.report["final"]["replicas_equal"] is True
    else:
        assert apart == []
        assert {f["node"] for f in ran.fields("finding") if f["rule"] == "state-apart"} == {"node0", "node1"}
