import pytest
from harness import TINY, Ran, end_leftovers, run

STEPS = 150


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Whatever a failed test leaves running is ended before the next one."""
    yield
    end_leftovers(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Ran:
    """The tiny job without a fault: what every disturbed one must equal, bit by bit."""
    return run(tmp_path_factory.mktemp("undisturbed"), "--nnodes", 3, TINY, STEPS)
