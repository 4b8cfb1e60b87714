"""The walks lead through these sources: what they name is there, and leads on to the next."""

from dataclasses import replace
from pathlib import Path

import pytest
import walks
from imports import Module, modules_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return walks.by_path(modules_of(ROOT / "src" / "holdfast"))


@pytest.mark.parametrize("walk", walks.WALKS, ids=lambda walk: walk.title)
def test_a_walk_leads_through_the_sources(walk: walks.Walk, modules: dict[str, Module]) -> None:
    assert list(walks.faults(walk, modules)) == []


@pytest.mark.parametrize("walk", walks.WALKS, ids=lambda walk: walk.title)
def test_each_line_and_form_of_a_walk_is_needed_once(walk: walks.Walk) -> None:
    assert len(walk.forms.split()) == len(set(walk.forms.split()))
    beside = [(hop.place, hop.caller, hop.by) for hop in walks.hops_of(walk)]
    assert len(beside) == len(set(beside))


@pytest.mark.parametrize(
    ("hops", "fault"),
    [
        ("train/step:Step.gone", "train/step:Step.gone is gone"),
        ("train/gone:Step", "train/gone:Step is gone"),
        (
            "train/step:Step.apply\n    train/step:Step.backward",
            "train/step:Step.backward is not called by train/step:Step.apply",
        ),
        (
            "train/step:Step.apply\ntrain/step:Step.backward",
            "train/step:Step.backward follows from nothing: `by` is missing",
        ),
        (
            "train/step:Step.apply\nagent/agent:Agent.run by Step",
            "agent/agent:Agent.run: Step does not stand in its own module",
        ),
        (
            "train/step:Step.apply\nagent/agent:Agent.run by Agent",
            "agent/agent:Agent.run: Agent stands in no module of what it follows from",
        ),
    ],
)
def test_what_is_not_so_is_found(hops: str, fault: str, modules: dict[str, Module]) -> None:
    assert list(walks.faults(replace(walks.GRADIENT, hops=hops, forms=""), modules)) == [fault]


def test_a_form_that_is_no_class_is_found(modules: dict[str, Module]) -> None:
    wrong = replace(walks.GRADIENT, forms="train/step:Gone train/reduction:clip train/step:Step")
    assert list(walks.faults(wrong, modules)) == [
        "train/step:Gone is no class",
        "train/reduction:clip is no class",
    ]


def test_files_and_forms_count_once() -> None:
    walk = walks.Walk(
        title="a thing",
        hops="one:first\n    two:second\n    one:third by NAME\n",
        forms="three:Thing one:Other",
        others=("bytes",),
    )
    assert walks.files(walk) == {"one", "two", "three"}
    assert len(walks.forms(walk)) == 3
    assert [(hop.place, hop.by, hop.caller) for hop in walks.hops_of(walk)] == [
        ("one:first", "", None),
        ("two:second", "", "one:first"),
        ("one:third", "NAME", "one:first"),
    ]
