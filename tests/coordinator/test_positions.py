"""Who holds up scripts that do not know of Holdfast, by optimizer steps and collectives."""

import random

import pytest

from holdfast.coordinator.membership.policy import HangVerdict, find_culprits_by_position
from holdfast.protocol.messages import WorkerView
from holdfast.protocol.phases import GroupReading, PageReading, Phase

IN_C10D = 'File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2799 in recv'
IN_SCRIPT = 'File "/home/u/train.py", line 12 in load'


def at(entered: int, waits: bool = False, group: str = "0/ab/gloo", size: int = 3) -> GroupReading:
    return GroupReading(
        group=group,
        label=f"group {group[0]}",
        size=size,
        entered=entered,
        operation="all_reduce",
        waits=waits,
    )


def view(
    worker: str,
    *groups: GroupReading,
    steps: int = 20,
    idle_s: float = 50.0,
    process: str = "S",
    answers: bool = True,
) -> WorkerView:
    page = PageReading(committed=steps, phase=int(Phase.FORWARD))
    return WorkerView(
        worker=worker,
        slot=0,
        pid=1,
        formed=0,
        page=page,
        process=process,
        idle_s=idle_s,
        groups=groups if answers else None,
    )


def judged(*views: WorkerView, stacks: dict[str, str] | None = None, complete: bool = True) -> HangVerdict:
    ranks = {v.worker: i for i, v in enumerate(views)}
    return find_culprits_by_position(views, {v.worker: 3.0 for v in views}, stacks or {}, complete, ranks)


def test_who_has_not_entered_what_the_others_stand_in_is_named_with_it():
    verdict = judged(
        view("a", at(21, waits=True)), view("b", at(20), steps=19), view("c", at(21, waits=True))
    )
    assert verdict == HangVerdict(
        workers=("b",),
        reason="has not entered all_reduce 21 of group 0, in which others wait",
        collective="all_reduce 21 of group 0",
        stood_at_step=19,
    )


def test_of_several_all_are_named():
    verdict = judged(view("a", at(21, waits=True)), view("b", at(20)), view("c", at(18)))
    assert verdict.workers == ("b", "c")


def test_who_waits_for_another_is_not_to_blame_for_those_who_wait_for_it():
    """a and b train together, b and c too: a waits for b, which waits for c."""
    verdict = judged(
        view("a", at(9, waits=True, group="1/ab/gloo", size=2)),
        view("b", at(8, group="1/ab/gloo", size=2), at(5, waits=True, group="2/bc/gloo", size=2)),
        view("c", at(4, group="2/bc/gloo", size=2)),
    )
    assert verdict.workers == ("c",)
    assert verdict.collective == "all_reduce 5 of group 2"


def test_who_receives_from_another_waits_though_torch_has_no_record_of_it():
    verdict = judged(
        view("a", at(9, waits=True)),
        view("b", at(8)),
        view("c", at(8)),
        stacks={"a": IN_C10D, "b": IN_C10D, "c": IN_SCRIPT},
    )
    assert verdict.workers == ("c",)


def test_ranks_that_wait_for_each_other_in_different_groups_are_not_named():
    """The script's own fault. (Their stacks are equal, and so are their steps.)"""
    one, two = "1/ab/gloo", "2/ab/gloo"
    verdict = judged(
        view("a", at(9, waits=True, group=one, size=2), at(4, group=two, size=2)),
        view("b", at(8, group=one, size=2), at(5, waits=True, group=two, size=2)),
        stacks={"a": IN_C10D, "b": IN_C10D},
    )
    assert verdict == HangVerdict(workers=(), reason="no worker differs from the others")


def test_a_collective_that_is_complete_for_its_source_is_nothing_to_wait_for():
    """Rank a sent a broadcast and went on to compute; the others have not needed it yet."""
    verdict = judged(view("a", at(21)), view("b", at(20)), view("c", at(20)))
    assert verdict.workers == ()
    # The others wait for c, in the collective before.
    verdict = judged(view("a", at(21)), view("b", at(20, waits=True)), view("c", at(19)))
    assert verdict.workers == ("c",)


def test_the_only_one_that_does_not_answer_while_all_others_wait_in_a_collective_of_all():
    views = (view("a", at(21, waits=True)), view("b", answers=False), view("c", at(21, waits=True)))
    assert judged(*views).workers == ("b",)
    assert judged(*views).collective == "all_reduce 21 of group 0"
    # It may be in it, or not belong to the group.
    assert judged(*views, stacks={"b": IN_C10D}).workers == ()
    small = [view(w, at(21, waits=True, size=2)) for w in ("a", "c")]
    assert judged(*small, view("b", answers=False)).workers == ()
    # One of the others is not there either.
    assert judged(view("a", at(21, waits=True)), views[1], view("c", at(20))).workers == ("c",)
    assert judged(view("a", at(21, waits=True)), views[1], view("c", answers=False)).workers == ()


def test_without_collectives_the_fewest_optimizer_steps_tell():
    views = [view(w, steps=n, answers=False) for w, n in (("a", 20), ("b", 19), ("c", 20))]
    verdict = judged(*views)
    assert verdict == HangVerdict(
        workers=("b",), reason="did 19 optimizer steps, others 20", stood_at_step=19, collective=None
    )


def test_a_rank_that_waits_or_has_no_optimizer_is_not_behind_in_steps():
    views = [view("a", steps=20), view("b", at(7, waits=True), steps=19), view("c", steps=20)]
    assert judged(*views).workers == ()
    assert judged(*[view(w, steps=n) for w, n in (("a", 20), ("b", 0), ("c", 20))]).workers == ()


def test_nobody_is_named_before_its_first_step_is_counted_without_a_null():
    verdict = judged(view("a", at(2, waits=True), steps=0), view("b", at(1), steps=0))
    assert (verdict.workers, verdict.stood_at_step) == (("b",), None)


def test_a_stopped_process_is_at_fault_whatever_the_collectives_say():
    assert judged(view("a", at(21, waits=True), process="T"), view("b", at(20))).workers == ("a",)


def test_who_was_not_seen_or_still_moves_may_be_the_one():
    views = (view("a", at(21, waits=True)), view("b", at(20)), view("c", at(21, waits=True)))
    assert judged(*views, complete=False).workers == ()
    assert judged(*views[:2], view("c", at(20), idle_s=1.0)).workers == ()


def test_at_last_the_stacks_tell():
    stacks = dict.fromkeys("ab", IN_C10D) | {"c": IN_SCRIPT}
    assert judged(*(view(w, answers=False) for w in "abc"), stacks=stacks).workers == ("c",)


# ---------------------------------------------------------------- at random


class Script:
    """Ranks in a grid of rows and columns that run the same program: each waits until all members of a group have entered
    its collective. One rank stops somewhere and never enters anything again."""

    def __init__(self, rng: random.Random) -> None:
        rows, columns = rng.choice([(1, 2), (1, 4), (2, 2), (2, 3), (3, 4)])
        self.world = rows * columns
        everyone = range(self.world)
        self.members = {"w": tuple(everyone)}
        self.members |= {f"r{r}": tuple(x for x in everyone if x // columns == r) for r in range(rows)}
        self.members |= {f"c{c}": tuple(x for x in everyone if x % columns == c) for c in range(columns)}
        kinds = rng.choices("wrc", weights=(1, 2, 2), k=rng.randrange(4, 20))
        column = {x: x % columns for x in everyone}
        self.program = {
            x: [k if k == "w" else f"r{x // columns}" if k == "r" else f"c{column[x]}" for k in kinds]
            for x in everyone
        }
        self.culprit = rng.randrange(self.world)
        self.stops = rng.randrange(len(kinds))
        self.done = dict.fromkeys(everyone, 0)
        self.inside: dict[int, str | None] = dict.fromkeys(everyone)
        self.entered = {(x, g): 0 for g, ranks in self.members.items() for x in ranks}
        self.rng = rng

    def run(self) -> None:
        """Until nobody can move, in a random order."""
        while movable := [x for x in self.done if self._can_move(x)]:
            self._move(self.rng.choice(movable))

    def _complete(self, rank: int) -> bool:
        group = self.inside[rank]
        number = self.entered[rank, group]
        return all(self.entered[x, group] >= number for x in self.members[group])

    def _can_move(self, rank: int) -> bool:
        if self.inside[rank] is not None:
            return self._complete(rank)
        if rank == self.culprit and self.done[rank] == self.stops:
            return False
        return self.done[rank] < len(self.program[rank])

    def _move(self, rank: int) -> None:
        if self.inside[rank] is not None:
            self.inside[rank] = None
            self.done[rank] += 1
        else:
            group = self.program[rank][self.done[rank]]
            self.entered[rank, group] += 1
            self.inside[rank] = group

    def views(self) -> list[WorkerView]:
        return [
            view(
                f"n{x}",
                *(
                    at(n, waits=self.inside[x] == g, group=g, size=len(self.members[g]))
                    for (r, g), n in self.entered.items()
                    if r == x and len(self.members[g]) > 1
                ),
            )
            for x in self.done
        ]


@pytest.mark.parametrize("seed", range(300))
def test_in_a_random_grid_of_groups_only_the_one_that_stopped_is_named(seed):
    script = Script(random.Random(seed))
    script.run()
    views = script.views()
    random.Random(seed).shuffle(views)
    somebody_waits = any(g is not None for g in script.inside.values())
    assert judged(*views).workers == ((f"n{script.culprit}",) if somebody_waits else ())
