"""The watch of a machine: what calls it sick, how that looks on its Node, when it is over, and what all of them cost the API server."""

import asyncio
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from fakeapi import refused, serving
from liveapi import LiveApi, merged
from rights import WATCH, objects
from test_kube_reconcile import actions, observed, pod, said

from holdfast.agent import health, simulated_sources
from holdfast.errors import HoldfastError
from holdfast.health.ruleset import catalogue
from holdfast.kubernetes.client.api import ApiError, Backoff
from holdfast.kubernetes.names import HEALTH_CONDITION, NOTE_WATCH
from holdfast.kubernetes.objects.machine import (
    HealthNote,
    MachineSeen,
    calls_sick,
    health_note_of,
    health_note_on,
    machine_seen,
    note_patches,
)
from holdfast.kubernetes.pods.watch import NodeConditionWriter, watch
from holdfast.kubernetes.policy.plan import MakeNode, Observed
from holdfast.protocol.health import Condition, Finding, Remedy, Severity, acts_on_node
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.messages import FindingsReported, NodeReadings

NODE = "/api/v1/nodes/m1"
WITHIN_S = 30.0
SEEDS = 300
LINE = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
NOW_S = 1_800_000_000.0


def finding(rule: str = "xid-79", **fields: Any) -> Finding:
    given = {
        "severity": Severity.FATAL,
        "remedy": Remedy.REPLACE,
        "source": "kmsg",
        "subject": "gpu 0000:05:00",
        "evidence": LINE,
    }
    return Finding(rule=rule, **(given | fields))


def node(note: HealthNote | None = None, **fields: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"metadata": {"name": "m1", "uid": "u-1", "resourceVersion": "7"}, **fields}
    if note is not None:
        made = patched(made, next(note_patches(made, note, "b1", NOW_S)))
    return made


def patched(there: dict[str, Any], patch: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """As the API server does it: a merge patch, and one that knows the keys of conditions."""
    below, change = patch
    if not below:
        return dict(merged(there, change))
    by_type = {one["type"]: one for one in there.get("status", {}).get("conditions", ())}
    for one in change["status"]["conditions"]:
        by_type[one["type"]] = by_type.get(one["type"], {}) | one
    return {**there, "status": {**there.get("status", {}), "conditions": list(by_type.values())}}


def condition(made: dict[str, Any]) -> dict[str, Any]:
    """Ours; empty: there is none."""
    return next(
        (one for one in made.get("status", {}).get("conditions", ()) if one["type"] == HEALTH_CONDITION), {}
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"remedy": Remedy.REBOOT, "severity": Severity.ERROR}, True),
        ({"remedy": Remedy.RESET_DEVICE}, True),
        ({"remedy": Remedy.RESTART_WORKER}, False),
        ({"remedy": Remedy.ASK}, False),
        ({"remedy": Remedy.WATCH}, False),
        ({"severity": Severity.WARNING}, False),
        ({"condition": Condition.UNKNOWN}, False),
        ({"condition": Condition.HEALTHY}, False),
        ({"shared": True}, False),
        ({"dry_run": True}, False),
    ],
)
def test_what_calls_a_machine_sick(fields: dict[str, Any], expected: bool) -> None:
    assert calls_sick(finding(**fields)) is expected


def test_every_rule_that_calls_one_sick_has_a_reason_that_kubernetes_takes() -> None:
    rules = [rule.id for rule in catalogue() if acts_on_node(rule.remedy)]
    assert len(rules) > 100
    reasons = {
        condition(
            patched(
                node(), list(note_patches(node(), health_note_of(finding(rule), "b1", NOW_S), "b1", NOW_S))[1]
            )
        )["reason"]
        for rule in (*rules, "0x9", "a.b_c-d")
    }
    assert len(reasons) == len(rules) + 2
    assert {"Xid79", "GpuOffTheBus", "Rule0x9", "ABCD"} < reasons
    assert all(re.fullmatch("[A-Za-z][A-Za-z0-9]*", reason) for reason in reasons)


