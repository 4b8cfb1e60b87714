"""What reads bytes of somebody else: one target a kind, with all that it may raise.

Where bytes carry a checksum, the target puts a right one on: a fuzzer would else only find out that checksums work.
"""

from __future__ import annotations

import atexit
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import typer
import xxhash

from holdfast.checkpoint import layout, memory
from holdfast.checkpoint.loading import rebuild
from holdfast.cli import job_file
from holdfast.cli.app import app
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service import checking, routes
from holdfast.coordinator.service.store import Store, state_of
from holdfast.coordinator.service.tally import Tally
from holdfast.data.files import TokenFile
from holdfast.data.megatron import MegatronIndex, write_index
from holdfast.engines.jobs import read_spec
from holdfast.errors import Damaged, ProtocolError, StateError, UsageError
from holdfast.health.ruleset import RuleSet
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.check_options import CheckOptions
from holdfast.protocol.engine_orders import NodeGoing
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.endpoint import FILE_NAME, Endpoint, read_endpoint
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.frames import Codec, encode_all
from holdfast.tensors.index import StateIndex, TensorSpec, decode_index, leaves, small_tensors

WORK = Path(tempfile.mkdtemp(prefix="holdfast-fuzz-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)
RULES = """
[[rule]]
id = "disk"
source = "kmsg"
pattern = '^nvme(?P<n>\\d+): timeout after (?P<value>\\d+)'
subject = "nvme {n}"
severity = "error"
remedy = "ask"
above = 10
count = 3
window = "10m"
examples = ["nvme0: timeout after 30"]

[family.eeh]
source = "kmsg"
pattern = '^EEH: (?P<code>\\d+)'
[family.eeh.class.bad]
severity = "error"
remedy = "replace"
[family.eeh.code.7]
class = "bad"
name = "frozen"
repeat = {count = 2, window = "1h"}
"""


@dataclass(frozen=True)
class Target:
    read: Callable[[bytes], object]
    may_raise: tuple[type[Exception], ...]
    valid: Callable[[], list[bytes]]
    """Inputs that are read without an error; mutations begin with these and with those in the corpus."""
    suffix: str = "bin"


def manifest() -> bytes:
    shards = tuple(
        layout.parts_of(5, rank, layout.Sealed(b"head", b"header", b"12345678", 26)) for rank in range(2)
    )
    made = layout.Manifest(
        format=1, step=5, world=2, chunk_bytes=1 << 15, saved_at="2026-11-28T16:30:32+00:00", shards=shards
    )
    return layout.encode_manifest(made)


def read_manifest(data: bytes) -> object:
    return layout.decode_manifest(data, "m")


def read_sealed_manifest(data: bytes) -> object:
    try:
        data = msgspec.json.encode(msgspec.json.decode(data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    sealed = {"xxh3": layout.digest(data), "manifest": msgspec.Raw(data)}
    return layout.decode_manifest(msgspec.json.encode(sealed), "m")


def index() -> StateIndex:
    tree: Any = ["d", [["w", ["T", 0]], ["n", ["x", 3]], ["s", ["b", ["float32", [1], b"abcd"]]]]]
    wrapper = ["p", [{"dims": [0]}, ["w", [{"class": "a"}, [["inner", ["T", 1]]]]]]]
    tensors = (
        TensorSpec(path="a.w", dtype="float32", shape=(2, 4), offset=0, nbytes=32),
        TensorSpec(path="a.q", dtype="int8", shape=(8,), offset=32, nbytes=8, global_shape=(16,), start=(8,)),
    )
    return StateIndex(5, {"a": tree, "q": wrapper, "l": ["l", [["t", [["x", None]]]]]}, tensors, 40)


def walk(read: StateIndex) -> None:
    """As those do who list what a checkpoint holds, and who load it."""
    small_tensors(read)
    for name, tree in read.tree.items():
        list(leaves(tree, name))
    tensors = [torch.zeros(0) for _ in read.tensors]
    for tree in read.tree.values():
        rebuild(tree, tensors)


def read_index(data: bytes) -> None:
    walk(decode_index(data))


def read_head(data: bytes) -> None:
    walk(layout.decode_head(data, layout.Part("x", len(data), layout.digest(data)), "h").index)


def read_slot(data: bytes) -> None:
    size = memory._HEADER.size
    fields = bytearray(data[:size].ljust(size, b"\0"))
    path = WORK / "slot"
    path.write_bytes(bytes(fields) + xxhash.xxh3_64_digest(bytes(fields)) + data[size:])
    memory._read_slot(path, 1)


def slot() -> bytes:
    head = layout.encode_head(index(), b"12345678")
    fields = memory._HEADER.pack(
        memory._MAGIC, memory._VERSION, memory.SlotState.SEALED, 5, 1, 0, 2, 40, len(head),
        xxhash.xxh3_128_digest(head), 1,
    )  # fmt: skip
    at = memory._head_at(40)
    return (fields + bytes(at - 8 - len(fields)) + head).ljust(at + 4096, b"\0")


def read_end_point(data: bytes) -> None:
    (WORK / FILE_NAME).write_bytes(data)
    found = read_endpoint(WORK)
    if found is not None:
        _ = found.names


def read_core_state(data: bytes) -> object:
    return state_of(data)


def core_state() -> list[bytes]:
    spec = JobSpec(name="job", script="train.py", min_nodes=1, max_nodes=2)
    state: Any = msgspec.to_builtins(CoreState(spec=spec))
    old = {k: v for k, v in state.items() if k not in ("membership", "storage")}
    old |= state["membership"] | state["storage"]
    old |= {"blame": {"cause": "exit code 1"}, "broke_cause": "x"}
    return [msgspec.msgpack.encode(state), msgspec.msgpack.encode(old)]


@cache
def whole_ledger() -> bytes:
    with closing(Store(WORK / "made.sqlite")) as store:
        spec = JobSpec(name="job", script="train.py")
        store.save(CoreState(spec=spec))
        store.add_event(0.0, "2026-11-28T16:30:32+00:00", "formed", {"world": 2, "start": 0, "names": ["a"]})
        explained = {"id": 1, "node": "n0", "cause": "a", "was": "b"}
        store.add_event(0.5, "2026-11-28T16:30:33+00:00", "incident-explained", explained)
        told = [m.ReportedStep(step=1, loss=0.5, took_s=0.1), m.ReportedStep(step=2, loss=None, took_s=None)]
        store.add_steps(1.0, told, 1, 2)
        return store.copy()


def read_store(path: Path) -> None:
    with closing(Store(path, read_only=True)) as store:
        store.load()
        for entry in store.events():
            ledger.read(entry.kind, entry.fields)
        store.tally(Tally())
        store.news(0, 0)
        store.summary()
        store.incidents(1 << 40)
        store.batches()


def read_ledger_file(data: bytes) -> None:
    path = WORK / "read.sqlite"
    path.write_bytes(data)
    read_store(path)


def read_ledger_row(data: bytes) -> None:
    """data: of an event the kind, its time and its fields, by lines; and of a step a column."""
    kind, utc, fields, loss = (data.split(b"\n") + [b""] * 4)[:4]
    path = WORK / "row.sqlite"
    path.write_bytes(whole_ledger())
    with closing(sqlite3.connect(path)) as db:
        text = (kind.decode(errors="replace"), utc.decode(errors="replace"), fields.decode(errors="replace"))
        db.execute("insert into events (t_s, kind, utc, fields) values (0, ?, ?, ?)", text)
        db.execute("update events set utc = ? where seq = 1", (text[1],))
        db.execute(
            "update steps set loss = ?, world = ? where step = 1", (loss, loss.decode(errors="replace"))
        )
        db.execute("insert or replace into kept values ('pages', ?)", (loss,))
        db.execute("insert or replace into kept values ('dropped', ?)", (fields,))
        db.commit()
    read_store(path)


def ledger_rows() -> list[bytes]:
    utc = "2026-11-28T16:30:32+00:00"
    incident = msgspec.json.encode(
        {"id": 1, "node": "node0", "fault": "kill", "rule": None, "cause_kind": "x", "phases": {}}
    )
    return [
        f"{kind}\n{utc}\n".encode() + incident + b"\n0.5" for kind in ("incident-resumed", "asked", "formed")
    ]


def read_specification(data: bytes) -> None:
    (WORK / "spec.json").write_bytes(data)
    read_spec(WORK)


def read_rules(data: bytes) -> None:
    RuleSet().read(data.decode(errors="replace"), "rules.toml")


@cache
def run_options() -> list[Any]:
    commands: Any = typer.main.get_command(app)
    return commands.commands["run"].params


def read_job_file(data: bytes) -> None:
    path = WORK / "job.yaml"
    path.write_bytes(data)
    job_file.expand(["-f", str(path)], run_options())


def read_data_index(data: bytes) -> None:
    path = WORK / "x.idx"
    path.write_bytes(data)
    found = MegatronIndex(path, 12)
    found.check()
    found.edges(np.arange(found.documents + 1))


def data_index() -> bytes:
    with (WORK / "made.idx").open("wb") as file:
        write_index(file, np.dtype(np.uint16), np.array([2, 1, 3], np.int32))
    return (WORK / "made.idx").read_bytes()


def read_npy(data: bytes) -> None:
    path = WORK / "x.npy"
    path.write_bytes(data)
    _ = TokenFile(path).probes


def npy() -> bytes:
    np.save(WORK / "made.npy", np.arange(9, dtype=np.uint16))
    return (WORK / "made.npy").read_bytes()


def read_body(data: bytes) -> None:
    """By the decoders of the routes, as they use them."""
    for reader in (routes._going, routes._engine_says, checking._wishes):
        with_what(reader.decode, data)


def with_what(reader: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(reader, data, "x")
    except Damaged:
        pass


_codec: Codec[Any] = Codec(m.AgentMessage)

TARGETS: dict[str, Target] = {
    "manifest": Target(read_manifest, (StateError,), lambda: [manifest()]),
    "sealed-manifest": Target(
        read_sealed_manifest,
        (StateError,),
        lambda: [msgspec.json.encode(msgspec.json.decode(manifest())["manifest"])],
    ),
    "head": Target(read_head, (StateError,), lambda: [layout.encode_head(index(), b"12345678")]),
    "slot": Target(read_slot, (), lambda: [slot()]),
    "index": Target(read_index, (StateError,), lambda: [msgspec.msgpack.encode(index())]),
    "endpoint": Target(
        read_end_point,
        (),
        lambda: [msgspec.json.encode(Endpoint(host="::1", port=7077, pid=1, instance="a", term=2))],
    ),
    "core-state": Target(read_core_state, (Damaged,), core_state),
    "ledger": Target(read_ledger_file, (sqlite3.Error,), lambda: [whole_ledger()]),
    "ledger-row": Target(read_ledger_row, (sqlite3.Error,), ledger_rows),
    "specification": Target(
        read_specification,
        (UsageError,),
        lambda: [msgspec.json.encode(JobSpec(name="job", script="train.py"))],
    ),
    "rules": Target(read_rules, (UsageError,), lambda: [RULES.encode()]),
    "job-file": Target(
        read_job_file, (UsageError,), lambda: [b"job: a\nnnodes: 2:4\nscript: t.py\nargs: [1, --x]\n"]
    ),
    "data-index": Target(read_data_index, (ValueError,), lambda: [data_index()]),
    "npy": Target(read_npy, (ValueError,), lambda: [npy()]),
    "body": Target(
        read_body,
        (),
        lambda: [
            msgspec.json.encode(NodeGoing(node="node0", reason="drain", within_s=3.0)),
            msgspec.json.encode(CheckOptions()),
        ],
    ),
    "message": Target(
        _codec.decode, (ProtocolError,), lambda: [msgspec.msgpack.encode(m.Checked(request=1, results=()))]
    ),
    "messages": Target(
        _codec.decode_all,
        (ProtocolError,),
        lambda: [
            encode_all([msgspec.msgpack.encode(m.Checked(request=n, results=())) for n in range(count)])
            for count in (1, 3)
        ],
    ),
}


def corpus(target: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each input that is kept."""
    for number, data in enumerate(TARGETS[target].valid()):
        yield f"valid {number}", data
    for path in sorted((Path(__file__).parent / "corpus" / target).glob("*")):
        yield path.name, path.read_bytes()
