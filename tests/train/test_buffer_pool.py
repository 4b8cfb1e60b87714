"""Memory that FSDP2's collectives use again."""

import gc

import torch

from holdfast.train.gloo_group import KEPT_BLOCKS, SMALL_BYTES, BufferPool
from holdfast.train.sharding import PooledAllGather

COUNT = SMALL_BYTES  # of two bytes each


def test_what_is_given_back_is_used_again():
    scratch = BufferPool()
    first = scratch.take(COUNT, torch.bfloat16)
    where = first.data_ptr()
    assert scratch.take(COUNT, torch.bfloat16).data_ptr() != where  # the first is in use
    part = first[10:20].view(5, 2)
    del first
    gc.collect()
    others = [scratch.take(COUNT, torch.bfloat16) for _ in range(3)]
    assert where not in {other.data_ptr() for other in others}  # a view of it is left
    del part
    assert scratch.take(COUNT // 2, torch.float32).data_ptr() == where


def test_a_block_serves_what_is_a_little_smaller():
    scratch = BufferPool()
    large = scratch.take(2 * COUNT, torch.bfloat16).data_ptr()
    assert scratch.take(COUNT + 8, torch.bfloat16).data_ptr() == large
    assert scratch.take(COUNT - 8, torch.bfloat16).data_ptr() != large  # less than half of it would waste it


def test_few_blocks_are_kept():
    scratch = BufferPool()
    blocks = [scratch.take(COUNT, torch.float32) for _ in range(3 * KEPT_BLOCKS)]
    for block in blocks:
        block.fill_(1.0)
    del blocks, block
    assert len(scratch._free) == KEPT_BLOCKS


def test_sizes_are_those_asked_for():
    gather = PooledAllGather(BufferPool())
    for size in [(7,), (3, 5), (COUNT,), (2, COUNT)]:
        given = gather.allocate(size, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert given.shape == torch.Size(size)
        assert given.is_contiguous()
    assert gather.allocate((4,), dtype=torch.float32, device=torch.device("meta")).device.type == "meta"
