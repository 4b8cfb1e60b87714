"""Random faults of every kind against real jobs, one job after the other, for as long as it is told to.

    PYTHONPATH=tests .venv/bin/python tests/faults/chaos.py --seconds 600 --seed 3
    PYTHONPATH=tests .venv/bin/python tests/faults/chaos.py --seed 3 --only 7       the seventh job of that seed again

Each job draws its script, its options and a row of faults: those that Holdfast injects, those that the system does to its
processes, files, disk and connections, and the end of everything at once, after which the job is started again from what
is left, whole or damaged. Every job has to end with code 0, with the losses and the final parameters of the undisturbed
run, without a step that was lost beyond the promise, without more incidents than faults that may open one, and with
nothing left behind: no process, no snapshot memory, no temporary file.

What is drawn follows from the seed alone. When exactly a fault strikes does not: it depends on the machine.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from drive import Act, Deed, Driver, drain, fault, kill_everything, resize
from harness import (
    HERE,
    TINY,
    Ran,
    agents,
    end_leftovers,
    end_started,
    ended,
    held,
    leftovers,
    run,
    start,
    wait_for,
)
from stranger import stranger
from test_floods import WORKER, flood, workers
from test_full_disk import Disk
from test_life import signal_when_gone
from test_snapshots import flip, memory_of, newest_slots, remove_memory_of

from holdfast.checkpoint.archive import Archive
from holdfast.coordinator.service.store import Store
from holdfast.engines.client import JobClient
from holdfast.engines.jobs import EXIT_STOPPED
from holdfast.protocol.faults import MACHINE_FAULTS, PHASES, FaultKind
from holdfast.protocol.job_options import Timing
from holdfast.protocol.job_view import JobView
from holdfast.protocol.network.endpoint import read_endpoint

EVERY = 10
"""Steps between two snapshots; there is a checkpoint for every second one."""
JOB_S = 150
"""A start of a job takes at most so long, besides what a worker may stand still for."""
ROOT = os.getuid() == 0


@dataclass(frozen=True)
class Script:
    """What is trained, and on how many nodes."""

    name: str
    arguments: tuple[object, ...]
    nodes: str
    steps: int
    gap: tuple[int, int]
    """Steps between two faults."""
    over: int
    """Steps before the end from which on no fault begins: what it does has to be over before the job is."""
    world: int | None
    """Faults begin only at this size. None: at any, for the result depends on no size."""

    def options(self) -> list[object]:
        return ["--nnodes", self.nodes, *(["--spares", 1] if self.world else [])]


def fixed(steps: int = 300, gap: tuple[int, int] = (8, 45), device_s: float = 0.01, over: int = 60) -> Script:
    """Three replicas and a spare: it never trains smaller, and one replica always survives."""
    return Script("fixed", (TINY, steps, "--device-s", device_s), "3", steps, gap, over, 3)


def elastic() -> Script:
    """Its sums are exact, so its bits are the same at every size."""
    return Script("elastic", (HERE / "train_exact.py", 800), "2:5", 800, (15, 100), 60, None)


@dataclass
class Job:
    """One job that is about to be disturbed."""

    home: Path
    script: Script
    rng: random.Random
    undisturbed: Ran
    launcher: subprocess.Popen[str] | None = None
    disk: Disk | None = None
    flooding: Any = None
    done: list[str] = field(default_factory=list)
    """Names of the faults that struck."""
    outputs: list[str] = field(default_factory=list)
    """Of every start."""

    @property
    def dir(self) -> Path:
        return self.home / "jobs" / "job"

    @property
    def tier(self) -> Path:
        return self.home / "saved"

    def pid_of(self, who: str) -> int | None:
        """Of one process of this kind that runs now, drawn. None: there is none at the moment."""
        if who == "coordinator":
            where = read_endpoint(self.dir)
            return where.pid if where is not None else None
        if who == "agent":
            found = sorted(agents(self.home).values())
        else:
            form = {"worker": WORKER.match, "fork server": lambda c: "holdfast.agent.fork_server" in c}[who]
            found = sorted(pid for pid, command in leftovers(self.home).items() if form(command))
        return self.rng.choice(found) if found else None


Make = Callable[[Job], list[Deed]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    make: Make
    """What is done: at the first of these, and later, to end it."""
    incidents: int
    """How many it may open, at most."""
    once: bool = False
    """More than one in a job is refused by design, or says nothing new."""
    elastic: bool | None = None
    """Whether only jobs that change their size can have it (False: only those that do not)."""


def sync(deed: Callable[[JobClient, dict[str, Any]], None]) -> Act:
    async def act(client: JobClient, status: JobView) -> None:
        deed(client, status)

    return act


def injected(kind: FaultKind) -> Make:
    """What `holdfast fault` does, in a phase that is drawn."""

    def make(job: Job) -> list[Deed]:
        keys = {}
        if kind is FaultKind.SLOW:
            keys["factor"] = str(job.rng.choice((1.5, 3)))
        if kind is FaultKind.XID:
            keys["code"] = "79"
        if kind is not FaultKind.KILL_COORDINATOR:
            keys["rank"] = str(job.rng.randrange(job.script.world or 2))
        if kind not in MACHINE_FAULTS | {FaultKind.KILL_COORDINATOR, FaultKind.PREEMPT_NODE, FaultKind.SLOW}:
            # A phase that does not come in every step would leave the fault armed for who knows when.
            keys["phase"] = job.rng.choice([name for name in PHASES if name not in ("transfer", "snapshot")])
        return [Deed(fault(f"{kind}:" + ",".join(f"{k}={v}" for k, v in keys.items())))]

    return make


def in_recovery(job: Job) -> list[Deed]:
    """A worker is killed, and whoever fetches the state in its place is struck as well."""
    second = job.rng.choice(["kill-worker", "kill-node", "stop-worker", "deadlock", "segfault", "drop-node"])
    rank = job.rng.randrange(2)

    async def act(client: JobClient, status: JobView) -> None:
        await client.post("/fault", f"{second}:rank={rank},phase=transfer")
        await client.post("/fault", f"kill-worker:rank={rank}")

    return [Deed(act)]


def signalled(who: str, number: signal.Signals) -> Make:
    def make(job: Job) -> list[Deed]:
        @sync
        def act(client: JobClient, status: JobView) -> None:
            if (pid := job.pid_of(who)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        return [Deed(act)]

    return make


def agent_stopped(job: Job) -> list[Deed]:
    """Its workers train on until it counts as lost, so the next fault waits for that."""
    stopped: list[str] = []

    @sync
    def act(client: JobClient, status: JobView) -> None:
        there = agents(job.home)
        node = job.rng.choice(sorted({w.node for w in status.workers} & there.keys()))
        os.kill(there[node], signal.SIGSTOP)
        stopped.append(node)

    def lost(status: JobView) -> bool:
        return stopped[0] not in {w.node for w in status.workers}

    return [Deed(act), Deed(sync(lambda client, status: None), after=0, when=lost)]


def suspended(job: Job) -> list[Deed]:
    """Everything is stopped for a while, and goes on in an order that is drawn."""
    seconds = job.rng.uniform(0.5, 6)

    @sync
    def act(client: JobClient, status: JobView) -> None:
        handles = [os.pidfd_open(pid) for pid in leftovers(job.home)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for handle in handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            if number is signal.SIGSTOP:
                select.select([], [], [], seconds)  # the fault is that time passes
                job.rng.shuffle(handles)
        for handle in handles:
            os.close(handle)

    return [Deed(act)]


def disk_full(job: Job) -> list[Deed]:
    """There is no room for some steps; half of the time the coordinator is replaced meanwhile."""
    number = job.rng.choice([None, signal.SIGKILL, signal.SIGTERM])

    @sync
    def fill(client: JobClient, status: JobView) -> None:
        assert job.disk is not None
        job.disk.fill()
        if number is not None and (pid := job.pid_of("coordinator")) is not None:
            os.kill(pid, number)

    @sync
    def make_room(client: JobClient, status: JobView) -> None:
        assert job.disk is not None
        job.disk.make_room()

    return [Deed(fill), Deed(make_room, after=0 if number else job.rng.randint(5, 30))]


def files_deleted(job: Job) -> list[Deed]:
    """Some files of the folder are gone; half of the time a process that needs them starts right afterwards."""
    names = ["token", "spec.json", "resume.json", "identity", "lock", "coordinator.json", "logs"]
    gone = job.rng.sample(names, job.rng.randint(1, len(names)))
    victim = job.rng.choice([None, "coordinator", "worker"])

    @sync
    def act(client: JobClient, status: JobView) -> None:
        pid = job.pid_of(victim) if victim else None
        for name in gone:
            path = job.dir / name
            with suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return [Deed(act)]


def no_descriptors(who: str) -> Make:
    """It can open no file and take no connection for some steps."""

    def make(job: Job) -> list[Deed]:
        limited: list[tuple[int, tuple[int, int]]] = []

        @sync
        def take(client: JobClient, status: JobView) -> None:
            assert job.launcher is not None
            pid = job.launcher.pid if who == "launcher" else job.pid_of(who)
            if pid is None:
                return
            with suppress(ProcessLookupError, FileNotFoundError):
                before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                used = len(os.listdir(f"/proc/{pid}/fd"))
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
                limited.append((pid, before))

        @sync
        def give(client: JobClient, status: JobView) -> None:
            for pid, before in limited:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        return [Deed(take), Deed(give, after=job.rng.randint(5, 30))]

    return make


def cut(job: Job) -> list[Deed]:
    """The connections of one agent, or of all, to the coordinator are torn. All processes live, so nothing is lost."""
    of_all = job.rng.random() < 0.5
    drawn = job.rng.random()

    @sync
    def act(client: JobClient, status: JobView) -> None:
        if (where := read_endpoint(job.dir)) is None:
            return
        ours = set(agents(job.home).values())
        told = subprocess.run(
            ["ss", "-tnpH", "dport", "=", str(where.port)], capture_output=True, check=True, text=True
        )
        ports = sorted(
            line.split()[3].rpartition(":")[2]
            for line in told.stdout.splitlines()
            if ours & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
        )
        if ports:
            torn = [] if of_all else ["sport", "=", ports[int(drawn * len(ports))]]
            tear = ["ss", "-K", "-tn", *torn, "dport", "=", str(where.port)]
            subprocess.run(tear, capture_output=True, check=True)

    return [Deed(act)]


def flooded(job: Job) -> list[Deed]:
    """Strangers on the ports of the coordinator and of all workers, to the job's end."""

    @sync
    def act(client: JobClient, status: JobView) -> None:
        ports = [port for ports in workers(job.home).values() for port in ports[:2]]
        if (where := read_endpoint(job.dir)) is not None:
            ports.append(where.port)
        job.flooding.send(ports)

    return [Deed(act)]


