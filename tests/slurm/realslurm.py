"""The test cluster's nodes, and jobs on it, for tests and benchmarks. Started by `tests/slurm/cluster.sh with`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from holdfast.coordinator.service.store import Store, newest_ledger
from holdfast.engines.client import Announcement, JobClient
from holdfast.protocol.job_view import JobView

CLUSTER = os.environ.get("HOLDFAST_SLURM_CLUSTER", "")
NODES = [f"n{i}" for i in range(1, 7)]
ROOT = Path(__file__).parents[2]
USER = "games"
"""Of Debian's own, so slurmctld and all nodes know it."""
OPEN = """
home=$1 work=$(mktemp -d); shift
for path; do mkdir -p "$work$path"; mount --bind "$path" "$work$path"; done
mount -t tmpfs -o mode=755 tmpfs "$home"
for path; do mkdir -p "$path"; mount --bind "$work$path" "$path"; umount -l "$work$path"; done
rm -r "$work"
"""
PATIENCE_S = 60.0
TRAIN = Path(__file__).parent / "train_paced.py"
STEPS = 1000
PACE_S = 0.05
Wanted = Callable[[Announcement], bool]


def cluster(*argv: str) -> None:
    """cluster.sh: kill, boot, exchange, cut, heal, exec."""
    subprocess.run([CLUSTER, *argv], check=True, timeout=20)


def as_user(node: str, home: Path) -> tuple[str, ...]:
    """Begins a command of an ordinary user's on a node."""
    drop = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
    return (CLUSTER, "exec", node, *drop, "env", f"HOME={home}")


def in_another(path: Path, others: list[Path]) -> bool:
    """Whether one of these folders has it in it."""
    return any(other in path.parents for other in others)


def open_to_others(node: str) -> None:
    """Python and this project may be in a home that only root can enter. On this node they are all that is in it, and
    everybody can."""
    needed = sorted({p.resolve() for p in (Path(sys.base_prefix), Path(sys.prefix), ROOT)})
    closed = {p: next((c for c in reversed(p.parents) if not c.stat().st_mode & 0o001), None) for p in needed}
    for home in set(filter(None, closed.values())):
        # What lies in another one comes with it; mounted by itself it would be gone when that is unmounted.
        inside = [str(p) for p, c in closed.items() if c == home and not in_another(p, needed)]
        cluster("exec", node, "bash", "-ec", OPEN, "bash", str(home), *inside)


def slurm(*argv: str, check: bool = True) -> str:
    """One of Slurm's commands."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0 or not check, f"{argv}: {done.stderr}"
    return done.stdout.strip()


def until(true: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Slurm has no events: waits until it says so."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


def mend() -> None:
    """Every node is up, plugged in and idle, and no job is left."""
    if jobs := slurm("squeue", "--noheader", "--format=%A").split():
        slurm("scancel", *jobs, check=False)
    for node in NODES:
        cluster("heal", node)
        if not (Path(os.environ["HOLDFAST_SLURM_DIR"]) / "pid" / f"power-{node}").exists():
            cluster("boot", node)
    until(lambda: not slurm("squeue", "-h"), "the queue is empty")

    until(lambda: sum([usable(node) for node in NODES]) == len(NODES), "all nodes are idle")


def state(node: str) -> str:
    return slurm("sinfo", "-h", "-n", node, "-p", "train", "-o", "%T")


def reason(node: str) -> str:
    """Why it is kept out."""
    return slurm("sinfo", "-h", "-n", node, "-p", "train", "-o", "%E")


def usable(node: str) -> bool:
    """Whether it is idle. One that is kept out for good is let in again, and is idle after a while."""
    now = state(node)
    if now.rstrip("*") in ("down", "drained", "fail"):
        slurm("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    return now == "idle"


@contextmanager
def configured(**settings: object) -> Iterator[None]:
    """Other settings in slurm.conf for a while, in force on all nodes."""
    path = Path(os.environ["SLURM_CONF"])
    before = path.read_text()
    lines = [x for x in before.splitlines() if x.partition("=")[0] not in settings]
    path.write_text("\n".join([*lines, *(f"{k}={v}" for k, v in settings.items())]) + "\n")
    _reconfigure()
    try:
        yield
    finally:
        path.write_text(before)
        _reconfigure()


def _reconfigure() -> None:
    """Every node registers again. Of one that was heard of only once since its boot Slurm then thinks that it has booted
    once more (it reckons in whole seconds), and sets it down for good."""
    with (Path(os.environ["HOLDFAST_SLURM_DIR"]) / "log/slurmctld.log").open() as log:
        log.seek(0, os.SEEK_END)
        slurm("scontrol", "reconfigure")
        said = ""

        def registered() -> bool:
            nonlocal said
            said += log.read()
            return set(NODES) <= set(re.findall(r"node_registration complete for (\w+) ", said))

        until(registered, "all nodes have read the settings")
    for node in NODES:
        if "unexpectedly rebooted" in reason(node):
            slurm("scontrol", "update", f"nodename={node}", "state=resume")


class Job:
    """`holdfast run --engine slurm`, and what became of it."""

    def __init__(self, home: Path, name: str, *args: object, login: tuple[str, ...] = ()) -> None:
        """login: what makes a command somebody else's (see `as_user`)."""
        self.name, self.home = name, home
        self.dir = home / "jobs" / name
        self.env = dict(os.environ, HOLDFAST_HOME=str(home), OMP_NUM_THREADS="1")
        self._holdfast = [*login, sys.executable, "-m", "holdfast.cli"]
        argv = [*self._holdfast, "run", "--engine", "slurm", "--no-ui", "--job", name]
        self.log = home / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*argv, *map(str, args)],
                env=self.env,
                stdout=out,
                stderr=out,
                start_new_session=True,
                # Below nohup it is ignored, and a child inherits that: a hang-up would not end the submitter.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if exc[0] is not None:
            said = [self.log, *self.dir.glob("slurm-*.out"), *self.dir.glob("logs/agents/*.log")]
            print(*(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in said), sep="\n", file=sys.stderr)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """The submitter's exit code."""
        return self.process.wait(within_s)

    @property
    def id(self) -> str:
        return json.loads((self.dir / "allocation.json").read_text())["id"]

    @property
    def coordinator(self) -> str:
        """The node of the coordinator."""
        host = json.loads((self.dir / "coordinator.json").read_text())["host"]
        return f"n{int(host.rpartition('.')[2]) - 10}"

    def see(self, wanted: Wanted, after: int = 0, within_s: float = PATIENCE_S) -> Announcement:
        """Waits for something that the coordinator says, across coordinators."""

        async def look() -> Announcement:
            async with asyncio.timeout(within_s):
                while not (self.dir / "coordinator.json").exists():  # noqa: ASYNC110 - another machine's file
                    await asyncio.sleep(0.1)
                async with JobClient(self.dir) as client, aclosing(client.watch(after)) as heard:
                    async for said in heard:
                        if wanted(said):
                            return said
            raise AssertionError("the job has ended")

        return asyncio.run(look())

    def event(
        self, kind: str, after: int = 0, within_s: float = PATIENCE_S, **fields: object
    ) -> dict[str, Any]:
        """Waits for an event of the ledger."""

        def wanted(said: Announcement) -> bool:
            if said.kind != "event" or said.value["kind"] != kind or said.value["seq"] <= after:
                return False
            return all(said.value["fields"].get(k) == v for k, v in fields.items())

        value: dict[str, Any] = self.see(wanted, after, within_s).value
        return value

    def training(self, world: int, beyond: int = 0, spares: int = 0) -> JobView:
        """Waits until so many workers train, beyond a step, and so many spares are ready; returns the status."""

        def wanted(said: Announcement) -> bool:
            if said.kind != "status" or said.value.phase != "running":
                return False
            ready = sum(w.state == "ready" for w in said.value.workers)
            step = said.value.step
            if step is None:  # at level 0 only the script knows where it went on after a restart
                step = said.value.steps.computed or 0
            return said.value.world == world and step > beyond and ready >= spares

        value: JobView = self.see(wanted).value
        return value

    def post(self, path: str, body: str = "") -> None:
        async def send() -> None:
            async with JobClient(self.dir) as client:
                await client.post(path, body)

        asyncio.run(send())

    def notes(self) -> str:
        """What the launchers in the allocation said."""
        said = [*self.dir.glob("slurm-*.out"), *self.dir.glob("logs/agents/*.log")]
        return "".join(p.read_text() for p in said)

    def report(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.dir / "report.json").read_text())
        return value

    def losses(self) -> list[float | None]:
        store = Store(newest_ledger(self.dir), read_only=True)
        try:
            return [s.loss for s in store.steps()]
        finally:
            store.close()

    def command(self, *args: str, within_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Another command of holdfast's about this job."""
        argv = [*self._holdfast, args[0], "--job", self.name, *args[1:]]
        return subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=within_s, check=False
        )


def members(status: JobView) -> list[str]:
    """The nodes that train, by rank."""
    ranked = [w for w in status.workers if w.rank is not None]
    return [w.node for w in sorted(ranked, key=lambda w: w.rank)]


def paced(home: Path, name: str) -> list[object]:
    """Arguments of the script: slow until `hurry`."""
    return [STEPS, PACE_S, home / f"{name}.hurry"]


def hurry(job: Job) -> None:
    """The rest of the steps as fast as can be."""
    (job.home / f"{job.name}.hurry").touch()


def told(what: str, report: dict) -> None:
    """Prints what the incidents cost."""
    for i in report["incidents"]:
        print(
            f"\n{what}: {i['cause']}: detected after {i['detect_s']} s, training after {i['stall_s']} s, "
            f"at full strength after {i['full_strength_s']} s",
            end="",
        )


def on_node(node: str, text: str) -> list[str]:
    """Command lines of a node's processes that contain the text."""
    found = subprocess.run(
        [os.environ["HOLDFAST_SLURM_CLUSTER"], "exec", node, "ps", "-eo", "args"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in found.stdout.splitlines() if text in line]


def events(job: Job, kind: str) -> list[dict]:
    said = job.command("events", "--json", "--kind", kind)
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]
