"""Level 0 and 1: where a script is in the collectives of its process groups, as torch's flight recorder has it.

Torch notes the newest collectives of gloo and NCCL by itself, so a script pays nothing for this before somebody asks.
"""

from __future__ import annotations

import json
import sys
import threading
import zlib
from typing import Any

from holdfast.protocol.messages import InCollectives
from holdfast.protocol.phases import MOST_GROUPS, GroupReading
from holdfast.train.link import Link

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

LAST_GROUPS = 8
"""Of so many groups the end of a script is told: it is kept for every worker that has left."""

_WORD = 128
"""Characters of a name, at most."""


class CollectivesTeller:
    """Answers the agent's question, each time from a thread of its own."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._answering = threading.Lock()
        link.on_where = self.answer

    def answer(self, request: int) -> None:
        """Sends InCollectives soon. Nothing is sent while an earlier answer is still on its way."""
        # Not on the link's own thread: torch takes locks of its own here, and should one never be given back, this
        # worker must still hear what its agent says.
        if self._answering.acquire(blocking=False):
            threading.Thread(target=self._answer, args=(request,), name="holdfast-where", daemon=True).start()

    def _answer(self, request: int) -> None:
        try:
            self._link.send(InCollectives(request, positions()))
        finally:
            self._answering.release()


def last_positions(within_s: float = 1.0) -> tuple[GroupReading, ...] | None:
    """The same at the end of a script: of the largest groups alone. None: torch did not say it in time, either."""
    found: list[tuple[GroupReading, ...] | None] = []
    # On a thread, as above: a lock that is never given back must not keep the process from its end.
    asking = threading.Thread(target=lambda: found.append(positions()), name="holdfast-where", daemon=True)
    asking.start()
    asking.join(within_s)
    groups = found[0] if found else None
    return None if groups is None else tuple(sorted(groups, key=lambda g: -g.size)[:LAST_GROUPS])


def positions() -> tuple[GroupReading, ...] | None:
    """Where this process is in each of its groups of more than one member; None: this torch does not say, or there is no
    process group."""
    # Nothing is imported here: a script that has not used torch.distributed is in no collective, and an import would
    # wait for the lock that a main thread which imports holds.
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return None
    try:
        groups = [
            (pg.group_name, pg.group_desc, tuple(c10d.get_process_group_ranks(pg)), _backends(c10d, pg))
            for pg in list(c10d._world.pg_map)
        ]
        return _readings(groups, _recorded())
    # Torch promises none of these names. Whatever is missing in another version, "not known" is an answer that the
    # core can judge, and an error in this thread would be none.
    except Exception:  # noqa: BLE001 - see above
        return None


def _recorded() -> list[dict[str, Any]]:
    """Entries of the flight recorders, oldest first in each: gloo's, and with CUDA also NCCL's."""
    torch_c: Any = sys.modules.get("torch._C")
    dumps = [getattr(torch_c._distributed_c10d, name, None) for name in _RECORDERS]
    texts = [dump(includeCollectives=True, onlyActive=False) for dump in dumps if dump is not None]
    return [entry for text in texts for entry in json.loads(text).get("entries", [])]


def _backends(c10d: Any, pg: Any) -> tuple[str, ...]:
    """Names of what computes the group's collectives: one for each kind of device, and each counts by itself."""
    return tuple(sorted({part.rpartition(":")[2] for part in str(c10d.get_backend_config(pg)).split(",")}))


def _readings(
    groups: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]], entries: list[dict[str, Any]]
) -> tuple[GroupReading, ...] | None:
    """groups: name, description, ranks and backends of each; entries: of the flight recorder. None: it holds nothing,
    so it is turned off."""
    if not entries:
        return None
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    waits: set[tuple[str, str]] = set()
    for entry in entries:
        backend, _, operation = str(entry["profiling_name"]).partition(":")
        key = str(entry["process_group"][0]), backend
        # Retired by the thread that completes it, whether or not the script looked at the result.
        if not entry["retired"]:
            waits.add(key)
        # Messages between two members have a number of their own, or none: members send different numbers of them.
        if not entry["is_p2p"]:
            # The newest, not the largest: a group that is made again under its old name counts from 1 on.
            newest[key] = int(entry["collective_seq_id"]), operation
    found = []
    for name, description, ranks, backends in groups:
        if len(ranks) < 2:
            continue
        members = zlib.crc32(repr(sorted(ranks)).encode())
        for backend in backends:
            number, operation = newest.get((name, backend), (0, ""))
            label = description if description and description != "undefined" else f"group {name}"
            found.append(
                GroupReading(
                    group=f"{name[: _WORD - 40]}/{members:08x}/{backend[:20]}",
                    label=label[:_WORD],
                    size=len(ranks),
                    entered=number,
                    operation=operation[:_WORD],
                    waits=(name, backend) in waits,
                )
            )
    found.sort(key=lambda g: not g.waits)
    return tuple(found[:MOST_GROUPS])