def ledger_damaged(job: Job) -> list[Deed]:
    """The next coordinator finds a ledger that it cannot read, and waits until it is put right. Training goes on meanwhile."""
    whole: list[bytes] = []

    @sync
    def damage(client: JobClient, status: JobView) -> None:
        assert job.launcher is not None
        if (pid := job.pid_of("coordinator")) is None:
            return
        os.kill(job.launcher.pid, signal.SIGSTOP)  # it must not start another one before the file is damaged
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        signal_when_gone(handle)
        with (job.dir / "job.sqlite").open("r+b") as file:
            whole.append(file.read(100))
            file.seek(0)
            file.write(bytes(100))
        os.kill(job.launcher.pid, signal.SIGCONT)
        # Nobody tells of steps while there is no coordinator, so it is put right here.
        time_to_find_it = 2.0
        select.select([], [], [], time_to_find_it)
        with (job.dir / "job.sqlite").open("r+b") as file:
            file.write(whole[0])

    return [Deed(damage)]


def drained(job: Job) -> list[Deed]:
    return [Deed(drain(job.rng.randrange(5)))]


def resized(job: Job) -> list[Deed]:
    return [Deed(resize(job.rng.randint(2, 5)))]


INJECTED = [kind for kind in FaultKind if kind is not FaultKind.FLIP_BIT]
"""A flipped bit is found within some steps, not undone: `test_flipped_bits.py`."""
FREE = {FaultKind.SLOW, FaultKind.PREEMPT_NODE}
"""No failures: nothing was lost."""

