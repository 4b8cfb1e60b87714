"""A few processes of one gloo group for tests: `together(function, world, *args)` runs a function of a test's module.

Results come back as JSON through files; a rank that fails shows its trace. The ranks are forks of one process that has
imported torch: it takes three seconds of a processor, and a test may need six ranks.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

LIMIT_S = 90
IMPORTED = [
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
SETTING = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
"""What the imports read, and gloo."""

_processes = multiprocessing.get_context("forkserver")


def together(function, world: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on every rank; world 0: without a process group."""
    _processes.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, SETTING):
        forkserver.ensure_running()
        environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        names = (function.__module__, function.__name__)
        children = [
            _processes.Process(
                target=_rank, args=(*names, folder, world, rank, json.dumps(args), environment, sys.path)
            )
            for rank in range(max(1, world))
        ]
        try:
            for child in children:
                child.start()
            limit_s = time.monotonic() + LIMIT_S
            for child in children:
                child.join(max(0.0, limit_s - time.monotonic()))
            codes = [child.exitcode for child in children]
        finally:
            for child in children:
                child.kill()
                child.join()
                child.close()
        said = [(Path(folder) / f"{rank}.out").read_text() for rank in range(max(1, world))]
        for rank, code in enumerate(codes):
            assert code == 0, (
                f"rank {rank} ({'runs still' if code is None else f'exit code {code}'}):\n{said[rank][-4000:]}"
            )
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(max(1, world))]
    for rank, result in enumerate(results):
        if isinstance(result, dict):
            result["said"] = said[rank]
    return results


def _rank(module, name, folder, world, rank, args, environment, path) -> None:
    code = 1
    try:
        out = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        _run(getattr(importlib.import_module(module), name), folder, world, rank, json.loads(args))
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(
            code
        )  # gloo's threads and Python's teardown do not always agree: now and then an exit aborts


def _run(function, folder: str, world: int, rank: int, args: list[Any]) -> None:
    if world:
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = function(*args)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if world:
        dist.barrier()
        dist.destroy_process_group()
