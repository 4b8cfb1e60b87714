"""The demonstration behind `make demo`: training that failures do not stop, and the proof that nothing was lost.

First short runs: one undisturbed, one in which a worker and a node are killed, and one of which everything is killed
at once and which goes on from a snapshot in memory. Their losses and final parameters must be equal to the bit. Then a
job that grows and shrinks between 1 and 4 nodes, is drained, struck and killed whole, in a random order: under the exact
reduction its curve must be that of one undisturbed worker. Last the main job, on 4 nodes and 1 spare, in which a node is
killed, a worker is stopped and the coordinator is killed. Everything is written below out/demo. The exit code is 1 if a
check fails.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "demo"
HOME = OUT / "home"
TRAIN = "examples/text/train.py"
CACHE = ("--cache", str(OUT / "text"))
ENVIRONMENT = os.environ | {"HOLDFAST_HOME": str(HOME)}

EXACT_STEPS = 60
EXACT = ("--nnodes", "2", "--spares", "1", "--wait-for-spare")
EXACT_MODEL = ("--dim", "96", "--layers", "2", "--heads", "4", "--seq-len", "64", "--global-batch", "16")
SNAPSHOT_EVERY = 10
EXACT_FAULTS = ("--fault", "kill-worker:rank=1,step=20", "--fault", "kill-node:rank=0,step=40")

ELASTIC = ("--nnodes", "1:4", "--snapshot-every", str(SNAPSHOT_EVERY), "--detection", "1")
ELASTIC_MODEL = ("--dim", "64", "--layers", "2", "--heads", "4", "--seq-len", "32", "--global-batch", "22")
ELASTIC_MODEL += (
    "--micro-batch",
    "2",
    "--reduction",
    "exact",
)  # 11 micro-batches, which 2, 3 and 4 do not divide
SIZES = ("1", "2", "3", "4", "2")
STRIKES = ("kill-worker", "kill-node", "kill-coordinator", "preempt-node", "drain")
SHORT_CALM_S = 0.7
LEAST_STEPS = 300

MAIN = ("--nnodes", "2:4", "--spares", "1")
MAIN_MODEL = ("--seq-len", "64", "--global-batch", "16", "--steps", "1000000")  # it is stopped long before
MAIN_FAULTS = ("kill-node:rank=1", "stop-worker:rank=2", "kill-coordinator")
CALM_S = 14.0
"""Training between two faults, so that the curve shows what each of them cost."""
LIMIT_S = 420.0
"""The main job is given up after this time."""
TRAININGS: list[subprocess.Popen[bytes]] = []
"""All that were started. None outlives the demonstration."""


def main() -> int:
    OUT.parent.mkdir(exist_ok=True)
    lock = (OUT.parent / "demo.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return fail("another demo is running in this folder; wait for its end")
    signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is for the job, which ends in order
    signal.signal(signal.SIGTERM, end)
    try:
        return demonstrate()
    finally:
        for training in TRAININGS:
            training.wait()


def end(number: int, frame: object) -> None:
    """Unlike Ctrl-C, SIGTERM reaches this process alone: it is passed on, and the job ends in order."""
    for training in TRAININGS:
        training.terminate()
    sys.exit(128 + number)


def demonstrate() -> int:
    """All of it; returns the exit code."""
    shutil.rmtree(OUT, ignore_errors=True)
    HOME.mkdir(parents=True)

    title("1. Two short runs, one with faults: are they equal to the bit?")
    exact = compare_runs()
    title("2. A third, of which every process is killed at once: does it go on where it was?")
    exact |= kill_everything()
    title("3. A job that grows, shrinks and is struck at random: is its curve that of one worker?")
    exact |= grow_and_shrink()
    title("4. The main job: 4 nodes and 1 spare; a node, a worker and the coordinator are struck")
    checks = exact | run_main_job()
    holdfast("report", "--job", "main", "--curve", str(OUT / "loss.png"), quiet=True)

    title("Checked")
    for words, good in checks.items():
        print(f"  {'ok    ' if good else 'FAILED'}  {words}")
    print(f"\nPictures: {OUT / 'loss.png'} (the main job), {OUT / 'exact.png'} (the two short runs)")
    print(f"Report:   {OUT / 'main.json'}")
    return 0 if all(checks.values()) else fail("not everything is as it should be, see above")


# ------------------------------------------------------------ the two short runs


def compare_runs() -> dict[str, bool]:
    """Runs the same training twice, with faults and without, and compares every bit that it reports."""
    script = (TRAIN, "--steps", str(EXACT_STEPS), *EXACT_MODEL, *CACHE)
    for job, faults in (("calm", ()), ("struck", EXACT_FAULTS)):
        run(job, *EXACT, *faults, *script).wait()
        if report(job)["outcome"] != "finished":
            sys.exit(fail(f"the short run {job!r} {report(job)['outcome']}, so there is nothing to compare"))
    calm, struck = losses("calm"), losses("struck")
    hashes = {job: report(job)["final"]["params_xxh3"] for job in ("calm", "struck")}
    incidents = report("struck")["incidents"]
    holdfast("report", "--job", "struck", "--curve", str(OUT / "exact.png"), "--baseline", "calm", quiet=True)
    return {
        f"short runs: {len(calm)} of {EXACT_STEPS} losses known, and bit-identical with and without faults": (
            len(calm) == EXACT_STEPS and calm == struck
        ),
        f"short runs: final parameters bit-identical (xxh3 {hashes['calm']} and {hashes['struck']})": (
            hashes["calm"] is not None and hashes["calm"] == hashes["struck"]
        ),
        f"short runs: {len(incidents)} incidents, all recovered": len(incidents) >= 2
        and recovered(incidents),
    }


def kill_everything() -> dict[str, bool]:
    """Kills launcher, coordinator, agents and workers after some snapshots, and starts the job again."""
    options = (*EXACT, "--snapshot-every", str(SNAPSHOT_EVERY))
    script = (TRAIN, "--steps", str(EXACT_STEPS), *EXACT_MODEL, *CACHE)
    training = run("killed", *options, *script)
    events = follow("killed", training)
    for _ in range(3):
        wait_for(events, "snapshot")
    kill_tree(training.pid)
    training.wait()
    done = max(losses("killed"), default=0)
    print(f"\nkilled after step {done}: everything at once; the same command again\n", flush=True)
    run("killed", *options, *script).wait()
    again, calm = losses("killed"), losses("calm")
    begin = min(again, default=0)
    lost = max(0, done + 1 - begin)
    same = {step: loss for step, loss in calm.items() if step >= begin}
    hashes = {job: report(job)["final"]["params_xxh3"] for job in ("calm", "killed")}
    return {
        f"killed whole: went on from step {begin}, {lost} steps lost (a snapshot every {SNAPSHOT_EVERY})": (
            begin > 0 and lost <= SNAPSHOT_EVERY
        ),
        "killed whole: losses from there and final parameters bit-identical to the undisturbed run": (
            again == same and hashes["calm"] is not None and hashes["calm"] == hashes["killed"]
        ),
    }


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that descend from it, stopped first, so that none sees another one's end."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text[text.rindex(")") + 2 :].split()[1])
    tree, before = {pid}, 0
    while len(tree) > before:
        before = len(tree)
        tree |= {child for child, parent in parents.items() if parent in tree}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for one in tree:
            try:
                os.kill(one, number)
            except ProcessLookupError:
                continue


def losses(job: str) -> dict[int, float]:
    """Every committed step's loss, from the job's ledger."""
    with sqlite3.connect(f"file:{HOME}/jobs/{job}/job.sqlite?mode=ro", uri=True) as ledger:
        return dict(ledger.execute("select step, loss from steps order by step"))


# ------------------------------------------------------------ any number of workers


def grow_and_shrink() -> dict[str, bool]:
    """Resizes, drains, faults and a kill of everything in a random order, then one worker over the same steps."""
    seed = int(os.environ.get("HOLDFAST_SEED") or time.time())
    print(f"HOLDFAST_SEED={seed} make demo   does these things in the same order again\n", flush=True)
    rng = random.Random(seed)
    deeds = [("resize", size) for size in SIZES] + [("strike", kind) for kind in STRIKES]
    rng.shuffle(deeds)
    script = (TRAIN, "--steps", "1000000", *ELASTIC_MODEL, *CACHE)
    half = len(deeds) // 2
    training = run("elastic", *ELASTIC, *script)
    do_all(training, deeds[:half])
    kill_tree(training.pid)
    training.wait()
    known, sizes = losses("elastic"), worlds("elastic")
    print("\nkilled: everything at once; the same command again\n", flush=True)
    training = run("elastic", *ELASTIC, *script)
    do_all(training, deeds[half:], until=LEAST_STEPS)
    holdfast("stop", "--job", "elastic", quiet=True)
    training.wait()
    steps = report("elastic")["steps"]["committed"]
    run("one", "--nnodes", "1", TRAIN, "--steps", str(steps), *ELASTIC_MODEL, *CACHE).wait()
    one, other = losses("one"), [s for part in (known, losses("elastic")) for s in part.items()]
    hashes = {job: report(job)["final"]["params_xxh3"] for job in ("one", "elastic")}
    sizes = sorted(sizes | worlds("elastic"))
    return {
        f"elastic: {steps} steps through {len(deeds)} events and a kill of everything, with {sizes} workers": (
            steps >= LEAST_STEPS and len(one) == steps
        ),
        "elastic: every loss bit-identical to that of one undisturbed worker": (
            len(other) > 0 and all(one.get(step) == loss for step, loss in other)
        ),
        f"elastic: final parameters bit-identical (xxh3 {hashes['one']} and {hashes['elastic']})": (
            hashes["one"] is not None and hashes["one"] == hashes["elastic"]
        ),
    }


def worlds(job: str) -> set[int]:
    """The numbers of workers that computed its steps, from the job's ledger."""
    with sqlite3.connect(f"file:{HOME}/jobs/{job}/job.sqlite?mode=ro", uri=True) as ledger:
        return {world for (world,) in ledger.execute("select distinct world from steps")}


