"""Marks on machines that a job blames: when one is made, the brake over the whole cluster, and how it is taken back."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from fakeapi import refused, serving
from kubejobs import job
from liveapi import LiveApi
from operating import JOB, Nobody, operated
from rights import is_permitted
from test_kube_reconcile import actions, observed, pod, said

from holdfast.kubernetes.names import NOTE_FAULT, TAINT_UNHEALTHY
from holdfast.kubernetes.objects.machine import (
    FAULT_CONDITION,
    MachineMarks,
    MachineSeen,
    Mark,
    lags_behind,
    machine_seen,
    mark_note,
    mark_patches,
)
from holdfast.kubernetes.policy.machines import Setting, why_not_marked
from holdfast.kubernetes.policy.plan import MarkMachine, Observed, Tell, UnmarkMachine, Warn
from holdfast.kubernetes.tasks.job_task import JobTask
from holdfast.kubernetes.tasks.machine_marks import NodeMarks
from holdfast.kubernetes.tasks.operator import Operator
from holdfast.protocol.engine_orders import MarkNode, OrderDone

ORDER = MarkNode("llm-n1", "Xid 79", order_id=3)
SEEDS = 200


def mark(**fields: Any) -> Mark:
    given = {
        "uid": "u-1",
        "job": "research/llm",
        "run": 1,
        "term": 1,
        "quarantined": True,
        "reason": "Xid 79",
    }
    return Mark(**(given | fields))


def machines(**marked: Mark) -> dict[str, MachineSeen]:
    """Four of this job and more; the marked ones by their place."""
    all_ = [f"m-n{k}" for k in range(40)]
    return {
        name: MachineSeen(name=name, marks=MachineMarks(mark=marked.get(name.removeprefix("m-"))))
        for name in all_
    }


def blames(**fields: Any) -> Observed:
    """The coordinator has node 1's machine in quarantine, and orders a mark."""
    words = fields.pop("said", {"orders": (ORDER,), "bad_machines": frozenset({"m-n1"})})
    given = {"marking": "taint", "machines": machines(), "said": said("n0", "n1", "n2", **words)}
    return observed(**(given | fields))


def test_a_machine_is_marked_and_the_order_answered_when_it_is() -> None:
    seen = blames()
    assert actions(seen) == (MarkMachine("m-n1", mark(at_s=seen.now_s)),)
    assert actions(blames(machines=machines(n1=mark()))) == (Tell(OrderDone(3)),)
    # Another job's mark will do.
    assert actions(blames(machines=machines(n1=mark(uid="u-2")))) == (Tell(OrderDone(3)),)


def test_nothing_is_marked_that_nobody_asked_for() -> None:
    (told,) = actions(blames(marking="none"))
    assert isinstance(told, Tell)
    assert "--mark is none" in str(told.news.error)  # type: ignore[union-attr]
    (told,) = actions(blames(no_marks="machines may not be marked: forbidden"))
    assert "forbidden" in str(told.news.error)  # type: ignore[union-attr]
    absent = {"absent": frozenset({"llm-n1"})}
    (told, *_) = actions(blames(pods=(pod("c1"), pod("n0"), pod("n2")), **absent))
    assert "its pod is gone" in str(told.news.error)  # type: ignore[union-attr]


def test_the_brake_holds_and_says_so() -> None:
    others = {f"n{k}": mark(uid=f"u-{k}") for k in (10, 11)}
    assert isinstance(actions(blames(machines=machines(n10=others["n10"])))[0], MarkMachine)
    warned, told = actions(blames(machines=machines(**others)))
    assert isinstance(warned, Warn)
    assert (warned.reason, warned.about) == ("MarkHeld", "order 3")
    assert warned.text.startswith("m-n1 (Xid 79): 2 of 40 machines are marked, and at most 5% may be (2)")
    assert told == Tell(OrderDone(3, warned.text.removeprefix("m-n1 (Xid 79): ")))
    assert isinstance(actions(blames(machines=machines(**others), most_marked_percent=10))[0], MarkMachine)


@pytest.mark.parametrize(
    ("there", "marked", "may"), [(3, 0, True), (3, 1, False), (40, 1, True), (40, 2, False)]
)
def test_one_machine_may_always_be_marked(there: int, marked: int, may: bool) -> None:
    known = {f"m{k}": MachineMarks(mark=mark() if k < marked else None) for k in range(there)}
    assert (why_not_marked(known, 5) is None) is may


