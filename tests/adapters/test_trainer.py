"""Hugging Face's Trainer at level 2: what it computes is what one undisturbed process computes, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ends import LIMIT_S, by_itself, ends
from harness import Ran, run
from killed import killed_and_gone_on, train
from resized import check, sizes, smaller_and_whole_again
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from holdfast.adapters.huggingface.progress import TrainerProgress

SCRIPT = Path(__file__).parent / "train_trainer.py"
TRL = SCRIPT.with_name("train_trl.py")
STEPS = 18
"""Of train_trainer.py: 96 samples, 16 of them in a step, 3 times."""

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("transformers")]


def alone(folder: Path, *options: str) -> dict:
    """By one process, which computes all micro-batches of a step."""
    return by_itself(folder, SCRIPT, folder, "--accumulate", 4, *options)


def in_a_job(
    home: Path,
    *options: object,
    nodes: str = "2",
    script: tuple[str, ...] = (),
    worlds: tuple[int, ...] = (2,),
) -> list[dict]:
    """By two workers. worlds: the sizes that the job begins with."""
    ran = run(home, "--nnodes", nodes, *options, SCRIPT, home / "out", *script, timeout=LIMIT_S)
    check(ran, *worlds)
    return ends(home / "out")


def without_counts(end: dict) -> dict:
    return {name: value for name, value in end.items() if name not in ("ended", "epochs", "saves")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    return alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.long
@pytest.mark.capability("level 2", "kill")
def test_a_killed_worker_changes_nothing(tmp_path, undisturbed):
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", "kill-worker:rank=0,step=8")
    assert [without_counts(end) for end in ended] == 2 * [without_counts(undisturbed)]
    first, second = sorted((end["ended"] for end in ended), key=len)
    assert second == [*range(1, STEPS + 1)]  # the survivor's callbacks: each step once
    assert first == second[-len(first) :]  # the newcomer's: every step from where it came in
    assert 0 < len(first) < STEPS
    assert [end["saves"] for end in ended].count(True) == 1


@pytest.mark.capability("level 2")
def test_what_is_trained_is_what_the_trainer_counts(undisturbed):
    assert undisturbed["steps"] == STEPS
    assert undisturbed["seen"] == STEPS * 16  # without what the evaluations saw
    assert undisturbed["ended"] == [*range(1, STEPS + 1)]
    assert undisturbed["epochs"] == [1.0, 2.0, 3.0]
    logged = [logs["step"] for logs in undisturbed["history"] if "loss" in logs]
    assert logged == [3, 6, 9, 12, 15, 18]
    assert [logs["step"] for logs in undisturbed["history"] if "eval_loss" in logs] == [6, 12, 18]
    losses = [logs["loss"] for logs in undisturbed["history"] if "loss" in logs]
    assert losses[-1] < losses[0]


@pytest.mark.nightly
@pytest.mark.capability("level 2")
@pytest.mark.parametrize("step", [5, 6, 7])
def test_an_update_that_fails_on_one_worker(tmp_path, undisturbed, step):
    """It fetches the state of the commit from the other, and does what follows the step as if it had updated itself."""
    ended = in_a_job(tmp_path, script=("--broken", str(step)))
    assert [{**end, "saves": True} for end in ended] == [undisturbed, undisturbed]


@pytest.mark.nightly
@pytest.mark.capability("level 2")
def test_the_last_update_fails_on_one_worker(tmp_path, undisturbed):
    """The other one has the result, and the job may end with it."""
    ended = in_a_job(tmp_path, script=("--broken", str(STEPS)))
    assert ended
    assert all({**end, "saves": True} == undisturbed for end in ended)


@pytest.mark.nightly
@pytest.mark.capability("kill")
def test_a_survivor_that_goes_back_to_a_snapshot(tmp_path, undisturbed):
    """Of an epoch before: the other worker, which alone had the newest state, is lost in the same step."""
    options = ("--spares", 1, "--snapshot-every", 4, "--fault", "kill-worker:rank=0,step=7,phase=commit")
    ended = in_a_job(tmp_path, *options, script=("--broken", "8"))
    assert [without_counts(end) for end in ended] == 2 * [without_counts(undisturbed)]


@pytest.mark.nightly
@pytest.mark.capability("kill")
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "vote", "update", "commit"])
def test_a_kill_in_any_phase(tmp_path, undisturbed, phase):
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", f"kill-worker:rank=1,step=7,phase={phase}")
    assert [without_counts(end) for end in ended] == 2 * [without_counts(undisturbed)]


@pytest.mark.nightly
@pytest.mark.capability("resize")
def test_a_job_that_gets_smaller(tmp_path, undisturbed):
    ended = in_a_job(tmp_path, "--fault", "kill-node:node=1,step=5", nodes="1:2", worlds=(2, 1))
    assert {json.dumps(without_counts(end)) for end in ended} == {json.dumps(without_counts(undisturbed))}


@pytest.mark.nightly
@pytest.mark.capability("resize")
def test_a_job_that_gets_smaller_and_whole_again(tmp_path, monkeypatch, undisturbed):
    smaller_and_whole_again(tmp_path, monkeypatch, SCRIPT, tmp_path / "out")
    ended = ends(tmp_path / "out")
    assert [without_counts(end) for end in ended] == 2 * [without_counts(undisturbed)]
    newcomer, survivor = sorted((end["ended"] for end in ended), key=len)
    assert survivor == [*range(1, STEPS + 1)]
    assert newcomer == survivor[-len(newcomer) :]


@pytest.mark.nightly
@pytest.mark.capability("kill")
def test_early_stopping_counts_through_a_kill(tmp_path):
    wanted = alone(tmp_path / "alone", "--patience", "1", "--epochs", "8")
    assert wanted["steps"] < 8 * 6
    ended = in_a_job(
        tmp_path,
        "--spares",
        1,
        "--fault",
        "kill-worker:rank=0,step=10",
        script=("--patience", "1", "--epochs", "8"),
    )
    assert [without_counts(end) for end in ended] == 2 * [without_counts(wanted)]


@pytest.mark.nightly
@pytest.mark.capability("level 2", "kill")
def test_a_users_own_loss(tmp_path):
    wanted = alone(tmp_path / "alone", "--own-loss")
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", "kill-worker:rank=1,step=4", script=("--own-loss",))
    assert [without_counts(end) for end in ended] == 2 * [without_counts(wanted)]


@pytest.mark.nightly
@pytest.mark.capability("level 2", "kill")
def test_label_smoothing_and_noise_in_the_embeddings(tmp_path):
    wanted = alone(tmp_path / "alone", "--noise")
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", "kill-worker:rank=1,step=4", script=("--noise",))
    assert [without_counts(end) for end in ended] == 2 * [without_counts(wanted)]


@pytest.mark.nightly
@pytest.mark.capability("level 2", "kill")
def test_a_tracker_gets_each_log_once_though_rank_0_is_killed(tmp_path, monkeypatch, undisturbed):
    """By `report_to`: the worker that becomes rank 0 begins a run of its own, and goes on where the other one was."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    fault = ("--fault", "kill-worker:rank=0,step=8")
    ended = in_a_job(tmp_path, "--spares", 1, *fault, script=("--report-to", "tensorboard"))
    assert [without_counts(end) for end in ended] == 2 * [without_counts(undisturbed)]
    told = []
    for file in (tmp_path / "runs").rglob("*tfevents*"):
        events = EventAccumulator(str(file)).Reload()
        if "train/loss" in events.Tags()["scalars"]:
            told += [(event.step, event.value) for event in events.Scalars("train/loss")]
    logged = [(logs["step"], logs["loss"]) for logs in undisturbed["history"] if "loss" in logs]
    assert sorted(told) == [(step, pytest.approx(loss)) for step, loss in logged]


