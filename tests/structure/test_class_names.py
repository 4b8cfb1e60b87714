"""A public class has its name alone in the package, so that a reader knows which class is meant without the import.

Where several classes share a name, the reason stands here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from figures import shared_names
from imports import modules_of

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"

RECORDED = "the ledger's event that records this message or order; its kind on disk is the class's name"
ENTERED = "the ledger's event that records this event of the core; its kind on disk is the class's name"
CAUSE = "the cause that this message reports; its kind on disk is the class's name"
RECORDED_NAMES = (
    "one worker as a message, all together in the ledger; both names are in what is recorded of decisions"
)
DOCUMENTED = "the name that a script imports from the adapter of its own framework"
TORCHTITAN = "torchtitan names the class of a component's options so, within the component"

SHARED = {
    "BeganAnew": RECORDED,
    "Capacity": RECORDED,
    "CollectiveError": RECORDED,
    "Config": TORCHTITAN,
    "Failed": RECORDED,
    "Finding": RECORDED,
    "GradientsDiffer": CAUSE,
    "JobGoing": RECORDED,
    "NodeJoined": ENTERED,
    "NodeLost": ENTERED,
    "NodeTaken": RECORDED,
    "NodeUnavailable": RECORDED,
    "Rebuild": RECORDED,
    "Repaired": RECORDED,
    "Saved": RECORDED,
    "Snapshots": DOCUMENTED,
    "Stalled": RECORDED,
    "Started": RECORDED_NAMES,
    "StopRequested": ENTERED,
}
"""Names that several modules have, with the reason."""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return shared_names(modules_of(PACKAGE))


def test_names_of_classes_are_unique_but_for_those_with_a_reason(found: dict[str, list[str]]) -> None:
    new = [f"{name} ({', '.join(where)})" for name, where in found.items() if name not in SHARED]
    assert not new, "name each class by what differs: " + "; ".join(new)
    assert set(SHARED) <= set(found), "an exception that is not needed"


@pytest.mark.parametrize(
    ("reason", "home"),
    [
        (RECORDED, "holdfast.protocol.ledger"),
        (ENTERED, "holdfast.protocol.ledger"),
        (CAUSE, "holdfast.protocol.causes"),
    ],
)
def test_a_shared_name_is_where_its_reason_says(reason: str, home: str, found: dict[str, list[str]]) -> None:
    for name in (name for name, why in SHARED.items() if why == reason):
        assert len(found[name]) == 2, name
        assert home in found[name], name
