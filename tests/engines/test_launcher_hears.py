"""What the coordinator announces: people look at a part of it, and the engine does the rest."""

import asyncio

from holdfast.engines.client import Announcement
from holdfast.engines.launcher import Launcher
from holdfast.protocol.job import JobSpec


class Broken:
    """A view that cannot show anything."""

    def event(self, entry):
        raise TypeError("no such event")

    status = note = output = event


class Engine:
    """Starts a node at the second try."""

    def __init__(self):
        self.asked = 0
        self.started = asyncio.Event()

    async def provide(self):
        self.asked += 1
        if self.asked == 1:
            raise OSError("no more processes")
        self.started.set()


class NoLauncher(Launcher):
    async def open(self):
        raise NotImplementedError

    async def staff(self):
        raise NotImplementedError


class Notes(Broken):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def heard(tmp_path, view, *announcements):
    async def hear():
        engine = Engine()
        launcher = NoLauncher(JobSpec(name="j", script="x.py"), tmp_path, view)
        obeying = asyncio.create_task(launcher._obey(engine))
        try:
            for said in announcements:
                launcher.on_announcement(said)
            await asyncio.wait_for(engine.started.wait(), 30)
        finally:
            obeying.cancel()
            await launcher.close()

    asyncio.run(hear())


PROVIDE = Announcement("provide-node", {"reason": "a node was lost"})


def test_what_cannot_be_shown_keeps_no_order_from_the_engine(tmp_path, caplog):
    shown = [Announcement(kind, {"text": "x"}) for kind in ("event", "status", "log", "status")]
    heard(tmp_path, type("Quiet", (Broken,), {"note": lambda self, text: None})(), *shown, PROVIDE, PROVIDE)
    assert [r.getMessage() for r in caplog.records].count(
        "an announcement cannot be shown; the job continues"
    ) == 1


def test_an_engine_that_fails_once_is_asked_again(tmp_path):
    view = Notes()
    heard(tmp_path, view, PROVIDE, PROVIDE)
    assert view.notes == ["provide-node: no more processes"]
