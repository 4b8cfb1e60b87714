"""Makes kueue.yaml of the folder of Kueue's module: its definitions, and the webhooks of its own kinds and of batch Jobs.

The webhooks are at an address and not behind a Service: the tests run Kueue beside the cluster. URL_ and CA_ stand for the address
and for the certificate authority.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CONVERTED = {"localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters"}
"""Kinds whose versions a webhook converts, as Kueue's own kustomization has it."""
HOOKED = {
    "workloads",
    "clusterqueues",
    "resourceflavors",
    "cohorts",
    "jobs",
    "localqueues",
    "admissionchecks",
}


def definitions(folder: Path) -> Iterator[dict[str, Any]]:
    """The CustomResourceDefinitions."""
    for file in sorted((folder / "crd" / "bases").glob("*.yaml")):
        for made in yaml.safe_load_all(file.read_text()):
            if made and made["spec"]["names"]["plural"] in CONVERTED:
                client = {"url": "URL_/convert", "caBundle": "CA_"}
                webhook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
                made["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
            if made:
                yield made


def webhooks(folder: Path) -> Iterator[dict[str, Any]]:
    """Of Kueue's own kinds and of batch Jobs."""
    for made in yaml.safe_load_all((folder / "webhook" / "manifests.yaml").read_text()):
        kept = []
        for hook in made["webhooks"]:
            rule = hook["rules"][0]
            ours = "kueue" in rule["apiGroups"][0] or rule["apiGroups"][0] == "batch"
            if ours and rule["resources"][0].split("/")[0] in HOOKED:
                path = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = {"url": f"URL_{path}", "caBundle": "CA_"}
                kept.append(hook)
        made["webhooks"] = kept
        made["metadata"]["name"] = f"kueue-{made['metadata']['name']}"
        yield made


def without_descriptions(value: Any) -> Any:
    """They are four fifths of the text."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (k == "description" and isinstance(v, str))}
        return {key: without_descriptions(inner) for key, inner in kept.items()}
    return [without_descriptions(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    components = Path(sys.argv[1]) / "config" / "components"
    all_ = [without_descriptions(one) for one in (*definitions(components), *webhooks(components))]
    print(yaml.safe_dump_all(all_, sort_keys=False, width=200), end="")