def do_all(training: subprocess.Popen[bytes], deeds: list[tuple[str, str]], until: int = 0) -> None:
    """One deed after the other, each when what the one before it did is over. until: steps that the job has at the end, however
    slow the machine is."""
    watchdog = threading.Timer(LIMIT_S, training.terminate)
    watchdog.daemon = True  # a demonstration that is ended does not wait for it
    watchdog.start()
    events = follow("elastic", training)
    wait_for(events, "formed")
    size = "4"
    for deed, what in deeds:
        time.sleep(SHORT_CALM_S)
        if deed == "resize":
            if what != size:
                size = what
                holdfast("resize", what, "--job", "elastic", quiet=True)
                wait_for(events, "changed", to_world=int(what))
        elif what == "drain":
            holdfast("drain", a_member("elastic"), "--job", "elastic", quiet=True)
            wait_for(events, "node-left")
        else:
            kind = "kill-worker" if what == "kill-node" and size == "1" else what
            holdfast("fault", kind, "--job", "elastic", quiet=True)
            wait_for(events, "node-left" if what == "preempt-node" else "incident-closed")
    time.sleep(SHORT_CALM_S)
    while until and training.poll() is None and status_of("elastic")["step"] < until:
        time.sleep(SHORT_CALM_S)
    watchdog.cancel()


