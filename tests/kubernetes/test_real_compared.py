"""The simulated API server of the other tests answers as a real one does: both are given the same requests.

What its first run found, and what was mended in the simulated one (`liveapi.py`): see docs/architecture/kubernetes.md.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fakeapi import serving
from kubejobs import job
from liveapi import LiveApi
from test_real_rules import defined

from holdfast.kubernetes.client.api import Api, ApiError

pytestmark = [pytest.mark.kube, pytest.mark.nightly, pytest.mark.timeout(900)]
JOBS = "/apis/holdfast.dev/v1alpha1/namespaces/default/holdfastjobs"
MAPS = "/api/v1/namespaces/default/configmaps"
SEEDS, REQUESTS, BETWEEN_LISTS = range(8), 150, 30
NAMES = ("one", "two", "three")
TEXTS = ("plain", "a > b & c < d", "größe", "\u2028", 'a "quoted" \\ word', "")
FINALIZERS = (["holdfast.dev/save"], ["holdfast.dev/save", "example.com/other"], None)
Request = dict[str, Any]


class Side:
    """One of the two servers, and what was last seen of each object there."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._last: dict[str, dict[str, Any]] = {}

    async def ask(self, request: Request) -> Any:
        """The answer, without what differs between any two servers."""
        path, known = request["path"], self._last.get(request["path"].removesuffix("/status"), {})
        metadata = known.get("metadata", {})
        try:
            match request["verb"]:
                case "create":
                    made = await self.api.create(path.rpartition("/")[0], request["body"])
                case "get":
                    made = await self.api.get(path)
                case "apply":
                    made = await self.api.apply(path, request["body"], manager="tests")
                case "merge":
                    made = await self.api.merge(path, self._filled(request["body"], metadata))
                case "patch":
                    made = await self.api.test_and_set(path, self._tested(request["body"], known))
                case "delete":
                    uid = metadata.get("uid", "none") if request["uid"] == "its" else "another"
                    version = {"none": None, "its": metadata.get("resourceVersion"), "old": 1}[
                        request["version"]
                    ]
                    made = await self.api.delete(path, uid, version=None if version is None else int(version))
                case _:
                    raise AssertionError(request)
        except ApiError as error:
            return "refused", error.status, error.reason
        if request["verb"] == "delete" and "deletionTimestamp" in metadata:
            self._last[path] = made
            return plain(
                made
            )  # asked for again: now and then the real one writes the object anew, and changes nothing
        if made.get("kind") == "Status":  # of what is gone with its deletion
            self._last.pop(path, None)
            return "gone"
        at = path.removesuffix("/status")
        before, self._last[at] = self._last.get(at), made
        same = before is not None and before["metadata"].get("uid") == made["metadata"]["uid"]
        newer = before is None or int(made["metadata"]["resourceVersion"]) > int(
            before["metadata"]["resourceVersion"]
        )
        return plain(made), "the same" if same else "another", "newer" if newer else "as it was"

    @staticmethod
    def _filled(body: Any, metadata: dict[str, Any]) -> Any:
        """The uid and the version are the server's own."""
        if "metadata" not in body:
            return body
        own = {"its": metadata.get("uid"), "another": "another"}
        filled = {**body["metadata"]}
        if "uid" in filled:
            filled["uid"] = own[filled["uid"]]
        if "resourceVersion" in filled:
            filled["resourceVersion"] = {"its": metadata.get("resourceVersion"), "old": "1"}[
                filled["resourceVersion"]
            ]
        return {**body, "metadata": filled}

    @staticmethod
    def _tested(body: list[Any], known: dict[str, Any]) -> list[Any]:
        """A value that is tested may be what stands there on this server."""
        made = []
        for one in body:
            if one.get("value") != "as it is":
                made.append(one)
                continue
            value: Any = known
            for name in one["path"].strip("/").split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            made.append({**one, "value": value})
        return made

    async def listed(self, folder: str, query: dict[str, str]) -> tuple[list[Any], str]:
        items, version = await self.api.list_all(folder, query)
        items = [one for one in items if is_ours(one)]
        return sorted((plain(one) for one in items), key=lambda one: str(one["metadata"]["name"])), version

    async def watched(self, folder: str, query: dict[str, str], version: str, last: str) -> list[Any]:
        """Events from the version on, until the object of this name comes."""
        seen = []
        async for event in self.api.watch(folder, query, version):
            if event["type"] == "BOOKMARK" or not is_ours(event["object"]):
                continue
            seen.append((event["type"], plain(event["object"])))
            if event["object"]["metadata"]["name"] == last:
                return seen
        raise AssertionError(f"the watch ended before {last}")