KINDS: dict[str, Kind] = {
    **{str(k): Kind(injected(k), int(k not in FREE), once=k in MACHINE_FAULTS) for k in INJECTED},
    "fault in recovery": Kind(in_recovery, 2),
    "worker SIGKILL": Kind(signalled("worker", signal.SIGKILL), 1),
    "worker SIGTERM": Kind(signalled("worker", signal.SIGTERM), 1),
    "worker SIGSTOP": Kind(signalled("worker", signal.SIGSTOP), 1),
    "agent SIGKILL": Kind(signalled("agent", signal.SIGKILL), 1),
    "agent SIGTERM": Kind(signalled("agent", signal.SIGTERM), 0),
    "agent SIGSTOP": Kind(agent_stopped, 1),
    "coordinator SIGKILL": Kind(signalled("coordinator", signal.SIGKILL), 1),
    "coordinator SIGTERM": Kind(signalled("coordinator", signal.SIGTERM), 0),
    "coordinator SIGSTOP": Kind(signalled("coordinator", signal.SIGSTOP), 1),
    "fork server SIGKILL": Kind(signalled("fork server", signal.SIGKILL), 0),
    "suspended": Kind(suspended, 0),
    "full disk": Kind(disk_full, 1),
    "deleted files": Kind(files_deleted, 1),
    "coordinator without descriptors": Kind(no_descriptors("coordinator"), 0),
    "agent without descriptors": Kind(no_descriptors("agent"), 0),
    "launcher without descriptors": Kind(no_descriptors("launcher"), 0),
    "torn connection": Kind(cut, 0),
    "flood": Kind(flooded, 0, once=True),
    "damaged ledger": Kind(ledger_damaged, 1),
    "drain": Kind(drained, 0),
    "resize": Kind(resized, 0, elastic=True),
}
ONLY_ROOT = {"full disk", "torn connection", "flood"}
"""They mount, look into the kernel's sockets, and act as another user."""

