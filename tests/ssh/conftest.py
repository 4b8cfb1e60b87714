"""The hosts of these tests."""

from __future__ import annotations

import pytest
from realssh import Hosts, missing


@pytest.fixture
def hosts(tmp_path):
    """Four hosts that share nothing but the file system of the checkpoints."""
    if why := missing():
        pytest.skip(why)
    made = Hosts(tmp_path)
    yield made
    made.close()