def plain(made: dict[str, Any]) -> dict[str, Any]:
    """An object without what is another one on each server: times, numbers, owners of fields."""
    metadata = {
        key: value
        for key, value in made["metadata"].items()
        if key
        not in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "deletionGracePeriodSeconds")
    }
    if "deletionTimestamp" in metadata:
        metadata["deletionTimestamp"] = "set"
    rest = {key: value for key, value in made.items() if key not in ("kind", "apiVersion", "metadata")}
    return {"metadata": metadata, **rest}


# ------------------------------------------------------------ what is asked


def metadata_of(dice: random.Random) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key in ("labels", "annotations"):
        if dice.random() < 0.5:
            values = ["x", "y", None] if key == "labels" else [*TEXTS, None]
            changed[key] = {name: dice.choice(values) for name in dice.sample(["a", "b"], dice.randint(1, 2))}
    if dice.random() < 0.3:
        changed["finalizers"] = dice.choice(FINALIZERS)
    if dice.random() < 0.2:
        changed["resourceVersion"] = dice.choice(["its", "its", "old"])
    if dice.random() < 0.2:
        changed["uid"] = dice.choice(["its", "its", "another"])
    return changed


def condition(dice: random.Random) -> dict[str, Any]:
    return {
        "type": dice.choice(["Training", "Accepted", "Complete"]),
        "status": dice.choice(["True", "False"]),
        "reason": "Word",
        "message": dice.choice(TEXTS),
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def status_patch(dice: random.Random) -> list[dict[str, Any]]:
    """Tests and changes of a status, right and wrong ones."""
    some = [
        {"op": "test", "path": "/metadata/uid", "value": "as it is"},
        {"op": "test", "path": "/metadata/generation", "value": "as it is"},
        {"op": "test", "path": "/metadata/generation", "value": 99},
        {"op": "test", "path": "/status/revision", "value": "as it is"},
        {"op": "test", "path": "/status/reason", "value": "as it is"},
        {"op": "test", "path": "/status/state", "value": dice.choice(["Running", "Failed"])},
        {"op": "test", "path": "/status/conditions/0/type", "value": "Training"},
        {"op": "add", "path": "/status/revision", "value": dice.randint(1, 9)},
        {"op": "add", "path": "/status/state", "value": dice.choice(["Running", "Failed"])},
        {"op": "add", "path": "/status/reason", "value": dice.choice(TEXTS)},
        {"op": "replace", "path": "/status/reason", "value": dice.choice(TEXTS)},
        {"op": "remove", "path": "/status/reason"},
        {"op": "remove", "path": "/status/nodes"},
        {"op": "add", "path": "/status/nodes", "value": {"wanted": 3}},
        {"op": "add", "path": "/status/nodes/present", "value": 2},
        {"op": "add", "path": "/status/conditions", "value": [condition(dice)]},
        {"op": "replace", "path": "/status/conditions/0", "value": condition(dice)},
        {"op": "remove", "path": "/status/conditions/0"},
        {"op": "add", "path": "/metadata/labels", "value": {"a": "by status"}},
        {"op": "replace", "path": "/spec/nodes", "value": 3},
    ]
    first = [{"op": "add", "path": "/status", "value": {"state": "Running", "conditions": [condition(dice)]}}]
    chosen = dice.sample(some, dice.randint(0, 3))
    # What is tested comes before what is changed, as clients write it.
    chosen.sort(key=lambda one: one["op"] != "test")
    return [*(first if dice.random() < 0.4 else []), *chosen]


def request(dice: random.Random, spec: dict[str, Any]) -> Request:
    name, of_job = dice.choice(NAMES), dice.random() < 0.7
    path = f"{JOBS if of_job else MAPS}/{name}"
    made: dict[str, Any] = (
        {**job(), "metadata": {"name": name}, "spec": spec}
        if of_job
        else {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"k": dice.choice(TEXTS)},
        }
    )
    verb = dice.choices(["create", "get", "merge", "patch", "delete", "apply"], [20, 8, 30, 25, 12, 5])[0]
    match verb:
        case "create":
            labels = {"labels": {"a": "x"}} if dice.random() < 0.5 else {}
            body = {**made, "metadata": {"name": name, **labels}}
            return {"verb": verb, "path": path, "body": body}
        case "merge":
            change: dict[str, Any] = {"metadata": metadata_of(dice)} if dice.random() < 0.8 else {}
            if of_job and dice.random() < 0.5:
                change["spec"] = dice.choice(
                    [
                        {"nodes": 2},
                        {"nodes": 4},
                        {"minNodes": 1},
                        {"minNodes": None},
                        {"runPolicy": {"suspend": True}},
                    ]
                )
            if of_job and dice.random() < 0.2:
                change["status"] = {"state": "by a person"}
            if not of_job:
                change["data"] = {dice.choice(["k", "l"]): dice.choice([*TEXTS, None])}
            return {"verb": verb, "path": path, "body": change}
        case "patch" if of_job:
            return {"verb": verb, "path": f"{path}/status", "body": status_patch(dice)}
        case "apply":
            labels = {"labels": {"b": dice.choice("xy")}} if dice.random() < 0.5 else {}
            return {"verb": verb, "path": path, "body": {**made, "metadata": {"name": name, **labels}}}
        case "delete":
            uid, version = dice.choice(["its", "its", "another"]), dice.choice(["none", "none", "its", "old"])
            return {"verb": verb, "path": path, "uid": uid, "version": version}
        case _:
            return {"verb": "get", "path": path}