@pytest.mark.parametrize(
    ("there", "words", "expected"),
    [
        (mark(), {"bad_machines": frozenset({"m-n1"})}, ()),
        # It passed its checks, or `holdfast node clear`.
        (mark(), {}, (UnmarkMachine("m-n1"),)),
        # Another job's is not this one's to take back.
        (mark(uid="u-2"), {}, ()),
        # Runs and terms that know nothing of it prove nothing.
        (mark(run=7), {}, ()),
        (mark(term=0), {}, ()),
        (mark(term=0), {"bad_machines": frozenset({"m-n1"})}, (MarkMachine("m-n1", mark()),)),
        # It turned a node away there, and has taken another one in since.
        (mark(quarantined=False), {}, (UnmarkMachine("m-n1"),)),
        (mark(quarantined=False), {"bad_machines": frozenset({"m-n1"})}, (MarkMachine("m-n1", mark()),)),
    ],
)
def test_a_mark_is_taken_back_on_evidence(there: Mark, words: dict[str, Any], expected: Any) -> None:
    assert actions(blames(machines=machines(n1=there), said=words)) == expected


def test_a_machine_from_which_nobody_has_joined_since_keeps_its_mark() -> None:
    there = machines(n9=mark(quarantined=False))
    assert actions(blames(machines=there, said={})) == ()


def test_who_does_not_answer_has_taken_nothing_back() -> None:
    seen = msgspec.structs.replace(blames(machines=machines(n1=mark())), said=None)
    assert not [one for one in actions(seen) if isinstance(one, UnmarkMachine)]


# ------------------------------------------------------------ on a Node


def node(name: str = "m1", mark_: Mark | None = None, **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"metadata": {"name": name, "resourceVersion": "7"}, "spec": spec}
    return (
        made if mark_ is None else {**made, "metadata": {**made["metadata"], **mark_note(mark_)["metadata"]}}
    )


def test_a_mark_is_read_as_it_was_written() -> None:
    assert machine_seen(node(mark_=mark())).marks == MachineMarks(mark=mark())
    assert machine_seen(node()).marks == MachineMarks()
    by_hand = node()
    by_hand["metadata"]["annotations"] = {NOTE_FAULT: "smells of smoke"}
    found = machine_seen(by_hand).marks.mark
    assert found is not None
    assert (found.uid, found.reason) == ("", "smells of smoke")


def test_condition_and_taint_follow_the_mark() -> None:
    others = [{"key": "gpu", "effect": "NoSchedule"}]
    (at, spec), (below, status) = mark_patches(node(mark_=mark(), taints=others), "taint", 0.0)
    assert (at, below) == ("", "/status")
    assert spec["metadata"] == {"resourceVersion": "7"}
    assert spec["spec"]["taints"] == [*others, {"key": TAINT_UNHEALTHY, "effect": "NoSchedule"}]
    (condition,) = status["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        FAULT_CONDITION,
        "True",
        "Quarantined",
    )
    assert condition["message"] == "research/llm: Xid 79"
    ((only, _),) = mark_patches(node(mark_=mark()), "condition", 0.0)
    assert only == "/status"
    # The mark is gone: what followed it goes, and nothing else.
    tainted = node(taints=[*others, {"key": TAINT_UNHEALTHY, "effect": "NoSchedule"}])
    ((_, spec),) = mark_patches(tainted, "taint", 0.0)
    assert spec["spec"]["taints"] == others


@pytest.mark.parametrize("marking", ["condition", "taint"])
@pytest.mark.parametrize("seen", [MachineMarks(), MachineMarks(mark=mark()), MachineMarks(condition=True)])
def test_what_lags_is_what_has_patches(seen: MachineMarks, marking: Any) -> None:
    made = node(mark_=seen.mark)
    if seen.condition:
        made["status"] = {"conditions": [{"type": FAULT_CONDITION, "status": "True"}]}
    assert lags_behind(seen, marking) == bool(list(mark_patches(made, marking, 0.0)))


