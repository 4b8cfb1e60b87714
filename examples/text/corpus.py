"""Makes the training text: one file of byte tokens from a folder of text files.

Needs no download: without a folder it takes the sources of Python's own standard library, which every
machine that can run the example has.
"""

import fcntl
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SEPARATOR = b"\0"
"""Stands between two files. Text has no NUL bytes, so the model can tell where a file ends."""

_SNIFF_BYTES = 8 * 1024
_NOT_SOURCES = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


def corpus_path(folder: Path | None, cache: Path) -> Path:
    """Where in `cache` the corpus of `folder` belongs: one file per folder, so none evicts another."""
    if folder is None:
        return cache / "stdlib.npy"
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return cache / f"{folder.resolve().name}-{digest[:8]}.npy"


def build_corpus(folder: Path | None, out: Path) -> Path:
    """Writes the text files of a folder, one after the other, as uint8 tokens (one per byte).

    The order is that of the files' relative paths, so two machines with equal files get equal tokens. Any
    number of processes may call this at once: one builds, the others wait and use the result. A corpus that
    is already there is used again if its folder, number of files and total bytes are still the same. The text
    is joined in memory, so this is for folders up to a few gigabytes.

    Args:
        folder: all text files in it are taken, at any depth; left out are hidden folders and files, and
            binary files (those with a NUL in the first 8 KiB). None: the `.py` files of Python's standard
            library, without its tests.
        out: the `.npy` file to write, shape [bytes]. Beside it appear `.json` (what it was made from) and
            `.lock`.

    Returns:
        `out`.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the folder holds no text.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    sidecar = out.with_suffix(".json")
    with _locked(out.with_suffix(".lock")):
        source = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder.resolve()
        files = _python_sources(source) if folder is None else _visible_files(source, own=out)
        made_from = {
            "folder": str(source),
            "files": len(files),
            "bytes": sum(file.stat().st_size for file in files),
        }
        if out.exists() and _read_json(sidecar) == made_from:
            return out
        texts = [text for text in map(Path.read_bytes, files) if text and b"\0" not in text[:_SNIFF_BYTES]]
        if not texts:
            raise ValueError(f"no text found in {source}; give --text a folder that holds text files")
        tokens = np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)
        # Removed first and written last, so that after a kill it never vouches for another corpus.
        sidecar.unlink(missing_ok=True)
        with _replacing(out) as temporary, temporary.open("wb") as file:
            np.save(file, tokens)
        with _replacing(sidecar) as temporary:
            temporary.write_text(json.dumps(made_from))
    return out


def _python_sources(folder: Path) -> list[Path]:
    return sorted(file for file in _walk(folder, _NOT_SOURCES) if file.suffix == ".py")


def _visible_files(folder: Path, own: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"text folder {folder} does not exist; check --text")
    written_here = {own.resolve().with_suffix(suffix) for suffix in (".npy", ".json", ".lock")}
    return sorted(
        file for file in _walk(folder) if not file.name.startswith(".") and file not in written_here
    )


def _walk(folder: Path, skipped: Set[str] = frozenset()) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        yield from (file for name in names if (file := Path(parent, name)).is_file())


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock. The kernel drops it with the process, so a killed builder blocks nobody."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` in one step when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
