"""Which machines are left because a condition calls them sick, and which stay in use all the same. Pure.

A wrong rule may call every machine of a cluster sick. Jobs that leave them all have nowhere to go. So at most a share of the machines
is left for a condition at once, those first that were called sick first. Cordons and taints are not counted: Kubernetes' scheduler
acts on them as well, and who sets them has a brake of his own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from holdfast.kubernetes.actions import Warn
from holdfast.kubernetes.observed import MachineSeen, PodSeen

HELD = "SickMachineHeld"


def braked(machines: Mapping[str, MachineSeen], most_percent: int) -> Iterator[MachineSeen]:
    """Those of which `held` is to be another than it is, as they are to be."""
    sick = sorted((one for one in machines.values() if one.sick is not None), key=_age)
    # One may always be left: a cluster of a few machines has no smaller share.
    most = max(1, len(machines) * most_percent // 100)
    words = f"{len(sick)} of {len(machines)} machines are called sick, and at most {most_percent}% are left for that ({most})"
    held = {one.name for one in sick[most:]}
    for one in machines.values():
        if one.name in held and one.held != words:
            yield msgspec.structs.replace(one, held=words)
        elif one.name not in held and one.held is not None:
            yield msgspec.structs.replace(one, held=None)


def warnings(machines: Mapping[str, MachineSeen], pods: Iterable[PodSeen]) -> Iterator[Warn]:
    """Of the job's machines that stay in use."""
    names = {pod.machine for pod in pods if pod.stays and pod.machine}
    for name in sorted(names & machines.keys()):
        machine = machines[name]
        if machine.held is not None:
            text = f"{name} stays in use, and is called sick ({machine.sick}): {machine.held}"
            yield Warn(reason=HELD, text=text, about=f"{name} since {machine.sick_since}")


def _age(machine: MachineSeen) -> tuple[str, str]:
    # Moments as Kubernetes writes them are all in UTC and sort as text.
    return machine.sick_since, machine.name
