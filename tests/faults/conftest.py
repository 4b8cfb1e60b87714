import pytest
from harness import TIERS, TINY, Ran, end_leftovers, end_started, run, shared

STEPS = 150
LENGTH, SAVES = 900, 50
"""Steps of train_tiers.py, and after how many it saves."""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Whatever a failed test leaves running is ended before the next one."""
    yield
    end_started()
    end_leftovers(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Ran:
    """The tiny job without a fault: what every disturbed one must equal, bit by bit."""
    return shared(tmp_path_factory, "undisturbed", lambda home: run(home, "--nnodes", 3, TINY, STEPS))


@pytest.fixture(scope="session")
def tiers_undisturbed(tmp_path_factory) -> Ran:
    """The script with two lines of `hf.checkpoint`, without a fault."""
    return shared(tmp_path_factory, "tiers", lambda home: run(home, "--nnodes", 2, TIERS, LENGTH, SAVES))
