"""The CRD: made of the types, structural, and small enough for `kubectl apply`."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from holdfast import kubernetes
from holdfast.kubernetes.objects.resource import HoldfastJobSpec, PodTemplate, QueueTopology, Scheduling, rule
from holdfast.kubernetes.objects.schema import SIZE_OF_A_RUN, crd, crd_text, job_schema, rules_of

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


def test_every_number_list_and_text_of_the_spec_is_bounded() -> None:
    for path, schema in nodes_of(job_schema()["properties"]["spec"]):
        if "template" in path:
            continue  # the API server has its own schema of pods
        if schema.get("type") in ("integer", "number"):
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


def test_what_has_to_hold_between_fields_is_written_once_and_said_to_the_server() -> None:
    """`make kube-test` asks a real one whether it says the same."""
    found = {
        (path, one["rule"]): one["message"]
        for path, schema in nodes_of(job_schema())
        for one in schema.get("x-kubernetes-validations", ())
    }
    assert found[".spec", "!has(self.minNodes)||self.minNodes<=self.nodes"] == "minNodes: at most nodes"
    worker = "self.spec.containers.exists_one(c,c.name=='worker')"
    assert found[".spec.template", worker] == "spec.containers: exactly one named worker"
    classes = (HoldfastJobSpec, PodTemplate, Scheduling, QueueTopology)
    assert found.pop(("", SIZE_OF_A_RUN["rule"])) == SIZE_OF_A_RUN["message"]
    assert len(found) == sum(len(rules_of(one)) for one in classes) == 7


def test_an_expression_that_cel_has_no_word_for_is_not_translated_to_another_one() -> None:
    class Part(msgspec.Struct):
        names: tuple[str, ...] = ()

        @rule("names", "none")
        def has_none(self) -> bool:
            """It calls what CEL does not know."""
            return len(self.names) == 0

    with pytest.raises(TypeError, match=r"len\(self.names\): CEL has no word"):
        rules_of(Part)
