"""The fields of a scenario: flags and keys of YAML, declared once."""

from holdfast.protocol.options import declared
from holdfast.tools.simulate.options import ScenarioOptions
from holdfast.tools.simulate.scenario import read

ASKED = {"nodes": 8, "days": 1, "rate": "1%"}


def test_the_defaults_that_help_shows_are_those_of_a_scenario():
    shown = {field.name: field.option.default for field in declared(ScenarioOptions) if field.option.default}
    assert len(shown) > 15
    assert read(shown | ASKED) == read(ASKED)


def test_every_field_can_be_given_by_its_example():
    for field in declared(ScenarioOptions):
        if field.name not in ("nodes", "min_nodes", "days"):
            read(ASKED | {"days": 30, field.name: field.option.example})
