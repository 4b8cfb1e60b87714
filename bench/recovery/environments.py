"""The Python environments that the systems run in: ours, and one of its own for every peer.

A peer gets a virtual environment at the root of the repository (`.venv-bench-NAME/`, ignored by git), so
that its dependencies cannot change ours. torch goes in first and pinned: with it in place no requirement
of a peer can pull another build of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
TORCHFT = "torchft-nightly==2026.10.26"
NVRX_VERSION = "0.6.0"


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the way to fill it."""

    name: str
    packages: tuple[str, ...]
    """What is asked for its version and printed above the table."""
    fill: Callable[[Environment], None]
    """Installs the peer into an environment that already has torch."""

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-bench-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Written last: without it the environment is not whole."""
        return self.folder / ".ready"

    @property
    def complaint(self) -> Path:
        """The output of the installation that failed, for the row that is printed in its place."""
        return ROOT / f".venv-bench-{self.name}-error.txt"

    def trouble(self) -> str | None:
        """Why this environment cannot be used, or None if it can."""
        if self.stamp.exists():
            return None
        if self.complaint.exists():
            return self.complaint.read_text(encoding="utf-8").strip()
        return "not installed here: run `python -m bench.recovery --setup` first"

    def pip(self, *arguments: str) -> None:
        """Run this environment's pip. Raises InstallError with pip's last lines."""
        _run([str(self.python), "-m", "pip", "--disable-pip-version-check", "-q", *arguments])

    def site_packages(self) -> Path:
        return next(iter(self.folder.glob("lib/python3.*/site-packages")))


class InstallError(Exception):
    """An installation failed. The message holds the last lines that the installer printed."""


def create(environment: Environment) -> None:
    """Make `environment` if it is not whole yet. Raises InstallError, and remembers the error for the table."""
    if environment.stamp.exists():
        return
    environment.complaint.unlink(missing_ok=True)
    try:
        if not environment.python.exists():
            _run([sys.executable, "-m", "venv", str(environment.folder)])
        environment.pip("install", TORCH, "numpy")
        environment.fill(environment)
    except InstallError as error:
        environment.complaint.write_text(str(error) + "\n", encoding="utf-8")
        raise
    environment.stamp.touch()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING")]
        raise InstallError(
            f"`{' '.join(command[-4:])}` ended with {done.returncode}: " + " | ".join(lines[-4:])
        )


def _fill_torchft(environment: Environment) -> None:
    """torchft's own requirement on torch is left out, so that the pinned build stays."""
    environment.pip("install", "--no-deps", TORCHFT)
    environment.pip(
        "install", "opentelemetry-sdk", "opentelemetry-api", "opentelemetry-exporter-otlp-proto-http"
    )


def _fill_nvrx(environment: Environment) -> None:
    """Install the 0.6.0 wheel also where pip would not.

    The wheels of 0.6.0 ask for glibc 2.39. On an older one pip takes 0.4.1 without a word. All but one
    CUPTI module in the wheel is Python, and nothing here uses that module, so it is unpacked by hand.
    """
    wheels = environment.folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    environment.pip(
        *("download", f"nvidia-resiliency-ext=={NVRX_VERSION}", "--no-deps", "--only-binary=:all:"),
        *("--platform", "manylinux_2_39_x86_64", "--python-version", version, "-d", str(wheels)),
    )
    (wheel,) = wheels.glob("nvidia_resiliency_ext-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(environment.site_packages())
    environment.pip(
        *("install", "packaging", "psutil", "pyyaml", "nvidia-ml-py", "defusedxml", "httpx", "setproctitle"),
        *("grpcio>=1.76,<2", "protobuf>=4.22"),
    )


TORCHFT_ENVIRONMENT = Environment("torchft", ("torchft-nightly",), _fill_torchft)
NVRX_ENVIRONMENT = Environment("nvrx", ("nvidia-resiliency-ext",), _fill_nvrx)
PEERS = (TORCHFT_ENVIRONMENT, NVRX_ENVIRONMENT)


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """The installed versions of `packages` as `python` sees them, without importing them."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    done = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        return dict.fromkeys(packages, "?")
    return dict(json.loads(done.stdout))
