"""Decoders are made when a module is imported: two threads that are the first to decode a type crash msgspec 0.22, and
with it an agent that took two snapshots at once."""

import re
import subprocess
import sys
from pathlib import Path

import holdfast

SOURCES = Path(holdfast.__file__).parent
RACE = """
import sys, threading
from holdfast.checkpoint import layout
from holdfast.tensors import index as index_module
sys.setswitchinterval(1e-6)
index = index_module.StateIndex(1, {}, (index_module.TensorSpec(path="a", dtype="float32", shape=(1,), offset=0, nbytes=4),), 4)
data, head = layout.msgspec.msgpack.encode(index), layout.encode_head(index, b"12345678")
part = layout.Part("x", len(head), layout.digest(head))
start = threading.Barrier(8)
def read(number):
    start.wait()
    assert (index_module.decode_index(data) if number % 2 else layout.decode_head(head, part, "x").index) == index
threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_many_threads_that_are_the_first_to_read():
    for _ in range(6):  # with a decoder made by each of them one run in three crashed
        ran = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr


def test_no_module_with_threads_makes_a_decoder_on_the_way():
    for folder in ("agent", "checkpoint", "data", "protocol", "train"):
        for path in (SOURCES / folder).rglob("*.py"):
            found = re.findall(r"(?:json|msgpack)\.decode\([^\n]*type=", path.read_text())
            if path.name != "endpoint.py":  # read by commands, which have one thread
                assert not found, path
