"""GPUs as the exporter of DCGM reports them, for agents that cannot ask the driver themselves.

`HOLDFAST_DCGM_URL` names the exporter's page of metrics. Its readings have the same names as those of the driver's
library, so the same rules judge them. If the agent has that library this source is not used, because both would count
the same errors.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Iterator

from prometheus_client.parser import text_string_to_metric_families

from holdfast.health.bounded_call import BoundedCaller, NoAnswerError
from holdfast.health.files import unknown
from holdfast.health.nvml import load_nvml
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import MachineRoot
from holdfast.health.xids import xid_line

URL_VARIABLE = "HOLDFAST_DCGM_URL"
DCGM_S = 30.0
FETCH_LIMIT_S = 5.0
PAGE_BYTES = 8 << 20
_NAMES = {
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": "nvml.ecc.volatile.corrected",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "nvml.ecc.volatile.uncorrected",
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": "nvml.ecc.aggregate.corrected",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": "nvml.ecc.aggregate.uncorrected",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "nvml.remap.uncorrected_rows",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "nvml.remap.pending",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "nvml.remap.failure",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "nvml.nvlink.flit_crc_errors",
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "nvml.nvlink.data_crc_errors",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "nvml.nvlink.replays",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "nvml.nvlink.recoveries",
    "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS": "nvml.nvlink.integrity_errors",
    "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS": "nvml.nvlink.recovered",
    "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS": "nvml.nvlink.recoveries_failed",
    "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS": "nvml.nvlink.effective_errors",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "nvml.pcie_replays",
    "DCGM_FI_DEV_GPU_TEMP": "nvml.temperature_c",
    "DCGM_FI_DEV_GPU_UTIL": "nvml.utilization_percent",
    "DCGM_FI_DEV_POWER_USAGE": "nvml.power_watts",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "nvml.clock_reasons",
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "nvml.clock_reasons",
}
_XID = "DCGM_FI_DEV_XID_ERRORS"
_XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
_WANTED = {*_NAMES, _XID, _XID_COUNT}
# DCGM writes special large numbers for `not supported`, `not found` and `no permission`; as values they would
# exceed every limit.
_NO_VALUE = 0x7FFFFFF0
"""DCGM's blank values start here (dcgm_structs.h)."""


class Dcgm:
    """Reads one exporter's page every `every_s` seconds."""

    name = "dcgm"
    every_s = DCGM_S

    def __init__(self, url: str, fetch: Callable[[str], str] | None = None) -> None:
        self._url, self._fetch = url, fetch or fetch_page
        # The socket has its own time limit, but a server that sends a byte now and then never runs into it;
        # and name resolution has none.
        self._caller = BoundedCaller("DCGM's exporter", FETCH_LIMIT_S + 1.0)
        self._last_xid: dict[str, float] = {}
        self._counts: dict[tuple[str, str], float] = {}
        self._seen: dict[str, str] = {}

    def read(self) -> Iterator[Reading | LogLine]:
        """The same readings as from the driver's library, as far as the exporter is configured to give them; Xids as
        lines of the kernel."""
        try:
            samples = self._caller.call(lambda: list(parse_samples(self._fetch(self._url))))
        except (NoAnswerError, OSError, ValueError) as error:
            yield unknown("dcgm", "dcgm.page", f"{self._url}: {error}")
            return
        # An exporter answers before it has read its first values. An empty page is Unknown, because the loop
        # below would call every GPU lost.
        if not samples and self._seen:
            yield unknown("dcgm", "dcgm.page", f"{self._url} lists no GPU")
            return
        yield Reading(source="dcgm", name="dcgm.silent", value=0.0)
        here: set[str] = set()
        for name, labels, value in samples:
            # DCGM writes `00000000:65:00.0`; the kernel and the rules write `0000:65:00`, a domain of four
            # digits and no function.
            pci = labels.get("pci_bus_id", "").lower()[4:].partition(".")[0]
            subject = f"gpu {pci or labels.get('gpu', '')}"
            uuid = labels.get("UUID", "")
            here.add(uuid)
            self._seen[uuid] = subject
            if name == _XID:
                yield from self._last(pci, uuid, value)
            elif name == _XID_COUNT:
                yield from self._counted(pci, uuid, labels.get("xid", ""), value)
            elif name in _NAMES:
                # Under NVML's name as the source, so that the rules and users' changes of them hold for both.
                yield Reading(source="nvml", name=_NAMES[name], value=value, subject=subject, device=uuid)
        # A GPU that DCGM has lost no longer has an entry on the page.
        for uuid, subject in self._seen.items():
            yield Reading(
                source="nvml", name="nvml.lost", value=float(uuid not in here), subject=subject, device=uuid
            )

    def _last(self, pci: str, uuid: str, code: float) -> Iterator[LogLine]:
        """The gauge holds the last Xid only: on the first read it may be an old one, and the same Xid again cannot be
        seen."""
        before = self._last_xid.get(uuid)
        self._last_xid[uuid] = code
        # The gauge has no time and is never cleared. If the exporter also counts by code (below), both may
        # report one Xid; the bursts of the rules make it one finding.
        if before is not None and code not in (before, 0.0) and pci:
            yield xid_line(pci, int(code))

    def _counted(self, pci: str, uuid: str, xid: str, count: float) -> Iterator[LogLine]:
        before = self._counts.get((uuid, xid))
        self._counts[uuid, xid] = count
        # Not on the first look, which would report Xids from before the job; and a counter that fell belongs
        # to an exporter that was restarted.
        if before is not None and count > before and pci and xid.isdigit():
            yield xid_line(pci, int(xid))

    def close(self) -> None:
        """Releases its thread."""
        self._caller.close()


def parse_samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample that is used here and has a value. Raises ValueError."""
    # Filtered as text first: a page of a node with eight GPUs has thousands of lines, and parsing them all
    # takes longer than everything else here.
    wanted = "\n".join(line for line in page.splitlines() if line.partition("{")[0] in _WANTED)
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if sample.value < _NO_VALUE:
                yield sample.name, sample.labels, sample.value


def fetch_page(url: str) -> str:
    """Raises OSError (urllib's errors are) and ValueError."""
    with urllib.request.urlopen(url, timeout=FETCH_LIMIT_S) as answer:
        # Bounded, because the address comes from the environment and may lead to anything.
        page: bytes = answer.read(PAGE_BYTES)
    return page.decode(errors="replace")


def dcgm_sources(machine: MachineRoot) -> list[Dcgm]:
    """The source for `HOLDFAST_DCGM_URL`, if it is set and the driver's library is not available."""
    url = os.environ.get(URL_VARIABLE, "")
    if not url or machine.stand_in or load_nvml() is not None:
        return []
    return [Dcgm(url)]
