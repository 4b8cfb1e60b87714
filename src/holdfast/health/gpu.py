"""Describes one NVIDIA GPU for the sources that read it through the driver's library."""

from __future__ import annotations

from typing import Any


class Gpu:
    """One GPU that was present at the start. handle: None if it was already lost."""

    def __init__(self, index: int, handle: Any, uuid: str = "", pci: str = "") -> None:
        self.handle, self.uuid, self.pci = handle, uuid, pci
        # By PCI address, as in the kernel's lines, so that findings of both sources are about one subject.
        # Indexes change when a GPU is lost and the driver is loaded again.
        self.subject = f"gpu {pci or index}"
        self.links: set[int] = set()
