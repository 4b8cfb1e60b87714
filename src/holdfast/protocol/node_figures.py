"""Which readings of a machine are figures for people: what a dashboard shows beside a job, and no rule needs to judge."""

from __future__ import annotations

from typing import NamedTuple

MOST_READINGS = 128
"""Of one node. Each is a time series for whoever scrapes `/metrics`, and a job may have thousands of nodes."""
SUBJECT_CHARS = 64


class NodeFigure(NamedTuple):
    """One reading as a series."""

    metric: str
    text: str
    label: str
    """What its subject is called."""
    is_counter: bool = False
    scale: float = 1.0
    """From the reading to the base unit."""


NODE_FIGURES: dict[str, NodeFigure] = {
    "nvml.utilization_percent": NodeFigure(
        "holdfast_node_gpu_utilization_ratio",
        "Share of time in which the GPU ran a kernel.",
        "gpu",
        scale=0.01,
    ),
    "nvml.memory_used_bytes": NodeFigure(
        "holdfast_node_gpu_memory_used_bytes", "Memory of the GPU that is in use.", "gpu"
    ),
    "nvml.temperature_c": NodeFigure(
        "holdfast_node_gpu_temperature_celsius", "Temperature of the GPU.", "gpu"
    ),
    "nvml.power_watts": NodeFigure("holdfast_node_gpu_power_watts", "Power that the GPU draws.", "gpu"),
    "net.rx_bytes": NodeFigure(
        "holdfast_node_network_received_bytes", "Received by the interface.", "interface", True
    ),
    "net.tx_bytes": NodeFigure(
        "holdfast_node_network_sent_bytes", "Sent by the interface.", "interface", True
    ),
    "disk.read_bytes": NodeFigure("holdfast_node_disk_read_bytes", "Read from the drive.", "disk", True),
    "disk.written_bytes": NodeFigure(
        "holdfast_node_disk_written_bytes", "Written to the drive.", "disk", True
    ),
}
"""By the reading's name."""
