import pytest
from harness import end_leftovers, end_started
from table import tag


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
def pytest_collection_modifyitems(items):
    """What a test shows goes into the results that pytest writes, for `table.py`."""
    tag(items)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Whatever a failed test leaves running is ended before the next one."""
    yield
    end_started()
    end_leftovers(tmp_path)
