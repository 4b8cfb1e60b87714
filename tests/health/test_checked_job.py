"""A job with hooks whose spare is checked while it trains."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TINY, end_leftovers, finish, run, start, wait_for

from holdfast.cli.check_places import write_places
from holdfast.engines.client import JobClient
from holdfast.protocol.health import PairFigures

HOOK = '#!/bin/sh\necho "$HOLDFAST_HOOK $HOLDFAST_JOB $HOLDFAST_NODE: $HOLDFAST_REASON"\n'


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Whatever a failed test leaves running is ended."""
    yield
    end_leftovers(tmp_path)


def hooks(folder: Path) -> Path:
    folder.mkdir()
    for name in ("on-create", "before-join", "on-drain", "after-job"):
        (folder / name).write_text(HOOK + ("exit 3\n" if name == "on-create" else ""))
        (folder / name).chmod(0o755)
    return folder


async def until_it_trains(job_dir: Path, nodes: int) -> None:
    async with JobClient(job_dir) as client:
        async for said in client.watch():
            there = said.kind == "status" and sum(n.alive for n in said.value.nodes) == nodes
            if there and said.value.phase == "running" and said.value.step > 3:
                return


async def post(job_dir: Path, page: str) -> None:
    async with JobClient(job_dir) as client:
        await client.post(page)


def check(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "check", "--job", "job", *map(str, args)],
        env=os.environ | {"HOLDFAST_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.long
def test_a_spare_is_checked_and_hooks_run(tmp_path):
    process = start(
        tmp_path,
        "--nnodes",
        1,
        "--spares",
        1,
        "--hooks",
        hooks(tmp_path / "hooks"),
        TINY,
        100_000,
        "--device-s",
        0.01,
    )
    job_dir = tmp_path / "jobs" / "job"
    wait_for(process, "waiting for nodes")  # the folder is there
    asyncio.run(until_it_trains(job_dir, 2))
    report = tmp_path / "checks.json"
    ran = check(tmp_path, "--deep", "--seconds", 0.2, "--json", report)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ((spare, told),) = json.loads(report.read_text())["nodes"].items()
    assert {"memory", "cpu-bits", "memory-patterns", "disk-read", "loopback"} <= {
        r["name"] for r in told["results"]
    }
    others = [p.name for p in (job_dir / "logs").iterdir() if p.name.startswith("node") and p.name != spare]
    refused = check(tmp_path, "--deep", *others)
    assert refused.returncode == 2
    assert "deep checks would disturb the workers that train there; add --disturb" in refused.stderr
    asyncio.run(post(job_dir, "/stop?reason=test"))
    ran = finish(process, tmp_path)
    assert ran.report["outcome"] == "stopped"
    assert ran.report["incidents"] == []
    findings = ran.fields("finding")
    assert {f["rule"] for f in findings} == {"hook-on-create"}
    assert "exit code 3; its output is in" in findings[0]["evidence"]
    for node in (spare, *others):
        folder = job_dir / "logs" / node
        assert (folder / "hook-before-join.log").read_text().startswith(f"before-join job {node}: ")
        assert (folder / "hook-after-job.log").read_text() == f"after-job job {node}: stopped\n"
        assert not (folder / "hook-on-drain.log").exists()


@pytest.mark.long
def test_every_pair_is_measured_and_the_file_places_the_next_job(tmp_path):
    process = start(tmp_path, "--nnodes", 1, "--spares", 2, TINY, 100_000, "--device-s", 0.01)
    job_dir, file, report = tmp_path / "jobs" / "job", tmp_path / "topology.txt", tmp_path / "pairs.json"
    wait_for(process, "waiting for nodes")
    asyncio.run(until_it_trains(job_dir, 3))
    ran = check(tmp_path, "--disturb", "--seconds", 0.2, "--json", report, "--write-topology", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(report.read_text())
    nodes = sorted(told["places"])
    assert told["left_out"] == {}
    assert {frozenset(p["nodes"]) for p in told["pairs"]} == {
        frozenset(pair) for pair in itertools.combinations(nodes, 2)
    }
    assert all(p["bytes_per_s"] > 1e6 and 0 < p["latency_s"] < 1 for p in told["pairs"])
    # Of one busy machine nobody knows which pairs are near. That the answer and the file agree is certain.
    assert file.exists() == any(told["places"].values()) == (told["file"] is not None)
    asyncio.run(post(job_dir, "/stop?reason=test"))
    stopped = finish(process, tmp_path)
    assert stopped.report["incidents"] == []
    assert stopped.fields("finding") == []

    figures = [
        PairFigures(nodes=pair, bytes_per_s=1e9, latency_s=1e-4 if "node1" not in pair else 1e-3)
        for pair in itertools.combinations(nodes, 2)
    ]
    file.unlink(missing_ok=True)
    assert write_places(figures, 0.0, file, tmp_path / "places.json", None)
    again = run(tmp_path, "--nnodes", 3, "--topology", file, TINY, 5, job="again")
    assert again.code == 0, again.output[-3000:]
    joined = {f["node"]: f["place"] for f in again.fields("node-joined")}
    assert joined == json.loads((tmp_path / "places.json").read_text())["places"]
    assert joined == {"node0": "d1", "node1": "d2", "node2": "d1"}


@pytest.mark.long
def test_a_failing_hook_keeps_the_node_out(tmp_path):
    folder = tmp_path / "hooks"
    folder.mkdir()
    # The other node waits until that was said: on a busy machine it would train to the end before.
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    cases = f"case $HOLDFAST_NODE in node0) exit 7;; node1) read line < {gate};; esac"
    (folder / "before-join").write_text(f"#!/bin/sh\n{cases}\n")
    (folder / "before-join").chmod(0o755)
    process = start(tmp_path, "--hooks", folder, "--spares", 1, TINY, 20)
    wait_for(process, "node0 was refused")
    gate.write_text("go on\n")
    ran = finish(process, tmp_path)
    assert ran.report["outcome"] == "finished", ran.output
    (refused,) = ran.fields("node-refused")
    assert refused["node"] == "node0"
    assert "hook before-join failed on node0: exit code 7" in refused["reason"]
