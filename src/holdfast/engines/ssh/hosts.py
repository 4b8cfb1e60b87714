"""Decides which hosts are started, tried again or left alone. Pure: the caller passes the time.

A host that has been used once is kept running: after every end of its agent it is tried again, with growing pauses, as long as
the job lives. So a host that was rebooted comes back by itself. Hosts of the reserve are started when the job asks for a node.
Whether a node is lost is not decided here but by the coordinator, from the agent's own connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
"""Longest pause between two attempts: trying a host that is off costs little, and one that has booted should be used soon."""
SETTLED_S = 30.0
"""Seconds in the job after which an agent counts as healthy, so that the pauses start again with the shortest."""


class HostStage(Enum):
    """The state of a host."""

    RESERVE = "reserve"
    """Never used."""
    STARTING = "starting"
    """It is being connected, in order to start its agent."""
    RUNNING = "running"
    """Its agent runs, as far as is known."""
    RESTING = "resting"
    """No agent runs; it is tried again at `next_s`."""
    LEFT = "left"
    """It left as planned, and is used again only if the job asks for a node and it `returns`."""
    BAD = "bad"
    """The job does not use it any more."""


@dataclass(kw_only=True)
class Host:
    """One of `--hosts`."""

    name: str
    stage: HostStage = HostStage.RESERVE
    linked: bool = False
    """Whether there is an ssh connection. A running agent does not need one."""
    linking: bool = False
    """Whether a connection is being made."""
    attempts: int = 0
    """Number of pauses since it was last healthy, by which the next one is computed."""
    next_s: float = 0.0
    """When it is to be tried again."""
    joined_s: float | None = None
    """When its node joined; None: it is not in the job."""
    fresh: bool = False
    """Whether an agent that still runs there is ended before a new one is started, because the job has continued without it."""
    boot: str = ""
    """Id of the boot in which it was last connected."""
    old_boot: str = ""
    """Id of the boot in which it is not used again, because it is to be rebooted; empty: none."""
    returns: bool = False
    """Whether it left because the job got smaller, and not because somebody needs the machine."""


class Hosts:
    """The hosts of one job. Most methods ignore other names, because orders may be about nodes that people have added."""

    def __init__(self, names: Sequence[str]) -> None:
        self.all = {name: Host(name=name) for name in names}

    # ------------------------------------------------------------ what to do

    def order(self, first: Sequence[str]) -> None:
        """Moves these hosts to the front of the reserve."""
        front = {name: self.all[name] for name in self.all if name in set(first)}
        self.all = {**front, **self.all}

    def use(self, count: int) -> list[str]:
        """Takes the first hosts of the reserve; returns their names, at most `count`."""
        taken = [h for h in self.all.values() if h.stage is HostStage.RESERVE][:count]
        for host in taken:
            host.stage, host.next_s = HostStage.RESTING, 0.0
        return [h.name for h in taken]

    def provide(self, now: float) -> str:
        """Starts one more node for the job. Returns why there is none; empty: one is being started."""
        # The reserve first, then hosts that left only because the job got smaller. A host that somebody took back or that is bad
        # is never started again because the job needs a node.
        if self.use(1):
            return ""
        for host in self.all.values():
            if host.stage is HostStage.LEFT and host.returns:
                host.stage, host.next_s, host.fresh, host.attempts = HostStage.RESTING, now, True, 0
                return ""
        away = sorted(h.name for h in self.all.values() if h.stage in (HostStage.RESTING, HostStage.STARTING))
        coming = f"; {', '.join(away)} {'is' if len(away) == 1 else 'are'} being tried" if away else ""
        return f"there are no unused hosts left in --hosts{coming}"

    def due(self, now: float) -> list[str]:
        """The hosts to connect now. From then on each of them counts as being connected."""
        chosen = [h for h in self.all.values() if self._wants_link(h) and h.next_s <= now]
        for host in chosen:
            host.linking = True
            if host.stage is HostStage.RESTING:
                host.stage = HostStage.STARTING
        return [h.name for h in chosen]

    def wake_s(self) -> float | None:
        """When the next host will be due; None: none will be, as long as nothing changes."""
        return min((h.next_s for h in self.all.values() if self._wants_link(h)), default=None)

    def _wants_link(self, host: Host) -> bool:
        # A host with a running agent whose ssh connection broke is connected again, so that it is told the address of a new
        # coordinator. That is not urgent, since the agent has its own connection to the coordinator.
        unlinked = host.stage is HostStage.RUNNING and not host.linked
        # An old connection has to end first, since messages of both would count for the host.
        resting = host.stage is HostStage.RESTING and not host.linked
        return not host.linking and (resting or unlinked)

    # ------------------------------------------------------------ what happened

    def greeted(self, name: str, boot: str) -> str:
        """A connection has been made. Returns why no agent may be started now; empty: it may."""
        host = self.all[name]
        host.boot = boot
        # By the id of the boot and not by a time: a host that answers again may only have lost its network, and still have the
        # fault because of which it is to be rebooted.
        if host.old_boot and boot == host.old_boot:
            return "its reboot was requested and has not happened yet"
        host.old_boot = ""
        return ""

    def begun(self, name: str) -> bool:
        """The agent runs and is connected. Returns False if it is no longer needed, so that it must be ended."""
        host = self.all[name]
        host.linking = False
        if host.stage not in (HostStage.STARTING, HostStage.RUNNING):
            return False
        host.stage, host.linked, host.fresh = HostStage.RUNNING, True, False
        return True

    def failed(self, name: str, now: float) -> None:
        """The connection or the start of the agent has failed."""
        host = self.all[name]
        host.linking = host.linked = False
        self._pause(host, now)
        if host.stage is HostStage.STARTING:
            host.stage = HostStage.RESTING

    def cut(self, name: str, now: float) -> None:
        """The ssh connection has ended. The agent may still be running."""
        host = self.all[name]
        if not host.linked:
            return
        host.linked = False
        if host.stage is HostStage.RUNNING:
            self._pause(host, now)

    def ended(self, name: str, now: float) -> None:
        """The host has reported the end of its agent, with which the connection ends."""
        host = self.all[name]
        host.linked = False
        if host.stage is HostStage.RUNNING:
            self._rest(host, now)

    def joined(self, name: str, now: float) -> None:
        """The node has joined the job. If it had been lost before, its agent need not be replaced any more."""
        host = self.all.get(name)
        if host is not None:
            host.joined_s, host.fresh = now, False

    def lost(self, name: str, now: float) -> None:
        """The coordinator has given up the node."""
        host = self.all.get(name)
        if host is None or host.stage not in (HostStage.STARTING, HostStage.RUNNING, HostStage.RESTING):
            return
        host.fresh = True
        if host.stage is HostStage.RUNNING:
            self._rest(host, now)
        host.joined_s = None

    def left(self, name: str, returns: bool) -> None:
        """The node left as planned. returns: whether the host may be used again when the job asks for a node."""
        host = self.all.get(name)
        if host is not None and host.stage is not HostStage.BAD:
            host.stage, host.joined_s, host.returns = HostStage.LEFT, None, returns

    def bad(self, name: str) -> None:
        """The host must not be used any more."""
        host = self.all.get(name)
        if host is not None:
            host.stage, host.joined_s = HostStage.BAD, None

    def reboot(self, name: str, now: float) -> None:
        """The host is to be rebooted, after which it is used again."""
        host = self.all.get(name)
        if host is not None and host.stage is not HostStage.BAD:
            host.stage, host.fresh, host.joined_s = HostStage.RESTING, True, None
            host.old_boot = host.boot
            self._pause(host, now)

    def _rest(self, host: Host, now: float) -> None:
        # Only an agent that has been in the job counts as healthy. Otherwise one that always ends before it joins would be
        # restarted without pauses.
        if host.joined_s is not None and now - host.joined_s >= SETTLED_S:
            host.attempts = 0
        host.stage, host.joined_s = HostStage.RESTING, None
        self._pause(host, now)

    def _pause(self, host: Host, now: float) -> None:
        host.next_s = now + min(FIRST_PAUSE_S * 2**host.attempts, MOST_PAUSE_S)
        host.attempts = min(host.attempts + 1, 16)
