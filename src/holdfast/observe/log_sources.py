"""Finds the log of each rank and node in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.protocol.faults import node_name
from holdfast.protocol.units import ranks


class LogSources:
    """Collects from the events, taken in their order, the logs to show.

    Args:
        rank: shows every worker that ever had this rank.
        node: shows every worker of this node. Without both: the workers of the newest generation.
    """

    def __init__(self, rank: int | None = None, node: str | None = None) -> None:
        self._rank, self._node = rank, node
        self._logs: dict[str, Path] = {}
        self._nodes: dict[str, str] = {}
        self._held: dict[str, int] = {}
        self._holders: dict[int, list[str]] = {}
        self._members: list[str] = []

    def heard(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes in one event of the ledger."""
        if kind == "worker-started":
            self._logs[fields["worker"]] = Path(fields["log"])
            self._nodes[fields["worker"]] = fields["node"]
        elif kind == "level":
            self._members, self._held, self._holders = [], {}, {}  # the first ranks were a guess
        elif kind in ("formed", "started"):
            self._members = list(fields["workers"])
            for rank, worker in enumerate(self._members):
                self._held[worker] = rank
                # A rank may have moved from worker to worker, and the log that explains the fault usually is
                # not that of the worker that has the rank now. So all workers that ever had it are kept, in
                # their order.
                holders = self._holders.setdefault(rank, [])
                if worker not in holders:
                    holders.append(worker)

    def chosen(self) -> dict[Path, str]:
        """The logs to show, each with its label. Of a rank or a node the oldest worker comes first, else they go by rank."""
        if self._rank is not None:
            workers = self._holders.get(self._rank, [])
        elif self._node is not None:
            workers = [w for w, node in self._nodes.items() if node == node_name(self._node)]
        else:
            workers = self._members or list(self._logs)
        return {self._logs[w]: self._label(w) for w in workers if w in self._logs}

    def placed(self, chosen: Mapping[Path, str]) -> list[tuple[str, Path, str]]:
        """The logs that `chosen` returned, each as its node, log and label."""
        nodes = {log: self._nodes[worker] for worker, log in self._logs.items()}
        return [(nodes[log], log, label) for log, label in chosen.items()]

    def known(self) -> str:
        """The ranks and nodes that have logs, for a message."""
        if not self._logs:
            return ""
        return (
            f"there are logs of ranks {ranks(list(self._holders))} and of "
            f"{', '.join(sorted(set(self._nodes.values())))}"
        )

    def _label(self, worker: str) -> str:
        rank = self._held.get(worker)
        return worker if rank is None else f"rank {rank} {worker}"
