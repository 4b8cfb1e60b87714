"""Every source that a machine has."""

from __future__ import annotations

from holdfast.health.dcgm import dcgm_sources
from holdfast.health.disks import disk_sources
from holdfast.health.mounts import mount_sources
from holdfast.health.network import network_sources
from holdfast.health.nvml import nvml_sources
from holdfast.health.pcie import pcie_sources
from holdfast.health.processor import processor_sources
from holdfast.health.rdma import rdma_sources
from holdfast.health.sources import Factory, MachineRoot, Source

FACTORIES: tuple[Factory, ...] = (
    processor_sources,
    pcie_sources,
    mount_sources,
    disk_sources,
    network_sources,
    rdma_sources,
    nvml_sources,
    dcgm_sources,
)


def machine_sources(machine: MachineRoot) -> list[Source]:
    """The sources of a machine, or of the stand-in for one."""
    return [source for factory in FACTORIES for source in factory(machine)]
