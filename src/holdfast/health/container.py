"""Tells whether this process runs in a container, where files of the image take the place of the machine's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.health.files import quiet

_FILES = (".dockerenv", "run/.containerenv", "run/systemd/container")
_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""`container` is set by podman, LXC and systemd-nspawn."""
_GROUPS = ("kubepods", "docker", "containerd", "libpod", "crio", "lxc")
"""Parts of the names of control groups that container runtimes make. A container with a cgroup namespace of its own
does not see them."""


def in_container(root: Path, environ: Mapping[str, str]) -> bool:
    """Whether anything indicates a container. A container that gives no indication is taken for a machine.

    root: where the file systems are mounted. environ: variables of this process.
    """
    if any((root / file).exists() for file in _FILES) or any(environ.get(name) for name in _VARIABLES):
        return True
    groups = quiet(root / "proc/self/cgroup")
    return any(name in groups for name in _GROUPS)
