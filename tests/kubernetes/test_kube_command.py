"""`holdfast run --engine kubernetes` and the commands that reach such a job, without a cluster."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fakeagents import serving as coordinating
from fakeapi import Transport, refused

from holdfast.cli.kube_options import KubernetesOptions
from holdfast.cli.kube_plan import plan_submission
from holdfast.cli.kubectl import arguments
from holdfast.coordinator.service.store import KEEPERS, Store
from holdfast.engines import jobs
from holdfast.engines.client import JobClient, NoAnswer
from holdfast.engines.jobs import Allocation
from holdfast.engines.run_options import FailureOptions, NodeOptions, RunOptions, SaveOptions
from holdfast.errors import UsageError
from holdfast.kubernetes.client.api import Api
from holdfast.kubernetes.commands.reach import KubernetesReach
from holdfast.kubernetes.commands.submission import Submission, refuse_wrong, submit
from holdfast.kubernetes.objects.check import check
from holdfast.kubernetes.objects.schema import job_schema
from holdfast.kubernetes.objects.status import QUEUED
from holdfast.protocol.job_options import HealthSpec, SnapshotOptions
from holdfast.protocol.network.endpoint import read_endpoint
from holdfast.protocol.options import check as check_options
from holdfast.protocol.options import declared

JOB = "/apis/holdfast.dev/v1alpha1/namespaces/research/holdfastjobs/llm"


def plan(**changes: Any) -> Submission:
    given = {
        "script": "train.py",
        "job": "llm",
        "engine": "kubernetes",
        "kubernetes": KubernetesOptions(image="me/train:1", namespace="research", in_image=True),
        **changes,
    }
    given["engines"] = {"kubernetes": given.pop("kubernetes")}
    return plan_submission(RunOptions(**given))


def ours(**changes: Any) -> KubernetesOptions:
    return KubernetesOptions(**{"image": "me/train:1", "namespace": "research", "in_image": True, **changes})


# ------------------------------------------------------------ from options to an object


def test_every_option_has_its_field():
    made = plan(
        args=("--lr", "1"),
        nodes=NodeOptions(nnodes="2:4", spares=2, wait_for_spare=True, nproc_per_node="gpu"),
        failures=FailureOptions(max_restarts=7, faults=("kill-worker:step=3",)),
        save=SaveOptions(
            checkpoints=("s3://bucket/llm,every=10m,keep=5,keep-every=100",),
            snapshots=SnapshotOptions("30s", copies=2),
            snapshot_memory="2G",
        ),
        health=HealthSpec(dry_run=("*",), blast_radius="50%", deep_checks=True, replace_slow=1.3),
        log_level="debug",
        kubernetes=ours(node_cpus="8", node_memory="64Gi", node_gpus=8, queue="team-a"),
    )
    assert check(made.job) == ()
    spec = made.spec
    assert made.job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert (spec["nodes"], spec["minNodes"], spec["spares"], spec["waitForSpare"]) == (4, 2, 2, True)
    assert spec["procsPerNode"] == "gpu"
    assert spec["run"] == {"script": "train.py", "args": ["--lr", "1"], "preload": ["torch"]}
    assert spec["snapshots"] == {"every": "30s", "copies": 2, "memory": "2Gi"}
    assert spec["checkpoints"] == [{"url": "s3://bucket/llm", "every": "10m", "keep": 5, "keepEvery": 100}]
    assert spec["runPolicy"] == {"maxRestarts": 7}
    assert spec["faults"] == ["kill-worker:step=3"]
    assert spec["health"] == {
        "dryRun": ["*"],
        "blastRadius": "50%",
        "deepChecks": True,
        "replaceSlow": 1.3,
    }
    (worker,) = spec["template"]["spec"]["containers"]
    assert worker["resources"] == {"limits": {"memory": "64Gi", "cpu": "8", "nvidia.com/gpu": "8"}}
    assert worker["env"] == [{"name": "HOLDFAST_LOG", "value": "debug"}]


def test_each_scheduler_of_gangs_has_a_value():
    """The option's values are the field's: whoever reads one page knows the other."""
    assert "scheduling" not in plan().spec
    scheduling = job_schema()["properties"]["spec"]["properties"]["scheduling"]
    (option,) = (one for one in declared(KubernetesOptions) if one.flag == "--gang")
    assert list(option.option.choices) == scheduling["properties"]["gang"]["enum"]
    for gang, queue in (("KAI", "a"), ("Volcano", "a"), ("Volcano", ""), ("PodGroup", "")):
        made = plan(kubernetes=ours(gang=gang, gang_queue=queue), nodes=NodeOptions(nnodes="2:4"))
        assert check(made.job) == ()
        assert made.spec["scheduling"] == {"gang": gang} | ({"queue": queue} if queue else {})


@pytest.mark.parametrize("kind", ["required", "preferred"])
def test_a_queue_that_chooses_machines_is_told_how_near_they_are_to_be(kind: str):
    made = plan(kubernetes=ours(queue="team-a", queue_topology=f"{kind}=topology.holdfast.dev/rack"))
    assert check(made.job) == ()
    assert made.spec["scheduling"] == {"queueTopology": {kind: "topology.holdfast.dev/rack"}}


def test_an_unknown_scheduler_is_refused_with_those_that_are_known():
    with pytest.raises(UsageError, match=r"--gang must be KAI, PodGroup or Volcano \(got 'slurm'\)"):
        check_options(ours(gang="slurm"))


def test_a_script_is_sent_along(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    made = plan(script=str(script), kubernetes=ours(in_image=False))
    assert made.spec["run"]["code"] == {"configMap": "llm-code"}
    assert made.spec["run"]["script"] == "train.py"
    assert [one["kind"] for one in made.objects()] == ["ConfigMap", "HoldfastJob"]
    assert made.objects()[0]["data"] == {"train.py": "print(1)\n"}


def test_a_template_keeps_what_it_says(tmp_path: Path):
    template = tmp_path / "pod.yaml"
    template.write_text(
        "metadata: {labels: {team: nlp}, name: x}\n"
        "spec: {nodeSelector: {gpu: h100}, containers: [{name: worker, image: other:2, env: [{name: A, value: b}]}]}\n"
    )
    made = plan(kubernetes=ours(image="", pod_template=template, node_memory="8Gi"))
    assert check(made.job) == ()
    assert made.spec["template"]["metadata"] == {"labels": {"team": "nlp"}}
    assert made.spec["template"]["spec"]["nodeSelector"] == {"gpu": "h100"}
    (worker,) = made.spec["template"]["spec"]["containers"]
    assert (worker["image"], worker["resources"]) == ("other:2", {"limits": {"memory": "8Gi"}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kubernetes": KubernetesOptions()}, "--image is missing"),
        ({"job": "Llm_1"}, "--job 'Llm_1'"),
        ({"nodes": NodeOptions(racks=2)}, "--racks"),
        ({"nodes": NodeOptions(topology=Path("x"))}, "--topology"),
        ({"health": HealthSpec(watch=False)}, "--health"),
        ({"health": HealthSpec(replay="1/100")}, "--replay"),
        ({"save": SaveOptions(data_cache="/x")}, "--data-cache"),
        ({"port": 7000}, "--port"),
        ({"save": SaveOptions(checkpoints=("here",))}, "--checkpoint here"),
        ({"nodes": NodeOptions(nnodes="4:2")}, "--nnodes '4:2'"),
        (
            {"script": "nowhere.py", "kubernetes": ours(in_image=False)},
            "nowhere.py: No such file or directory",
        ),
        ({"kubernetes": ours(pod_template=Path("/nowhere.yaml"))}, "--pod-template /nowhere.yaml"),
        (
            {"kubernetes": ours(gang="PodGroup", queue="team-a")},
            "--gang PodGroup cannot be combined with --queue team-a",
        ),
        ({"kubernetes": ours(gang_queue="team-a")}, "--gang-queue team-a: --gang is missing"),
        ({"kubernetes": ours(gang="PodGroup", gang_queue="team-a")}, "--gang-queue team-a: Kubernetes' own"),
        ({"kubernetes": ours(gang="KAI")}, "--gang KAI needs --gang-queue NAME"),
        (
            {"kubernetes": ours(queue_topology="required=rack")},
            "--queue-topology required=rack needs --queue",
        ),
        (
            {"kubernetes": ours(queue="team-a", queue_topology="rack")},
            "--queue-topology must be required=LABEL or preferred=LABEL (got rack)",
        ),
        (
            {"kubernetes": ours(queue="team-a", queue_topology="required=")},
            "--queue-topology must be required=LABEL or preferred=LABEL (got required=)",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(UsageError) as refusal:
        plan(**changes)
    assert words in str(refusal.value)


def test_what_only_the_object_knows_is_refused_with_its_field():
    with pytest.raises(
        UsageError, match=r"spec.snapshots.copies: 3; accepted: fewer than nodes and spares together"
    ):
        refuse_wrong(
            plan(nodes=NodeOptions(nnodes="2"), save=SaveOptions(snapshots=SnapshotOptions(copies=3)))
        )


# ------------------------------------------------------------ to the API server


class ApplyApi:
    """Takes objects by server-side apply. `refuse`: what is asked for, and the status; `soon`: why pods are refused, and how often."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {"/apis/holdfast.dev/v1alpha1": {}}
        self.asked: list[tuple[str, str, bool]] = []
        self.refuse: dict[str, int] = {}
        self.soon: tuple[str, float] = ("", 0)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        dry = "dryRun" in request.query
        path = request.path
        if request.method == "GET":
            there = self.objects.get(path)
            return refused(404, "NotFound", {}) if there is None else web.json_response(there)
        self.asked.append((request.method, path.rpartition("/")[2], dry))
        if status := self.refuse.get(path.rpartition("/")[2]):
            return refused(status, "Invalid", {})
        words, times = self.soon
        if path.endswith("/pods") and times:
            self.soon = words, times - 1
            return web.json_response({"reason": "Forbidden", "message": words}, status=403)
        made = json.loads(await request.text())
        made["metadata"]["uid"] = "u-1"
        if not dry:
            self.objects[path] = made
        return web.json_response(made)