ENDS = ("kill everything", "launcher SIGKILL", "Ctrl-C")
"""What ends a start of the job before it is finished."""
DAMAGE = (
    "nothing",
    "memory lost",
    "slot flipped",
    "checkpoint flipped",
    "manifest flipped",
    "manifest cut",
    "ledger lost",
)
"""What happens to what is left of a job whose processes were all killed."""
DAMAGED = {"slot flipped", "checkpoint flipped", "manifest flipped"}
"""What is only found as it is loaded costs the next start an incident."""


def named(name: str, job: Job, deeds: list[Deed]) -> list[Deed]:
    """The same deeds, of which the first begins only where it may, and says that it was done."""
    first, *rest = deeds
    last_begin = job.script.steps - job.script.over

    async def act(client: JobClient, status: JobView) -> None:
        job.done.append(name)
        await first.do(client, status)

    begin = Deed(
        act,
        job.rng.randint(*job.script.gap),
        job.script.world,
        lambda status: first.when(status) and status.step < last_begin,
    )
    return [begin, *rest]


def draw(job: Job, count: int, used: set[str]) -> list[Deed]:
    """So many faults. used: those that come once in a job, and have been."""
    names = []
    for _ in range(count):
        may = [
            name
            for name, kind in KINDS.items()
            if name not in used
            and (kind.elastic is None or kind.elastic == (job.script.world is None))
            and (ROOT or name not in ONLY_ROOT)
        ]
        names.append(job.rng.choice(may))
        if KINDS[names[-1]].once:
            used |= {names[-1]} | (
                set(map(str, MACHINE_FAULTS)) if names[-1] in set(MACHINE_FAULTS) else set()
            )
    return [deed for name in names for deed in named(name, job, KINDS[name].make(job))]


def end_of_start(job: Job, how: str) -> Deed:
    async def act(client: JobClient, status: JobView) -> None:
        assert job.launcher is not None
        if how == "kill everything":
            await kill_everything(job.home)(client, status)
        else:
            job.launcher.send_signal(signal.SIGKILL if how == "launcher SIGKILL" else signal.SIGINT)

    return Deed(act)


def damage(job: Job, what: str) -> int:
    """Does something to what a killed job left; returns the oldest step from which it may go on."""
    archive = Archive(str(job.tier))
    with closing(Store(job.dir / "job.sqlite", read_only=True)) as store:
        told = [e.fields for e in store.events() if e.kind == "snapshot"]
    on_disk = archive.steps()
    in_memory = max((f["step"] for f in told if f["nodes"] > 1), default=0)
    newest = max([0, *on_disk])
    match what:
        case "memory lost":
            remove_memory_of(job.home)
            return newest
        case "slot flipped":
            for slot in newest_slots(job.home)[:1]:
                flip(slot, job.rng.randrange(slot.stat().st_size))
        case "checkpoint flipped" | "manifest flipped" | "manifest cut":
            remove_memory_of(job.home)
            if len(on_disk) < 2:
                return newest
            manifest = archive.manifest(newest)
            path = archive.tier.folder / manifest.shards[0].blob.name
            if what != "checkpoint flipped":
                path = next(path.parent.glob("*manifest*"))
            if what == "manifest cut":
                os.truncate(path, job.rng.randrange(path.stat().st_size))
            else:
                with path.open("rb") as file:
                    header = 8 + int.from_bytes(file.read(8), "little")
                flip(path, job.rng.randrange(header, path.stat().st_size))
            return on_disk[-2]
        case "ledger lost":
            for path in job.dir.glob("job.sqlite*"):
                path.unlink()
        case _:
            pass
    return max(newest, in_memory)


def play(job: Job, deeds: list[Deed], options: list[object], timeout: float) -> tuple[Ran, bool]:
    """One start of the job, and whether all was done."""
    job.launcher = start(job.home, *options, *job.script.arguments)
    wait_for(job.launcher, "waiting for nodes")
    with Driver(job.dir, deeds) as driver:
        try:
            output, _ = job.launcher.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            state = {pid: command[:100] for pid, command in leftovers(job.home).items()}
            os.killpg(job.launcher.pid, signal.SIGKILL)
            end_leftovers(job.home)
            output, _ = job.launcher.communicate()
            job.outputs.append(output)
            raise AssertionError(f"the job did not end within {timeout:g} s; there were {state}") from None
        job.outputs.append(output)
        left = held(job.home) if job.launcher.returncode < 0 else []
        for handle in left:
            signal_when_gone(handle)
    return ended(job.launcher, job.home, "job", output), not driver.left


def curve(ran: Ran) -> dict[int, float]:
    return dict(zip(ran.steps(), ran.losses(), strict=True))


def check(job: Job, ran: Ran) -> None:
    """What every start has to keep, and what the last one has to have come to."""
    expected = curve(job.undisturbed)
    wrong = [step for step, loss in curve(ran).items() if expected[step] != loss]
    assert not wrong, f"other losses from step {wrong[0]} on"


def keep_if_failed(job: Job, error: type[BaseException] | None, *rest: object) -> None:
    """Beside the file system, which goes: what a person needs to see what was."""
    if error is not None:
        end_leftovers(job.home)
        shutil.copytree(
            job.dir, job.home / "kept", ignore=shutil.ignore_patterns("checkpoint"), symlinks=True
        )
        (job.home / "kept" / "output").write_text("\n======== next start\n".join(job.outputs))


def disturb(job: Job, ends: list[tuple[str, str]], count: int) -> Ran:
    """Runs a job to its end through faults that are drawn. ends: how each start before the last one ends, and what is damaged
    then; count: faults in each start."""
    detection = job.rng.choice((1, 2))
    # A worker that stands still in its first step, which may compile, is given as long as a start may take.
    timeout = Timing(detection_s=detection).start_s + JOB_S
    options = [*job.script.options(), "--detection", detection, "--snapshot-every", EVERY]
    options += ["--checkpoint", f"{job.tier},every={2 * EVERY},keep=5"]
    used: set[str] = set()
    at_least = unreadable = 0
    with ExitStack() as stack:
        if ROOT:
            job.disk = Disk(job.home / "jobs")
            job.disk.path.mkdir()
            assert job.disk.mount()
            stack.callback(subprocess.run, ["umount", "-l", str(job.disk.path)], check=True)
            stack.push(partial(keep_if_failed, job))
            # Begun here: a fork in a process with threads is none.
            job.flooding = stack.enter_context(stranger(flood))
        for how, what in [*ends, ("", "")]:
            before = len(job.done)
            deeds = draw(job, count, used)
            if how:
                deeds += named(f"{how}, {what}" if how == ENDS[0] else how, job, [end_of_start(job, how)])
            ran, all_done = play(job, deeds, options, timeout)
            check(job, ran)
            steps = ran.steps()
            assert not steps or steps[0] >= at_least, f"it went on from step {steps[0]}, not {at_least}"
            if how and all_done and ran.code not in (0, EXIT_STOPPED):
                assert ran.code == -signal.SIGKILL, f"exit code {ran.code}"
                at_least = damage(job, what if how == ENDS[0] else "nothing")
                unreadable = int(how == ENDS[0] and what in DAMAGED)
                continue
            stopped = ran.report.get("outcome") == "stopped"
            assert ran.code == (EXIT_STOPPED if stopped else 0), (
                f"exit code {ran.code}: {ran.report.get('reason')}"
            )
            struck = job.done[before:]
            allowed = unreadable + sum(KINDS[name].incidents for name in struck if name in KINDS)
            causes = [incident["cause"] for incident in ran.report["incidents"]]
            assert len(causes) <= allowed, f"{len(causes)} incidents, where {allowed} may be: {causes}"
            lost = 0 if job.script.world else 2 * EVERY * len(struck)
            assert ran.report["steps"]["lost"] <= lost, f"{ran.report['steps']['lost']} steps lost"
            if stopped:
                assert how == "Ctrl-C", ran.report["reason"]
                at_least, unreadable = ran.report["steps"]["committed"], 0
                continue
            assert ran.report["outcome"] == "finished", ran.report["outcome"]
            assert steps == list(range(steps[0], job.script.steps)), "not every step is in the ledger"
            assert ran.report["final"]["params_xxh3"] == job.undisturbed.report["final"]["params_xxh3"]
            break
        assert not memory_of(job.home), "snapshot memory is left behind"
    return ran


def drawn(seed: str, home: Path, scripts: list[tuple[Script, Ran]], count: int = 8) -> Job:
    """Runs the job that follows from a seed."""
    rng = random.Random(seed)
    script, undisturbed = rng.choice(scripts)
    ends = [(rng.choice(ENDS), rng.choice(DAMAGE)) for _ in range(rng.choice((0, 0, 1, 2)))]
    job = Job(home, script, rng, undisturbed)
    try:
        disturb(job, ends, max(1, count // (len(ends) + 1)))
    except BaseException as error:
        error.add_note(f"seed {seed}, {script.name}, of the ends {ends}; struck: {job.done}")
        raise
    finally:
        end_started()
        end_leftovers(home)
    return job


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="no job begins later than so long after the first"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of everything that is drawn")
    parser.add_argument("--only", type=int, help="the number of one job of the seed, instead of all")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    failed: list[int] = []
    # Registered first, so done last: the process that forks is in there.
    atexit.register(lambda: failed or shutil.rmtree(root))
    temporary = root / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    scripts = []
    for script in (fixed(), elastic()):
        home = root / script.name
        home.mkdir()
        ran = run(
            home, "--nnodes", script.world or 1, *script.arguments[:2]
        )  # nobody waits for a device here
        assert ran.code == 0, ran.output
        scripts.append((script, ran))
    before = set(temporary.iterdir())
    until, struck = time.monotonic() + given.seconds, Counter[str]()
    number = given.only if given.only is not None else 1
    while given.only in (None, number) and (given.only or time.monotonic() < until):
        home, began = root / str(number), time.monotonic()
        home.mkdir()
        try:
            job = drawn(f"{given.seed}/{number}", home, scripts)
            left = set(temporary.iterdir()) - before
            before |= left
            assert not left, f"temporary files are left behind: {left}"
        except Exception:
            failed.append(number)
            print(f"job {number} FAILED; {home} has what it left", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            shutil.rmtree(home)
            struck.update(job.done)
            took = time.monotonic() - began
            print(f"job {number}: {job.script.name}, {took:.0f} s, {', '.join(job.done)}", flush=True)
        number += 1
    print(
        f"seed {given.seed}: {number - (given.only or 1)} jobs, {struck.total()} faults, failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
