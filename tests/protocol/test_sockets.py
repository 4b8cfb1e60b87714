"""What a process may open, told by processes that begin with little; addresses of both families."""

import resource
import socket
import subprocess
import sys

import pytest

from families import needs_ipv6
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.sockets import listening

REPORT = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
from holdfast.protocol.network.sockets import raise_descriptor_limit
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


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:{}"), pytest.param("::1", "[::1]:{}", marks=needs_ipv6)],
)
def test_who_listens_is_reached_by_its_address(host, address):
    with listening(host) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port), timeout=5):
            pass
        where = Endpoint(host=host, port=port, pid=1, instance="i")
    assert where.url == "http://" + address.format(port)
    assert where.names[1].endswith(" at " + address.format(port))
