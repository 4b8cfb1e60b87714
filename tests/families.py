"""Whether this machine has addresses of IPv6: containers often have none."""

from pathlib import Path

import pytest

_ADDRESSES = Path("/proc/net/if_inet6")
# Asked of the kernel, and not of what the tests are about.
needs_ipv6 = pytest.mark.skipif(
    not _ADDRESSES.exists() or f"{1:032x} " not in _ADDRESSES.read_text(), reason="this machine has no ::1"
)
