"""What the Slurm engine decides by itself, with a Slurm that only answers."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from holdfast.engines.slurm import engine as module
from holdfast.engines.slurm.commands import SlurmError
from holdfast.engines.slurm.engine import SlurmProvider
from holdfast.engines.slurm.node import StandBy, _on_sigterm
from holdfast.engines.slurm.parse import JobLine, NodeLine
from holdfast.protocol.engine_orders import (
    Availability,
    Capacity,
    JobGoing,
    NodeGoing,
    NodeTaken,
    NodeUnavailable,
    ReleaseNode,
)
from holdfast.protocol.job import JobSpec
from holdfast.protocol.ledger import NodeLeaving
from holdfast.protocol.notices import NoticeCause


def line(id: str, state: str, reason: str, batch_host: str, left_s: float | None, nodes: str) -> JobLine:
    return JobLine(id=id, state=state, reason=reason, batch_host=batch_host, left_s=left_s, nodes=nodes)


class Answers:
    """Stands for Slurm: refuses to be told of nodes, unless `admin`."""

    def __init__(self, admin: bool = False) -> None:
        self.admin, self.asked = admin, list[tuple[str, ...]]()
        self.lines = {"7": line("7", "RUNNING", "None", "n1", 3600.0, "n[1-3]")}
        self.states = {n: NodeLine(n, "127.0.0.1", frozenset({"MIXED"}), "") for n in ("n1", "n2", "n3")}

    async def run(self, *argv: str, **options: object) -> str:
        self.asked.append(argv)
        if argv[:2] in (("scontrol", "update"), ("scontrol", "reboot")) and not self.admin:
            raise SlurmError("scontrol: slurm_update error: Invalid user id")
        return ""

    async def job(self, id: str) -> JobLine | None:
        return self.lines.get(id)

    async def jobs(self, *ids: str) -> dict[str, JobLine]:
        return {id: self.lines[id] for id in ids if id in self.lines}

    async def names(self, nodes: str) -> list[str]:
        return ["n1", "n2", "n3"]

    async def nodes(self, names: list[str]) -> dict[str, NodeLine]:
        return {n: self.states[n] for n in names if n in self.states}

    async def steps(self, job: str) -> dict[str, str]:
        return {}

    async def submit(self, script: str, cwd: Path) -> str:
        self.asked.append(("sbatch", script))
        return "8"

    async def config(self) -> dict[str, str]:
        return {}


class Engine(SlurmProvider):
    """One that remembers what it said."""

    def __init__(self, folder: Path, admin: bool = False) -> None:
        self.notes: list[str] = []
        self.posts: list[Availability] = []
        spec = JobSpec(name="job", script="train.py", max_nodes=3, engine="slurm")
        super().__init__(spec, folder, "7", self.notes.append, self.posts.append)
        self.slurm = Answers(admin)  # type: ignore[assignment]
        self.alive = {"n1", "n2", "n3"}

    async def settle(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    monkeypatch.setattr(module, "REACH_S", 0.01)


def test_who_may_not_drain_says_so_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    async def marks() -> None:
        await engine.mark("n2", "xid 79: fell off")
        await engine.mark("n3", "ecc")

    asyncio.run(marks())
    assert [a[:2] for a in engine.slurm.asked].count(("scontrol", "update")) == 1
    assert engine.notes == [
        "n2 is not drained in Slurm (scontrol: slurm_update error: Invalid user id); this job does not use it any more, "
        "but other jobs may"
    ]


def test_a_bad_node_is_drained_and_turned_away(tmp_path: Path) -> None:
    engine = Engine(tmp_path, admin=True)

    async def bad() -> None:
        await engine.mark("n2", "xid 79: fell off")
        await engine.release(ReleaseNode(node="n2", reason="xid 79: fell off"))
        await engine.settle()

    asyncio.run(bad())
    update, shrink = [a for a in engine.slurm.asked if a[:2] == ("scontrol", "update")]
    assert update[2:] == ("nodename=n2", "state=drain", "reason=holdfast job: xid 79: fell off")
    assert shrink[2:] == ("jobid=7", "nodelist=n1,n3")
    assert engine.posts == [NodeTaken("n2", "xid 79: fell off")]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("admin", [False, True])
def test_a_node_is_booted_and_another_asked_for(tmp_path: Path, planned: bool, admin: bool) -> None:
    engine = Engine(tmp_path, admin)
    if admin:  # what `scontrol reboot ASAP` makes of it
        states = frozenset({"MIXED", "DRAIN", "REBOOT_REQUESTED"})
        engine.slurm.states["n2"] = NodeLine("n2", "127.0.0.1", states, "holdfast")

    async def boot() -> None:
        await engine.release(ReleaseNode(node="n2", reason="xid 154", planned=planned))
        await engine.reboot("n2", "xid 154")
        await engine.settle()

    asyncio.run(boot())
    assert (
        "scontrol",
        "reboot",
        "ASAP",
        "nextstate=RESUME",
        "reason=holdfast job: xid 154",
        "n2",
    ) in engine.slurm.asked
    assert not any("state=down" in a for a in engine.slurm.asked)
    (submitted,) = [a[1] for a in engine.slurm.asked if a[0] == "sbatch"]
    assert ("--exclude=n2" in submitted) == (not admin)  # one that could not be booted is still sick
    assert NodeTaken("n2", "xid 154") in engine.posts


def test_many_lost_at_once_are_nobodys_fault(tmp_path: Path) -> None:
    engine = Engine(tmp_path, admin=True)

    async def lost() -> None:
        await engine.release(ReleaseNode(node="n2", reason="silent for 2 s"))
        await engine.release(ReleaseNode(node="n3", reason="silent for 2 s"))
        await engine.settle()

    asyncio.run(lost())
    assert not engine.slurm.asked
    assert not engine.posts
    assert "2 nodes were lost at the same time, n2 among them: they are not reported to Slurm" in engine.notes


def test_a_follow_up_is_asked_for_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    async def ask() -> None:
        engine._known.bad["n2"] = "xid"
        engine.alive = {"n1", "n3"}
        assert await engine.provide()
        assert not await engine.provide()

    asyncio.run(ask())
    (submitted,) = [a[1] for a in engine.slurm.asked if a[0] == "sbatch"]
    assert "#SBATCH --exclude=n2\n" in submitted
    assert "#SBATCH --time=60\n" in submitted
    assert engine.posts == [NodeUnavailable("a node was requested from Slurm and has not joined yet")]


def test_a_follow_up_submitted_while_slurm_answers_is_kept(tmp_path: Path) -> None:
    """Slurm's answer is older than the follow-up job, whose node may join before the answer is read."""
    engine = Engine(tmp_path)
    engine.alive = {"n1", "n3"}
    engine._known.bad["n2"] = "xid"
    answer = engine.slurm.jobs

    async def late(*ids: str) -> dict[str, JobLine]:
        found = await answer(*ids)
        if "8" not in engine._known.follow_ups:
            assert await engine.provide()
            engine.slurm.lines["8"] = line("8", "RUNNING", "None", "n9", 3600.0, "n9")
            engine.alive.add("n9")
        return found

    async def look() -> None:
        engine.slurm.jobs = late
        await engine._look()
        assert engine._known.follow_ups == {"8": None}
        await engine._look()

    asyncio.run(look())
    assert engine._known.follow_ups == {"8": "n9"}
    assert not engine.posts


