"""An image of the environment that runs this, made without a builder and a registry: `python image.py NAME OUT.tar`.

Two layers. The first has Python, the libraries that are installed and what they load from the system; the second has this
checkout, and busybox for people. It is for a cluster of tests. Users' images are made of `deploy/kubernetes/Containerfile`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
CODE = "/opt/holdfast/lib"
LEFT_OUT = re.compile(
    r"/(__pycache__|tests?|include|share/man|config-3[^/]*|idlelib|ensurepip|turtledemo|pip|mypy|ruff|sphinx|babel|jedi)(/|$)"
    r"|\.(a|pyc|pyi|h|hpp|cuh)$"
)
USERS = (
    "root:x:0:0::/root:/bin/sh\nholdfast:x:1000:1000::/tmp:/bin/sh\ncoordinator:x:65532:65532::/tmp:/bin/sh\n"
)


def main() -> None:
    """Writes the archive, as `ctr images import` reads it."""
    name, out = sys.argv[1:]
    layers = [_layer(Path(f"{out}.system"), _system()), _layer(Path(f"{out}.code"), _code())]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": [
                f"PATH={sys.prefix}/bin:/bin:/usr/bin",
                f"PYTHONPATH={CODE}",
                "PYTHONDONTWRITEBYTECODE=1",
            ],
            "Cmd": ["/bin/sh"],
            "User": "1000:1000",
            "WorkingDir": "/tmp",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for _, digest in layers]},
    }
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [
        {"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar" for _, digest in layers]}
    ]
    with tarfile.open(out, "w") as archive:
        for path, digest in layers:
            archive.add(path, arcname=f"{digest}/layer.tar")
            path.unlink()
        for file, data in ((config_name, text), ("manifest.json", json.dumps(manifest).encode())):
            _put(archive, file, data)


def _layer(path: Path, files: Iterator[tuple[str, Path | bytes | str]]) -> tuple[Path, str]:
    with tarfile.open(path, "w") as layer:
        for name, what in files:
            if isinstance(what, bytes):
                _put(layer, name, what)
            elif isinstance(what, str):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, what
                layer.addfile(link)
            else:
                layer.add(what, arcname=name, recursive=False, filter=_anybodys)
    with path.open("rb") as file:
        return path, hashlib.file_digest(file, "sha256").hexdigest()


def _anybodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Read by a user that is not root, and with the same bytes for the same environment."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode |= 0o444 | (0o111 if info.mode & 0o100 else 0)
    return info


def _put(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755 if name.startswith("bin/") else 0o644
    archive.addfile(info, io.BytesIO(data))


def _system() -> Iterator[tuple[str, Path | bytes | str]]:
    """Python and the libraries, at the paths that they have here."""
    loads: set[Path] = {Path(sys.executable).resolve()}
    base, environment = Path(sys.base_prefix), Path(sys.prefix)
    for folder in (base / "bin", base / "lib", environment):
        for path in [folder, *sorted(folder.rglob("*"))]:
            inside = f"/{path.relative_to(folder)}"
            # The interpreter's own packages are not those of its environment.
            if LEFT_OUT.search(inside) or (folder != environment and "/site-packages" in inside):
                continue
            yield str(path).lstrip("/"), path
            if re.search(r"\.so(\.\d+)*$", path.name) and path.is_file():
                loads.add(path)
    for library in sorted(_loaded(loads)):
        if not any(library.is_relative_to(folder) for folder in (base, environment)):
            yield str(library).lstrip("/"), library.resolve()


def _loaded(files: set[Path]) -> set[Path]:
    """What the dynamic linker finds for them outside of the environment."""
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    return {Path(found) for found in re.findall(r"(?:=> )?(/\S+) \(0x", listed)}


def _code() -> Iterator[tuple[str, Path | bytes | str]]:
    for path in sorted((TOP / "src").rglob("*")):
        if not LEFT_OUT.search(str(path.relative_to(TOP / "src"))):
            yield f"{CODE.lstrip('/')}/{path.relative_to(TOP / 'src')}", path
    yield "etc/passwd", USERS.encode()
    yield "bin/busybox", Path("/bin/busybox")
    for name in ("sh", "ls", "cat", "sleep", "env", "id", "ps"):
        yield f"bin/{name}", "busybox"
    command = (
        f"#!{sys.prefix}/bin/python3 -P\nimport runpy\nrunpy.run_module('holdfast', run_name='__main__')\n"
    )
    yield "bin/holdfast", command.encode()


if __name__ == "__main__":
    main()
