"""The same scripts converted to level 2, against the unconverted ones, which get the samples and the random numbers of a job.

What both print is the same to the last digit, hashes of the weights included: a job of one adds up in the order of the script,
and two workers in that of DDP. A kill changes none of it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from dealt import dealing, execute
from harness import run
from test_real_scripts import HERE, LONG_S, by_rank, by_torchrun, place

pytestmark = pytest.mark.timeout(5 * LONG_S)
RANKS = 2
LONG = pytest.mark.long


@dataclass(frozen=True)
class Pair:
    """A script and its conversion, which has the same name in another folder.

    accumulate: micro-batches of a step, by the number of ranks. how: see `dealing`. plain, both: arguments. says_ranks: the
    conversion is told for how many its global batch is.
    """

    script: str
    seed: int
    micro_batch: int
    accumulate: dict[int, int]
    how: str = "loads"
    plain: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    says_ranks: bool = False

    def dealt(self, ranks: int) -> tuple[int, int, int, str]:
        return self.seed, self.micro_batch, self.accumulate[ranks], self.how

    def unconverted(self) -> tuple[str, ...]:
        return (*self.plain, *self.both)

    def converted(self, ranks: int) -> list[str]:
        return [f"converted/{self.script}", *self.both, *(["--ranks", str(ranks)] if self.says_ranks else [])]


CHARACTERS = Pair("character_model.py", 1337, 4, {1: 4, 2: 2}, how="randint")
IMAGES = Pair("image_classifier.py", 7, 8, {1: 1, 2: 1}, plain=("--workers", "0"), says_ranks=True)
ACCELERATED = Pair("run_clm_no_trainer.py", 4, 4, {1: 2, 2: 2}, both=("--rows", "64"))
SHARDED = Pair("sharded_model.py", 100, 8, {2: 1}, how="randn", plain=("dcp",))
NAMES = {"ids": lambda given: given.script if isinstance(given, Pair) else None}


def plainly(folder: Path, pair: Pair) -> dict[str, list[str]]:
    how = map(str, pair.dealt(RANKS))
    seen = by_torchrun(place(folder), "dealt.py", *how, pair.script, *pair.unconverted())
    assert set(seen.lines) == {str(rank) for rank in range(RANKS)}
    return seen.lines


def in_a_job(home: Path, monkeypatch, pair: Pair, *options: object) -> dict[str, list[str]]:
    """By two workers on as many nodes."""
    monkeypatch.chdir(place(home / "place"))
    ran = run(home, "--nnodes", RANKS, *options, *pair.converted(RANKS), timeout=LONG_S)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"]["replicas_equal"]
    assert len(ran.report["incidents"]) == options.count("--fault")
    logs = sorted((ran.job_dir / "logs").glob("node*/*.log"))
    return by_rank("".join(log.read_text() for log in logs))


@pytest.fixture
def one_thread():
    """As a worker has that shares its machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("pair", [CHARACTERS, IMAGES, ACCELERATED], **NAMES)
@pytest.mark.usefixtures("one_thread")
def test_a_job_of_one_prints_what_the_script_does(tmp_path, monkeypatch, capfd, pair):
    """Losses, rates, evaluations and accuracies; and the hash of its whole state, buffers included."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    with dealing(*pair.dealt(1)):
        execute(HERE / pair.script, *pair.unconverted())
    expected = by_rank(capfd.readouterr().out)["0"]
    script, *args = pair.converted(1)
    execute(HERE / script, *args)
    found = by_rank(capfd.readouterr().out)["0"]
    assert [line for line in found if not line.startswith("best")] == expected


@LONG
@pytest.mark.parametrize(
    ("pair", "otherwise", "close", "options"),
    [
        (CHARACTERS, ("best",), 0.0, ()),
        # DDP's running statistics are those of rank 0's samples, and its hash has them.
        (IMAGES, ("finished",), 0.0, ()),
        # Accelerate divides the held out samples among the ranks, and fills the last batch with others.
        pytest.param(ACCELERATED, ("epoch",), 0.0, (), marks=pytest.mark.nightly),
        # Of sharded gradients torch adds up a norm in float32 that Holdfast adds up in float64, and both clip by it.
        (SHARDED, ("saved",), 1e-6, ("--snapshot-every", 1)),
    ],
    **NAMES,
)
def test_two_workers_print_what_torchrun_does_and_a_kill_changes_nothing(
    tmp_path, monkeypatch, pair, otherwise, close, options
):
    """otherwise: how lines begin that torchrun prints with other numbers, or not at all. close: how near the others are."""
    expected = plainly(tmp_path / "torchrun", pair)
    found = in_a_job(tmp_path / "undisturbed", monkeypatch, pair, *options)
    for rank, lines in expected.items():
        ours, theirs = (
            [line for line in each if not line.startswith(otherwise)] for each in (found[rank], lines)
        )
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert (one == other) if not close else (numbers(one) == pytest.approx(numbers(other), rel=close))
    fault = ("--spares", 1, "--wait-for-spare", "--fault", "kill-worker:rank=1,step=3")
    killed = in_a_job(tmp_path / "killed", monkeypatch, pair, *options, *fault)
    # A step that only the lost shard's snapshot has is computed, and printed, again.
    assert list(dict.fromkeys(killed["0"])) == found["0"]
    assert set(killed["1"]) == set(found["1"])


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+(?:\.\d+)?", line)]