def test_annotation_and_condition_say_what_was_found() -> None:
    note = health_note_of(finding(), "b1", NOW_S)
    (at, written), (below, status) = note_patches(node(), note, "b1", NOW_S)
    assert (at, below) == ("", "/status")
    # Of this machine, and of no later one of its name.
    assert written["metadata"]["uid"] == status["metadata"]["uid"] == "u-1"
    assert set(written) == {"metadata"}
    assert health_note_on(patched(node(), (at, written))) == note
    (said_,) = status["status"]["conditions"]
    assert (said_["status"], said_["reason"], said_["message"]) == (
        "True",
        "Xid79",
        f"gpu 0000:05:00: {LINE}",
    )
    made = patched(patched(node(), (at, written)), (below, status))
    assert machine_seen(made).why_left == f"the condition {HEALTH_CONDITION}: gpu 0000:05:00: {LINE}"
    assert machine_seen(made).is_avoided


def test_a_machine_that_is_well_is_left_alone() -> None:
    assert not list(note_patches(node(), None, "b1", NOW_S))
    others = node(status={"conditions": [{"type": "Ready", "status": "True"}]})
    assert not list(note_patches(others, None, "b1", NOW_S))


def test_what_a_person_notes_stays_until_a_person_removes_it() -> None:
    by_hand = node()
    by_hand["metadata"]["annotations"] = {NOTE_WATCH: "smells of smoke"}
    ((below, status),) = note_patches(by_hand, None, "another boot", NOW_S)
    assert below == "/status"
    assert status["status"]["conditions"][0]["message"] == "smells of smoke"
    assert status["status"]["conditions"][0]["reason"] == "Noted"


def test_a_boot_that_is_not_known_ends_nothing() -> None:
    sick = node(health_note_of(finding(), "", NOW_S))
    assert [at for at, _ in note_patches(sick, None, "b2", NOW_S)] == ["/status"]
    sick = node(health_note_of(finding(), "b1", NOW_S))
    assert [at for at, _ in note_patches(sick, None, "", NOW_S)] == ["/status"]


def test_the_time_of_a_condition_is_that_of_its_change() -> None:
    sick = node(health_note_of(finding(), "b1", NOW_S))
    (shown,) = note_patches(sick, None, "b1", NOW_S)
    sick = patched(sick, shown)
    moment = condition(sick)["lastTransitionTime"]
    # A person writes another text into the annotation.
    sick["metadata"]["annotations"][NOTE_WATCH] = "it smells"
    ((_, other),) = note_patches(sick, None, "b1", NOW_S + 60)
    assert condition(patched(sick, ("/status", other)))["lastTransitionTime"] == moment
    sick["metadata"]["annotations"] = {}
    ((_, over),) = note_patches(sick, None, "b1", NOW_S + 60)
    after = condition(patched(sick, ("/status", over)))
    assert (after["status"], after["lastTransitionTime"] > moment) == ("False", True)


def test_whatever_happens_only_a_boot_or_a_person_ends_it() -> None:
    """Random lives of one machine. Its watch is killed between any two requests, and the next one goes on."""
    written = ended = cut = 0
    for seed in range(SEEDS):
        dice = random.Random(seed)
        made, boot, first = node(), 0, None
        for step in range(40):
            happens = dice.choice(("finds", "finds", "harmless", "boots", "person", "meddles", "restarts"))
            found = None
            if happens == "finds":
                found = health_note_of(
                    finding(dice.choice(("xid-79", "memory-ue"))), f"b{boot}", NOW_S + step
                )
                first = first or found
            elif happens == "boots":
                boot += 1
                ended += first is not None
                first = None
            elif happens == "person":
                made["metadata"].get("annotations", {}).pop(NOTE_WATCH, None)
                ended += first is not None
                first = None
            elif happens == "meddles" and condition(made):
                made = patched(
                    made,
                    (
                        "/status",
                        {"status": {"conditions": [{"type": HEALTH_CONDITION, "status": "Unknown"}]}},
                    ),
                )
            # The first request is carried out where something was found: what is only known to a process ends with it.
            asked = list(note_patches(made, found, f"b{boot}", NOW_S + step))
            for one in asked[: dice.choice((1, 2))]:
                made = patched(made, one)
                written += 1
            if list(note_patches(made, None, f"b{boot}", NOW_S + step)):
                cut += 1  # and its successor does the rest
            for one in list(note_patches(made, None, f"b{boot}", NOW_S + step)):
                made = patched(made, one)
            assert health_note_on(made) == first, f"seed {seed}, {happens}"
            assert (condition(made).get("status") == "True") is (first is not None), f"seed {seed}, {happens}"
            assert machine_seen(made).is_avoided is (first is not None)
            assert not list(note_patches(made, None, f"b{boot}", NOW_S + step)), (
                f"seed {seed}: it is never done"
            )
    assert min(written, ended, cut) > SEEDS


# ------------------------------------------------------------ jobs keep away


def test_new_nodes_keep_away_from_a_machine_that_a_condition_calls_sick() -> None:
    """The scheduler knows nothing of conditions, and would put the replacement there."""
    machines = {name: MachineSeen(name=name) for name in ("m-n0", "m-n1", "m-n2", "free")}
    machines["free"] = MachineSeen(name="free", sick="the condition HoldfastHealth: Xid 79")
    machines["m-n1"] = MachineSeen(name="m-n1", sick="the condition HoldfastHealth: Xid 79")
    seen = {"pods": tuple(map(pod, ("c1", "n0", "n1", "n2"))), "said": said("n0", "n1", "n2")}
    seen |= {"granted": frozenset({"llm-n3"})}
    assert avoided(observed(machines=machines, **seen)) == [frozenset({"free", "m-n1"})]
    # A machine that is cordoned is the scheduler's affair.
    machines |= {name: MachineSeen(name=name, going="it is cordoned") for name in ("free", "m-n1")}
    assert avoided(observed(machines=machines, **seen)) == [frozenset()]


def avoided(seen: Observed) -> list[frozenset[str]]:
    """By each node that is made."""
    return [one.avoid for one in actions(seen) if isinstance(one, MakeNode)]


# ------------------------------------------------------------ the edge


class OneNode(LiveApi):
    """`refuses`: how often a PATCH is refused (a status), or its connection cut (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: list[int] = []
        self.watching = asyncio.Event()
        self.one_answered, self.answered = asyncio.Event(), list[str]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._spoiled(request)
        finally:
            self.answered.append(request.path)
            self.one_answered.set()

    async def _spoiled(self, request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH" and self.refuses:
            status = self.refuses.pop(0)
            if status:
                return refused(status, "Forbidden" if status == 403 else "InternalError", {})
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await super().answer(request)

    async def _watch_all(self, request: web.Request, collection: str) -> web.StreamResponse:
        assert request.query["fieldSelector"] == "metadata.name=m1", "each watches its own Node"
        self.watching.set()
        response = web.StreamResponse()
        await response.prepare(request)
        version = int(request.query["resourceVersion"])
        while True:
            for kind, _, made in list(self.log):
                if int(made["metadata"]["resourceVersion"]) > version:
                    version = int(made["metadata"]["resourceVersion"])
                    await response.write(msg(kind, made))
            there = len(self.log)
            async with self.news:
                await self.news.wait_for(lambda there=there: len(self.log) > there)

    async def until_asked(self, times: int) -> None:
        """Until it has answered so many requests."""
        while len(self.answered) < times:
            await self.one_answered.wait()
            self.one_answered.clear()

    def requests(self) -> list[tuple[str, str]]:
        """Methods and paths, a watch as WATCH."""
        return [("WATCH" if "watch" in query else method, path) for method, path, query, _ in self.asked]

    @property
    def shown(self) -> tuple[bool, str | None]:
        """Whether the annotation is there, and the condition's status."""
        made = self.objects[NODE]
        return health_note_on(made) is not None, condition(made).get("status")