@asynccontextmanager
async def serving(answer: Any) -> AsyncIterator[tuple[Api, Any]]:
    """An API server, and what `kubernetes_asyncio` would make of a kubeconfig for it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        base = str(server.make_url("")).rstrip("/")
        client: Any = Transport(session, base)
        client.rest_client = SimpleNamespace(pool_manager=session)
        client.configuration = SimpleNamespace(host=base)

        async def prove(headers: dict[str, str], queries: object, settings: object) -> None:
            headers["Authorization"] = "Bearer of-the-person"

        client.update_params_for_auth = prove
        yield Api(client), client


def submitted(
    fake: ApplyApi, submission: Submission, told: list[str] | None = None, account_s: float = 60
) -> str:
    async def run() -> str:
        async with serving(fake.answer) as (api, _):
            return await submit(api, submission, ([] if told is None else told).append, account_s)

    return asyncio.run(run())


def with_code() -> Submission:
    return msgspec.structs.replace(plan(), code={"train.py": ""})


def test_everything_is_tried_before_anything_is_made():
    fake = ApplyApi()
    assert submitted(fake, with_code()) == "u-1"
    assert fake.asked == [
        ("PATCH", "llm-code", True),
        ("PATCH", "llm", True),
        ("POST", "pods", True),
        ("PATCH", "llm-code", False),
        ("PATCH", "llm", False),
        ("PATCH", "llm-code", False),
    ]
    code = fake.objects["/api/v1/namespaces/research/configmaps/llm-code"]
    # It is removed together with the job.
    assert code["metadata"]["ownerReferences"][0]["uid"] == "u-1"


@pytest.mark.parametrize("refusal", ["llm-code", "llm", "pods"])
def test_the_api_servers_words_are_told_and_nothing_is_made(refusal: str):
    fake = ApplyApi()
    fake.refuse[refusal] = 422
    with pytest.raises(UsageError, match="the API server says: Invalid: in its own words"):
        submitted(fake, with_code())
    assert all(dry for _, _, dry in fake.asked)


NO_ACCOUNT = 'pods "llm-n0" is forbidden: error looking up service account research/{0}: serviceaccount "{0}" not found'


def test_the_service_account_of_a_new_namespace_is_waited_for():
    fake, told = ApplyApi(), list[str]()
    fake.soon = NO_ACCOUNT.format("default"), 2
    assert submitted(fake, plan(), told) == "u-1"
    assert [what for _, what, dry in fake.asked if dry] == ["llm", "pods", "pods", "pods"]
    assert told == ["the namespace research is new; waiting up to 60 s for its service account"]  # once


@pytest.mark.parametrize(("account", "account_s"), [("default", 0), ("mine", 60)])
def test_an_account_that_does_not_come_is_refused(account: str, account_s: float):
    fake, told = ApplyApi(), list[str]()
    fake.soon = NO_ACCOUNT.format(account), math.inf
    with pytest.raises(UsageError) as refusal:
        submitted(fake, plan(), told, account_s)
    assert NO_ACCOUNT.format(account) in str(refusal.value)
    assert not told
    assert all(dry for _, _, dry in fake.asked)


def test_its_words_are_beside_ours():
    fake = ApplyApi()
    fake.refuse["llm"] = 422
    with pytest.raises(UsageError) as refusal:
        submitted(fake, plan(save=SaveOptions(snapshots=SnapshotOptions(copies=9))))
    assert "spec.snapshots.copies: 9; accepted: a whole number from 0 to 8" in str(refusal.value)
    assert "the API server says: Invalid: in its own words" in str(refusal.value)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("Training", "`holdfast attach --job llm -n research` shows it"),
        ("Complete", "which has ended (Known)"),
    ],
)
def test_a_name_that_is_taken(condition: str, words: str):
    fake = ApplyApi()
    fake.objects[JOB] = status_of(condition)
    with pytest.raises(UsageError) as refusal:
        submitted(fake, plan())
    assert words in str(refusal.value)
    assert fake.asked == []


def test_a_cluster_without_the_definition():
    fake = ApplyApi()
    fake.objects.clear()
    with pytest.raises(UsageError, match="because the operator is not installed"):
        submitted(fake, plan())


def status_of(condition: str, **status: Any) -> dict[str, Any]:
    one = {
        "type": condition,
        "status": "True",
        "reason": "Because",
        "message": "",
        "lastTransitionTime": "2026-11-24T00:00:00Z",
    }
    return {"status": {"state": "Known", "conditions": [one], **status}}


# ------------------------------------------------------------ to the coordinator


class ProxyApi:
    """An API server whose proxy leads to a real coordinator. Like the real one it keeps `Authorization` for itself."""

    def __init__(self, base: str) -> None:
        self.base, self.job = (
            base,
            status_of("Training", coordinator={"pod": "job-c1", "address": "127.0.0.1"}),
        )
        self.prefix = "/api/v1/namespaces/research/pods/http:job-c1:7077/proxy"
        self.session: aiohttp.ClientSession | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/holdfastjobs/job"):
            return web.json_response(self.job)
        if request.path.endswith("/secrets/job-holdfast"):
            return web.json_response({"data": {"token": "c2VjcmV0"}})
        assert request.raw_path.startswith(self.prefix)
        assert request.headers["Authorization"] == "Bearer of-the-person"
        path = request.raw_path.removeprefix(self.prefix)
        headers = {k: v for k, v in request.headers.items() if k not in ("Authorization", "Host")}
        # One for all who ask, as the real one: a request goes over a connection that is open from another one's.
        self.session = self.session or aiohttp.ClientSession()
        if request.headers.get("Upgrade") == "websocket":
            return await self._upgrade(request, self.session, path)
        data = await request.read()
        async with self.session.request(
            request.method, self.base + path, headers=headers, data=data
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.startswith("Holdfast") or k == "Retry-After"}
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def _upgrade(
        self, request: web.Request, session: aiohttp.ClientSession, path: str
    ) -> web.StreamResponse:
        path = path.partition("?")[0]  # as 1.37.2 does
        own = {k: v for k, v in request.headers.items() if k == "X-Holdfast-Token"}
        # The real proxy passes bytes on: a side that closes waits for the answer of the other one.
        async with session.ws_connect(
            self.base + path, headers=own, autoclose=False, max_msg_size=0
        ) as behind:
            before = web.WebSocketResponse()
            before.headers["Holdfast-Proof"] = behind._response.headers["Holdfast-Proof"]
            await before.prepare(request)
            back = asyncio.create_task(pass_on(before, behind))
            await pass_on(behind, before)
            await back
            return before


async def pass_on(source: Any, to: Any) -> None:
    """One direction of a WebSocket, with its end."""
    while (frame := await source.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
        await (to.send_str if isinstance(frame.data, str) else to.send_bytes)(frame.data)
    await to.close()


def reached(folder: Path, scene: Any, spoil: Any = lambda proxy: None, copies: int = 0) -> None:
    """A job's client, which has nothing of the job but its name and where its object is."""

    async def run() -> None:
        async with coordinating(folder, copies=copies) as plane:
            endpoint = read_endpoint(folder / "jobs" / "job")
            assert endpoint is not None
            proxy = ProxyApi(plane.url)
            spoil(proxy)
            here = folder / "elsewhere" / "job"
            here.mkdir(parents=True)
            allocation = Allocation(engine="kubernetes", id="u-1", namespace="research")
            jobs.write_allocation(here, allocation)
            async with serving(proxy.answer) as (_, client):

                @asynccontextmanager
                async def opened(context: str | None) -> AsyncIterator[Any]:
                    yield client

                reach = KubernetesReach(here, allocation, opened, port=endpoint.port)
                try:
                    async with JobClient(here, reach) as job:
                        await scene(plane, job, here)
                finally:
                    await proxy.close()

    asyncio.run(run())


