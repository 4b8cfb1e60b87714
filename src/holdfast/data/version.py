"""The version of a remote file: the cache compares it, and a fetch refuses bytes of another one."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, frozen=True):
    """The present version of a remote file: it changes when the file does."""

    # Stores differ in what they offer: some have no e-tag, and web servers may have no exact time. All three
    # are compared, so any of them that changes shows a new version.
    size: int
    """Size in bytes."""
    e_tag: str | None
    """The store's e-tag; None: the store has none."""
    modified: str
    """The store's modification time; empty: the store does not give one."""


class RemoteFileChanged(Exception):
    """The remote file has changed since the fetch began."""
