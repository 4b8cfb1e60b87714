"""A few processes of one gloo group for tests: `together(function, world, *args)` runs a function of a test's module.

Results come back as JSON through files; a rank that fails shows its trace.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT_S = 90


def together(function, world: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on every rank; world 0: without a process group."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, function.__module__, function.__name__, folder, str(world)]
        children = [
            subprocess.Popen(
                [*command, str(rank), json.dumps(args)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(max(1, world))
        ]
        try:
            said = [child.communicate(timeout=LIMIT_S)[0] for child in children]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.communicate()
        for rank, child in enumerate(children):
            assert child.returncode == 0, f"rank {rank}:\n{said[rank][-4000:]}"
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(max(1, world))]
    for rank, result in enumerate(results):
        if isinstance(result, dict):
            result["said"] = said[rank]
    return results


def main() -> None:
    module, name, folder, world, rank, args = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    if int(world):
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/store", int(world))
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    result = function(*json.loads(args))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if int(world):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads and Python's teardown do not always agree: now and then an exit aborts