@pytest.mark.nightly
@pytest.mark.framework("trl")
@pytest.mark.capability("level 2", "kill")
@pytest.mark.parametrize("kind", ["sft", "dpo", "dpo-reference"])
def test_trl_with_an_adapter_of_peft(tmp_path, kind):
    """make adapters-test installs TRL and PEFT."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    wanted = by_itself(tmp_path / "alone", TRL, tmp_path / "alone", "level-2", kind, 4)
    ran = trl_job(tmp_path, "--nnodes", 2, "--spares", 1, "--fault", "kill-worker:rank=1,step=3", kind=kind)
    assert ends(tmp_path / "out") == 2 * [wanted]
    if kind == "sft":  # with the end of each text, twice: the job's, and of each step once
        assert wanted["num_tokens"] == 2 * sum(5 + i % 7 + 1 for i in range(64))
    # What is trained and Adam's two moments of it: neither the base under an adapter nor a reference model.
    assert ran.fields("snapshot")[-1]["nbytes"] < 3 * wanted["trained_bytes"] + 1000


@pytest.mark.nightly
@pytest.mark.framework("trl")
@pytest.mark.capability("resize")
def test_a_job_of_trl_that_gets_smaller(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    wanted = by_itself(tmp_path / "alone", TRL, tmp_path / "alone", "level-2", "sft", 4)
    ran = trl_job(tmp_path, "--nnodes", "1:2", "--fault", "kill-node:node=1,step=3", kind="sft")
    assert sizes(ran) == [2, 1]
    assert ends(tmp_path / "out") == [wanted]


@pytest.mark.nightly
@pytest.mark.framework("trl")
@pytest.mark.capability("level 1")
def test_trl_goes_on_from_a_snapshot(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    assert train(TRL, tmp_path / "alone", 0, "sft", 4) == 0
    (wanted,) = ends(tmp_path / "alone")
    (again,) = killed_and_gone_on(TRL, tmp_path / "killed", 5, "sft", 4)
    # The mean of the loss is over the steps of this process, also with a checkpoint of the Trainer's own. So are the tokens.
    assert {**again, "loss": wanted["loss"], "num_tokens": wanted["num_tokens"]} == wanted


def trl_job(home: Path, *options: object, kind: str) -> Ran:
    ran = run(home, *options, TRL, home / "out", "level-2", kind, 2, timeout=LIMIT_S)
    check(ran)
    return ran


def test_what_a_worker_logs_of_its_own_samples_is_no_part_of_the_state():
    """Else replicas would differ that are equal, and the copies of a snapshot with them (TRL logs its rewards so)."""
    logs = {
        "loss": 0.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "epoch": 0.5,
        "rewards/chosen": 0.1,
        "step": 4,
    }
    evaluated = {"eval_loss": 0.4, "eval_runtime": 1.5, "eval_samples_per_second": 9.0, "step": 4}
    state = SimpleNamespace(
        epoch=0.5, global_step=4, best_metric=None, best_global_step=0, log_history=[logs, evaluated]
    )
    trainer = SimpleNamespace(
        state=state,
        _tr_loss=0.0,
        _total_loss_scalar=0.0,
        _globalstep_last_logged=4,
        control=None,
        callback_handler=SimpleNamespace(callbacks=[]),
    )
    assert TrainerProgress(trainer).state_dict()["history"] == [
        {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": 0.5, "step": 4},
        {"eval_loss": 0.4, "step": 4},
    ]
