"""The Helm chart makes the objects of deploy/kubernetes/operator.yaml. Rendered by Helm itself where `make helm-test` put it."""

import re
from typing import Any

import pytest
import yaml
from rights import MANIFEST, MARKS, objects

CHART = MANIFEST.parents[1] / "helm" / "holdfast-operator"
NAMESPACE = "holdfast-system"


def rules(text: str) -> list[str]:
    return sorted(re.findall(r"^- \{apiGroups:.*$", text, re.MULTILINE))


def test_its_rights_are_those_of_the_manifest() -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert rules(templates) == rules(MANIFEST.read_text() + MARKS.read_text())


def test_every_value_is_used_and_every_value_used_is_there() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    paths = {
        f"{name}.{inner}"
        for name, value in values.items()
        for inner in (value if isinstance(value, dict) and value and name != "resources" else {None: None})
    }
    there = {path.removesuffix(".None") for path in paths}
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"\.Values\.([a-zA-Z.]+)", templates)) == there


# ------------------------------------------------------------ as Helm renders it


def rendered(**values: Any) -> list[dict[str, Any]]:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with helm.Chart.load(str(CHART)) as chart:
        made = chart.render(values or None, name="holdfast", namespace=NAMESPACE)
    return [one for text in made.values() for one in yaml.safe_load_all(text) if one]


def by_name(all_: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in all_}


def test_by_default_it_makes_the_manifest() -> None:
    expected = by_name(objects())
    del expected["Namespace", NAMESPACE]  # helm install --create-namespace
    made = by_name(rendered())
    assert made == expected


def test_helm_finds_no_fault_in_it() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema()
    found = helm.lint(str(CHART))
    assert found["total_charts_linted"] == 1
    assert not found["errors"]
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


def test_a_site_leaves_rights_out() -> None:
    kinds = by_name(rendered(rights={"machines": False, "kueue": False, "groups": False, "users": False}))
    assert ("ClusterRole", "holdfast-jobs") in kinds
    left_out = {"holdfast-machines", "holdfast-kueue", "holdfast-groups", "holdfast-users"}
    assert not {name for _, name in kinds} & left_out


def test_marks_are_made_where_a_site_wants_them() -> None:
    made = by_name(rendered(marks={"mode": "taint"}))
    added = by_name(objects(MARKS))
    assert {key: made[key] for key in added} == added
    (container,) = made["Deployment", "holdfast-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--mark=taint", "--mark-at-most=5"]


def test_one_namespace_needs_no_rights_elsewhere() -> None:
    made = by_name(rendered(watchNamespace="research", rights={"machines": False}))
    role, binding = made["Role", "holdfast-jobs"], made["RoleBinding", "holdfast-jobs"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "research"
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["subjects"][0]["namespace"] == NAMESPACE
    assert ("ClusterRole", "holdfast-jobs") not in made
    (container,) = made["Deployment", "holdfast-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--watch=research"]


def test_what_a_site_sets_is_in_the_pod() -> None:
    values = {
        "image": {
            "repository": "r/holdfast",
            "tag": "7",
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "s"}],
        },
        "topologyLabels": ["site/hall", "site/row"],
        "goingConditions": ["GpuMemWatch"],
        "coordinator": {"image": "r/c:1", "priorityClass": "high"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "nodeSelector": {"pool": "system"},
        "priorityClassName": "high",
        "python": "python3.12",
        "log": "debug,json",
        "replicas": 1,
    }
    deployment = by_name(rendered(**values))["Deployment", "holdfast-operator"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["replicas"] == 1
    assert (container["image"], container["imagePullPolicy"]) == ("r/holdfast:7", "Always")
    assert container["args"] == [
        "--coordinator-image=r/c:1",
        "--coordinator-priority-class=high",
        "--topology-labels=site/hall,site/row",
        "--going-conditions=GpuMemWatch",
        "--python=python3.12",
        "--log=debug,json",
    ]
    assert container["command"][0] == "python3.12"
    assert pod["imagePullSecrets"] == [{"name": "s"}]
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"pool": "system"}, "high")
    assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}]


def test_a_value_that_is_not_there_is_refused() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError, match="replica"):
        chart.render({"replica": 3}, name="holdfast", namespace=NAMESPACE)
