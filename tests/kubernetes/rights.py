"""What the operator's account may do, as `deploy/kubernetes/operator.yaml` says."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "operator.yaml"
MARKS = MANIFEST.with_name("marks.yaml")
"""What a site adds that wants machines marked."""
WATCH = MANIFEST.with_name("watch.yaml")
"""What a site adds that wants machines watched."""
REPLACE = MANIFEST.with_name("replace.yaml")
"""And replaced."""
OPERATORS = "holdfast-system"
_PATH = re.compile(
    r"^(?:/api/v1|/apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)
_GROUP = re.compile(r"/apis/[^/]+")
PARTS = (
    "holdfast-jobs",
    "holdfast-machines",
    "holdfast-kueue",
    "holdfast-groups",
    "holdfast-marks",
    "holdfast-replace",
)
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def objects(file: Path = MANIFEST) -> list[dict[str, Any]]:
    """All of the file."""
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


def is_permitted(
    method: str, path: str, query: Mapping[str, str], marks: bool = False, replaces: bool = False
) -> bool:
    """Whether a request for a job or a machine is. marks: the site wants machines marked; replaces: and replaced."""
    if _GROUP.fullmatch(path):
        return method == "GET"  # everybody may ask which versions there are
    found = _PATH.match(path)
    assert found is not None, path
    if method == "GET":
        verb = "watch" if "watch" in query else "get" if found["name"] else "list"
    else:
        verb = _VERBS[method]
    resource = found["resource"] + (f"/{found['sub']}" if found["sub"] else "")
    return any(
        (found["group"] or "") in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        for one in [
            *objects(),
            *(objects(MARKS) if marks else ()),
            *(objects(REPLACE) if replaces else ()),
        ]
        # A Role is for the operator's own namespace.
        if (one["kind"] == "ClusterRole" or (one["kind"] == "Role" and found["namespace"] == OPERATORS))
        and one["metadata"]["name"] in PARTS
        for rule in one["rules"]
    )
