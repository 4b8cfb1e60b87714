"""Sharded replicas (FSDP2, HSDP, tensor parallelism): whatever is lost, losses and parameters are those of a run that
nobody disturbed, bit by bit, at one shard degree."""

import itertools
import random
import re

import pytest
from drive import Deed, Driver, Gate, drain, fault, kill_everything, newcomer, resize
from harness import HERE, ended, finish, run, shared, start, wait_for

SCRIPT = HERE / "train_sharded.py"
STEPS = 22
ELASTIC = ("--nnodes", "2:4")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """One replica of two workers, without a fault."""
    return shared(tmp_path_factory, "sharded", lambda home: run(home, "--nnodes", 2, SCRIPT, STEPS))


def check(ran, expected):
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert ran.losses() == expected.losses()
    assert ran.report["final"]["params_xxh3"] == expected.report["final"]["params_xxh3"]
    assert ran.report["final"]["replicas_equal"] is True


def faults(*specs):
    return [x for spec in specs for x in ("--fault", spec)]


def replaced(status):
    """Somebody new is here, or about to be."""
    return status.world == 4 or newcomer(status)


def formed(ran):
    return ran.fields("formed")


@pytest.mark.long
@pytest.mark.parametrize("phase", ["backward", pytest.param("vote", marks=pytest.mark.nightly)])
def test_a_lost_worker_costs_its_own_shard_only(tmp_path, undisturbed, phase):
    gate = Gate(tmp_path / "gate")  # or a slow machine would be done before the lost one is replaced
    specs = faults(f"kill-worker:rank=1,step=8,phase={phase}")
    process = start(tmp_path, *ELASTIC, *specs, SCRIPT, STEPS, "--gate", tmp_path / "gate")
    wait_for(process, "waiting for nodes")
    with Driver(tmp_path / "jobs" / "job", [Deed(gate.open(), 9, when=replaced)]) as driver:
        ran = finish(process, tmp_path)
    gate.close()
    assert not driver.left
    check(ran, undisturbed)
    first, *between, full = formed(ran)
    assert first["groups_connected_in"] == [1, 1]
    # None where the newcomer was ready before all survivors had left the step.
    for alone in between[:1]:
        assert (alone["world"], alone["groups_connected_in"]) == (
            2,
            [1],
        )  # the healthy replica's groups are the first ones still
        assert len(alone["workers"]) == 3  # the survivor of the other stays beside it
    # Of two replicas it is the second, until it trains alone. The groups of the other are new.
    healthy = 0 if between else 1
    assert (full["world"], full["groups_connected_in"][healthy]) == (4, 1)
    fetched = [worker for f in formed(ran)[1:] for worker in f["restore"]]
    assert len(fetched) == 1, fetched  # only the new one
    assert ran.report["steps"]["lost"] == 0


def averaged(ran):
    """What the workers that trained to the end hold of the average: one digest for every shard."""
    return {
        line for log in ran.job_dir.rglob("*.log") for line in re.findall(r"averaged: .*", log.read_text())
    }


@pytest.mark.long
def test_what_else_belongs_to_the_commit_is_done_on_every_shard_once(tmp_path, undisturbed):
    specs = faults("kill-worker:rank=1,step=8,phase=vote", "kill-worker:rank=0,step=14,phase=update")
    ran = run(tmp_path, *ELASTIC, *specs, SCRIPT, STEPS)
    check(ran, undisturbed)
    assert ran.report["steps"]["lost"] == 0
    assert len(averaged(undisturbed)) == 2
    assert averaged(ran) == averaged(undisturbed)


@pytest.mark.long
def test_two_replicas_that_lost_different_shards_become_one(tmp_path, undisturbed):
    both = faults("kill-worker:rank=1,step=8", "kill-worker:rank=2,step=8")
    ran = run(tmp_path, *ELASTIC, *both, SCRIPT, STEPS)
    check(ran, undisturbed)
    assert {f["source"] for f in formed(ran)[1:]} == {"live"}
    assert ran.report["steps"]["lost"] == 0


@pytest.mark.long
def test_a_shard_that_nobody_holds_comes_from_memory(tmp_path, undisturbed):
    """Plain FSDP: no other replica has it. A snapshot in every step, at a neighbour: at most one step is lost."""
    given = ("--nnodes", 2, "--spares", 1, "--snapshot-every", 1)
    ran = run(tmp_path, *given, *faults("kill-node:rank=1,step=12"), SCRIPT, STEPS)
    check(ran, undisturbed)
    assert "memory" in {f["source"] for f in formed(ran)}
    assert ran.report["steps"]["lost"] <= 1


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--bf16", "--checkpointing", "--hsdp", "--meta"),
        pytest.param(("--compile", "--reduction", "fast"), marks=pytest.mark.nightly),
        pytest.param(("--tensor", 2, "--shard", 1), marks=pytest.mark.nightly),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_what_composes_with_it(tmp_path, flags):
    """Undisturbed with as many replicas: a fast reduction depends on how many there are."""
    wait = ("--nnodes", 4, "--snapshot-every", 0)
    expected = run(tmp_path, *wait, SCRIPT, STEPS, *flags, job="expected")
    ran = run(tmp_path, *wait, *faults("kill-worker:rank=1,step=8"), SCRIPT, STEPS, *flags)
    check(ran, expected)
    if "--compile" in flags:  # a recovery compiles nothing
        for log in (ran.job_dir / "logs").glob("*/*.log"):
            graphs = [line.split()[-2] for line in log.read_text().splitlines() if "compiled:" in line]
            assert len(set(graphs[1:])) <= 1, log