def test_a_node_that_the_site_lets_in_again_may_be_used(tmp_path: Path) -> None:
    engine = Engine(tmp_path, admin=True)
    drained = NodeLine("n2", "127.0.0.1", frozenset({"MIXED", "DRAIN"}), "holdfast")
    engine.slurm.states["n2"] = drained

    async def mark_and_look() -> None:
        await engine.mark("n2", "xid 79")
        await engine.release(ReleaseNode(node="n2", reason="xid 79"))
        await engine.settle()
        assert await engine.provide()
        engine.slurm.lines["8"] = line("8", "PENDING", "Resources", "", None, "")
        await engine._look()
        assert engine._known.bad
        engine.slurm.states["n2"] = NodeLine("n2", "127.0.0.1", frozenset({"IDLE"}), "")
        await engine._look()

    asyncio.run(mark_and_look())
    assert not engine._known.bad
    assert "Slurm has n2 in service again, so this job may use it" in engine.notes
    assert engine.slurm.asked[-1] == ("scontrol", "update", "jobid=8", "excnodelist=")


def test_what_slurm_says_of_the_allocation(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.alive = {"n1", "n2", "n3", "n9"}
    engine.slurm.states["n3"] = NodeLine("n3", "127.0.0.1", frozenset({"MIXED", "DRAIN"}), "fan")
    asyncio.run(engine._look())
    asyncio.run(engine._look())  # what was said is not said again
    assert engine.posts == [
        NodeTaken("n9", "Slurm removed the node from the allocation"),
        NodeGoing("n3", "Slurm drains the node: fan"),
    ]


@pytest.mark.parametrize("left_s", [None, 900.0, 240.0])
def test_far_from_the_time_limit_nobody_is_told(tmp_path: Path, left_s: float | None) -> None:
    assert posts_of_a_job_that_has(tmp_path, left_s) == []


def test_the_time_limit_is_foretold_as_long_before_the_stop_as_that_is_before_the_limit(
    tmp_path: Path,
) -> None:
    stop_s = 120  # --stop-before
    foretold = JobGoing(module.TIME_LIMIT, 239.0 - stop_s, NoticeCause.TIME_LIMIT)
    assert posts_of_a_job_that_has(tmp_path, 239.0) == [foretold]
    assert posts_of_a_job_that_has(tmp_path, 239.0, 119.0) == [
        foretold,
        Capacity(0, module.TIME_LIMIT, 119.0, NoticeCause.TIME_LIMIT),
    ]


def test_more_time_takes_the_notice_back_once(tmp_path: Path) -> None:
    posts = posts_of_a_job_that_has(tmp_path, 239.0, 3600.0, 3597.0)
    assert posts[1:] == [JobGoing("Slurm gives the job more time", None, NoticeCause.TIME_LIMIT)]


def posts_of_a_job_that_has(folder: Path, *left_s: float | None) -> list[Availability]:
    """What the engine says at one look after the other, when Slurm leaves the job so many seconds."""
    engine = Engine(folder)
    for seconds in left_s:
        engine.slurm.lines["7"] = msgspec.structs.replace(engine.slurm.lines["7"], left_s=seconds)
        asyncio.run(engine._look())
    return engine.posts


def leaving(node: str, cause: NoticeCause) -> dict[str, object]:
    event = NodeLeaving(node=node, reason="SIGTERM", within_s=8.0, cause=cause)
    return dict(msgspec.to_builtins(event))


def test_sigterm_to_all_nodes_is_the_end_of_the_allocation(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for node in ("n1", "n2"):
        engine.on_event("node-leaving", leaving(node, NoticeCause.PREEMPTION))
    # A person takes the last one out, and has said SIGTERM: it is no end of the allocation.
    engine.on_event("node-leaving", leaving("n3", NoticeCause.DRAIN))
    assert not engine.posts
    engine.on_event("node-leaving", leaving("n3", NoticeCause.PREEMPTION))
    assert engine.posts == [Capacity(0, "Slurm ends the whole allocation", 8.0)]


class Stopped:
    """A launcher that was told of SIGTERM, or was not."""

    told = 0

    def on_sigterm(self) -> None:
        self.told += 1


def test_sigterm_to_a_step_reaches_its_agent_and_stops_the_job_where_the_coordinator_is() -> None:
    """The coordinator itself takes it for a request to hand over."""

    async def signalled() -> int:
        stand_by, launcher = StandBy.__new__(StandBy), Stopped()
        codes = []
        for stand_by.launcher in (None, launcher):
            agent = await asyncio.create_subprocess_exec("sleep", "1000")
            _on_sigterm(agent, stand_by)
            codes.append(await agent.wait())
        assert codes == [-signal.SIGTERM] * 2
        return launcher.told

    assert asyncio.run(signalled()) == 1


def test_an_answer_that_cannot_be_used_does_not_end_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, looks = Engine(tmp_path), list[int]()
    monkeypatch.setattr(module, "POLL_S", 0.0)

    async def look() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise asyncio.CancelledError  # as `close` does
        raise ValueError("unexpected")

    monkeypatch.setattr(engine, "_look", look)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(engine._poll())
    assert looks == [0, 1, 2]
    assert engine.notes == ["Slurm's answer cannot be used, and the request is repeated: unexpected"] * 2
