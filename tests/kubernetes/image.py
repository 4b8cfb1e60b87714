"""The image of the test cluster, made in a second, without a builder and a registry.

    image.py NAME OUT.tar               this checkout's code and a few files, as `ctr images import` reads it
    image.py --container < SPEC         the runtime's default container with this machine's Python, read-only

An image with PyTorch has a gigabyte, and each node of the cluster would unpack one of its own. Here the image has the code
alone. The interpreter and the libraries come from this machine, by mounts that the container runtime adds to every
container, as sites add a GPU's driver. Nothing of it is in a pod's specification. Users' images are made of
`deploy/kubernetes/Containerfile`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
CODE = "/opt/holdfast/lib"
PREFIX = Path(sys.prefix).resolve()
"""Of the environment. Its folder may be a link, as in a second worktree; the containers have what it leads to, and no link."""
ENVIRONMENT = "/opt/holdfast/environment"
"""Where the containers have it. A pod's own /tmp would hide a checkout below this machine's."""
LEFT_OUT = re.compile(r"/__pycache__(/|$)|\.pyc$")
USERS = (
    "root:x:0:0::/root:/bin/sh\nholdfast:x:1000:1000::/tmp:/bin/sh\ncoordinator:x:65532:65532::/tmp:/bin/sh\n"
)
LINKS = ("bin", "sbin", "lib", "lib64")
PROGRAM = "manager"
STAYS = "/opt/holdfast/bin/sleep"
"""What holds a pod's namespaces is of this image too. It gets no mounts, so its program needs no library."""


def main() -> None:
    """See above."""
    if sys.argv[1:] == ["--container"]:
        json.dump(container(json.load(sys.stdin)), sys.stdout)
        return
    name, out = sys.argv[1:]
    write_image(name, Path(out))


def write_image(name: str, out: Path) -> None:
    """This checkout's code."""
    started = {
        "Env": [
            f"PATH={ENVIRONMENT}/bin:/bin",
            f"PYTHONPATH={':'.join([CODE, *_beside()])}",
            "PYTHONDONTWRITEBYTECODE=1",
        ],
        "Cmd": [STAYS, "1000000000"],
        "User": "1000:1000",
        "WorkingDir": "/tmp",
    }
    _write(name, out, _files(), started)


def write_program(name: str, program: Path, out: Path) -> None:
    """Somebody else's program alone, as `/manager`, which is how controllers are called."""
    files = [(PROGRAM, program.read_bytes()), *((link, f"usr/{link}") for link in LINKS)]
    _write(name, out, files, {"Cmd": [f"/{PROGRAM}"], "User": "65532:65532"})


def _write(
    name: str, out: Path, files: Iterable[tuple[str, bytes | str]], started: dict[str, object]
) -> None:
    """One layer, a configuration and a manifest, in one archive."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for at, what in files:
            _put(archive, at, what)
    data = layer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": started,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(out, "w") as archive:
        _put(archive, f"{digest}/layer.tar", data)
        _put(archive, config_name, text)
        _put(archive, "manifest.json", json.dumps(manifest).encode())


def container(spec: dict[str, object]) -> dict[str, object]:
    """The runtime's default container, with this machine's Python. Its environment is in a place of its own, all else where it is
    here."""
    mounts = spec["mounts"]
    assert isinstance(mounts, list)
    # Before the others: what a pod mounts below must not be hidden by them.
    own = [
        {"destination": at, "type": "bind", "source": path, "options": ["rbind", "ro", "nosuid"]}
        for path, at in {**{path: path for path in _folders()}, str(PREFIX): ENVIRONMENT}.items()
    ]
    return {**spec, "mounts": [*own, *mounts]}


def _folders() -> list[str]:
    """The fewest folders that have the interpreter, and what is on its path beside the environment."""
    beside = [path for path in map(Path, sys.path) if not path.resolve().is_relative_to(PREFIX)]
    wanted = [Path("/usr"), Path(sys.base_prefix), *beside]
    there = sorted({path.resolve() for path in wanted if path.is_dir() and not _is_code(path)})
    kept: list[Path] = []
    for path in there:
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return [str(path) for path in kept]


def _is_code(path: Path) -> bool:
    """Of a checkout: the image has this one's, and nothing else of it."""
    return (path / "holdfast").is_dir() or path == Path(__file__).parent


def _beside() -> list[str]:
    """What PYTHONPATH adds to this process, so that the containers have it too."""
    import os

    given = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    return [path for path in given if Path(path).is_dir() and not _is_code(Path(path))]


def _files() -> Iterator[tuple[str, bytes | str]]:
    """Paths with their bytes, or with where they lead."""
    yield "etc/passwd", USERS.encode()
    yield STAYS.lstrip("/"), Path("/bin/busybox").read_bytes()
    yield from ((name, f"usr/{name}") for name in LINKS)
    for path in sorted((TOP / "src").rglob("*")):
        inside = path.relative_to(TOP / "src")
        if path.is_file() and not LEFT_OUT.search(f"/{inside}"):
            yield f"{CODE.lstrip('/')}/{inside}", path.read_bytes()


def _put(archive: tarfile.TarFile, name: str, what: bytes | str) -> None:
    """The same bytes for the same code, and readable by a user that is not root."""
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if f"/{name}" in (STAYS, f"/{PROGRAM}") else 0o644
    if isinstance(what, str):
        info.type, info.linkname = tarfile.SYMTYPE, what
        archive.addfile(info)
        return
    info.size = len(what)
    archive.addfile(info, io.BytesIO(what))


if __name__ == "__main__":
    main()
