"""Where machines stand: from their labels, by a note on each pod, to the agent, which has no credentials."""

import threading
from pathlib import Path
from typing import Any

import pytest
from kubejobs import accept
from kubejobs import job as asked
from liveapi import LiveApi
from operating import PODS, operated
from test_kube_reconcile import actions, observed, pod, said

from holdfast.kubernetes.names import NO_PLACE, NOTE_PLACE, PLACE_FILE
from holdfast.kubernetes.objects.machine import MachineSeen, machine_seen
from holdfast.kubernetes.objects.render import agent_pod
from holdfast.kubernetes.pods.pod import read_place
from holdfast.kubernetes.policy.plan import TellPlace
from holdfast.protocol.place import parse_place

ZONE, RACK, CLIQUE = "topology.kubernetes.io/zone", "topology.holdfast.dev/rack", "nvidia.com/gpu.clique"


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({}, ""),
        ({ZONE: "eu-1a"}, "eu-1a"),
        ({CLIQUE: "7f9c-2.32766", ZONE: "eu-1a", RACK: "r7"}, "eu-1a/r7/7f9c-2.32766"),
        ({f"topology.k8s.aws/network-node-layer-{k}": f"nn-{k}" for k in (3, 1, 2)}, "nn-1/nn-2/nn-3"),
        ({ZONE: "eu-1a", "kubernetes.io/hostname": "m1", RACK: ""}, "eu-1a"),
    ],
)
def test_labels_make_a_place(labels: dict[str, str], place: str) -> None:
    seen = machine_seen({"metadata": {"name": "m1", "labels": labels}})
    assert seen.place == place
    assert parse_place(place) is not None


def test_a_site_names_its_own_labels() -> None:
    node = {"metadata": {"name": "m1", "labels": {ZONE: "a", "site/hall": "h2", "site/row": "17"}}}
    assert machine_seen(node, ("site/hall", "site/row")).place == "h2/17"
    many = {f"l{k}": str(k) for k in range(10)}
    node = {"metadata": {"name": "m1", "labels": many}}
    assert machine_seen(node, tuple(many)).place == "2/3/4/5/6/7/8/9", "the inner ones say more"


def test_a_pod_is_told_its_place_when_it_has_a_machine() -> None:
    waits = {"waits_for_place": True, "ready": False}
    machines = {"m-n1": MachineSeen(name="m-n1", place="z/r7"), "m-n2": MachineSeen(name="m-n2")}
    pods = (pod("c1"), pod("n0", machine=None, **waits), pod("n1", **waits), pod("n2", **waits))
    seen = observed(pods=pods, machines=machines, said=said("n0", "n1", "n2"))
    assert actions(seen) == (
        TellPlace(name="llm-n1", uid="uid-n1", place="z/r7"),
        TellPlace(name="llm-n2", uid="uid-n2", place=NO_PLACE),
    )


def test_only_where_machines_have_places_does_a_pod_wait() -> None:
    job = accept(asked())
    waits, does_not = (agent_pod(job, 0, waits_for_place=one) for one in (True, False))
    assert waits["metadata"]["annotations"][NOTE_PLACE] == ""
    (note,) = [
        source["downwardAPI"]["items"][0]
        for volume in waits["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        if "downwardAPI" in source
    ]
    assert note["path"] == PLACE_FILE
    assert note["fieldRef"] == {"fieldPath": f"metadata.annotations['{NOTE_PLACE}']"}
    assert NOTE_PLACE not in does_not["metadata"]["annotations"]
    assert "downwardAPI" not in str(does_not)


def test_an_agent_reads_its_place(tmp_path: Path) -> None:
    assert read_place(tmp_path) == (), "the operator knows none"
    note = tmp_path / PLACE_FILE
    note.write_text(NO_PLACE)
    assert read_place(tmp_path) == ()
    note.write_text("a//b")
    assert read_place(tmp_path) == (), "no reason not to train"
    note.write_text("")
    assert read_place(tmp_path, wait_s=0.0) == (), "nobody waits for an operator for ever"
    told = threading.Timer(0.05, lambda: note.write_text("z/r7"))
    told.start()
    assert read_place(tmp_path) == ("z", "r7")
    told.join()


def test_the_operator_notes_places_on_pods() -> None:
    async def scene(fake: LiveApi, restart: Any) -> None:
        node = {"metadata": {"name": "m1", "labels": {ZONE: "eu-1a"}}}
        await fake.put("/api/v1/nodes/m1", node, "ADDED")
        await fake.until(lambda: "llm-n0" in fake.named("pods"))
        await restart()
        await fake.remove(f"{PODS}/llm-n0")
        await fake.until(lambda: "llm-n3" in fake.named("pods"))
        path = f"{PODS}/llm-n3"
        assert fake.objects[path]["metadata"]["annotations"][NOTE_PLACE] == ""
        bound = {**fake.objects[path], "spec": {**fake.objects[path]["spec"], "nodeName": "m1"}}
        await fake.put(path, bound)
        await fake.until(lambda: fake.objects[path]["metadata"]["annotations"].get(NOTE_PLACE) == "eu-1a")

    operated(scene)
