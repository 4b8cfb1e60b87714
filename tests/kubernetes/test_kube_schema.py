"""The CRD: made of the types, structural, and small enough for `kubectl apply`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.engines import kubernetes
from holdfast.engines.kubernetes.schema import crd, crd_text, job_schema

FILE = Path(kubernetes.__file__).with_name("crd.yaml")


def nodes_of(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    below = list(schema.get("properties", {}).items())
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            below.append((f"[{key}]", schema[key]))
    return [(path, schema), *(x for name, one in below for x in nodes_of(one, f"{path}.{name}"))]


def test_the_file_is_what_the_types_say() -> None:
    assert FILE.read_text() == crd_text(), "run `make crd`"
    assert yaml.safe_load(FILE.read_text()) == crd()


def test_it_fits_beside_itself_in_the_annotation_of_kubectl_apply() -> None:
    assert len(json.dumps(crd(), separators=(",", ":"))) < 12_000


def test_it_is_structural() -> None:
    for path, schema in nodes_of(job_schema()):
        assert ("type" in schema) != bool(schema.get("x-kubernetes-int-or-string")), path
        assert "$ref" not in schema, path
        for branch in schema.get("oneOf", []):
            assert set(branch) == {"required"}, path
        assert schema.get("type") != "number", path


def test_every_number_list_and_text_of_the_spec_is_bounded() -> None:
    for path, schema in nodes_of(job_schema()["properties"]["spec"]):
        if "template" in path:
            continue  # the API server has its own schema of pods
        if schema.get("type") == "integer":
            assert {"minimum", "maximum"} <= set(schema), path
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        if schema.get("type") == "string":
            assert {"maxLength", "enum", "pattern"} & set(schema), path


def test_columns_and_scale_name_fields_that_exist() -> None:
    version = crd()["spec"]["versions"][0]
    known = {path for path, _ in nodes_of(job_schema())} | {".metadata.creationTimestamp"}
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"]["scale"].values()
    assert set(paths) <= known


@pytest.mark.parametrize("path", [".spec.nodes", ".spec.spares", ".spec.runPolicy.suspend"])
def test_kubectl_explain_has_the_words_of_the_source(path: str) -> None:
    found = dict(nodes_of(job_schema()))[path]["description"]
    assert re.sub(r"\s+", " ", found) == found != ""