def a_member(job: str) -> str:
    """The node of rank 0."""
    node: str = next(w["node"] for w in status_of(job)["workers"] if w["rank"] == 0)
    return node


def status_of(job: str) -> dict[str, Any]:
    """What `holdfast status` says."""
    command = [sys.executable, "-P", "-m", "holdfast.cli", "status", "--job", job, "--json"]
    said = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(said.stdout)
    return found


# ------------------------------------------------------------ the main job


def run_main_job() -> dict[str, bool]:
    """Trains, strikes, waits for the recovery, trains on, and stops after the last one."""
    training = run("main", *MAIN, TRAIN, *MAIN_MODEL, *CACHE)
    watchdog = threading.Timer(LIMIT_S, training.terminate)
    watchdog.daemon = True  # a demonstration that is ended does not wait for it
    watchdog.start()
    try:
        strike_and_stop(training)
    finally:
        training.wait()
        watchdog.cancel()
    ended = report("main")
    incidents = ended["incidents"]
    kinds = [(i["fault"] or "").partition(":")[0] for i in incidents]
    missing = [f for f in MAIN_FAULTS if f.partition(":")[0] not in kinds]
    return {
        f"main job: ended as asked ({ended['outcome']})": ended["outcome"] == "stopped",
        f"main job: every fault became an incident{' but ' + ', '.join(missing) if missing else ''}": not missing,
        f"main job: {len(incidents)} incidents, all back at full strength": recovered(incidents),
        f"main job: {ended['steps']['lost']} committed steps lost": ended["steps"]["lost"] == 0,
        f"main job: all replicas hold bit-equal parameters (xxh3 {ended['final']['params_xxh3']})": (
            ended["final"]["replicas_equal"] is True
        ),
    }


