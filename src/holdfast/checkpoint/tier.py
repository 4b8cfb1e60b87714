"""What a durable tier can do: keep named bytes. `disk` and `objects` are the two kinds.

Names are relative, with `/` between folder and file. Every method may be called from several threads at once and
blocks; it raises TierError when the tier cannot do it, with what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from holdfast.errors import UsageError


class Tier(Protocol):
    """A place that keeps bytes for longer than the job lives.

    url: names it to a person, and opens it again.
    """

    url: str

    def check(self) -> None:
        """Raises TierError unless it can be read and written now. Leaves nothing behind."""

    def folders(self) -> list[str]:
        """The names of the folders at the top."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it is not there."""

    def read(self, name: str) -> bytes:
        """A small file, whole."""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fills `view` from byte `offset` on; raises StateError when the file ends before."""

    def write(
        self,
        name: str,
        pieces: Iterable[memoryview],
        nbytes: int,
        seen: Callable[[int], None] = lambda n: None,
    ) -> None:
        """A file of any size. It appears under its name when all of it is there and durable, or not at all.

        seen: told of bytes as they are written.
        """

    def publish(self, name: str, data: bytes) -> None:
        """A small file, in one indivisible step; one of the same name is replaced."""

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is removed already."""

    def remove_folder(self, name: str) -> None:
        """Removes a folder and all files in it."""


def open_tier(url: str | Path) -> Tier:
    """The tier behind a path, `file://` URL, or object store URL (`s3://`, `gs://`, `az://`, `memory://`).

    Raises:
        UsageError: no such kind of tier, or its library is not installed.
    """
    from holdfast.checkpoint.disk import DiskTier

    text = str(url)
    parts = urlsplit(text)
    if "://" not in text:
        return DiskTier(Path(text))
    if parts.scheme == "file":
        return DiskTier(Path(parts.path))
    try:
        from holdfast.checkpoint.objects import SCHEMES, ObjectTier
    except ImportError as error:
        raise UsageError(
            f"{text}: object stores need an extra: pip install 'holdfast[object]' ({error})"
        ) from error
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"{text}: no tier is called {parts.scheme}; give a folder, or one of {', '.join(SCHEMES)}"
        )
    return ObjectTier(text)