QUERIES = ({}, {"labelSelector": "a=x"}, {"fieldSelector": "metadata.name=two"})


def is_ours(made: dict[str, Any]) -> bool:
    """A controller puts a ConfigMap of its own into every namespace."""
    name = made["metadata"]["name"]
    return name in NAMES or name.startswith("last-")


async def cleared(api: Api) -> None:
    for folder in (JOBS, MAPS):
        for one in filter(is_ours, (await api.list_all(folder, {}))[0]):
            path = f"{folder}/{one['metadata']['name']}"
            if "finalizers" in one["metadata"]:
                one = await api.merge(path, {"metadata": {"finalizers": None}})
            if "deletionTimestamp" not in one["metadata"]:
                await api.delete(path, one["metadata"]["uid"])


def test_the_simulated_server_answers_as_the_real_one() -> None:
    async def run() -> None:
        async with defined(alone=True) as api:
            for seed in SEEDS:
                await compare(api, seed)

    asyncio.run(run())


async def compare(api: Api, seed: int) -> None:
    dice, real = random.Random(seed), Side(api)
    await cleared(api)
    async with serving(LiveApi()) as other:
        simulated = Side(other)
        # With its defaults: the simulated server fills none in.
        body = {**job(spec__nodes=3), "metadata": {"name": "full"}}
        spec = (await api.request("POST", JOBS, {"dryRun": "All"}, body))["spec"]
        since: dict[tuple[str, str], tuple[str, str]] = {}
        for number in range(REQUESTS):
            asked = request(dice, spec)
            theirs, ours = await real.ask(asked), await simulated.ask(asked)
            assert ours == theirs, (seed, number, asked)
            if number % BETWEEN_LISTS:
                continue
            for folder in (JOBS, MAPS):
                last = f"last-{number}"
                made = {"metadata": {"name": last, "labels": {"a": "x"}}}
                if folder == JOBS:
                    made = {**job(), "spec": spec, **made}
                end = {"verb": "create", "path": f"{folder}/{last}", "body": made}
                assert await simulated.ask(end) == await real.ask(end)
                for query in QUERIES[:2]:
                    if (versions := since.get((folder, str(query)))) is not None:
                        heard = [
                            await side.watched(folder, query, version, last)
                            for side, version in zip((real, simulated), versions, strict=True)
                        ]
                        assert heard[1] == heard[0], (seed, number, query)
                for query in QUERIES:
                    found, version = await real.listed(folder, query)
                    simulated_found, simulated_version = await simulated.listed(folder, query)
                    assert simulated_found == found, (seed, number, query)
                    since[folder, str(query)] = version, simulated_version
    await cleared(api)
