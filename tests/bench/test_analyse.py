"""The arithmetic of the benchmarks, on event logs written down by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from bench.overhead import analyse as overhead
from bench.recovery import analyse, table
from bench.recovery.events import NOT_PARTICIPATING, Commit, StateBytes, StateLog, parse, read_states
from bench.recovery.floor import PARAMETERS, last_of
from bench.recovery.harness import Measured, Plan
from rich.console import Console

KILLED, FIRST, SECOND, NEWCOMER = 13, 11, 12, 14
KILLED_AT = 10.5


def commit(
    t: float, pid: int, step: int, *, world: int = 3, gen: str = "1", rank: int | None = None
) -> Commit:
    return Commit(
        t=t, pid=pid, rank=pid - 11 if rank is None else rank, step=step, world=world, gen=gen, took_s=0.1
    )


def whole_step(
    t: float, step: int, pids: tuple[int, ...] = (FIRST, SECOND, KILLED), **kind: object
) -> list[Commit]:
    """A step committed by `pids`, ten milliseconds apart."""
    return [commit(t + 0.01 * n, pid, step, **kind) for n, pid in enumerate(pids)]  # type: ignore[arg-type]


BEFORE = [*whole_step(10.0, 40), *whole_step(10.2, 41), *whole_step(10.4, 42)]


def recovery(later: list[Commit]) -> analyse.Recovery:
    log = [*BEFORE, *later]
    return analyse.recovery(log, analyse.fault_of(log, KILLED, KILLED_AT), replicas=3)


def test_fault_of_takes_the_last_commit_of_the_killed_worker() -> None:
    fault = analyse.fault_of(BEFORE, KILLED, KILLED_AT)
    assert (fault.rank, fault.step, fault.gen, fault.world) == (2, 42, "1", 3)
    assert fault.members == {FIRST, SECOND, KILLED}


def test_survivors_that_go_on_smaller_and_grow_again() -> None:
    smaller = whole_step(10.9, 43, (FIRST, SECOND), world=2, gen="2")
    full = whole_step(11.4, 44, (FIRST, SECOND, NEWCOMER), gen="3")
    found = recovery([*smaller, *full])
    assert found.stall_s == pytest.approx(0.4)
    assert found.full_s == pytest.approx(11.42 - KILLED_AT), "when the last replica has committed"
    assert found.new_work_s == found.stall_s
    assert found.lost_steps == 0
    assert found.complete


def test_a_step_that_was_in_flight_is_not_the_recovery() -> None:
    in_flight = whole_step(10.51, 43, (FIRST, SECOND))
    found = recovery([*in_flight, *whole_step(11.0, 44, (FIRST, SECOND, NEWCOMER), gen="2")])
    assert found.stall_s == pytest.approx(0.5)
    assert found.lost_steps == 0


def test_a_late_commit_by_the_killed_worker_itself_is_not_the_recovery() -> None:
    assert recovery([commit(10.501, KILLED, 43)]).stall_s is None


def test_without_a_name_of_the_membership_a_newcomer_shows_that_a_step_is_new() -> None:
    found = recovery(whole_step(10.8, 43, (FIRST, SECOND, NEWCOMER)))
    assert found.stall_s == pytest.approx(0.3)
    assert found.lost_steps == 0


def test_without_any_sign_only_the_second_step_is_surely_new() -> None:
    found = recovery([*whole_step(10.7, 43, (FIRST, SECOND)), *whole_step(10.9, 44, (FIRST, SECOND))])
    assert found.stall_s == pytest.approx(0.4)


def test_a_restart_from_a_checkpoint_loses_the_steps_since_then() -> None:
    processes = (21, 22, 23)
    again = [
        c for n, step in enumerate((40, 41, 42, 43)) for c in whole_step(15.0 + n, step, processes, gen="2")
    ]
    found = recovery(again)
    assert found.stall_s == pytest.approx(4.5)
    assert found.full_s == pytest.approx(4.52)
    assert found.lost_steps == 3
    assert found.new_work_s == pytest.approx(7.5)


def test_a_recovery_is_not_complete_before_it_has_passed_the_step_it_had() -> None:
    found = recovery(whole_step(15.0, 40, (21, 22, 23), gen="2"))
    assert found.full_s is not None
    assert found.new_work_s is None
    assert not found.complete


def test_a_spare_that_trains_along_does_not_count_towards_full_strength() -> None:
    spare = commit(10.9, NEWCOMER, 43, gen="2", rank=NOT_PARTICIPATING)
    survivors = whole_step(10.9, 43, (FIRST, SECOND), gen="2")
    assert recovery([spare, *survivors]).full_s is None


def test_the_stall_when_the_newcomer_joins_counts_for_the_longest_gap() -> None:
    smaller = whole_step(10.9, 43, (FIRST, SECOND), world=2, gen="2")
    found = recovery(
        [*smaller, *whole_step(12.0, 44, (FIRST, SECOND, NEWCOMER), gen="3"), *whole_step(20.0, 45)]
    )
    assert found.stall_s == pytest.approx(0.4)
    assert found.longest_s == pytest.approx(12.0 - 10.91)
    assert recovery(smaller).longest_s is None


def test_bytes_moved_are_those_fetched_by_anyone_until_full_strength() -> None:
    later = whole_step(11.4, 44, (FIRST, SECOND, NEWCOMER), gen="2")
    fault = analyse.fault_of(BEFORE, KILLED, KILLED_AT)
    states = [
        StateBytes(9.0, KILLED, "holds", 600),
        StateBytes(9.1, FIRST, "holds", 500),
        StateBytes(9.5, KILLED, "fetched", 600),
        StateBytes(11.0, NEWCOMER, "holds", 600),
        StateBytes(11.1, NEWCOMER, "fetched", 600),
        StateBytes(11.2, SECOND, "fetched", 300),
        StateBytes(12.0, FIRST, "fetched", 500),
    ]
    found = analyse.with_bytes(recovery(later), fault, states)
    assert (found.moved_bytes, found.lost_bytes) == (900, 600), (
        "neither before the fault nor after full strength"
    )
    assert found.moved_ratio == pytest.approx(1.5)


def test_without_a_word_of_the_killed_worker_there_is_no_figure_of_bytes() -> None:
    found = recovery(whole_step(11.4, 44, (FIRST, SECOND, NEWCOMER), gen="2"))
    fault = analyse.fault_of(BEFORE, KILLED, KILLED_AT)
    assert analyse.with_bytes(found, fault, [StateBytes(9.0, FIRST, "holds", 5)]).moved_ratio is None


def test_typical_step_is_the_median_at_full_strength() -> None:
    slow = [Commit(t=10.9, pid=FIRST, rank=0, step=43, world=2, gen="2", took_s=9.0)]
    assert analyse.typical_step_s([*BEFORE, *slow], 3) == [pytest.approx(0.1)]
    assert analyse.typical_step_s(slow, 3) == []


def test_participants_are_those_of_the_newest_full_step() -> None:
    partial = whole_step(10.6, 43, (FIRST, SECOND))
    assert analyse.participants([*BEFORE, *partial], 3) == {0: FIRST, 1: SECOND, 2: KILLED}


def test_block_step_takes_the_slowest_rank_per_step() -> None:
    log = [
        Commit(t=0.0, pid=pid, rank=pid, step=step, world=2, gen="", took_s=took)
        for pid, times in ((0, (0.1, 0.5, 0.1)), (1, (0.2, 0.2, 0.2)))
        for step, took in enumerate(times, start=5)
    ]
    assert analyse.block_step_s(log, 5, 8) == pytest.approx(0.7 / 3)
    assert analyse.block_step_s(log, 7, 8) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("save_s", "budget", "steps"),
    [(0.15, 0.1, 14), (0.15, 0.5, 2), (0.0, 0.1, 1), (0.01, 0.5, 1)],
)
def test_checkpoint_interval_keeps_to_the_budget(save_s: float, budget: float, steps: int) -> None:
    step_s = 0.1
    every = analyse.checkpoint_interval(save_s, step_s, budget)
    assert every == steps
    assert save_s / (every * step_s + save_s) <= budget + 1e-9


def test_spread() -> None:
    assert analyse.spread([]) is None
    assert analyse.spread([3.0, 1.0, 2.0]) == analyse.Spread(median=2.0, low=1.0, high=3.0, count=3)


def test_a_log_reads_back_as_it_was_written() -> None:
    assert parse(json.dumps(asdict(c)) for c in BEFORE) == BEFORE


def test_a_log_of_states_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "states"
    assert read_states(path) == []
    log = StateLog(path)
    log.holds(3)
    log.fetched(2)
    assert [(s.kind, s.count) for s in read_states(path)] == [("holds", 3), ("fetched", 2)]


def test_floor_waits_for_the_last_rank() -> None:
    lines = [{"kind": "going", "rank": 0, "t": 1.0}, {"kind": "noticed", "rank": 1, "t": 1.5}]
    assert last_of(lines, "going", 1, ranks=2) is None
    assert last_of([*lines, {"kind": "going", "rank": 1, "t": 2.0}], "going", 1, ranks=2) == 2.0
    assert last_of(lines, "going", 2, ranks=1) is None


def blocks(number: int, before: float, protected: float, after: float) -> list[overhead.Block]:
    kinds = ((overhead.PLAIN_BEFORE, before), (overhead.PROTECTED, protected), (overhead.PLAIN_AFTER, after))
    return [
        overhead.Block(kind=kind, round=number, rank=rank, wall_s=[s, s, 9.0], cpu_s=[s / 2] * 3)
        for kind, s in kinds
        for rank in (0, 1)
    ]


def test_overhead_pairs_the_rounds_so_that_a_drift_cancels() -> None:
    drifting = [b for n in range(5) for b in blocks(n, 0.10 + n, 0.13 + n, 0.12 + n)]
    found = overhead.compare(drifting)
    assert found.extra_s == pytest.approx(0.02)
    assert found.noise_s == pytest.approx(0.02)
    assert found.plain_s == pytest.approx(2.11)
    assert found.extra_share == pytest.approx(0.02 / 2.11)
    assert found.extra_cpu_s == pytest.approx(0.01)
    assert found.rounds == 5


def test_overhead_leaves_out_a_round_that_is_not_whole() -> None:
    log = [*blocks(0, 0.1, 0.2, 0.1), *blocks(1, 0.1, 0.9, 0.1)[:-1]]
    assert overhead.compare(log).rounds == 1
    with pytest.raises(ValueError, match="no round"):
        overhead.compare(log[:3])


def measured(name: str, title: str, stalls: list[float], steps: list[float]) -> Measured:
    recoveries = [
        analyse.Recovery(stall_s=stall, full_s=stall + 0.1, new_work_s=stall, lost_steps=0)
        for stall in stalls
    ]
    return Measured(
        name=name, title=title, note="", recoveries=recoveries, step_s=steps, plain_step_s=[1.0] * len(steps)
    )


def test_verdicts_name_the_target_and_the_best_peer() -> None:
    ours = measured("holdfast-2", "Holdfast", [0.4, 0.45, 0.5], [1.0, 1.02, 1.04, 1.1])
    slow = measured("a", "Slow", [5.0], [0.99, 1.03, 1.05])
    quick = measured("b", "Quick", [0.41], [1.4, 1.5, 1.6])
    stall, full, lost, step = table.verdicts(ours, [slow, quick])
    assert stall == "stall: 0.45; target <0.5: met; best peer 0.41 (Quick): BEHIND"
    assert full == "full strength: 0.55; target <1.5: met; best peer 0.51 (Quick): BEHIND"
    assert lost == "lost steps: 0; target 0: met; best peer 0 (Slow): level"
    assert step == "step / plain DDP: 1.03; best peer 1.03 (Slow): level (within the noise)"


def test_the_sharded_table_has_its_own_targets_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    ours = Measured(name="holdfast-sharded", title="Holdfast", note="")
    ours.recoveries = [
        analyse.Recovery(
            stall_s=0.6, full_s=2.0, new_work_s=0.6, lost_steps=0, moved_bytes=101, lost_bytes=100
        )
    ]
    peer = Measured(name="torchft-sharded", title="torchft", note="")
    peer.recoveries = [
        analyse.Recovery(
            stall_s=1.2, full_s=6.0, new_work_s=1.2, lost_steps=0, moved_bytes=200, lost_bytes=100
        )
    ]
    table.print_results(Console(width=table.WIDTH), Plan(replicas=2, shards=2), [ours, peer], floor=None)
    printed = capsys.readouterr().out
    assert "stall: 0.60; target <0.7: met; best peer 1.20 (torchft): ahead" in printed
    assert "moved / lost bytes: 1.01; target <1.1: met; best peer 2.00 (torchft): ahead" in printed


def test_a_system_without_figures_has_a_row_and_its_error_below(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Measured(
        name="torchft", title="torchft", note="its flags", error="pip: no matching [distribution]"
    )
    console = Console(width=table.WIDTH)
    table.print_results(console, Plan(), [broken], floor=None)
    printed = capsys.readouterr().out
    assert "could not be measured" in printed
    assert "pip: no matching [distribution]" in printed
    assert max(map(len, printed.splitlines())) <= table.WIDTH


def test_the_floor_knows_the_size_of_the_model() -> None:
    torch = pytest.importorskip("torch")
    from bench.recovery import model

    with torch.device("meta"):
        network = model.build()
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS
