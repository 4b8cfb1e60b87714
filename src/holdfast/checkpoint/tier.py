"""What a durable tier can do: keep named bytes. `disk` and `objects` are the two kinds.

Names are relative, with `/` between folder and file. Every method may be called from several threads at once and
blocks; it raises TierError when the tier cannot do it, with what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from holdfast.checkpoint.policy import parse_cadence
from holdfast.errors import UsageError
from holdfast.protocol.snapshots import DurableTier

TIER_EXAMPLE = "s3://bucket/run,every=10m,keep=3,keep-every=10000"


class Tier(Protocol):
    """Storage that keeps bytes for longer than the job lives."""

    url: str
    """Names it to a person, and opens it again."""

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
        buffers: Iterable[memoryview],
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

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder, and the bytes of each; none when it is not there."""

    def remove_folder(self, name: str, last: str = "") -> None:
        """Removes a folder and all files in it; the file `last` when the others are gone."""


def open_tier(url: str | Path) -> Tier:
    """The tier behind a path, `file://` URL, or object store URL (`s3://`, `gs://`, `az://`, `memory://`).

    Raises:
        UsageError: no such kind of tier, or its library is not installed.
    """
    # Imported on use: the command line asks for tiers, and the object store's library takes a noticeable part
    # of its start.
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
            f"{text}: support for object stores is not installed: pip install 'holdfast-train[object]' ({error})"
        ) from error
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"{text}: {parts.scheme} is not a known kind of tier; use a folder, or a URL with one of "
            f"{', '.join(SCHEMES)}"
        )
    return ObjectTier(text)


def parse_tier(text: str, every: str = "auto") -> DurableTier:
    """`URL[,every=CADENCE][,keep=N][,keep-every=STEPS]`; `every` is what holds when it is not given.

    Raises:
        UsageError: no folder or URL, an option that is none of it, or a value that cannot be.
    """
    url, *options = text.split(",")
    if not url:
        raise UsageError(f"{text!r}: not a folder or URL, for example {TIER_EXAMPLE}")
    fields: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("every", "keep", "keep-every") or not equals or name in fields:
            raise UsageError(f"{text!r}: {option!r} is not a known option; write for example {TIER_EXAMPLE}")
        fields[name] = value
    for name in ("keep", "keep-every"):
        if not re.fullmatch(r"\d+", fields.get(name, "1")):
            raise UsageError(f"{text!r}: {name} must be a whole number, for example {TIER_EXAMPLE}")
    # Refused, not raised to 1: who writes 0 may mean all or none, and with one of the two meanings
    # checkpoints would be deleted.
    if int(fields.get("keep", "2")) < 1:
        raise UsageError(f"{text!r}: keep must be at least 1, because the newest checkpoint is always kept")
    every = fields.get("every", every)
    try:
        parse_cadence(every)
    except UsageError as error:
        raise UsageError(f"{text!r}: every: {error}") from error
    # Absolute before it leaves this process: agents have another working folder, and each would write to its
    # own.
    absolute = url if "://" in url else str(Path(url).absolute())
    return DurableTier(absolute, every, int(fields.get("keep", "2")), int(fields.get("keep-every", "0")))
