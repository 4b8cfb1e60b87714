"""Another machine in place of one that stays marked: whom the site has asked, when, how often, and what stands in the mark."""

import asyncio
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakeapi import refused, serving
from liveapi import LiveApi
from operating import operated
from rights import OPERATORS
from test_kube_marks import mark, node

from holdfast.kubernetes import __main__ as program
from holdfast.kubernetes.names import NOTE_FAULT
from holdfast.kubernetes.objects.machine import FAULT_CONDITION, Mark, machine_seen, marks_of
from holdfast.kubernetes.policy.machines import (
    DAY_S,
    MOST_KEPT,
    DeleteMachine,
    DeleteNodeClaim,
    ReplacementRecord,
    Replacements,
    RunProgram,
    SetLabel,
    Setting,
    Way,
    free_again_s,
    owner_of,
    read_way,
    replacement_due_s,
    why_not_replaced,
    with_record,
)
from holdfast.kubernetes.tasks import machine_marks
from holdfast.kubernetes.tasks.machine_marks import NodeMarks, NodeReplacement

RECORDS = f"/api/v1/namespaces/{OPERATORS}/configmaps/holdfast-replacements"
MACHINE = "/apis/cluster.x-k8s.io/v1beta2/namespaces/fleet/machines/pool-7"
CLAIM = "/apis/karpenter.sh/v1/nodeclaims/default-x7"
LONG_AGO = 1_000.0


# ------------------------------------------------------------ what a site may say


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("none", None),
        ("cluster-api", DeleteMachine()),
        ("karpenter", DeleteNodeClaim()),
        (
            "label:sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement",
            SetLabel("sagemaker.amazonaws.com/node-health-status", "UnschedulablePendingReplacement"),
        ),
        ("label:sick=", SetLabel("sick", "")),
        ("command:/opt/site/replace", RunProgram("/opt/site/replace")),
    ],
)
def test_ways(text: str, way: Way | None) -> None:
    assert read_way(text) == way