def strike_and_stop(training: subprocess.Popen[bytes]) -> None:
    """What a person would do in another terminal."""
    events = follow("main", training)
    wait_for(events, "formed")
    for fault in MAIN_FAULTS:
        time.sleep(CALM_S)
        if holdfast("fault", fault, "--job", "main", quiet=True) != 0:
            return
        wait_for(events, "incident-closed", fault)
    time.sleep(CALM_S)
    holdfast("stop", "--job", "main", quiet=True)


def wait_for(events: Iterator[dict[str, Any]], kind: str, fault: str = "", **fields: object) -> None:
    """Reads on to the next event of a kind, with these fields; returns early when the job ends."""
    for event in events:
        found = event["fields"]
        struck = str(found.get("fault") or "").startswith(fault.partition(":")[0])
        if event["kind"] == kind and struck and all(found[name] == value for name, value in fields.items()):
            return


def follow(job: str, training: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The job's events as they happen, until it ends."""
    began_s, address = time.time(), HOME / "jobs" / job / "coordinator.json"
    while not address.exists() or address.stat().st_mtime < began_s:  # an older one is of the run before
        if training.poll() is not None:
            return
        time.sleep(0.1)
    command = [sys.executable, "-P", "-m", "holdfast.cli", "events", "--job", job, "--follow", "--json"]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


# ------------------------------------------------------------ for both


def run(job: str, *args: str) -> subprocess.Popen[bytes]:
    """Starts `holdfast run`; its view and its report go to this terminal."""
    written = OUT / f"{job}.json"
    command = ["run", "--job", job, "--report", str(written), *args]
    print(f"$ holdfast {' '.join(arg.replace(str(ROOT) + '/', '') for arg in command)}", flush=True)
    training = subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.cli", *command], env=ENVIRONMENT, cwd=ROOT
    )
    TRAININGS.append(training)
    return training


def report(job: str) -> dict[str, Any]:
    """What `--report` wrote."""
    path = OUT / f"{job}.json"
    if not path.exists():
        sys.exit(fail(f"the job {job} left no report; see its output above"))
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def recovered(incidents: list[dict[str, Any]]) -> bool:
    """Training went on after each of them, at last at full strength."""
    return all(i["stall_s"] is not None and i["full_strength_s"] is not None for i in incidents)


def holdfast(*args: str, quiet: bool = False) -> int:
    """Any other command; what it says is shown if it fails."""
    command = [sys.executable, "-P", "-m", "holdfast.cli", *args]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=quiet, text=True, check=False)
    if done.returncode != 0 and quiet:
        print(f"holdfast {args[0]}: {done.stderr.strip()}", file=sys.stderr)
    return done.returncode


def title(words: str) -> None:
    print(f"\n=== {words}\n", flush=True)


def fail(words: str) -> int:
    print(f"\ndemo: {words}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
