"""A plugin for machines that others use too. How long something takes is no finding there."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

LONG_LIMIT_S = 900
"""Some long tests take two minutes where three of them share two cores, and only one that hangs is to be ended."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))
