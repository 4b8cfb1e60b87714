"""Which hosts are started, tried again and left alone: decisions only, on a clock that the caller passes.

A host that was used once is kept running: it is tried again after every end of its agent, with growing pauses, for as long
as the job lives. So one that was rebooted comes back by itself. Hosts of the reserve are started when the job asks for a
node. Whether a node is lost is never decided here: the coordinator does, by the agent's own connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
"""Between two attempts. A connection to a host that is off costs nothing, and one that boots is wanted soon."""
SETTLED_S = 30.0
"""An agent that was in the job for this long was well: the pauses begin anew."""


class HostStage(Enum):
    """What a host is to the job."""

    RESERVE = "reserve"
    """Never used."""
    STARTING = "starting"
    """It is being connected, for its agent to be started."""
    RUNNING = "running"
    """Its agent runs, as far as is known."""
    RESTING = "resting"
    """No agent runs; it is tried again at `next_s`."""
    LEFT = "left"
    """It left as planned: only a wish for a node uses it again, if it may be used at all."""
    BAD = "bad"
    """This job does not use it any more."""


@dataclass(kw_only=True)
class Host:
    """One of `--hosts`."""

    name: str
    stage: HostStage = HostStage.RESERVE
    linked: bool = False
    """There is a connection of ssh. A running agent does not need one."""
    linking: bool = False
    """A connection is being made."""
    attempts: int = 0
    """That failed, since it was last well."""
    next_s: float = 0.0
    joined_s: float | None = None
    """When its node joined; None: it is not in the job."""
    fresh: bool = False
    """What may still run there is ended before its agent is started: the job has gone on without it."""
    boot: str = ""
    """The boot that it was last seen in."""
    old_boot: str = ""
    """It is not used again in this boot: it is to be rebooted."""
    returns: bool = False
    """It left because the job got smaller, and not because somebody wants the machine."""


class Hosts:
    """The hosts of one job. Names that are not among them are ignored: orders may concern nodes of other people's."""

    def __init__(self, names: Sequence[str]) -> None:
        self.all = {name: Host(name=name) for name in names}

    # ------------------------------------------------------------ what to do

    def order(self, first: Sequence[str]) -> None:
        """These come before the others of the reserve."""
        front = {name: self.all[name] for name in self.all if name in set(first)}
        self.all = {**front, **self.all}

    def use(self, count: int) -> list[str]:
        """Takes the first hosts of the reserve; returns their names, at most `count`."""
        taken = [h for h in self.all.values() if h.stage is HostStage.RESERVE][:count]
        for host in taken:
            host.stage, host.next_s = HostStage.RESTING, 0.0
        return [h.name for h in taken]

    def provide(self, now: float) -> str:
        """The job wants one more node. Returns why there is none; empty: one is being started."""
        # The reserve first, then hosts that left only because the job got smaller. One that somebody took
        # back or that is bad is never started again by a wish for more.
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
        """The hosts to connect now. Each of them counts as being connected from now on."""
        chosen = [h for h in self.all.values() if self._wants_link(h) and h.next_s <= now]
        for host in chosen:
            host.linking = True
            if host.stage is HostStage.RESTING:
                host.stage = HostStage.STARTING
        return [h.name for h in chosen]

    def wake_s(self) -> float | None:
        """When `due` will have the next one; None: never, as things are."""
        return min((h.next_s for h in self.all.values() if self._wants_link(h)), default=None)

    def _wants_link(self, host: Host) -> bool:
        # A running agent whose connection broke is connected again, so that it learns the address of a new
        # coordinator. Until then nothing is missing: its own connection to the coordinator decides.
        unlinked = host.stage is HostStage.RUNNING and not host.linked
        # An old connection has to end first: of two, both would speak for the host.
        resting = host.stage is HostStage.RESTING and not host.linked
        return not host.linking and (resting or unlinked)

    # ------------------------------------------------------------ what happened

    def greeted(self, name: str, boot: str) -> str:
        """A connection stands. Returns why no agent may be started now; empty: it may."""
        host = self.all[name]
        host.boot = boot
        # The boot's identity and not a time: a host that answers again may have lost its network only, and
        # still have the fault that the reboot was for.
        if host.old_boot and boot == host.old_boot:
            return "its reboot was requested and has not happened yet"
        host.old_boot = ""
        return ""

    def begun(self, name: str) -> bool:
        """The agent runs, and the connection stands. False: nobody wants it any more, and it is to be ended."""
        host = self.all[name]
        host.linking = False
        if host.stage not in (HostStage.STARTING, HostStage.RUNNING):
            return False
        host.stage, host.linked, host.fresh = HostStage.RUNNING, True, False
        return True

    def failed(self, name: str, now: float) -> None:
        """No connection could be made, or no agent be started."""
        host = self.all[name]
        host.linking = host.linked = False
        self._pause(host, now)
        if host.stage is HostStage.STARTING:
            host.stage = HostStage.RESTING

    def cut(self, name: str, now: float) -> None:
        """The connection of ssh ended. The agent may well live."""
        host = self.all[name]
        if not host.linked:
            return
        host.linked = False
        if host.stage is HostStage.RUNNING:
            self._pause(host, now)

    def ended(self, name: str, now: float) -> None:
        """The agent has ended, as the host says; the connection is over with it."""
        host = self.all[name]
        host.linked = False
        if host.stage is HostStage.RUNNING:
            self._rest(host, now)

    def joined(self, name: str, now: float) -> None:
        """The coordinator has the node. One that lost its way and came back is as good as a new one."""
        host = self.all.get(name)
        if host is not None:
            host.joined_s, host.fresh = now, False

    def lost(self, name: str, now: float) -> None:
        """The coordinator has given the node up."""
        host = self.all.get(name)
        if host is None or host.stage not in (HostStage.STARTING, HostStage.RUNNING, HostStage.RESTING):
            return
        host.fresh = True
        if host.stage is HostStage.RUNNING:
            self._rest(host, now)
        host.joined_s = None

    def left(self, name: str, returns: bool) -> None:
        """The node left as planned. returns: the host may be used again when a node is wanted."""
        host = self.all.get(name)
        if host is not None and host.stage is not HostStage.BAD:
            host.stage, host.joined_s, host.returns = HostStage.LEFT, None, returns

    def bad(self, name: str) -> None:
        """The job does not use the host any more."""
        host = self.all.get(name)
        if host is not None:
            host.stage, host.joined_s = HostStage.BAD, None

    def reboot(self, name: str, now: float) -> None:
        """Somebody has to reboot the host. It is used again when it has been."""
        host = self.all.get(name)
        if host is not None and host.stage is not HostStage.BAD:
            host.stage, host.fresh, host.joined_s = HostStage.RESTING, True, None
            host.old_boot = host.boot
            self._pause(host, now)

    def _rest(self, host: Host, now: float) -> None:
        # Only an agent that was in the job counts as well. One that starts and ends before it joins would
        # otherwise be started at full speed for ever.
        if host.joined_s is not None and now - host.joined_s >= SETTLED_S:
            host.attempts = 0
        host.stage, host.joined_s = HostStage.RESTING, None
        self._pause(host, now)

    def _pause(self, host: Host, now: float) -> None:
        host.next_s = now + min(FIRST_PAUSE_S * 2**host.attempts, MOST_PAUSE_S)
        host.attempts = min(host.attempts + 1, 16)
