"""In the middle of an upload, and of a copy to another node: agents that are killed there, and a disk that stands still.
Whatever was reported saved is there, and training goes on from it with the same bits."""

import os
import re
import select
import shutil
import signal
import threading
from pathlib import Path

import pytest
from conftest import LENGTH, SAVES
from harness import HERE, TIERS, TINY, agents, finish, run, start, wait_for
from s3server import S3Server
from test_snapshots import begins, ends, kill_all, memory_of, remove_memory_of

from holdfast.checkpoint.archive import Archive
from holdfast.coordinator.service.store import Store

NIGHTLY = pytest.mark.nightly
EVERY = 10


class Gate:
    """Where a process of the job waits for the test. See gate/sitecustomize.py."""

    def __init__(self, folder: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "open").touch()
        for name in ("here", "go"):
            os.mkfifo(folder / name)
        self._go = folder / "go"
        self._here = os.open(folder / "here", os.O_RDWR)
        monkeypatch.setenv("HOLDFAST_TEST_POINT", point)
        monkeypatch.setenv("HOLDFAST_TEST_GATE", str(folder))
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join([str(HERE / "gate"), os.environ.get("PYTHONPATH", "")])
        )

    def wait(self) -> int:
        """The process that came there."""
        assert select.select([self._here], [], [], 90)[0], "nobody came to the point"
        return int(os.read(self._here, 100))

    def open(self) -> None:
        """Whoever waits goes on."""
        os.close(os.open(self._go, os.O_WRONLY))

    def close(self) -> None:
        os.close(self._here)


@pytest.fixture
def gate_at(tmp_path, monkeypatch):
    made = []

    def make(point: str) -> Gate:
        made.append(Gate(tmp_path / "gate", point, monkeypatch))
        return made[-1]

    yield make
    for gate in made:
        gate.close()


def events(home: Path) -> list[tuple[str, dict]]:
    store = Store(home / "jobs" / "job" / "job.sqlite", read_only=True)
    try:
        return [(e.kind, e.fields) for e in store.events()]
    finally:
        store.close()


def reported(told: list[tuple[str, dict]], kind: str) -> list[int]:
    return [fields["step"] for what, fields in told if what == kind]


def whole(tier: Path) -> list[int]:
    """The checkpoints of a tier; every one is as it was saved."""
    archive = Archive(str(tier))
    return [archive.verify(step).step for step in archive.steps()]


def check_saved(ran, told, tier: Path) -> None:
    """The newest two are kept, whole; the last one may have come too late to be reported."""
    there = whole(tier)
    assert there == sorted({*reported(told, "saved"), *there})[-2:]
    assert not memory_of(ran.job_dir.parents[1])


@pytest.mark.long
def test_an_agent_that_is_killed_in_the_middle_of_an_upload(tmp_path, gate_at, tiers_undisturbed):
    """Its third row is not of the first checkpoint, which is reported and stays."""
    gate, tier = gate_at("write:3"), tmp_path / "saved"
    options = ["--nnodes", 2, "--spares", 1, "--checkpoint", f"{tier},every=100"]
    process = start(tmp_path, *options, TIERS, LENGTH, SAVES, 0.005)  # it must not end before the agent does
    victim = gate.wait()
    node = next(name for name, pid in agents(tmp_path).items() if pid == victim)
    before = reported(events(tmp_path), "saved")
    assert whole(tier) == before != []
    os.kill(victim, signal.SIGKILL)
    ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    told = events(tmp_path)
    lost_at = [kind for kind, _ in told].index("node-lost")
    if any(
        w.startswith(f"{node}.") for w in ran.fields("started")[0]["workers"]
    ):  # else the spare wrote its copy
        assert begins(ran)[1] >= max(reported(told[:lost_at], "snapshot"))
    assert ends(ran) == ends(tiers_undisturbed)
    check_saved(ran, told, tier)


@pytest.mark.nightly
def test_everything_is_killed_in_the_middle_of_an_upload(tmp_path, gate_at, tiers_undisturbed):
    """Nothing is left but the tier: the checkpoint that was reported is the one to go on from."""
    gate, tier = gate_at("write:3"), tmp_path / "saved"
    options = ["--nnodes", 2, "--checkpoint", f"{tier},every=100"]
    process = start(tmp_path, *options, TIERS, LENGTH, SAVES)
    gate.wait()
    before = reported(events(tmp_path), "saved")
    kill_all(tmp_path, process)
    remove_memory_of(tmp_path)
    assert whole(tier) == before != []
    shutil.rmtree(tmp_path / "jobs" / "job" / "logs")
    ran = run(tmp_path, *options, TIERS, LENGTH, SAVES)
    assert ran.code == 0, ran.output[-3000:]
    assert begins(ran) == [before[-1]]
    assert ends(ran) == ends(tiers_undisturbed)
    assert whole(tier)[-1] > before[-1]


