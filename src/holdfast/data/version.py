"""Which version of a remote file there is: the cache compares it, and fetching refuses bytes of any other one."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, frozen=True):
    """What a remote file is now: it changes when the file does."""

    size: int
    e_tag: str | None
    modified: str


class Changed(Exception):
    """The remote file is another one than when the fetch began."""
