"""The view of a job: of other versions, as changes, and as the operator takes it; and the fold of incidents that is in it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from filled import filled

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.job_view import build_status
from holdfast.errors import ProtocolError
from holdfast.kubernetes.tasks.coordinator_link import said_of
from holdfast.protocol.engine_orders import EngineOrders
from holdfast.protocol.health import Ask
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_view import COMMON, JobView, ReceivedView
from holdfast.protocol.ledger import add_incident


def plain(view: JobView) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(view))
    return read


def test_a_view_of_another_version_is_read() -> None:
    """Where it has a field that is not known here it is ignored, and one that it lacks is unknown."""
    newer = {**plain(filled(JobView)), "invented": 1, "pace": {"steps_per_s": 2.0, "invented": 1}}
    assert ReceivedView().whole(newer).pace.steps_per_s == 2.0
    older = ReceivedView().whole({"job": "j", "phase": "running", "nodes": [], "workers": []})
    assert (older.step, older.pace.left, older.goodput.share, older.saving.tiers) == (None, None, None, [])


def test_what_cannot_be_a_view_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a status"):
        ReceivedView().whole({"job": "j"})
    view = ReceivedView("the answer", ValueError)
    view.whole({"job": "j", "phase": "running"})
    with pytest.raises(ValueError, match="the answer"):
        view.changed({"head": {"step": "seven"}})


def test_a_change_before_there_is_a_view_is_none() -> None:
    assert ReceivedView().changed({"head": {"step": 7}}) is None


def test_a_change_leaves_the_rest_as_it_was_and_fills_in_the_common_step() -> None:
    first = filled(JobView)
    row = {"worker": "w", "node": "n", "rank": 0, "state": "member", "restored": None, "log": ""}
    heard = ReceivedView()
    heard.whole(plain(first) | {"workers": [row], "common": 6})
    now = heard.changed({"head": {"step": 7, "pace": {"left": 3}}, "common": 7})
    assert now is not None
    assert (now.step, now.pace.left, now.workers[0].step) == (7, 3, 7)
    assert msgspec.structs.replace(now, step=first.step, pace=first.pace, workers=first.workers) == first
    assert COMMON not in {w.step for w in now.workers}


def test_the_operator_takes_its_values_from_the_view() -> None:
    said = said_of(filled(JobView), EngineOrders(nodes=4, orders=()), term=2)
    assert (said.term, said.wanted, said.goodput, said.last_incident) == (2, 4, 5.25, "incident 5 on node")
    assert said.snapshot is not None
    assert said.snapshot.startswith("step ")


def test_an_ask_about_no_incident_is_on_the_page() -> None:
    state = CoreState(spec=JobSpec(name="job", script="train.py"))
    state.health.asks.append(Ask(at_s=1.0, node="n", rule="r", text="look"))
    assert plain(build_status(state, 1.0))["health"]["asks"][0]["incident"] == 0


OPENED = {"id": 1, "t_s": 1.0, "cause": "silent for 2 s", "node": "n1", "ranks": [1], "stall_s": None}


def test_a_cause_that_was_found_later_stays_and_its_node_too() -> None:
    found: dict[int, dict[str, Any]] = {}
    add_incident(found, "incident-explained", {"id": 1, "cause": "of another start", "node": None})
    assert not found
    add_incident(found, "incident-opened", OPENED)
    add_incident(found, "incident-explained", {"id": 1, "cause": "its disk broke", "node": None})
    add_incident(found, "incident-closed", OPENED | {"stall_s": 2.0})
    assert (found[1]["cause"], found[1]["node"], found[1]["stall_s"]) == ("its disk broke", "n1", 2.0)


def test_a_field_that_has_its_default_again_is_not_kept() -> None:
    found: dict[int, dict[str, Any]] = {}
    add_incident(found, "incident-opened", OPENED | {"paused_s": 3.0})
    add_incident(found, "incident-opened", OPENED)
    assert "paused_s" not in found[1]
