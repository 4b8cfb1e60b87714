"""Faults as people write them."""

import pytest

from holdfast.errors import UsageError
from holdfast.protocol.faults import FaultKind, FaultSpec, join_words, node_name, parse_fault

XID = FaultSpec(kind=FaultKind.XID, node=2, step=40, code=79)


@pytest.mark.parametrize(
    "words",
    [
        ["xid=79", "node=2", "step=40"],
        ["xid=79,node=2,step=40"],
        ["xid:code=79,node=2,step=40"],
        ["xid:node=2,code=79", "step=40"],
        ["xid", "code=79", "node=2", "step=40"],
        ["xid=79:node=2,step=40"],
    ],
)
def test_an_xid(words):
    assert parse_fault(join_words(words)) == XID


@pytest.mark.parametrize(
    "text", ["xid:code=79,node=2", "ecc:node=1,after=8s", "link-down:rank=0", "readonly-fs"]
)
def test_what_is_shown_can_be_given_again(text):
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize(("given", "name"), [("2", "node2"), ("node2", "node2"), ("gpu-a17", "gpu-a17")])
def test_a_node_has_a_number_or_a_name(given, name):
    spec = parse_fault(f"kill-node:node={given}")
    assert spec.node is not None
    assert node_name(spec.node) == name
    assert parse_fault(str(spec)) == spec


def test_what_is_no_name_of_a_node_is_refused():
    with pytest.raises(UsageError, match="neither a number nor a node's name"):
        parse_fault("kill-node:node=-1")