def test_what_others_say_of_a_machine_is_read() -> None:
    sick = {"type": "ReadonlyFilesystem", "status": "True", "message": "/ is read-only"}
    made = {**node(), "status": {"conditions": [sick]}}
    assert machine_seen(made).why_left == "the condition ReadonlyFilesystem: / is read-only"
    assert machine_seen(made, (), ()).why_left is None
    assert machine_seen(made, (), ("GpuMemWatch",)).why_left is None
    well = {**node(), "status": {"conditions": [{**sick, "status": "False"}]}}
    assert machine_seen(well).why_left is None
    hyperpod = {
        "key": "sagemaker.amazonaws.com/node-health-status",
        "value": "Unschedulable",
        "effect": "NoSchedule",
    }
    assert machine_seen(node(taints=[hyperpod])).why_left == "HyperPod calls the machine unhealthy"
    assert machine_seen(node(taints=[{"key": TAINT_UNHEALTHY, "effect": "NoSchedule"}])).why_left is None


# ------------------------------------------------------------ the edge


def marked(fake: LiveApi, name: str) -> tuple[bool, bool, bool]:
    """Annotation, condition, taint."""
    seen = machine_seen(fake.objects[f"/api/v1/nodes/{name}"]).marks
    return seen.mark is not None, seen.condition, seen.tainted


def test_what_a_person_removes_is_gone_with_all_that_followed_it() -> None:
    path = "/api/v1/nodes/m1"

    async def scene(fake: LiveApi, restart: Any) -> None:
        await fake.put(path, node(mark_=mark(uid="of-another-job"), taints=[]), "ADDED")
        await fake.until(lambda: marked(fake, "m1") == (True, True, True))
        there = fake.objects[path]
        del there["metadata"]["annotations"][NOTE_FAULT]
        await fake.put(path, there)
        await fake.until(lambda: marked(fake, "m1") == (False, False, False))
        # Nor does a new operator remember it.
        await restart()
        await fake.until(lambda: len(fake.named("pods")) == 4)
        assert marked(fake, "m1") == (False, False, False)
        assert JOB in fake.objects

    operated(scene, setting=Setting(marking="taint"))


def test_two_jobs_do_not_mark_one_too_many() -> None:
    """Each saw room for one."""

    async def run() -> None:
        fake = LiveApi()
        async with serving(fake) as api:
            for name in ("m1", "m2"):
                await fake.put(f"/api/v1/nodes/{name}", node(name), "ADDED")
            seen = {name: machine_seen(fake.objects[f"/api/v1/nodes/{name}"]) for name in ("m1", "m2")}

            def saw(raw: dict[str, Any]) -> None:
                seen[raw["metadata"]["name"]] = machine_seen(raw)

            writes = NodeMarks(api, seen, saw, "condition", 5)
            await asyncio.gather(writes.put("m1", mark()), writes.put("m2", mark(uid="u-2")))
            assert [marked(fake, name)[0] for name in ("m1", "m2")] == [True, False]
            await writes.take_back("m1", "u-2")
            assert marked(fake, "m1")[0], "another job's"
            await writes.take_back("m1", "u-1")
            await writes.put("m2", mark(uid="u-2"))
            assert [marked(fake, name)[0] for name in ("m1", "m2")] == [False, True]

    asyncio.run(run())


def test_a_right_that_is_missing_holds_nothing_up() -> None:
    class Forbids(LiveApi):
        async def answer(self, request: Any) -> Any:
            if request.method == "PATCH":
                return refused(403, "Forbidden", {})
            return await super().answer(request)

    async def run() -> None:
        async with serving(Forbids()) as api:
            writes = NodeMarks(api, {"m1": MachineSeen(name="m1")}, lambda raw: None, "condition", 5)
            await writes.put("m1", mark())
            assert "Forbidden" in (writes.refused or "")

    asyncio.run(run())


def test_the_brake_is_told_by_an_event_once() -> None:
    async def run() -> None:
        fake = LiveApi()
        async with serving(fake) as api:
            seen = observed()
            nobody = NodeMarks(api, {}, lambda raw: None, "taint", 5)
            task = JobTask(
                api=api, raw=job(), machines={}, setting=Setting(), lookup=lambda _: Nobody(), marks=nobody
            )
            held = Warn(reason="MarkHeld", text="m1: 2 of 40 machines are marked", about="order 3")
            assert task.expected.is_news(held)
            await task._do(held, seen)
            await task._events.close()
            (made,) = (one for path, one in fake.objects.items() if "/events/" in path)
            assert made["involvedObject"] | {"kind": "HoldfastJob", "uid": "u-1"} == made["involvedObject"]
            assert (made["type"], made["reason"], made["message"]) == ("Warning", held.reason, held.text)
            assert is_permitted("POST", "/api/v1/namespaces/research/events", {})
            assert not task.expected.is_news(held)
            task.expected.meet(1, (), ())
            assert task.expected.is_news(held), "another order of this number"

    asyncio.run(run())


