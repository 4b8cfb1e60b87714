"""The memory of a model: against sums by hand."""

import msgspec
import pytest

from holdfast.tools.plan.memory import Sizes, compute_bytes, memory

LLAMA = Sizes(
    parameters=8e9, trained=8e9, layers=32, hidden=4096, vocabulary=128_256, seq_len=8192, micro_batch=1
)


def test_what_is_trained_takes_sixteen_bytes_and_is_dealt():
    one, eight = memory(LLAMA, 1, 8), memory(LLAMA, 8, 8)
    assert one.state == 16 * 8e9
    assert eight.state == one.state / 8
    assert eight.compute == one.compute
    assert eight.device == eight.state + eight.compute
    assert eight.snapshot == 12 * 8e9  # a node is a replica
    assert memory(LLAMA, 16, 8).snapshot == 6 * 8e9  # a node is half of one


def test_what_is_frozen_takes_two_and_is_in_no_snapshot():
    adapters = msgspec.structs.replace(LLAMA, trained=1e7)
    found = memory(adapters, 1, 8)
    assert found.state == 16 * 1e7 + 2 * (8e9 - 1e7)
    assert found.snapshot == 12 * 1e7 * 8


def test_a_pass_grows_with_its_tokens_and_its_block():
    twice = msgspec.structs.replace(LLAMA, micro_batch=2)
    # Logits, inputs of blocks and one block's activations, of 8,192 more tokens.
    more = 8192 * (16 * 128_256 + 2 * 32 * 4096 + 34 * 4096)
    assert compute_bytes(twice) - compute_bytes(LLAMA) == pytest.approx(more)
    block = (8e9 - 2 * 128_256 * 4096) / 32
    without = msgspec.structs.replace(LLAMA, block=0.0)
    assert compute_bytes(LLAMA) - compute_bytes(without) == pytest.approx(8 * block)