@pytest.mark.parametrize(
    "text", ["", "karpenter:x", "label:sick", "label:=x", "label:a b=c", "label:a=b c", "command:replace"]
)
def test_what_is_no_way_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"command:") as refusal:
        read_way(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replace=karpenter",), "--replace needs --mark"),
        (("--mark=taint", "--replace=boot"), "'boot'"),
        (("--replace-after=-1",), "a whole number of seconds"),
        (("--replace-at-most=0",), "at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["operator", *options])
    with pytest.raises(SystemExit):
        program.main()
    assert words in capsys.readouterr().err


# ------------------------------------------------------------ when


def test_a_machine_is_due_when_its_mark_has_stood_and_once() -> None:
    assert replacement_due_s(mark(at_s=100.0), 600.0) == 700.0
    assert replacement_due_s(mark(at_s=100.0, replacement="it is asked for"), 600.0) is None
    # A person's words, and marks of operators that did not note the moment.
    assert replacement_due_s(mark(), 600.0) is None
    assert replacement_due_s(None, 600.0) is None


def record(at_s: float, machine: str = "m1") -> ReplacementRecord:
    return ReplacementRecord(
        machine=machine, uid=f"uid-of-{machine}", job="research/llm", reason="Xid 79", at_s=at_s
    )


def test_whatever_comes_no_day_has_more_than_the_brake_allows() -> None:
    for seed in range(100):
        dice = random.Random(seed)
        most, now_s = dice.randint(1, 5), 0.0
        records: tuple[ReplacementRecord, ...] = ()
        taken: list[float] = []
        for _ in range(200):
            now_s += dice.expovariate(1 / 7_000)
            if why_not_replaced(records, most, now_s) is None:
                records = with_record(records, record(now_s))
                taken.append(now_s)
            else:
                free_s = free_again_s(records, most)
                assert free_s > now_s
                assert why_not_replaced(records, most, free_s) is None
            assert len(records) <= MOST_KEPT
        assert len(taken) > most
        assert all(later >= at_s + DAY_S for at_s, later in zip(taken, taken[most:], strict=False))


# ------------------------------------------------------------ who is asked


def test_an_owner_is_whom_the_node_names() -> None:
    claims = node()
    claims["metadata"]["ownerReferences"] = [
        {"apiVersion": "example.com/v1", "kind": "NodeClaim", "name": "other", "uid": "u-0"},
        {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "default-x7", "uid": "u-7"},
    ]
    owner = owner_of(DeleteNodeClaim(), claims)
    assert owner is not None
    assert (owner.path("v1"), owner.uid) == (CLAIM, "u-7")
    assert owner_of(DeleteMachine(), claims) is None
    machine = node()
    machine["metadata"]["annotations"] = {
        "cluster.x-k8s.io/machine": "pool-7",
        "cluster.x-k8s.io/cluster-namespace": "fleet",
    }
    owner = owner_of(DeleteMachine(), machine)
    assert owner is not None
    assert owner.path("v1beta2") == MACHINE
    assert owner_of(DeleteNodeClaim(), machine) is None


def machine_of(name: str = "m1", marked: Mark | None = None) -> dict[str, Any]:
    """A Node that both kinds of owner have made."""
    made = node(name, mark(at_s=LONG_AGO) if marked is None else marked, taints=[])
    made["metadata"] |= {"uid": f"uid-of-{name}", "labels": {}}
    made["metadata"]["annotations"] |= {
        "cluster.x-k8s.io/machine": "pool-7",
        "cluster.x-k8s.io/cluster-namespace": "fleet",
    }
    made["metadata"]["ownerReferences"] = [
        {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "default-x7", "uid": "u-7"}
    ]
    return made


class Fleet(LiveApi):
    """With Cluster API and Karpenter. `forbids`: a part of paths whose deletion is refused."""

    def __init__(self, forbids: str = "nothing") -> None:
        super().__init__()
        self._forbids = forbids
        for group, version in (("cluster.x-k8s.io", "v1beta2"), ("karpenter.sh", "v1")):
            self.objects[f"/apis/{group}"] = {"preferredVersion": {"version": version}}
        for path, uid in ((MACHINE, "u-6"), (CLAIM, "u-7")):
            self.objects[path] = {"metadata": {"name": path.rpartition("/")[2], "uid": uid}}

    async def answer(self, request: Any) -> Any:
        if request.method == "DELETE" and self._forbids in request.path:
            return refused(403, "Forbidden", {})
        return await super().answer(request)


def wants(way: Way, **fields: Any) -> Setting:
    given = {"way": way, "after_s": 600.0, "most_a_day": 3} | fields
    return Setting(marking="condition", replacements=Replacements(**given))


def told(fake: LiveApi, name: str = "m1") -> str:
    """What stands in the mark of a machine about another one, once the condition says it as well."""
    made = fake.objects[f"/api/v1/nodes/{name}"]
    there = marks_of(made).mark
    said = "" if there is None else there.replacement
    conditions = {one["type"]: one for one in made.get("status", {}).get("conditions", ())}
    shown = conditions.get(FAULT_CONDITION, {}).get("message", "")
    return said if said and shown.endswith(said) else ""


def records(fake: LiveApi) -> list[dict[str, Any]]:
    return json.loads(fake.objects[RECORDS]["data"]["records.json"]) if RECORDS in fake.objects else []


def replaced(way: Way, then: Callable[[Fleet], None], fake: Fleet | None = None, **fields: Any) -> None:
    """A machine has been marked for long. `then` is called when its mark has words about another one."""
    fake = fake or Fleet()

    async def scene(fake: Any, restart: Any) -> None:
        await fake.put("/api/v1/nodes/m1", machine_of(), "ADDED")
        await fake.until(lambda: told(fake))
        then(fake)
        # A new operator asks nobody anew.
        before = len(fake.asked)
        await restart()
        await fake.put("/api/v1/nodes/m2", machine_of("m2", mark(at_s=LONG_AGO, replacement="x")), "ADDED")
        await fake.until(lambda: any(ask[:2] == ("PATCH", "/api/v1/nodes/m2/status") for ask in fake.asked))
        assert [one["machine"] for one in records(fake)] == ["m1"]
        assert not [ask for ask in fake.asked[before:] if ask[0] == "DELETE" and "/pods/" not in ask[1]]

    operated(scene, fake, wants(way, **fields))


def test_a_machine_of_cluster_api_is_deleted() -> None:
    def then(fake: Fleet) -> None:
        assert MACHINE not in fake.objects
        assert CLAIM in fake.objects
        assert told(fake) == "machines.cluster.x-k8s.io fleet/pool-7 is deleted, so that it is replaced"

    replaced(DeleteMachine(), then)


def test_a_node_claim_of_karpenter_is_deleted() -> None:
    def then(fake: Fleet) -> None:
        assert CLAIM not in fake.objects
        assert MACHINE in fake.objects
        assert told(fake) == "nodeclaims.karpenter.sh default-x7 is deleted, so that it is replaced"

    replaced(DeleteNodeClaim(), then)


def test_another_claim_of_that_name_is_not_deleted() -> None:
    fake = Fleet()
    fake.objects[CLAIM]["metadata"]["uid"] = "u-8"

    def then(fake: Fleet) -> None:
        assert CLAIM in fake.objects
        assert "is not there" in told(fake)

    replaced(DeleteNodeClaim(), then, fake)


@pytest.mark.parametrize(
    ("forbids", "gone", "words"),
    [
        ("/nodeclaims/", False, "another machine cannot be asked for: Forbidden"),
        (
            "nothing",
            True,
            "another machine cannot be asked for: nodeclaims.karpenter.sh default-x7 is not there",
        ),
    ],
)
def test_what_cannot_be_asked_is_told_and_not_tried_for_ever(forbids: str, gone: bool, words: str) -> None:
    fake = Fleet(forbids)
    if gone:
        del fake.objects[CLAIM]

    def then(fake: Fleet) -> None:
        assert told(fake).startswith(words)

    replaced(DeleteNodeClaim(), then, fake)


def test_a_machine_that_nobody_owns_is_told() -> None:
    async def scene(fake: Any, restart: Any) -> None:
        made = machine_of()
        del made["metadata"]["ownerReferences"]
        await fake.put("/api/v1/nodes/m1", made, "ADDED")
        await fake.until(lambda: told(fake).endswith("its Node does not name a NodeClaim of Karpenter"))

    operated(scene, Fleet(), wants(DeleteNodeClaim()))


def test_a_label_waits_for_the_nodes_of_jobs_and_goes_with_the_mark() -> None:
    """Whoever reads the label may switch the machine off at once."""
    path = "/api/v1/nodes/m1"

    async def scene(fake: Any, restart: Any) -> None:
        await fake.until(lambda: len(fake.named("pods")) == 4)
        name = "/api/v1/namespaces/research/pods/llm-n0"
        there = fake.objects[name]
        there["spec"]["nodeName"] = "m1"
        await fake.put(name, there)
        await fake.put(path, machine_of(), "ADDED")
        # Another machine's mark shows that the first one was looked at.
        await fake.put("/api/v1/nodes/m2", machine_of("m2"), "ADDED")
        await fake.until(lambda: told(fake, "m2"))
        assert not told(fake)
        assert "labels" not in fake.objects[path]["metadata"]
        await fake.remove(name)
        await fake.until(lambda: told(fake) == "it has the label sick=yes, so that it is replaced")
        assert fake.objects[path]["metadata"]["labels"] == {"sick": "yes"}
        there = fake.objects[path]
        del there["metadata"]["annotations"][NOTE_FAULT]
        await fake.put(path, there)
        await fake.until(lambda: "labels" not in fake.objects[path]["metadata"])

    operated(scene, Fleet(), wants(SetLabel("sick", "yes")))


def test_the_brake_holds_over_operators_and_lets_go_when_its_time_has_come() -> None:
    async def scene(fake: Any, restart: Any) -> None:
        for name in ("m1", "m2", "m3"):
            await fake.put(f"/api/v1/nodes/{name}", machine_of(name), "ADDED")
        await fake.until(lambda: sum(bool(told(fake, name)) for name in ("m1", "m2", "m3")) == 2)
        await restart()
        (held,) = (name for name in ("m1", "m2", "m3") if not told(fake, name))
        # A new operator comes to each of them and leaves it.
        await fake.put("/api/v1/nodes/m4", machine_of("m4", mark(at_s=LONG_AGO, replacement="x")), "ADDED")
        await fake.until(lambda: any(ask[:2] == ("PATCH", "/api/v1/nodes/m4/status") for ask in fake.asked))
        assert not told(fake, held)
        assert len(records(fake)) == 2
        # A day later.
        there = fake.objects[RECORDS]
        aged = [one | {"at_s": one["at_s"] - DAY_S} for one in records(fake)]
        there["data"]["records.json"] = json.dumps(aged)
        await fake.put(RECORDS, there)
        await restart()
        await fake.until(lambda: told(fake, held))
        assert len(records(fake)) == 3

    operated(scene, Fleet(), wants(SetLabel("sick", "yes"), most_a_day=2))


def test_a_record_that_cannot_be_read_holds_everything() -> None:
    async def scene(fake: Any, restart: Any) -> None:
        made = {"metadata": {"name": "holdfast-replacements"}, "data": {"records.json": "[7"}}
        await fake.put(RECORDS, made, "ADDED")
        await fake.put("/api/v1/nodes/m1", machine_of(), "ADDED")
        await fake.until(lambda: any(ask[:2] == ("GET", RECORDS) for ask in fake.asked))
        # Mended, and looked at again with the next change of a machine.
        await fake.put(RECORDS, {**fake.objects[RECORDS], "data": {"records.json": "[]"}})
        assert not told(fake)
        await fake.put("/api/v1/nodes/m2", node("m2"), "ADDED")
        await fake.until(lambda: told(fake))

    operated(scene, Fleet(), wants(SetLabel("sick", "yes")))


def test_an_operator_that_was_killed_before_it_asked_counts_once() -> None:
    async def scene(fake: Any, restart: Any) -> None:
        now_s = 4e9  # whatever it is now, this is not a day ago
        known = msgspec.json.encode([record(now_s)]).decode()
        await fake.put(RECORDS, {"metadata": {}, "data": {"records.json": known}}, "ADDED")
        await fake.put("/api/v1/nodes/m1", machine_of(), "ADDED")
        await fake.until(lambda: told(fake))
        assert len(records(fake)) == 1
        assert CLAIM not in fake.objects

    operated(scene, Fleet(), wants(DeleteNodeClaim(), most_a_day=1))


# ------------------------------------------------------------ a site's program


def script(tmp_path: Path, text: str) -> RunProgram:
    made = tmp_path / "replace"
    made.write_text(f"#!/bin/sh\n{text}\n")
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return RunProgram(str(made))


def test_a_program_is_told_machine_job_and_reason(tmp_path: Path) -> None:
    way = script(tmp_path, f'printf "%s\\n" "$@" >{tmp_path}/told; echo ticket 4711')

    def then(fake: Fleet) -> None:
        assert (tmp_path / "told").read_text().splitlines() == ["m1", "research/llm", "Xid 79"]
        assert told(fake) == f"{way.program} was asked to replace it: ticket 4711"

    replaced(way, then)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo no such machine >&2; exit 3", "ended with 3: no such machine"),
        (None, "No such file or directory"),
    ],
)
def test_a_program_that_fails_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    way = script(tmp_path, text) if text else RunProgram(str(tmp_path / "nothing"))

    def then(fake: Fleet) -> None:
        assert told(fake).endswith(words)

    replaced(way, then)