def msg(kind: str, made: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": made}).encode() + b"\n"


def watched(
    check: Callable[[OneNode, Callable[..., NodeConditionWriter], Any], Awaitable[None]], **fields: Any
) -> None:
    """Runs a check with a function that starts a watch in a boot, and one that ends it."""

    async def run() -> None:
        fake = OneNode()
        async with serving(fake) as api, asyncio.timeout(WITHIN_S):
            await fake.put(NODE, node(**fields), "ADDED")
            running: list[asyncio.Task[None]] = []

            def start(boot: str = "b1") -> NodeConditionWriter:
                at_once = Backoff(first_s=0.0)
                made = NodeConditionWriter(api, "m1", boot, at_once, Backoff(first_s=0.0))
                running.append(asyncio.create_task(made.run()))
                return made

            async def end() -> None:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                running.clear()

            try:
                await check(fake, start, end)
            finally:
                await end()

    asyncio.run(run())


def found(*which: Finding) -> FindingsReported:
    return FindingsReported(which)


def test_a_watch_that_finds_nothing_asks_once() -> None:
    async def check(fake: OneNode, start: Any, end: Any) -> None:
        one = start()
        one.hear(NodeReadings(()))
        one.hear(found(finding(severity=Severity.WARNING), finding(dry_run=True)))
        await fake.until_asked(1)
        one.hear(found(finding(condition=Condition.HEALTHY)))
        # Only now it has something to say.
        one.hear(found(finding(remedy=Remedy.ASK), finding()))
        await fake.until(lambda: fake.shown == (True, "True"))
        await fake.watching.wait()
        status = f"{NODE}/status"
        wrote = [("GET", NODE), ("PATCH", NODE), ("PATCH", status), ("WATCH", "/api/v1/nodes")]
        assert fake.requests() == [("GET", NODE), *wrote]

    watched(check)


def test_a_second_finding_changes_nothing_until_a_person_has_ended_the_first() -> None:
    async def check(fake: OneNode, start: Any, end: Any) -> None:
        one = start()
        one.hear(found(finding()))
        await fake.watching.wait()
        before = len(fake.asked)
        one.hear(found(finding("memory-ue")))
        assert len(fake.asked) == before
        there = fake.objects[NODE]
        assert (health_note_on(there) or there).rule == "xid-79"  # type: ignore[union-attr]
        del there["metadata"]["annotations"][NOTE_WATCH]
        await fake.put(NODE, there)
        await fake.until(lambda: fake.shown == (False, "False"))
        one.hear(found(finding("memory-ue")))
        await fake.until(lambda: fake.shown == (True, "True"))
        assert condition(fake.objects[NODE])["reason"] == "MemoryUe"

    watched(check)


def test_who_comes_after_does_not_forget_and_knows_of_a_boot() -> None:
    async def check(fake: OneNode, start: Any, end: Any) -> None:
        start().hear(found(finding()))
        await fake.watching.wait()
        await end()
        fake.asked.clear()
        fake.watching.clear()
        start()
        await fake.watching.wait()
        assert fake.requests() == [("GET", NODE), ("WATCH", "/api/v1/nodes")]
        assert fake.shown == (True, "True")
        await end()
        start("b2")
        await fake.until(lambda: fake.shown == (False, "False"))

    watched(check)


def test_what_a_person_removed_while_nobody_watched_is_over() -> None:
    async def check(fake: OneNode, start: Any, end: Any) -> None:
        start()
        await fake.until(lambda: fake.shown == (False, "False"))

    watched(check, status={"conditions": [{"type": HEALTH_CONDITION, "status": "True", "reason": "Xid79"}]})


@pytest.mark.parametrize("status", [0, 403, 409, 500])
def test_what_was_found_is_written_when_it_can_be(status: int) -> None:
    """The API server is away for a while, or somebody mends a right."""

    async def check(fake: OneNode, start: Any, end: Any) -> None:
        one = start()
        await fake.until_asked(1)
        fake.refuses = [status] * 3
        one.hear(found(finding()))
        await fake.until(lambda: fake.shown == (True, "True"))
        assert not fake.refuses

    watched(check)


def test_one_that_may_not_look_says_so() -> None:
    async def run() -> None:
        async with serving(OneNode()) as api, asyncio.timeout(WITHIN_S):
            with pytest.raises(ApiError, match="NotFound"):
                await NodeConditionWriter(api, "m1", "b1").run()

    asyncio.run(run())


def test_its_rights_are_enough() -> None:
    (role,) = [one for one in objects(WATCH) if one["kind"] == "ClusterRole"]
    verbs = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    needed = {("nodes", "get"), ("nodes", "patch"), ("nodes", "watch"), ("nodes/status", "patch")}
    assert verbs == needed


# ------------------------------------------------------------ the program


def test_a_line_of_the_kernel_is_on_the_node_and_the_end_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(left: Path) -> None:
        raise OSError(errno.EPERM, "/dev/kmsg: Operation not permitted")

    monkeypatch.setattr(health, "open_kernel_log", no_kernel)

    async def run() -> None:
        fake = OneNode()
        async with serving(fake) as api, asyncio.timeout(WITHIN_S):
            await fake.put(NODE, node(), "ADDED")
            # Whatever this machine's own sensors say is no part of this.
            rest = tuple(rule.id for rule in catalogue() if rule.id != "xid-79")
            running = asyncio.create_task(watch(api, "m1", tmp_path, HealthSpec(dry_run=rest)))
            await fake.until_asked(1)
            simulated_sources.append_kernel_lines(tmp_path / "kmsg", (LINE,))
            await fake.until(lambda: fake.shown == (True, "True"))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert [one.name for one in threading.enumerate() if one.name == "health"] == []


def test_a_refusal_at_the_start_names_the_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "machine_sources", lambda machine: [])

    async def run() -> None:
        async with serving(OneNode()) as api, asyncio.timeout(WITHIN_S):
            with pytest.raises(HoldfastError, match=r"watch of m1 needs .*NotFound.*watch\.yaml"):
                await watch(api, "m1", tmp_path, HealthSpec())

    asyncio.run(run())


