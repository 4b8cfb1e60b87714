"""Nodes that are lost together with what they share are one incident, which names the common place."""

import pytest
from desk import running

from holdfast.protocol import causes

RACKS = (("h1", "r1"), ("h1", "r1"), ("h1", "r2"), ("h1", "r2"), ("h2", "r1"), ("h2", "r1"))


def test_a_rack_is_one_incident_that_names_it():
    desk = running(6, places=RACKS)
    for name in ("n0", "n1"):
        desk.lose(name)
    (incident,) = desk.state.incidents
    assert incident.lost_nodes == ["n0", "n1"]
    assert incident.place == ("h1", "r1")
    assert incident.ranks == [0, 1]
    assert str(incident.cause) == "2 of 2 nodes in h1/r1 were lost together (its agent's connection closed)"
    assert incident.cause.kind is causes.CauseKind.NODE


def test_a_switch_above_racks_is_named_when_most_of_it_is_gone():
    desk = running(6, places=RACKS)
    for name in ("n0", "n1", "n2", "n3"):
        desk.lose(name)
    (incident,) = desk.state.incidents
    assert incident.place == ("h1",)
    assert incident.lost_nodes == ["n0", "n1", "n2", "n3"]


def test_nodes_that_happen_to_be_lost_at_one_time_are_two_incidents():
    """One of each rack: too few of the hall, and nothing else that they share."""
    places = tuple(("h1", f"r{i // 2}") for i in range(8))
    desk = running(8, places=places)
    desk.lose("n0")
    desk.lose("n4")
    assert [i.node for i in desk.state.incidents] == ["n0", "n4"]
    assert [i.place for i in desk.state.incidents] == [("h1", "r0"), ("h1", "r2")]


def test_a_node_that_is_lost_later_is_another_incident():
    desk = running(6, places=RACKS)
    desk.lose("n0")
    for worker in desk.members():
        desk.parks(worker, 5)
    desk.commit(6)
    others = tuple(n for n in desk.state.membership.nodes if n != "n0")
    desk.wait(2 * desk.core.timing.detection_s, alive=others)
    desk.lose("n1")
    assert [i.lost_nodes for i in desk.state.incidents if i.lost_nodes] == [["n0"], ["n1"]]


@pytest.mark.parametrize("places", [(), (("h1",), ("h2",), ("h3",))])
def test_nodes_that_share_nothing_are_incidents_of_their_own(places):
    desk = running(3, places=places)
    desk.lose("n0")
    desk.lose("n1")
    assert len(desk.state.incidents) == 2
    assert not any(isinstance(i.cause, causes.PlaceLost) for i in desk.state.incidents)


def test_a_loss_before_training_goes_on_makes_the_stall_longer():
    """A late commit of the generation that the second loss breaks is no end of it."""
    desk = running(6, places=RACKS, spares=1)
    desk.lose("n0")
    for worker in desk.members():
        desk.parks(worker, 5)
    assert desk.state.membership.number == 2
    desk.lose("n1")
    (incident,) = desk.state.incidents
    assert incident.generation == 2
    assert incident.decided_at_s is None
    assert incident.first_commit_at_s is None