def test_a_program_that_does_not_end_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_marks, "COMMAND_S", 0.3)
    pipe = tmp_path / "held"
    way = script(tmp_path, f"mkfifo {pipe}; (exec 3<>{pipe}; read line <&3) & wait")
    said = asyncio.run(machine_marks._run(way.program, "m1", mark()))
    assert said == f"another machine was asked for in vain: {way.program} did not end within 0.3 s"


def test_a_job_s_mark_does_not_wait_for_the_program(tmp_path: Path) -> None:
    """Its pods would wait as well."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    way = script(tmp_path, f"read line <{pipe}; echo $line")

    async def run() -> None:
        fake = Fleet()
        async with serving(fake) as api, asyncio.timeout(30):
            for name, there in (("m1", mark(at_s=LONG_AGO)), ("m2", None)):
                made = node(name) if there is None else machine_of(name, there)
                await fake.put(f"/api/v1/nodes/{name}", made, "ADDED")
            seen = {name: machine_seen(fake.objects[f"/api/v1/nodes/{name}"]) for name in ("m1", "m2")}

            def saw(raw: dict[str, Any]) -> None:
                seen[raw["metadata"]["name"]] = machine_seen(raw)

            replaces = NodeReplacement(api, OPERATORS, Replacements(way=way), lambda _: False)
            writes = NodeMarks(api, seen, saw, "condition", 100, replaces)
            running = asyncio.create_task(writes.run())
            await fake.until(lambda: RECORDS in fake.objects)
            await writes.put("m2", mark(uid="u-2"))
            assert seen["m2"].marks.mark is not None
            assert not told(fake)
            await asyncio.to_thread(pipe.write_text, "ticket 1\n")
            await fake.until(lambda: told(fake).endswith("ticket 1"))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
