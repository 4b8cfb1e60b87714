"""HoldfastJobs for the tests."""

import copy
from typing import Any

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
