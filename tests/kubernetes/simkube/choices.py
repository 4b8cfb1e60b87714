"""A Kueue that chooses the nodes' machines, in short: topology-aware scheduling on machines that have room for one node each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.kubernetes.objects.kueue import WorkloadSeen
from holdfast.kubernetes.objects.pod import PodSeen
from simkube.server import Server

if TYPE_CHECKING:
    from simkube.cluster import Machine


class Choices:
    """Which Workload has which machines; a pod waits at its gate until one of them is its own."""

    def __init__(self, server: Server, machines: Mapping[str, Machine]) -> None:
        self.server, self.machines = server, machines
        self.of: dict[str, list[str]] = {}
        """By the Workload's uid."""
        self.replaced = 0
        """Machines that were lost, and have others in their place."""

    def free(self) -> list[str]:
        taken = {name for chosen in self.of.values() for name in chosen}
        return [
            one.name
            for one in self.machines.values()
            if one.up and not one.cordoned and one.name not in taken
        ]

    def choose(self, one: WorkloadSeen) -> None:
        self.of[one.uid] = self.free()[: one.nodes]

    def act(self) -> None:
        """Choices of Workloads without quota go, lost machines get others in their place, and pods go where they may."""
        hold = {one.uid: one for one in self.server.workloads.values() if one.reserved and not one.finished}
        self.of = {uid: chosen for uid, chosen in self.of.items() if uid in hold}
        for uid, chosen in self.of.items():
            pods = [pod for pod in self.server.pods.values() if pod.workload == hold[uid].name]
            self._replace(hold[uid], chosen, pods)
            used = {pod.chosen for pod in pods if not pod.ended}
            gated = [pod for pod in pods if pod.gated and not pod.deleting]
            for pod, machine in zip(gated, [name for name in chosen if name not in used], strict=False):
                self.server.change(pod.name, chosen=machine, gated=False)

    def _replace(self, one: WorkloadSeen, chosen: list[str], pods: list[PodSeen]) -> None:
        """Only when no pod there may go on. Where there is no other machine the whole Workload is evicted."""
        for place, name in enumerate(chosen):
            stays = any(pod.machine == name and pod.stays for pod in pods)
            if self.machines[name].up or stays or one.evicted is not None:
                continue
            if others := self.free():
                chosen[place] = others[0]
                self.replaced += 1
            else:
                self.server.change_workload(one.name, evicted="NodeFailures")
                return
