"""Faults of a machine, written where the sources read: the node's stand-in for the kernel's log, `/sys` and the GPUs.

The files look as a healthy machine's until the fault is written, so that the sources see what they would see: a port
that was up goes down, a counter rises.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.agent.health import HealthWatcher
from holdfast.health.kmsg import format_record
from holdfast.health.sources import MachineRoot
from holdfast.protocol.faults import ArmedFault, FaultKind

PCI = "0000:3b:00"
PORT = "sys/class/infiniband/mlx5_0/ports/1"
MEMORY = "sys/devices/system/edac/mc/mc0"

HEALTHY = {
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/phys_state": "5: LinkUp",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)",
    f"{PORT}/link_layer": "InfiniBand",
    f"{PORT}/counters/link_downed": "0",
    f"{MEMORY}/mc_name": "Skylake Socket#0 IMC#0",
    f"{MEMORY}/ue_count": "0",
    f"{MEMORY}/ce_count": "0",
}
BROKEN = {
    FaultKind.LINK_DOWN: {
        f"{PORT}/state": "1: DOWN",
        f"{PORT}/phys_state": "3: Disabled",
        f"{PORT}/counters/link_downed": "1",
    },
    FaultKind.ECC: {f"{MEMORY}/ue_count": "1"},
}
LINES = {
    FaultKind.ECC: (
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1a2b3c offset:0x0 "
        "grain:32 - err_code:0x0101:0x0090 socket:0 imc:0 rank:0 row:0x1f col:0x3f8)",
    ),
    FaultKind.LINK_DOWN: ("mlx5_core 0000:5c:00.0 ibs0: Link down",),
    FaultKind.READONLY_FS: (
        "EXT4-fs error (device nvme0n1p2): ext4_journal_check_start:83: comm python: Detected aborted journal",
        "EXT4-fs (nvme0n1p2): Remounting filesystem read-only",
    ),
}
XIDS = {
    13: "Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0): Out Of Range Address",
    31: "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_0 faulted @ 0x7f3e_4c000000. Fault is "
    "of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "Ch 00000008",
    45: "Ch 00000008",
    48: "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 0, "
    "subpartition 0.",
    63: "Row Remapper: New row (0x0000000b78e2c000) marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Failed to remap row, reset gpu and try again.",
    74: "NVLink: fatal error detected on link 2(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "GPU has fallen off the bus.",
    94: "Contained: SM (0x1). RST: No, D-RST: No",
    95: "Uncontained: FBHUB. RST: Yes, D-RST: No",
    119: "Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x8).",
}
XID_FORMS = {
    154: "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
} | dict.fromkeys(
    range(144, 151), "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x00000000)"
)


async def strike(watcher: HealthWatcher, fault: ArmedFault) -> None:
    """Does to this node's stand-in what the fault says."""
    kind = fault.kind
    if kind in BROKEN:
        machine = MachineRoot(watcher.folder / "machine", watcher.folder / "machine" / "nvml")
        # Written once: a second fault strikes the machine as the first one left it, with its counters, and
        # not a healthy one.
        if not machine.root.exists():
            write_files(machine.root, HEALTHY)
        await watcher.stand_in(machine)
        write_files(machine.root, BROKEN[kind])
    lines = (xid_line(fault.code or 0),) if kind is FaultKind.XID else LINES.get(kind, ())
    append_kernel_lines(watcher.folder / "kmsg", lines)


def xid_line(code: int) -> str:
    """The line that NVIDIA's driver writes for an Xid."""
    if code in XID_FORMS:
        return f"NVRM: Xid (PCI:{PCI}): {code}, {XID_FORMS[code]}"
    return f"NVRM: Xid (PCI:{PCI}): {code}, pid='<unknown>', name=<unknown>, {XIDS.get(code, 'Error')}"


def append_kernel_lines(path: Path, lines: tuple[str, ...]) -> None:
    """Adds lines to a file that stands in for the kernel's log."""
    with path.open("ab") as log:
        for line in lines:
            # The offset serves as the record's sequence number, which rises as the kernel's does.
            log.write(format_record(log.tell(), line))


def write_files(root: Path, files: dict[str, str]) -> None:
    """Writes files below `root`, each at once."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f".{path.name}")
        work.write_text(text + "\n")
        # Replaced in one step. A source that read a file half written would report it as unreadable.
        work.replace(path)
