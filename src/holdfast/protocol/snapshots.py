"""Snapshots and checkpoints as the messages name them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.job_options import CADENCE, SnapshotOptions
from holdfast.protocol.wire.decoding import decode

TIERS_VARIABLE = "HOLDFAST_TIERS"
"""The environment variable that tells a worker the job's durable tiers."""


# Two lacks that need opposite answers: a slot becomes free again by waiting, memory only by giving something
# up.
class Lack(StrEnum):
    """What a node lacks for a shard. slot: the memory for it holds snapshots that are still needed, so there is room again when
    one of them is complete; memory: another snapshot does not fit."""

    SLOT = "slot"
    MEMORY = "memory"


# The generation is part of the key. After a fault the same step is computed again, and its shards have other
# bytes than those that were taken before: mixing them would give a state that never existed.
class Key(msgspec.Struct, frozen=True, order=True):
    """Identifies a shard of a snapshot."""

    step: int
    """Committed steps of the state; at level 0 and 1 the script's own number."""
    generation: int
    """Of the workers that took it; below 1 for one that an agent adopted from a run before, and another for
    every generation of every run."""
    rank: int
    """The shard's number: at level 2 its index, the same for all replicas; at level 0 and 1 the rank."""
    world: int
    """How many shards the snapshot has."""


class Part(msgspec.Struct, frozen=True):
    """A file of a checkpoint."""

    name: str
    nbytes: int
    xxh3: str
    """128 bits, hex: of a head's bytes; for a blob, of its file's header and its chunks' sums."""


# Head and blob are apart, because data-parallel ranks differ only in their heads: the blob, which is nearly all of the
# bytes, is written once.
class Shard(msgspec.Struct, frozen=True):
    """What one rank saved."""

    rank: int
    head: Part
    """What tells which tensors the blob has, and the values that are no tensors."""
    blob: Part
    """The bytes of the rank's tensors. They are the last ones of the file, after a header that names them. Ranks with equal
    bytes and header share one file."""
    header_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Of that header."""

    @property
    def files(self) -> dict[str, int]:
        """The two files, and the bytes of each."""
        return {self.head.name: self.head.nbytes, self.blob.name: self.header_bytes + self.blob.nbytes}


# Equality is by content, because a Shard holds its checksums. Two copies are equal if and only if either may
# be restored in place of the other.
class Copy(msgspec.Struct, frozen=True):
    """A shard in a node's snapshot memory. The names of its parts are those that a durable tier will give them."""

    key: Key
    shard: Shard


# The server's name is what must be proved on the connection. An address alone may belong to another process
# by the time that somebody calls.
class Holder(msgspec.Struct, frozen=True):
    """An agent that holds a shard, and where it serves it."""

    node: str
    host: str
    port: int
    server: str = ""
    """The name that whoever listens there must prove."""


def _said(**bounds: Any) -> msgspec.Meta:
    """Said to whoever makes a schema, and not enforced: what a job was started with is read for ever."""
    return msgspec.Meta(extra_json_schema=bounds)


class DurableTier(msgspec.Struct, frozen=True):
    """A durable tier, and which checkpoints are kept there."""

    url: Annotated[str, _said(pattern="^((s3|gs|az|file)://.+|/.+)")]
    """A bucket, or a folder that all nodes mount."""
    every: Annotated[str, _said(pattern=CADENCE)] = "auto"
    keep: Annotated[int, _said(minimum=1)] = 2  # the newest so many
    keep_every: Annotated[int, _said(minimum=0)] = 0
    """Steps that it divides are kept for ever; 0: none."""


_tiers = msgspec.json.Decoder(list[DurableTier])


def tiers_of(environment: Mapping[str, str]) -> list[DurableTier]:
    """The job's durable tiers, as a worker is told of them."""
    # By the environment and not by a message: a script may ask before it is a member of anything.
    return decode(_tiers.decode, environment.get(TIERS_VARIABLE, "[]"), TIERS_VARIABLE, error=UsageError)


class Saving(msgspec.Struct, frozen=True):
    """What a job saves."""

    snapshots: SnapshotOptions = SnapshotOptions()
    budget_bytes: int = 0
    """Of every node's snapshot memory; 0: half of what is free."""
    tiers: tuple[DurableTier, ...] = ()
