"""Faults as people write them."""

import pytest

from holdfast.protocol.faults import FaultKind, FaultSpec, join_words, parse_fault

XID = FaultSpec(FaultKind.XID, node=2, step=40, code=79)


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
