"""GPUs made of files, below the stand-in for the driver's library (nvml/standin.c)."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from machines import write

from holdfast.health.nvml import LIBRARY

HEALTHY = {
    "uuid": "GPU-aa-0",
    "bus": "0x5d",
    "temperature": "60",
    "margin": "27",
    "reasons": "4",
    "sram_threshold": "0",
    "fabric": "3 0 0x2",
    "field3": "7",
    "field4": "0",
    "field143": "1",
    "field144": "0",
    "field145": "0",
    "field230": "0",
    **{f"nvlink{link}": "1" for link in range(18)},
}


def stand_in(folder: Path) -> None:
    """One healthy GPU in `folder`; the test is skipped where it cannot be."""
    pytest.importorskip("pynvml")
    write(folder / "0", HEALTHY)
    (folder / LIBRARY).write_bytes(_library())


def forget(pynvml) -> None:
    """Other tests find the machine as it is."""
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def xid(gpu: Path, number: int, code: int) -> None:
    """The driver reports one. At one stroke: the library may read at any moment."""
    write(gpu, {"xid.new": f"{number} {code}\n"})
    (gpu / "xid.new").rename(gpu / "xid")


@functools.cache
def _library() -> bytes:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("the stand-in for libnvidia-ml.so.1 needs gcc, which is not installed")
    source = Path(__file__).parent / "nvml" / "standin.c"
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / LIBRARY
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source], check=True)
        return built.read_bytes()
