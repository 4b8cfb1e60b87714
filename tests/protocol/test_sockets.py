"""What a process may open, told by processes that begin with little."""

import resource
import subprocess
import sys

import pytest

REPORT = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
from holdfast.protocol.sockets import raise_descriptor_limit
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
"""


@pytest.mark.parametrize("hard", [256, 1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]])
def test_a_process_may_open_as_much_as_it_is_allowed(hard):
    ran = subprocess.run(
        [sys.executable, "-c", REPORT.format(hard=hard)], capture_output=True, text=True, check=True
    )
    soft, still = map(int, ran.stdout.split())
    assert still == hard
    assert soft == (hard if 0 <= hard < 1 << 20 else 1 << 20)
