"""The memory that training a model takes, of a device and of a node: sums, not measurements.

What is counted: parameters in fp32 with their gradients and Adam's two moments, dealt to the workers of a replica; what is
frozen, in bf16; what a pass needs beside that, with activations that are computed again; and what snapshots take of hosts.
"""

from __future__ import annotations

import msgspec

TRAINED_BYTES = 16
"""Of a trained parameter: itself, its gradient and two moments, fp32 each."""
SNAPSHOT_BYTES = 12
"""Of a trained parameter in a snapshot, which has no gradient."""
FROZEN_BYTES = 2
"""Of a parameter that is not trained, in bf16. It is in no snapshot."""
COMPUTE_BYTES = 6
"""Of a parameter that is gathered to compute: bf16, and its gradient in fp32 until it is dealt."""
LOGIT_BYTES = 16
"""Of a logit: bf16 and fp32, and the same again for its gradient, with what the softmax keeps in fp32."""
BLOCK_BYTES = 34
"""Of a channel of a token in the block that is computed again, in bf16: Korthikanti et al., "Reducing activation recomputation"
(2022), section 4.1, without the terms of attention that flash attention does not keep."""
HELD_SNAPSHOTS = 3
"""The newest complete one, the one before it and the one being written."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and a pass through it."""

    parameters: float
    trained: float
    """Of these; the rest is frozen."""
    layers: int
    hidden: int
    vocabulary: int
    seq_len: int
    micro_batch: int
    """Samples of a pass."""
    block: float | None = None
    """Parameters of a block that one worker gathers; None: all of a block. With expert parallelism, those without the
    experts of other workers."""


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one degree of sharding, all in bytes."""

    shard: int
    state: float
    """Of a device: parameters, gradients, moments, and what is frozen."""
    compute: float
    """Of a device: what is gathered, activations, logits; it does not depend on the degree."""
    snapshot: float
    """Of a node: one snapshot. Up to three are held."""

    @property
    def device(self) -> float:
        """Of a device, all."""
        return self.state + self.compute


def memory(sizes: Sizes, shard: int, workers_per_node: int) -> MemoryNeed:
    """For replicas of so many workers, of which so many are on a node."""
    frozen = sizes.parameters - sizes.trained
    return MemoryNeed(
        shard=shard,
        state=(TRAINED_BYTES * sizes.trained + FROZEN_BYTES * frozen) / shard,
        compute=compute_bytes(sizes),
        snapshot=SNAPSHOT_BYTES * sizes.trained * workers_per_node / shard,
    )


def compute_bytes(sizes: Sizes) -> float:
    """Of a device while it computes: embedding and head with two blocks (one ahead), the inputs of all blocks, one block's
    activations, and the logits."""
    # Both are counted, also where a model ties them: the sum is then a little too high, on the safe side.
    ends = 2.0 * sizes.vocabulary * sizes.hidden
    # Never below zero: sizes that do not fit together must not lower the sum.
    block = sizes.block if sizes.block is not None else max(0.0, sizes.parameters - ends) / sizes.layers
    tokens = sizes.seq_len * sizes.micro_batch
    # The block ahead is gathered in bf16 and has no gradient yet, so it takes less than the one at work.
    gathered = COMPUTE_BYTES * (ends + block) + FROZEN_BYTES * block
    # Of a block only its input is kept, in bf16: the backward pass computes the rest again.
    inputs = 2.0 * tokens * sizes.hidden * sizes.layers
    return gathered + inputs + BLOCK_BYTES * tokens * sizes.hidden + LOGIT_BYTES * tokens * sizes.vocabulary