def test_a_coordinator_behind_the_proxy_of_an_api_server(tmp_path: Path):
    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        await plane.pair()
        assert (await client.get("/status"))["phase"] == "running"
        with pytest.raises(UsageError, match="unheard-of"):
            await client.post("/fault", "unheard-of")
        heard = []
        async for said in client.watch():
            heard.append(said.kind)
            if said.kind == "status" and heard.count("status") == 1:
                await client.post("/stop?reason=a%20word", repeat=True)
            if said.kind == "ended":
                assert said.value.reason == "a word"
        assert heard[-1] == "ended"
        # What ends with the pods is here now.
        assert json.loads((here / "report.json").read_bytes())["reason"] == "a word"
        assert (here / "job.sqlite").read_bytes().startswith(b"SQLite format 3")
        assert not (here / "token").exists()

    reached(tmp_path, scene)


def test_who_looked_on_gets_the_ledger_also_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where the coordinator's machine was lost: the job may end before those who look on have found the next one."""
    monkeypatch.setattr("holdfast.coordinator.service.server.LINGER_S", 3600.0)

    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        await plane.pair()
        look_on = await plane.session.ws_connect(f"{plane.url}/watch/0/keep/c0ffee")
        await look_on.receive()
        look_on._response.connection.transport.abort()
        await client.post("/stop?reason=enough", repeat=True)
        await plane.heard.until(lambda said: said[0] == "ended")
        kinds = [said.kind async for said in client.watch()]
        assert kinds.count("ended") == 1
        assert kinds[-1] == "ended"
        assert (here / "job.sqlite").read_bytes().startswith(b"SQLite format 3")
        # It has given the ledger away, and nothing else keeps it.
        await plane.serving
        # A coordinator that took over just before the end would have known of who was cut off.
        with closing(Store(tmp_path / "jobs" / "job" / "job.sqlite", read_only=True)) as store:
            assert msgspec.msgpack.decode(store.kept(KEEPERS)) == ["c0ffee"]

    reached(tmp_path, scene, copies=2)


