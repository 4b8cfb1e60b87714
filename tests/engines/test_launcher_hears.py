"""What the coordinator announces: people look at a part of it, and the engine does the rest."""

import asyncio
from types import SimpleNamespace

import msgspec

from holdfast.engines import launcher as launcher_module
from holdfast.engines.client import Announcement
from holdfast.engines.launcher import Launcher
from holdfast.engines.local.launcher import LocalProvider
from holdfast.engines.slurm.engine import SlurmProvider
from holdfast.engines.ssh.engine import SshProvider
from holdfast.protocol.engine_orders import EngineTraits, OrderDone
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.endpoint import Endpoint


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


PROVIDE, PROVIDE_AGAIN = (
    Announcement("provide-node", {"reason": "a node was lost", "order_id": order_id}) for order_id in (1, 2)
)


def test_what_cannot_be_shown_keeps_no_order_from_the_engine(tmp_path, caplog):
    shown = [Announcement(kind, {"text": "x"}) for kind in ("event", "status", "log", "status")]
    heard(
        tmp_path,
        type("Quiet", (Broken,), {"note": lambda self, text: None})(),
        *shown,
        PROVIDE,
        PROVIDE_AGAIN,
    )
    assert [r.getMessage() for r in caplog.records].count(
        "an announcement cannot be shown; the job continues"
    ) == 1


def test_an_engine_that_fails_once_is_asked_again(tmp_path):
    view = Notes()
    heard(tmp_path, view, PROVIDE, PROVIDE_AGAIN)
    assert view.notes == ["provide-node: no more processes"]


def test_an_order_that_is_announced_again_is_only_acknowledged_again(tmp_path):
    class Once:
        asked = 0

        async def provide(self):
            self.asked += 1

    class Recording(NoLauncher):
        def __init__(self, *args):
            super().__init__(*args)
            self.told = asyncio.Queue()

        async def _tell_done(self, done):
            self.told.put_nowait(done)

    async def hear():
        engine, launcher = Once(), Recording(JobSpec(name="j", script="x.py"), tmp_path, Notes())
        obeying = asyncio.create_task(launcher._obey(engine))
        try:
            async with asyncio.timeout(30):
                launcher.on_announcement(PROVIDE)
                launcher.on_announcement(PROVIDE)  # by a coordinator that took over, while it is carried out
                first = await launcher.told.get()
                launcher.on_announcement(PROVIDE)
                assert [first, await launcher.told.get()] == [OrderDone(1), OrderDone(1)]
                assert launcher.told.empty()
        finally:
            obeying.cancel()
            await launcher.close()
        assert engine.asked == 1

    asyncio.run(hear())


class Asking(NoLauncher):
    """Keeps what it asks its coordinators for."""

    def __init__(self, tmp_path, traits):
        super().__init__(JobSpec(name="j", script="x.py"), tmp_path, Notes())
        self.engine, self.asked, self.said = SimpleNamespace(traits=traits), [], []

    async def _ask(self, path, body=""):
        (self.said if path == "/engine" else self.asked).append(body or path)


def test_a_stop_is_asked_of_every_coordinator(tmp_path):
    """The one that was asked may have ended before it wrote that."""

    async def run():
        launcher = Asking(tmp_path, EngineTraits())
        launcher._on_coordinator()
        launcher.stop("test")
        launcher._on_coordinator()
        launcher._on_coordinator()
        await asyncio.gather(*launcher._tasks)
        return launcher.asked

    assert asyncio.run(run()) == ["/stop?reason=test&cause=stop"] * 3


def test_every_coordinator_hears_what_the_engine_says_of_itself(tmp_path):
    """Also one that takes a job over whose state another version wrote."""

    async def run():
        launcher = Asking(tmp_path, EngineTraits(watches_boots=True))
        launcher._on_coordinator()
        launcher._on_coordinator()
        await asyncio.gather(*launcher._tasks)
        return [msgspec.json.decode(said, type=EngineTraits) for said in launcher.said]

    assert asyncio.run(run()) == [EngineTraits(watches_boots=True)] * 2
    assert (LocalProvider.traits, SshProvider.traits) == (
        EngineTraits(),
        EngineTraits(nodes_are_machines=True),
    )
    assert SlurmProvider.traits == EngineTraits(
        watches_boots=True, keeps_nodes=False, nodes_are_machines=True
    )


def test_the_link_to_the_page_is_printed(tmp_path, monkeypatch):
    class Answers:
        def __init__(self, folder, reach):
            assert folder == tmp_path

        async def __aenter__(self):
            return self

        async def __aexit__(self, *exc):
            return

        async def post(self, path, repeat):
            assert path.endswith("?role=view")
            return {"code": "c0de"}

    where = Endpoint(host="127.0.0.1", port=4711, pid=1, instance="i")
    monkeypatch.setattr(launcher_module, "JobClient", Answers)
    monkeypatch.setattr(launcher_module, "read_endpoint", lambda folder: where)

    async def show(host):
        view = Notes()
        launcher = NoLauncher(JobSpec(name="j", script="x.py"), tmp_path, view)
        launcher.host = host
        try:
            await launcher._show_page()
        finally:
            await launcher.close()
        return view.notes

    link = f"page: {where.url}/enter?code=c0de  (valid once, for one minute; later: holdfast ui --job j)"
    assert asyncio.run(show("127.0.0.1")) == [link]
    assert asyncio.run(show("0.0.0.0")) == ["page: holdfast ui --job j"]
