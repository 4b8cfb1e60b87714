"""The fault `slow`: how it is written, and whom it strikes."""

import pytest
from test_straggler_cases import running

from holdfast.coordinator.service.injector import Injector
from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.faults import FaultKind, join_words, parse_fault


@pytest.mark.parametrize(
    "text",
    ["slow=1.5x,rank=2", "slow:factor=1.5,rank=2", "slow=1.5:rank=2", join_words(["slow=1.5x", "rank=2"])],
)
def test_it_is_written_in_several_ways(text):
    spec = parse_fault(text)
    assert (spec.kind, spec.factor, spec.rank) == (FaultKind.SLOW, 1.5, 2)
    assert parse_fault(str(spec)) == spec


@pytest.mark.parametrize(
    "text", ["slow", "slow=0.5x", "slow=fast", "slow=1.5y", "slow=1e3", "kill-node:factor=2"]
)
def test_what_cannot_be_is_refused(text):
    with pytest.raises(UsageError, match="slow"):
        parse_fault(text)


def test_a_node_is_slow_in_all_of_its_workers_and_a_rank_is_one():
    desk = running(nodes=2, slots=2)
    members = desk.state.membership.generation.members
    injector = Injector(())
    spec = parse_fault("slow=1.5x,rank=1")
    (order,) = injector.fire_now(injector.add(spec, 0.0), desk.state)
    assert isinstance(order.message, m.RunFault)
    assert order.message.worker == members[1].worker
    assert order.message.fault.factor == 1.5