@pytest.mark.parametrize(
    ("copies", "looked_on"),
    [(2, "never"), (2, "and left"), (2, "was cut off, came again and left"), (0, "and left")],
)
def test_a_coordinator_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int, looked_on: str
):
    """Where nobody ever looked on, or who did has left, or the ledger stays."""
    monkeypatch.setattr("holdfast.coordinator.service.server.LINGER_S", 3600.0)

    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        await plane.pair()
        if "cut off" in looked_on:
            cut = await plane.session.ws_connect(f"{plane.url}/watch/0/keep/c0ffee")
            await cut.receive()
            cut._response.connection.transport.abort()
            again = await plane.session.ws_connect(f"{plane.url}/watch/0/keep/c0ffee")
            await again.receive()
            await again.close()
        elif looked_on != "never":
            async with aclosing(client.watch()) as heard:
                assert await anext(heard)
        await client.post("/stop?reason=enough", repeat=True)
        await plane.serving

    reached(tmp_path, scene, copies=copies)


def test_it_says_its_name_over_a_connection_that_another_one_has_used(tmp_path: Path):
    """As the API server's proxy sends it, which keeps connections open for whoever asks next."""

    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        await plane.pair()
        for _ in range(3):
            assert (await client.get("/status"))["phase"] == "running"
            client._reach._where = None  # as after another coordinator: its name is asked for anew

    reached(tmp_path, scene)


