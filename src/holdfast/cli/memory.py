"""Whether there is enough memory to start."""

from __future__ import annotations

from holdfast.errors import UsageError
from holdfast.protocol.units import plural

NODE_BYTES = 200 << 20
"""An agent with the process that its warm workers are forked from (measured: 150 to 230 MB with torch)."""

WORKER_BYTES = 150 << 20
"""A worker of a small model and the warm process behind it (measured: 130 to 210 MB); the model comes on top."""


def check_memory(nodes: int, nproc: int, available: int | None) -> None:
    """Raises UsageError when the processes alone would not fit; unknown (None) passes."""
    needed = nodes * (NODE_BYTES + nproc * WORKER_BYTES)
    if available is not None and available < needed:
        raise UsageError(
            f"{plural(nodes, 'node')} with {plural(nproc, 'worker')} each take about {needed >> 20} MiB of memory "
            f"before the model, but only {available >> 20} MiB are free: use a smaller --nnodes, --nproc-per-node or "
            "--spares, or end other programs"
        )
