"""HoldfastJobs for the tests."""

import copy
from collections.abc import Mapping
from typing import Any

from holdfast.kubernetes.objects.check import check, convert
from holdfast.kubernetes.objects.resource import HoldfastJob

NAME = "llm"
MINIMAL: dict[str, Any] = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "HoldfastJob",
    "metadata": {"name": NAME, "namespace": "research", "uid": "u-1", "generation": 1},
    "spec": {
        "run": {"script": "train.py"},
        "template": {
            "spec": {"containers": [{"name": "worker", "image": "registry.example.com/me/train:1"}]}
        },
    },
}


def accept(right: Mapping[str, Any]) -> HoldfastJob:
    """An object that can work, in its types."""
    assert check(right) == ()
    return convert(right)


def job(**changes: Any) -> dict[str, Any]:
    """The minimal job with changes by path, dots written as two underscores: `spec__nodes=4`."""
    made = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        put(made, path.replace("__", "."), value)
    return made


def put(target: dict[str, Any], path: str, value: Any) -> None:
    """Sets the field at `spec.template.spec.containers.0.command`."""
    *parents, last = path.split(".")
    at: Any = target
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})
    at[last] = value