def test_a_watch_that_is_behind_takes_no_mark_away() -> None:
    """The brake would let one more be marked."""

    async def run() -> None:
        fake = LiveApi()
        async with serving(fake) as api:
            operator = Operator(api, Setting(marking="taint"), lambda _: Nobody())
            operator._on_machine(node(mark_=mark()))
            older = node()
            older["metadata"]["resourceVersion"] = "6"
            operator._on_machine(older)
            assert operator._machines["m1"].marks.mark is not None
            newer = node()
            newer["metadata"]["resourceVersion"] = "8"
            operator._on_machine(newer)
            assert operator._machines["m1"].marks.mark is None

    asyncio.run(run())


# ------------------------------------------------------------ random schedules


@pytest.mark.parametrize(
    "seeds", [range(SEEDS // 5), pytest.param(range(SEEDS // 5, SEEDS), marks=pytest.mark.nightly)]
)
def test_whatever_jobs_and_people_do_the_brake_holds(seeds: range) -> None:
    held = taken_back = 0
    for seed in seeds:
        dice = random.Random(seed)
        size, percent = dice.randint(4, 40), dice.choice((5, 10, 30))
        names = [f"m-n{k}" for k in range(size)]
        there: dict[str, Mark | None] = dict.fromkeys(names)
        jobs = [{"uid": f"u-{k}", "bad": set[str](), "open": list[MarkNode](), "term": 1} for k in range(3)]
        most = max(1, size * percent // 100)
        for _ in range(60):
            blamer: dict[str, Any] = dice.choice(jobs)
            what = dice.choice(
                ("blames", "blames", "passes", "silent", "person", "successor", "forgetful", "look")
            )
            number = dice.randrange(size)
            if what == "blames":
                blamer["bad"].add(names[number])
                blamer["open"].append(MarkNode(f"llm-n{number}", "Xid 79", order_id=len(blamer["open"]) + 1))
            elif what == "passes" and blamer["bad"]:
                blamer["bad"].discard(dice.choice(sorted(blamer["bad"])))
            elif what == "person":
                there[names[number]] = None
            elif what == "successor":
                blamer["term"] += 1
            elif what == "forgetful":  # without its ledger
                blamer["term"] += 1
                blamer["bad"], blamer["open"] = set(), []
            known = {n: MachineSeen(name=n, marks=MachineMarks(mark=m)) for n, m in there.items()}
            pods = tuple(pod(f"n{k}") for k in range(size))
            words = {
                "orders": tuple(blamer["open"]),
                "bad_machines": frozenset(blamer["bad"]),
                "term": blamer["term"],
            }
            seen = observed(
                pods=(pod("c1"), *pods),
                machines=known,
                said=said(*(f"n{k}" for k in range(size)), wanted=size, **words),
            )
            taken = msgspec.structs.replace(
                seen.job, id=msgspec.structs.replace(seen.job.id, uid=blamer["uid"])
            )  # type: ignore[union-attr,type-var]
            status = msgspec.structs.replace(seen.status, term=blamer["term"])
            seen = msgspec.structs.replace(
                seen, job=taken, accepted=taken, status=status, marking="taint", most_marked_percent=percent
            )
            if what == "silent":
                seen = msgspec.structs.replace(seen, said=None)
            for action in actions(seen):
                match action:
                    case MarkMachine(name, made):
                        # The edge looks at the brake once more, as this loop does.
                        now = {n: MachineMarks(mark=m) for n, m in there.items()}
                        if there[name] is None and why_not_marked(now, percent) is not None:
                            continue
                        there[name] = made
                    case UnmarkMachine(name):
                        assert there[name] is not None, f"seed {seed}"
                        assert name not in blamer["bad"], f"seed {seed}: taken back from {name}, which is bad"
                        assert there[name].uid == blamer["uid"], f"seed {seed}: another job's"  # type: ignore[union-attr]
                        there[name] = None
                        taken_back += 1
                    case Warn():
                        held += 1
                    case Tell(OrderDone(order_id=order_id)):
                        blamer["open"] = [one for one in blamer["open"] if one.order_id != order_id]
            marked_now = [name for name, one in there.items() if one is not None]
            assert len(marked_now) <= most, f"seed {seed}: {len(marked_now)} of {size}, {percent}%"
    assert held > len(seeds)
    assert taken_back > len(seeds) / 4
