"""The machine's lasting identity, and those of its devices, whatever name the node has: the histories of nodes are kept
by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.health.container import in_container
from holdfast.health.files import keyed, names, quiet
from holdfast.protocol.health import CLUSTER_NAME

IDENTITY_VARIABLE = "HOLDFAST_NODE_IDENTITY"
"""The variable by which whoever starts the agent gives the machine's identity. It takes precedence over everything that
can be read."""
MACHINE_VARIABLE = "HOLDFAST_MACHINE"
"""The variable with the cluster's name for the machine of this container: `spec.nodeName` of the downward API."""
_GIVEN = re.compile(r"[a-z][a-z0-9-]{0,15}:[!-~]{1,200}")

PLACEHOLDERS = {
    "",
    "0",
    "none",
    "n/a",
    "na",
    "unknown",
    "default string",
    "not specified",
    "not applicable",
    "not available",
    "system serial number",
    "to be filled by o.e.m.",
    "0123456789",
    "123456789",
    "1234567890",
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "03000200-0400-0500-0006-000700080009",
}
"""Placeholders that manufacturers leave in these fields; many machines have the same."""

IN_IMAGE = {"instance", "machine-id"}
"""Kinds that are read from files of the installation. In a container these files are the image's, so they are the same
on every machine, or missing."""

_FILES = (
    # From properties of the machine to properties of its installation: a serial number survives a new image,
    # and a cloud's instance id does not survive a new instance. Files of one kind are two ways to the same
    # value.
    ("serial", "sys/class/dmi/id/product_serial"),
    ("serial", "proc/device-tree/serial-number"),
    ("uuid", "sys/class/dmi/id/product_uuid"),
    ("instance", "var/lib/cloud/data/instance-id"),
    ("instance", "run/cloud-init/.instance-id"),
    ("machine-id", "etc/machine-id"),
    ("machine-id", "var/lib/dbus/machine-id"),
)


def identity(root: Path, part: str = "", *, environ: Mapping[str, str]) -> str:
    """The machine's lasting identity, the most lasting that can be known; empty when it has none.

    The value of `HOLDFAST_NODE_IDENTITY`, else the first that can be read of `serial:...`, `uuid:...` (both mostly for
    root only), `instance:...` (a cloud's), `machine-id:...`. In a container the last two are not used, but `k8s:NAME`
    from `HOLDFAST_MACHINE` is.

    Args:
        part: for nodes that are only a part of the machine, as the local engine's are: `machine-id:.../node1`.
        environ: variables of this process.

    Raises:
        UsageError: `HOLDFAST_NODE_IDENTITY` is not KIND:VALUE.
    """
    if given := environ.get(IDENTITY_VARIABLE, ""):
        if _GIVEN.fullmatch(given) is None:
            raise UsageError(
                f"{IDENTITY_VARIABLE}={given[:80]!r} must be KIND:VALUE, for example serial:J7XK9, where the kind "
                "has at most 16 lower-case letters, digits and hyphens, and the value at most 200 ASCII characters "
                "without spaces"
            )
        return f"{given}/{part}" if part else given
    contained = in_container(root, environ)
    # Parts of a machine share its serial number; they are told apart by their names, and only the machine id
    # is readable by every user, so it does not depend on who runs the job.
    files = _FILES if not part else [file for file in _FILES if file[0] == "machine-id"]
    for kind, file in files:
        if contained and kind in IN_IMAGE:
            continue
        value = quiet(root / file).strip()
        # A placeholder taken for an identity would merge the histories of all machines of a maker, and one
        # lemon would bar them all.
        if value.casefold() not in PLACEHOLDERS and not _placeholder_pattern(value):
            return f"{kind}:{value}/{part}" if part else f"{kind}:{value}"
    name = environ.get(MACHINE_VARIABLE, "") if contained else ""
    if _GIVEN.fullmatch(f"{CLUSTER_NAME}{name}") is None:  # missing, or not a name that a cluster gives
        return ""
    return f"{CLUSTER_NAME}{name}/{part}" if part else f"{CLUSTER_NAME}{name}"


def _placeholder_pattern(value: str) -> bool:
    """Whether the value is one character repeated (`........`, `xxxxxxx`, zeros)."""
    # Also catches an empty field of separators.
    return len(set(value.replace("-", "").replace(" ", ""))) <= 1


def devices(root: Path) -> tuple[str, ...]:
    """Lasting identities of the machine's devices: UUIDs of GPUs, GUIDs of network adapters, serial numbers of NVMe
    drives. Read from the kernel only, so that a library that hangs cannot delay it."""
    return tuple(dict.fromkeys([*gpu_uuids(root).values(), *_adapters(root), *_drives(root)]))


def gpu_uuids(root: Path) -> dict[str, str]:
    """UUIDs of the NVIDIA GPUs by PCI address, as the kernel module knows them. A UUID with `????` in it has not been
    read yet."""
    folder = root / "proc/driver/nvidia/gpus"
    found = {}
    for address in names(folder):
        uuid = keyed(quiet(folder / address / "information"), ":").get("GPU UUID", "")
        # The module reads the UUID when the GPU is first opened; before that it prints question marks. A
        # later read has it.
        if uuid and "?" not in uuid:
            found[address.lower()] = uuid
    return found


def _adapters(root: Path) -> list[str]:
    folder = root / "sys/class/infiniband"
    guids = (quiet(folder / name / "node_guid") for name in names(folder))
    # All zeros: a software device (rxe, siw), or a driver that has none.
    return [f"guid:{guid}" for guid in guids if guid.strip("0:")]


def _drives(root: Path) -> list[str]:
    folder = root / "sys/class/nvme"
    serials = (quiet(folder / name / "serial").strip() for name in names(folder))
    return [f"nvme:{serial}" for serial in serials if serial]
