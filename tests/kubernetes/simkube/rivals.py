"""Two jobs on machines that are enough for one and a half, and no queue: who waits for whom."""

from __future__ import annotations

import random
from typing import Any

from kubejobs import accept
from kubejobs import job as asked

from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.status import ConditionType
from simkube.cluster import Cluster
from simkube.operator import Operator
from simkube.server import Server

NODES, MACHINES, STEPS = 4, 6, 40


class Rivals:
    """Runs one seed, a second at a time. `blocked`: how long neither job could train while both held machines."""

    def __init__(self, seed: int, **spec: Any) -> None:
        dice = random.Random(seed)
        self.problems: list[str] = []
        self.blocked = 0
        self.jobs: list[tuple[Server, Cluster, Operator]] = []
        for number in range(2):
            metadata = {"name": "llm", "namespace": f"team-{number}", "uid": f"{seed}-{number}"}
            taken = accept(asked(metadata=metadata, spec__nodes=NODES, **spec))
            server = Server(dice, taken)
            server.on_delete = self.deleted
            cluster = Cluster(dice, server, MACHINES, STEPS)
            self.jobs.append((server, cluster, Operator(server, cluster)))
        (one, here, _), (other, there, _) = self.jobs
        here.machines = there.machines
        here.neighbours, there.neighbours = [other], [one]

    def deleted(self, pod: PodSeen, reason: str, by: str) -> None:
        for server, cluster, _ in self.jobs:
            known = cluster.coordinator
            its_own = server.pods.get(pod.name) is pod and known is not None and known.outcome is None
            if its_own and pod.name in known.training():
                self.problems.append(f"{pod.name} trained and was deleted: {reason}")

    def run(self, most_s: int) -> int:
        """Until both are complete; returns after how many seconds."""
        for second in range(most_s):
            for server, cluster, operator in self.jobs:
                cluster.tick()
                operator.look()
                operator.work()
                if server.dice.random() < 0.02:
                    operator.__init__(server, cluster)  # another process takes over
            if all(self.holds(server, ConditionType.COMPLETE) for server, *_ in self.jobs):
                return second
            for server, *_ in self.jobs:
                if self.holds(server, ConditionType.FAILED):
                    assert server.object is not None
                    self.problems.append(f"failed: {server.object.status.reason}")
                    return second
            trains = any(c.coordinator is not None and c.coordinator.training() for _, c, _ in self.jobs)
            holding = [
                sum(pod.machine is not None for pod in s.pods.values() if not pod.coordinator)
                for s, *_ in self.jobs
            ]
            self.blocked += not trains and all(holding)
        self.problems.append("they block each other")
        return most_s

    def holds(self, server: Server, type_: ConditionType) -> bool:
        return server.object is not None and server.object.status.holds(type_)