@pytest.mark.nightly
def test_work_between_two_steps_uses_the_model(tmp_path, undisturbed):
    """Rank 1 dies in the middle of an evaluation; a worker that is beside the replicas takes part in another one."""
    ran = run(tmp_path, *ELASTIC, SCRIPT, STEPS, "--evaluate", "die")
    check(ran, undisturbed)
    said = [
        line
        for log in (ran.job_dir / "logs").glob("*/*.log")
        for line in log.read_text().splitlines()
        if line.startswith("evaluated: step 19")
    ]
    assert len(said) == 4 * 8
    whole = {line for line in said if ", -1," not in line}
    assert len({line.rsplit(", ", 1)[1] for line in whole}) == 1, whole


@pytest.mark.nightly
def test_another_sharding_at_a_restart(tmp_path, undisturbed):
    """The state is put together from other pieces; sums within a replica have another order, so the last bits differ."""
    for steps, nodes, flags in [
        (6, 4, ()),
        (10, 3, ("--shard", 3)),
        (13, 2, ("--shard", 1)),
        (17, 2, ("--shard", 1, "--tensor", 2)),
        (STEPS, 2, ()),
    ]:
        ran = run(tmp_path, "--nnodes", nodes, SCRIPT, steps, *flags)
        assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert ran.losses()[-1] == pytest.approx(undisturbed.losses()[-1], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_events_and_a_whole_job_kill_change_no_bit(tmp_path):
    """Replicas leave and come, a node is drained, the coordinator and everything are killed; then it goes on."""
    given = (*ELASTIC, "--spares", 1, "--snapshot-every", 5, "--detection", 1, SCRIPT, 160)
    first = [
        Deed(resize(2), 10, 4),
        Deed(resize(4), 10, 2),
        Deed(drain(1), 10, 4),
        Deed(fault("kill-worker:rank=2,phase=transfer"), 5, 4),
        Deed(fault("kill-coordinator"), 10, 4),
        Deed(fault("kill-node:rank=3"), 10, 4),
        Deed(kill_everything(tmp_path), 15, 4),
    ]
    losses: dict[int, float] = {}
    for deeds in (first, []):
        process = start(tmp_path, *given)
        wait_for(process, "waiting for nodes")
        with Driver(tmp_path / "jobs" / "job", deeds) as driver:
            output, _ = process.communicate(timeout=180)
        ran = ended(process, tmp_path, "job", output)
        assert not driver.left, ran.output[-3000:]
        for step, loss in zip(ran.steps(), ran.losses(), strict=True):
            assert losses.setdefault(step, loss) == loss, step
    alone = run(tmp_path, "--nnodes", 2, SCRIPT, 160, job="alone", timeout=120)
    assert losses == dict(zip(alone.steps(), alone.losses(), strict=True))
    assert ran.report["final"]["params_xxh3"] == alone.report["final"]["params_xxh3"]


@pytest.mark.nightly
@pytest.mark.parametrize("spec", ["kill-worker:rank=1,step=0", "kill-node:rank=3,step=0,phase=vote"])
def test_a_fault_in_the_first_step(tmp_path, undisturbed, spec):
    ran = run(tmp_path, *ELASTIC, *faults(spec), SCRIPT, STEPS)
    check(ran, undisturbed)


@pytest.mark.nightly
def test_a_newcomer_that_dies_while_it_fetches_its_shard(tmp_path, undisturbed):
    specs = faults("kill-worker:rank=1,step=8", "kill-worker:step=9,phase=transfer")
    ran = run(tmp_path, *ELASTIC, *specs, SCRIPT, STEPS)
    check(ran, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_random_faults_change_no_bit(tmp_path, undisturbed, seed):
    """Workers, nodes and the coordinator, in any phase, alone or two at once."""
    rng = random.Random(seed)
    print("seed", seed)
    kinds = ["kill-worker", "kill-worker", "kill-node", "stop-worker"]
    phases = ["forward", "backward", "reduce", "vote", "update", "commit", "transfer"]
    specs = []
    for step in sorted(rng.sample(range(2, STEPS - 4), 3)):
        for _ in range(rng.choice([1, 1, 2])):
            phase = f",phase={rng.choice(phases)}" if rng.random() < 0.7 else ""
            specs.append(f"{rng.choice(kinds)}:rank={rng.randrange(4)},step={step}{phase}")
    given = ("--nnodes", "2:4", "--spares", 1, "--snapshot-every", 1, "--max-restarts", 50, "--detection", 1)
    ran = run(tmp_path, *given, *faults(*specs), SCRIPT, STEPS, timeout=240)
    check(ran, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", list(itertools.combinations(range(4), 2)))
@pytest.mark.parametrize("phase", ["forward", "vote"])
def test_any_two_workers_at_once(tmp_path, undisturbed, pair, phase):
    """Of a job of 2 x 2: the same shard twice, one replica whole, or crosswise."""
    specs = [f"kill-worker:rank={rank},step=9,phase={phase}" for rank in pair]
    ran = run(tmp_path, *ELASTIC, "--snapshot-every", 1, *faults(*specs), SCRIPT, STEPS)
    check(ran, undisturbed)