@pytest.mark.nightly
def test_everything_is_killed_while_an_object_store_takes_a_checkpoint(
    tmp_path, tiers_undisturbed, monkeypatch
):
    """It has the row's bytes, and never answers; the checkpoint before is the one to go on from."""
    reached = threading.Event()
    with S3Server() as store:
        given = {"AWS_ENDPOINT_URL": store.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in {**given, "AWS_REGION": "eu-west-3"}.items():
            monkeypatch.setenv(name, value)

        def second(request):
            meant = re.search(r"\.\w{8}\.safetensors$", request.key) and any(
                k.endswith("manifest.json") for k in store.objects
            )
            if meant:
                reached.set()
            return meant

        store.fault("put part", "stall", when=second)
        options = ["--nnodes", 2, "--checkpoint", "s3://bucket/run,every=100"]
        process = start(tmp_path, *options, TIERS, LENGTH, SAVES)
        assert reached.wait(90)
        wait_for(process, "is saved in")
        before = reported(events(tmp_path), "saved")
        kill_all(tmp_path, process)
        remove_memory_of(tmp_path)
        shutil.rmtree(tmp_path / "jobs" / "job" / "logs")
        ran = run(tmp_path, *options, TIERS, LENGTH, SAVES)
        assert ran.code == 0, ran.output[-3000:]
        assert begins(ran) == [before[-1]]
        assert ends(ran) == ends(tiers_undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["buddy", pytest.param("owner", marks=NIGHTLY)])
def test_a_node_is_killed_in_the_middle_of_a_copy(tmp_path, gate_at, tiers_undisturbed, victim):
    """Half of a shard is at the buddy. Either of the two is killed; what was whole before is where training goes on."""
    gate = gate_at("send:5")
    process = start(tmp_path, "--nnodes", 2, "--spares", 1, TIERS, LENGTH, SAVES)
    owner = gate.wait()
    nodes = agents(tmp_path)
    working = {fields["node"] for kind, fields in events(tmp_path) if kind == "worker-started"}
    (buddy,) = [pid for name, pid in nodes.items() if name in working and pid != owner]
    os.kill(owner if victim == "owner" else buddy, signal.SIGKILL)
    if victim == "buddy":
        gate.open()
    ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    told = events(tmp_path)
    lost_at = [kind for kind, _ in told].index("node-lost")
    # Those that are on both nodes. The one in flight is complete as well as soon as its second copy has failed, and what of
    # it is on the node that is killed alone goes with that node.
    there = [fields["step"] for kind, fields in told[:lost_at] if kind == "snapshot" and fields["nodes"] > 1]
    assert there
    assert begins(ran)[1] >= max(there)
    assert ends(ran) == ends(tiers_undisturbed)
    assert not memory_of(tmp_path)


@pytest.mark.nightly
def test_a_disk_that_stands_still_holds_up_nothing_but_itself(tmp_path, gate_at):
    """It is said after a while, later checkpoints are skipped with a word, and snapshots go on in memory."""
    gate, tier = gate_at("write:1"), tmp_path / "saved"
    wide = tmp_path / "train_wide.py"
    wide.write_text(TINY.read_text().replace("WIDTH = 64", "WIDTH = 256"))
    options = [
        "--nnodes",
        2,
        "--snapshot-every",
        EVERY,
        "--detection",
        1,  # a loaded machine was seen to leave a process without a turn for 0.6 s
        "--checkpoint",
        f"{tier},every=50",
    ]
    process = start(tmp_path, *options, wide, 1_000_000)
    gate.wait()
    wait_for(process, "is still being written to", "no data of step")
    assert whole(tier) == []
    gate.open()
    wait_for(process, "skipped meanwhile")
    process.send_signal(signal.SIGINT)
    ran = finish(process, tmp_path)
    assert ran.report["outcome"] == "stopped"
    assert ran.report["incidents"] == [], ran.output[-3000:]
    told = events(tmp_path)
    (slow,) = [fields for kind, fields in told if kind == "tier-slow"]
    skipped = [fields for kind, fields in told if kind == "checkpoint-skipped"]
    assert [(f["older"], f["url"]) for f in skipped[:1]] == [(slow["step"], str(tier))]
    alarm, freed = ([kind for kind, _ in told].index(kind) for kind in ("tier-slow", "saved"))
    assert max(reported(told[:freed], "snapshot")) >= skipped[0]["step"] > slow["step"], "training went on"
    assert not reported(told[:alarm], "saved")
    first = next(fields for kind, fields in told if kind == "saved")
    assert (first["step"], first["skipped"] > 0) == (slow["step"], True)
    check_saved(ran, told, tier)
