"""The memory that training a model takes on a device and on a node: computed, not measured.

Counted are parameters in fp32 with their gradients and Adam's two moments, sharded over the workers of a replica; frozen
parameters in bf16; the additional memory of a pass, with recomputed activations; and the snapshots in the memory of hosts.
"""

from __future__ import annotations

import msgspec

TRAINED_BYTES = 16
"""Bytes of a trained parameter on a device: itself, its gradient and two moments, fp32 each."""
SNAPSHOT_BYTES = 12
"""Bytes of a trained parameter in a snapshot, which has no gradient."""
FROZEN_BYTES = 2
"""Bytes of a frozen parameter, in bf16. Snapshots do not contain it."""
COMPUTE_BYTES = 6
"""Bytes of a parameter that is gathered for computing: bf16, and its gradient in fp32 until that is scattered."""
LOGIT_BYTES = 16
"""Bytes of a logit: bf16 and fp32, and the same again for its gradient, with what the softmax keeps in fp32."""
BLOCK_BYTES = 34
"""Bytes per channel and token of the recomputed block, in bf16: Korthikanti et al., "Reducing activation recomputation"
(2022), section 4.1, without the terms of attention that flash attention does not keep."""
HELD_SNAPSHOTS = 3
"""Snapshots in memory: the newest complete one, the one before it and the one being written."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and a pass through it."""

    parameters: float
    trained: float
    """The parameters among these that are trained; the rest is frozen."""
    layers: int
    hidden: int
    vocabulary: int
    seq_len: int
    micro_batch: int
    """Number of samples in a pass."""
    block: float | None = None
    """Parameters of a block that one worker gathers; None: all of a block. With expert parallelism, those without the
    experts of other workers."""


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The memory for one degree of sharding, all in bytes."""

    shard: int
    state: float
    """On a device: parameters, gradients, moments, and frozen parameters."""
    compute: float
    """On a device: gathered parameters, activations, logits; independent of the degree."""
    snapshot: float
    """On a node: one snapshot. Up to three are held."""

    @property
    def device(self) -> float:
        """The total on a device."""
        return self.state + self.compute


def memory(sizes: Sizes, shard: int, workers_per_node: int) -> MemoryNeed:
    """The memory for replicas of `shard` workers, with `workers_per_node` workers on a node."""
    frozen = sizes.parameters - sizes.trained
    return MemoryNeed(
        shard=shard,
        state=(TRAINED_BYTES * sizes.trained + FROZEN_BYTES * frozen) / shard,
        compute=compute_bytes(sizes),
        snapshot=SNAPSHOT_BYTES * sizes.trained * workers_per_node / shard,
    )


def compute_bytes(sizes: Sizes) -> float:
    """Memory of a device while it computes: embedding and head with two blocks (one ahead), the inputs of all blocks,
    one block's activations, and the logits."""
    # Both are counted, even if a model ties them: the sum is then a little too high, which is the safe side.
    ends = 2.0 * sizes.vocabulary * sizes.hidden
    # Never below zero: sizes that do not fit together must not lower the sum.
    block = sizes.block if sizes.block is not None else max(0.0, sizes.parameters - ends) / sizes.layers
    tokens = sizes.seq_len * sizes.micro_batch
    # The block ahead is gathered in bf16 and has no gradient yet, so it takes less than the one at work.
    gathered = COMPUTE_BYTES * (ends + block) + FROZEN_BYTES * block
    # Only the input of a block is kept, in bf16: the backward pass recomputes the rest.
    inputs = 2.0 * tokens * sizes.hidden * sizes.layers
    return gathered + inputs + BLOCK_BYTES * tokens * sizes.hidden + LOGIT_BYTES * tokens * sizes.vocabulary
