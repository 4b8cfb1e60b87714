"""What a benchmark starts ends with it, and nothing else does."""

import os
import subprocess
import sys

from bench.processes import Children, descendants

PAUSES = "import signal; signal.pause()"
LEAVES_AN_ORPHAN = """
import subprocess, sys
orphan = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(orphan.pid, flush=True)
"""


def test_orphans_end_with_the_block_and_what_was_there_before_does_not(tmp_path):
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", PAUSES]) as other:
        with Children() as children, children.group() as group:
            group.spawn([sys.executable, "-c", LEAVES_AN_ORPHAN], os.environ, log).wait()
            orphan = int(log.read_text())
            assert orphan in set(descendants(os.getpid()))
        left = set(descendants(os.getpid(), ended=True))
        assert (other.pid in left, orphan in left) == (True, False)
        assert other.poll() is None
        other.kill()
