import pytest
from harness import end_leftovers, end_started


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Whatever a failed test leaves running is ended before the next one."""
    yield
    end_started()
    end_leftovers(tmp_path)
