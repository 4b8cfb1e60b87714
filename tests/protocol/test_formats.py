"""What outlives a process or goes between two versions, against golden files: every field of every type.

A golden file is of one format and version, and holds a value of each type with all fields set. Where today's writer makes
another one, whoever has older files or runs older processes may not be able to read it. Then either:

- the change is read by both (a field with a default): remove the golden file and run this module as a program;
- it is not: raise the format's version, keep the old file, and run this module as a program.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from filled import filled

from holdfast.checkpoint import layout, memory
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.store import state_of
from holdfast.protocol import job_report, job_view, ledger, messages
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.snapshots import Part
from holdfast.protocol.verified import SamplesChecked, Verified
from holdfast.tensors.index import StateIndex, TensorSpec

GOLDEN = Path(__file__).parent / "golden"
FOLDER_VERSION = 1
"""Of the files in a job's folder. They have no number of their own: a job is resumed by any later version."""


def _structs(module: Any) -> list[type[msgspec.Struct]]:
    found = [one for _, one in inspect.getmembers(module, inspect.isclass) if issubclass(one, msgspec.Struct)]
    return [one for one in found if one.__module__.startswith(module.__name__)]


FORMATS: dict[str, tuple[int, list[type[msgspec.Struct]]]] = {
    "messages": (messages.PROTOCOL_VERSION, _structs(messages)),
    "ledger": (ledger.VERSION, list(ledger.EVENTS.values())),
    "state": (ledger.VERSION, [CoreState]),
    "checkpoint": (layout.FORMAT, [layout.Manifest, layout.Head]),
    "folder": (FOLDER_VERSION, [JobSpec, Resume, Endpoint, Verified, SamplesChecked]),
    "view": (job_view.VERSION, [job_view.JobView, job_view.ViewChange]),
    "report": (job_report.VERSION, [job_report.JobReport]),
}


def written(types: list[type[msgspec.Struct]]) -> dict[str, Any]:
    """By the types' names, what today's writer makes of a value with all fields."""
    made: dict[str, Any] = json.loads(msgspec.json.encode({one.__name__: filled(one) for one in types}))
    return dict(sorted(made.items()))


def golden(name: str, version: int) -> Path:
    return GOLDEN / f"{name}-{version}.json"


@pytest.mark.parametrize("name", FORMATS)
def test_today_s_writer_makes_what_the_newest_golden_file_has(name: str) -> None:
    version, types = FORMATS[name]
    there = json.loads(golden(name, version).read_text())
    made = written(types)
    changed = sorted(one for one in made.keys() | there.keys() if made.get(one) != there.get(one))
    assert not changed, f"{', '.join(changed)} of {name} {version}: see the head of this module"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("ledger-*.json")), ids=lambda path: path.stem)
def test_events_of_every_version_are_read(path: Path) -> None:
    kinds = {event.__name__: kind for kind, event in ledger.EVENTS.items()}
    for name, fields in json.loads(path.read_text()).items():
        event = ledger.read(kinds[name], fields)
        assert event is not None, name
        assert event.kind == kinds[name]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("state-*.msgpack")), ids=lambda path: path.stem)
def test_states_of_every_version_are_read(path: Path) -> None:
    """As a ledger has them: in JSON the keys that are numbers would be texts."""
    read = state_of(path.read_bytes())
    if path == golden("state", FORMATS["state"][0]).with_suffix(".msgpack"):
        assert read == filled(CoreState)


@pytest.mark.parametrize("name", ["checkpoint", "folder", "view", "report"])
def test_files_of_every_version_are_read(name: str) -> None:
    newest, types = FORMATS[name]
    by_name = {one.__name__: one for one in types}
    for version in range(1, newest + 1):
        for kind, plain in json.loads(golden(name, version).read_text()).items():
            read = msgspec.json.decode(json.dumps(plain).encode(), type=by_name[kind])
            if version == newest:
                assert read == filled(by_name[kind])


def files_of_a_rank() -> dict[str, bytes]:
    """What is written beside a blob: its header, and its head."""
    tree = {
        "model": ["d", [["w", ["T", 0]], ["b", ["b", ["complex64", [1], b"12345678"]]]]],
        "values": [
            "d",
            [
                ["lr", ["x", 0.1]],
                ["worst", ["x", float("inf")]],
                ["large", ["b", ["int", [], b"1180591620717411303424"]]],
            ],
        ],
    }
    specs = (
        TensorSpec(
            path="model.w",
            dtype="float32",
            shape=(2, 3),
            offset=0,
            nbytes=24,
            global_shape=(4, 3),
            start=(2, 0),
        ),
        TensorSpec(path="model.scale", dtype="float8_e8m0fnu", shape=(5,), offset=24, nbytes=5),
    )
    sealed = layout.seal(StateIndex(40, tree, specs, 29), b"checksum")
    return {"safetensors": sealed.header, "head.safetensors": sealed.head}


@pytest.mark.parametrize("ending", ["safetensors", "head.safetensors"])
def test_files_of_a_checkpoint_are_as_the_golden_ones(ending: str) -> None:
    assert (GOLDEN / f"checkpoint-{layout.FORMAT}.{ending}").read_bytes() == files_of_a_rank()[ending]


@pytest.mark.parametrize("version", range(1, layout.FORMAT + 1))
def test_heads_of_every_version_are_read(version: int) -> None:
    data = (GOLDEN / f"checkpoint-{version}.head.safetensors").read_bytes()
    head = layout.decode_head(data, Part("", len(data), layout.digest(data)), "it")
    assert (head.index.step, head.index.tensors[0].global_shape, head.sums) == (40, (4, 3), b"checksum")
    assert head.index.tree["model"] == ["d", [["w", ["T", 0]], ["b", ["b", ["complex64", [1], b"12345678"]]]]]
    assert dict(head.index.tree["values"][1])["worst"] == ["x", float("inf")]


def test_a_slot_s_header_is_that_of_its_version() -> None:
    assert (memory._VERSION, memory._HEADER.format, memory._HEADER.size) == (2, "<8sIIqqiiQQ16sQ", 80)


def test_a_field_that_goes_or_changes_its_name_is_seen() -> None:
    class Sample(msgspec.Struct):
        step: int = 0
        name: str = ""

    class Renamed(msgspec.Struct):
        steps: int = 0
        name: str = ""

    assert written([Sample])["Sample"] == {"step": 7, "name": "name"}
    assert written([Renamed])["Renamed"].keys() == {"steps", "name"}


def main() -> int:
    GOLDEN.mkdir(exist_ok=True)
    for name, (version, types) in FORMATS.items():
        path = golden(name, version)
        if path.exists():
            sys.stdout.write(f"{path} stays as it is\n")
            continue
        path.write_text(json.dumps(written(types), indent=1, sort_keys=True) + "\n")
        if name == "checkpoint":
            for ending, data in files_of_a_rank().items():
                path.with_suffix(f".{ending}").write_bytes(data)
        if name == "state":
            path.with_suffix(".msgpack").write_bytes(msgspec.msgpack.encode(filled(CoreState)))
        sys.stdout.write(f"{path} is written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