def test_the_program_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    async def run() -> None:
        fake = OneNode()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", fake.answer)
        async with TestServer(app) as server, asyncio.timeout(WITHIN_S):
            await fake.put(NODE, node(), "ADDED")
            config = tmp_path / "kubeconfig"
            named = {"name": "t", "context": {"cluster": "t", "user": "t"}}
            cluster = {"name": "t", "cluster": {"server": str(server.make_url("")).rstrip("/")}}
            user = {"name": "t", "user": {"token": "t"}}
            made = {"contexts": [named], "clusters": [cluster], "users": [user], "current-context": "t"}
            config.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **made}))
            argv = ("--folder", str(tmp_path / "state"), "--health-dry-run", "*")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "holdfast.kubernetes.pods.watch", *argv),
                env=os.environ | {"KUBECONFIG": str(config), "HOLDFAST_MACHINE": "m1"},
                stderr=subprocess.PIPE,
            )
            await fake.until_asked(1)
            process.send_signal(signal.SIGTERM)
            _, told = await process.communicate()
            assert process.returncode == 0, told.decode()
            assert b"watches this machine" in told
            assert fake.requests() == [("GET", NODE)]

    asyncio.run(run())


def test_without_a_machine_it_says_what_it_is_for() -> None:
    env = {key: value for key, value in os.environ.items() if key != "HOLDFAST_MACHINE"}
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.kubernetes.pods.watch"],
        env=env,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "HOLDFAST_MACHINE is not set" in ended.stderr