def test_a_stranger_behind_the_proxy_is_no_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.engines.client.PATIENCE_S", 0.2)

    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        with pytest.raises(NoAnswer, match="does not answer"):
            await client.post("/stop?reason=x", repeat=True)

    def spoil(proxy: ProxyApi) -> None:
        # Its pod has another address now, so what is proven is of another process.
        proxy.job["status"]["coordinator"]["address"] = "127.0.0.2"

    reached(tmp_path, scene, spoil)


@pytest.mark.parametrize(("condition", "over"), [("Complete", True), ("Failed", True), ("Suspended", False)])
def test_a_job_that_does_not_run(tmp_path: Path, condition: str, over: bool):
    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        with pytest.raises(
            NoAnswer, match="is suspended" if condition == "Suspended" else "is not running: Known"
        ):
            await client.get("/status")
        allocation = jobs.read_allocation(here)
        assert allocation is not None
        assert allocation.over == over

    def spoil(proxy: ProxyApi) -> None:
        proxy.job.update(status_of(condition), spec={"runPolicy": {"suspend": True}})

    reached(tmp_path, scene, spoil)


def test_a_job_that_was_just_resumed_is_waited_for(tmp_path: Path):
    """Its status is that of before until the operator has seen the change."""

    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        assert await client._reach.is_running()

    def spoil(proxy: ProxyApi) -> None:
        proxy.job.update(status_of("Suspended"), spec={"runPolicy": {"suspend": False}})

    reached(tmp_path, scene, spoil)


def test_a_job_in_a_queue_is_waited_for(tmp_path: Path):
    """Nobody has to resume it, so who looks on stays."""

    async def scene(plane: Any, client: JobClient, here: Path) -> None:
        assert await client._reach.is_running()

    def spoil(proxy: ProxyApi) -> None:
        proxy.job.update(status_of("Suspended"))
        proxy.job["status"]["conditions"][0]["reason"] = QUEUED

    reached(tmp_path, scene, spoil)


# ------------------------------------------------------------ the plugin of kubectl


def test_the_plugin_gives_the_engine_and_the_place():
    assert arguments(["run", "-n", "research", "train.py"]) == [
        "run", "--engine", "kubernetes", "--namespace", "research", "train.py",
    ]  # fmt: skip
    assert arguments(["logs", "-n", "5", "--rank", "1"]) == ["logs", "-n", "5", "--rank", "1"]
    assert arguments(["status", "-n", "research"]) == ["status"]
    assert arguments([]) == ["--help"]
