"""Which version of a remote file there is: the cache compares it, and fetching refuses bytes of any other one."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, frozen=True):
    """What a remote file is now: it changes when the file does."""

    # Stores differ in what they offer: some have no e-tag, and web servers may have no exact time. All three
    # are compared, so any of them that changes shows a new version.
    size: int
    """Bytes."""
    e_tag: str | None
    """As the store gives it; None: it gives none."""
    modified: str
    """As the store gives it; empty: it does not."""


class RemoteFileChanged(Exception):
    """The remote file is another one than when the fetch began."""
