"""The events of the ledger: one struct for each kind, which reads what older versions wrote."""

import ast
import inspect
import json

import msgspec
import pytest

from holdfast.coordinator.service.store import Store
from holdfast.protocol import health, ledger


def written(event):
    return json.loads(msgspec.json.encode(event))


def test_what_a_later_version_wrote_is_nothing_that_this_one_knows():
    assert ledger.read("quantum-leap", {"node": "n1"}) is None
    assert ledger.read("node-joined", {"node": "n1"}) is None
    later = {"node": "n1", "host": "h", "slots": 1, "rooms": 3}
    assert ledger.read("node-joined", later) == ledger.NodeJoined(node="n1", host="h", slots=1)


@pytest.mark.parametrize("kind", sorted(ledger.EVENTS))
def test_events_are_frozen_documented_and_built_by_keyword(kind):
    event = ledger.EVENTS[kind]
    config = event.__struct_config__
    assert config.frozen
    assert config.tag is None
    assert event.__doc__
    if event.__struct_fields__:
        with pytest.raises(TypeError):
            event(*range(len(event.__struct_fields__)))
    for owner in (c for c in event.__mro__ if issubclass(c, ledger.LedgerEvent)):
        body = ast.parse(inspect.getsource(owner)).body[0].body
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert told, f"{owner.__name__}.{field.target.id} is not documented"


def test_a_misspelt_field_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match="nod"):
        ledger.NodeStays(nod="n1")


def test_a_finding_is_written_with_all_its_fields():
    of_a_rule = {f.name for f in msgspec.structs.fields(health.Finding)}
    written_down = {f.name for f in msgspec.structs.fields(ledger.Finding)}
    assert written_down == of_a_rule | {"node", "incident", "incidents"}


def test_a_field_without_a_default_is_written_also_when_it_is_not_known():
    assert written(ledger.NodeLeaving(node="n1", reason="spot", within_s=None)) == {
        "node": "n1",
        "reason": "spot",
        "within_s": None,
    }


def test_a_ledger_says_which_version_wrote_into_it(tmp_path):
    store = Store(tmp_path / "job.sqlite")
    entry = store.add_event(1.0, "now", "node-stays", ledger.NodeStays(node="n1"))
    assert [e.fields for e in store.events()] == [{"node": "n1"}]
    assert entry.kind == "node-stays"
    assert store.version == ledger.VERSION
    store.close()


def test_a_field_that_may_be_unknown_is_unknown_where_it_is_missing():
    left = ledger.read("node-leaving", {"node": "n1", "reason": "spot"})
    assert left == ledger.NodeLeaving(node="n1", reason="spot", within_s=None)
