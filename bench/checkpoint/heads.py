"""A head as Holdfast writes it, and the same values in msgpack: bytes and processor time, of a blob of 10 GiB.

A process of its own, without torch as the agent is: with torch's objects Python's garbage collector takes much longer. Prints
one JSON line for each format.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from holdfast.checkpoint.layout import CHUNK_BYTES, SUM_BYTES, Head, decode_head, digest, encode_head
from holdfast.protocol.snapshots import Part
from holdfast.tensors.index import StateIndex, TensorSpec, checked

LARGE = 5000
"""As many small ones lie with the plain values."""
TENSOR_BYTES = 2 << 20
_decoder = msgspec.msgpack.Decoder(Head)


@dataclass(frozen=True)
class HeadCost:
    """What a head of one format costs."""

    format: str
    nbytes: int
    sums_bytes: int
    """Of its checksums."""
    write_ms: float
    read_ms: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=5)
    for cost in measure(parser.parse_args().repetitions):
        sys.stdout.write(json.dumps(asdict(cost)) + "\n")


def measure(repetitions: int) -> list[HeadCost]:
    """Each median of `repetitions`."""
    specs = tuple(
        TensorSpec(
            path=f"optimizer.state.{i}.exp_avg",
            dtype="float32",
            shape=(1024, 512),
            offset=i * TENSOR_BYTES,
            nbytes=TENSOR_BYTES,
            global_shape=(4096, 512),
            start=(1024, 0),
        )
        for i in range(LARGE)
    )
    moments = [
        [i, ["d", [["step", ["b", ["float32", [], b"1234"]]], ["exp_avg", ["T", i]]]]] for i in range(LARGE)
    ]
    index = StateIndex(40, {"optimizer": ["d", [["state", ["d", moments]]]]}, specs, LARGE * TENSOR_BYTES)
    sums = bytes(range(SUM_BYTES)) * (index.nbytes // CHUNK_BYTES)
    ours, packed = encode_head(index, sums), msgspec.msgpack.encode(Head(index, sums))
    part = Part("", len(ours), digest(ours))

    def cost(name: str, data: bytes, write: Callable[[], Any], read: Callable[[], Any]) -> HeadCost:
        return HeadCost(name, len(data), len(sums), _ms(write, repetitions), _ms(read, repetitions))

    return [
        cost(
            "msgpack",
            packed,
            lambda: msgspec.msgpack.encode(Head(index, sums)),
            lambda: checked(_decoder.decode(packed).index),
        ),
        cost("safetensors", ours, lambda: encode_head(index, sums), lambda: decode_head(ours, part, "it")),
    ]


def _ms(action: Callable[[], Any], repetitions: int) -> float:
    taken = []
    for _ in range(repetitions):
        began_s = time.process_time()
        action()
        taken.append(time.process_time() - began_s)
    return statistics.median(taken) * 1e3


if __name__ == "__main__":
    main()
